"""The computation as written for one process: operators over tensors in program order.

Front ends make it, the solver places its tensors, and back ends write it out:

    builder = GraphBuilder()
    builder.add_input("x", (4, 8192, 4096), axes=("b", "s", "e"))
    builder.add_input("w", (14336, 4096), parameter=True, origin="mlp.up.weight")
    builder.apply("u = linear(x, w) :: b s e+, f e+ -> b s f")
    builder.apply("y = silu(u) :: b s f -> b s f")
    graph = builder.build(outputs=("y",))

A graph is flat: the layers of a model stand one after another, as in a program. Nothing in it says how anything is
sharded; `planner.sharding.problem.ShardingProblem` adds a mesh, the layouts that are given and those that are pinned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from planner.sharding.operators.operator import PRODUCT, Operator, Tensor, parse_operators
from simulator.config.runtime import ELEMENT_BYTES
from topology.errors import BadInput

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


MAX_OPERATORS = 20_000
MAX_INPUTS = 20_000
MAX_DIMS = 8
MAX_ELEMENTS = 1 << 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Operators in program order, and the tensors between them.

    `inputs` are made by no operator; those of them in `parameters` are weights, which have gradients and optimizer
    state. `outputs` are the results that the caller receives. With a backward pass, `gradients` names the gradient of
    each tensor that has one, and the operators from index `backward_start` on compute them.
    """

    tensors: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    operators: tuple[Operator, ...]
    parameters: frozenset[str] = frozenset()
    outputs: tuple[str, ...] = ()
    gradients: Mapping[str, str] = field(default_factory=dict)
    backward_start: int | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return sentences on axes kept whole against their annotations, and on opaque operators."""
        return tuple(dict.fromkeys(text for operator in self.operators for text in operator.roles.warnings))

    @property
    def producers(self) -> dict[str, int]:
        """Return the index of the operator that makes each result."""
        return {operator.result.name: number for number, operator in enumerate(self.operators)}

    @property
    def consumers(self) -> dict[str, list[tuple[int, int]]]:
        """Return the readers of each tensor: (index of the operator, position among its operands).

        Tensors in a formula that its annotation leaves out come after the annotated operands.
        """
        found: dict[str, list[tuple[int, int]]] = {}
        for number, operator in enumerate(self.operators):
            names = [*(name for name, _ in operator.operands), *operator.unannotated]
            for position, name in enumerate(names):
                found.setdefault(name, []).append((number, position))
        return found


class GraphBuilder:
    """Builds a `Graph` one tensor and one operator at a time.

    `sizes` are those of axes that no operand has alone; `declared` are functions whose annotations are believed.
    """

    def __init__(self, sizes: Mapping[str, int] | None = None, declared: Collection[str] = ()) -> None:
        self.sizes, self.declared = dict(sizes or {}), frozenset(declared)
        self.tensors: dict[str, Tensor] = {}
        self.inputs: list[str] = []
        self.parameters: set[str] = set()
        self.operators: list[Operator] = []
        self._lines = RepeatedLines()

    def add_input(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str = "bf16",
        *,
        axes: Sequence[str] = (),
        parameter: bool = False,
        origin: str = "",
    ) -> Tensor:
        """Add an input tensor; `origin` is its name in the captured module.

        Raises BadInput.
        """
        if not name.isidentifier() or len(name) > 64:
            raise BadInput(f"{name[:64]!r} is no name for a tensor", remedy="letters, digits and _")
        if name in self.tensors:
            raise BadInput(f"{name} is given twice", why="every tensor is made once", remedy="another name")
        if dtype not in ELEMENT_BYTES:
            raise BadInput(f"{name}: unknown dtype {dtype[:20]!r}", remedy=f"one of {', '.join(ELEMENT_BYTES)}")
        if axes and len(axes) != len(shape):
            raise BadInput(f"{name} has {len(shape)} dims and {len(axes)} axes", remedy="one name per dim")
        if len(self.inputs) >= MAX_INPUTS:
            raise BadInput(f"more than {MAX_INPUTS:,} inputs", remedy="split the graph")
        tensor = Tensor(name=name, shape=tuple(shape), dtype=dtype, axes=tuple(axes), origin=origin)
        _check_size(tensor)
        self.tensors[name] = tensor
        self.inputs.append(name)
        if parameter:
            self.parameters.add(name)
        return tensor

    def apply(self, text: str, *, dtype: str | None = None) -> tuple[Tensor, ...]:
        """Add the operator `name, ... = formula :: annotation` and return its results. Raises BadInput.

        The annotation may be left out where all functions of the formula are known (`planner.sharding.ops`). `dtype` is
        of the results, where it is not that of the operands.
        """
        results = []
        for parsed in self._lines.parse(text, self.tensors, self._parsed):
            result = parsed.result if dtype is None else replace(parsed.result, dtype=dtype)
            operator = replace(parsed, result=result)
            _check_size(operator.result)
            if len(self.operators) >= MAX_OPERATORS:
                raise BadInput(f"more than {MAX_OPERATORS:,} operators", remedy="split the graph")
            self.tensors[operator.result.name] = operator.result
            self.operators.append(operator)
            results.append(operator.result)
        return tuple(tensor for tensor in results if not tensor.name.endswith(PRODUCT))

    def _parsed(self, text: str, tensors: Mapping[str, Tensor]) -> list[Operator]:
        return parse_operators(text, tensors, self.sizes, self.declared)

    def build(self, outputs: Sequence[str] = ()) -> Graph:
        """Return the graph; `outputs` default to the results that no operator reads. Raises BadInput."""
        missing = [name for name in outputs if name not in self.tensors]
        if missing:
            raise BadInput(f"{missing[0][:60]!r} is an output, and no operator makes it", remedy="name a result")
        graph = Graph(
            tensors=dict(self.tensors),
            inputs=tuple(self.inputs),
            operators=tuple(self.operators),
            parameters=frozenset(self.parameters),
            outputs=tuple(outputs),
        )
        if outputs:
            return graph
        read = graph.consumers
        return replace(graph, outputs=tuple(o.result.name for o in graph.operators if o.result.name not in read))


def _check_size(tensor: Tensor) -> None:
    if any(size < 1 for size in tensor.shape) or prod(tensor.shape) > MAX_ELEMENTS or len(tensor.shape) > MAX_DIMS:
        raise BadInput(
            f"{tensor.name} has shape {list(tensor.shape)[:MAX_DIMS]}",
            why=f"sizes are positive, at most {MAX_DIMS} dims and {MAX_ELEMENTS:,} elements",
        )
