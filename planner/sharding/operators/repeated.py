"""A cache of parsed lines, so that repeated layers of a model are parsed once.

Two lines are alike if they differ only in names of tensors with the same shapes, dtypes and axes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace

from planner.sharding.operators.operator import PRODUCT, Operator, Tensor

# Strings are kept, and so are names of functions, methods and keywords.
_WORD = re.compile(r"'[^']*'|\"[^\"]*\"|(?<!\.)\b[A-Za-z_]\w*\b(?!\s*(?:\(|=(?!=)))")
_Known = tuple[
    tuple[str, ...], tuple[str, ...], tuple[Operator, ...]
]  # results, tensors, and the operators of the line


@dataclass(slots=True)
class RepeatedLines:
    """Operators of earlier lines, by their text without names of tensors."""

    _known: dict[Hashable, _Known] = field(default_factory=dict)

    def parse(
        self, text: str, tensors: Mapping[str, Tensor], parse: Callable[[str, Mapping[str, Tensor]], list[Operator]]
    ) -> list[Operator]:
        """Return the operators of a line: those of an earlier one that is alike, renamed, else the result of
        `parse`.
        """
        said, marks, annotation = text.partition("::")
        left, equals, formula = said.partition("=")
        results = tuple(name.strip() for name in left.split(","))
        used: dict[str, int] = {}

        def numbered(found: re.Match[str]) -> str:
            word = found.group()
            return f"#{used.setdefault(word, len(used))}" if word in tensors else word

        pattern = _WORD.sub(numbered, formula)
        if not equals or any(name in tensors or name + PRODUCT in tensors for name in results):
            return parse(text, tensors)
        about = tuple((tensors[name].shape, tensors[name].dtype, tensors[name].axes) for name in used)
        key = (pattern, marks, annotation, len(results), about)
        known = self._known.get(key)
        if known is not None and all(name.isidentifier() for name in results) and len(set(results)) == len(results):
            names = {**dict(zip(known[1], used, strict=True)), **dict(zip(known[0], results, strict=True))}
            names |= {f"{old}{PRODUCT}": f"{new}{PRODUCT}" for old, new in zip(known[0], results, strict=True)}
            return [_renamed(operator, names) for operator in known[2]]
        made = parse(text, tensors)
        if not any(operator.roles.warnings for operator in made):  # which name tensors
            self._known[key] = results, tuple(used), tuple(made)
        return made


def _renamed(operator: Operator, names: Mapping[str, str]) -> Operator:
    return replace(
        operator,
        result=replace(operator.result, name=names[operator.result.name]),
        text=_WORD.sub(lambda found: names.get(found.group(), found.group()), operator.text),
        operands=tuple((names[name], dims) for name, dims in operator.operands),
        unannotated=tuple(names[name] for name in operator.unannotated),
    )
