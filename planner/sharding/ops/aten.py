"""A captured operator of PyTorch, and the statements of a case for it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simulator.sharded.graph import GraphNode, tensors_in
from topology.codec import JsonObject

Shape = tuple[int, ...]
LETTERS = "abcdefgijklmnopq"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One operator of the case: `result = formula :: annotation`, and the kernel `op(*args)` that computes it.

    Without an annotation, the axes follow from the formula. The annotation of a function that `ops` does not have is
    believed; its arguments (windows, groups) are only in the kernel. `sizes` are those of axes that no operand has
    alone.
    """

    result: str
    formula: str
    op: str
    args: tuple[Any, ...]
    shape: Shape
    dtype: str
    annotation: str = ""
    kwargs: JsonObject = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    known: bool = True
    index: int | None = None

    @property
    def text(self) -> str:
        return f"{self.result} = {self.formula}" + (f" :: {self.annotation}" if self.annotation else "")

    @property
    def operands(self) -> tuple[str, ...]:
        """The tensors among the kernel's arguments, in order, each once."""
        return tensors_in([*self.args, *self.kwargs.values()])


class NotKnownError(Exception):
    """The operator has no rule for these arguments."""


@dataclass(frozen=True, slots=True)
class AtenCall:
    """A node with the shapes of its operands."""

    node: GraphNode
    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The operator's name without namespace and overload."""
        return self.node.op.removeprefix("aten.").split(".", maxsplit=1)[0]

    def tensor(self, position: int) -> str:
        """Return the tensor of an argument. Raises NotKnownError if it is none."""
        value = self.argument(position)
        if not isinstance(value, dict) or "tensor" not in value:
            raise NotKnownError
        return str(value["tensor"])

    def optional_tensor(self, position: int, keyword: str) -> str:
        value = self.argument(position, self.node.kwargs.get(keyword))
        return str(value["tensor"]) if isinstance(value, dict) and "tensor" in value else ""

    def argument(self, position: int, default: Any = None) -> Any:
        return self.node.args[position] if position < len(self.node.args) else default

    def shape(self, position: int) -> Shape:
        return self.shapes[self.tensor(position)]

    def dim(self, position: int, rank: int, default: Any = None) -> int:
        value = self.argument(position, default)
        if not isinstance(value, int) or isinstance(value, bool) or not -max(rank, 1) <= value < max(rank, 1):
            raise NotKnownError
        return value % max(rank, 1)

    def statement(self, formula: str, annotation: str = "", **more: Any) -> Statement:
        """Return the statement of this node; by default its kernel is the operator itself. A kernel with an `op` and
        `args` of its own has no `kwargs`, unless they are given.
        """
        given = {
            "op": self.node.op,
            "args": self.node.args,
            "kwargs": {} if "op" in more and "args" in more else self.node.kwargs,
            "result": self.node.name,
            "shape": self.node.shape,
            "dtype": self.node.dtype,
            "index": self.node.index if more.get("op", self.node.op) == self.node.op else None,
        }
        return Statement(formula=formula, annotation=annotation, **{**given, **more})


def result_axes(shape: Shape, positions: Sequence[int] | None = None) -> tuple[list[str], dict[str, int]]:
    """Return axes that only a result has and every rank has whole, named by position and size, and their sizes."""
    chosen = range(len(shape)) if positions is None else positions
    names = [f"r{LETTERS[d]}{shape[d]}^" if shape[d] > 1 else "1" for d in chosen]
    return names, {f"r{LETTERS[d]}{shape[d]}": shape[d] for d in chosen if shape[d] > 1}


def letters(shape: Shape) -> list[str]:
    return [LETTERS[d] if n > 1 else "1" for d, n in enumerate(shape)]


def written(dims: Sequence[str], marks: dict[int, str] | None = None) -> str:
    """Return dims as an annotation, with marks by position; dims of one element carry none."""
    return " ".join(d + ((marks or {}).get(i, "") if d != "1" else "") for i, d in enumerate(dims))


_SIZED = re.compile(r"(?<![a-z])[a-z]+_(\d+)")


def annotated(
    call: AtenCall, operands: Sequence[tuple[str, Sequence[str]]], result: Sequence[str], **more: Any
) -> list[Statement]:
    """Return the statement of an operator whose axes are written out for every operand and its result.

    An axis is a letter with a mark as in `annotation.py`, or `name_8` if no operand has it alone; an axis of an operand
    that the result does not have needs a mark. Dims of one element are left out. Raises NotKnownError if an operand
    occurs twice.
    """
    names = [name for name, _ in operands]
    if len(set(names)) != len(names):
        raise NotKnownError
    parts = [_without_ones(axes, call.shapes[name]) for name, axes in operands]
    text = f"{', '.join(parts)} -> {_without_ones(result, call.node.shape)}"
    sizes = {found[0]: int(found[1]) for found in _SIZED.finditer(text)}
    return [call.statement(f"{call.name}_of({', '.join(names)})", text, sizes=sizes, **more)]


def _without_ones(axes: Sequence[str], shape: Shape) -> str:
    return " ".join("1" if size == 1 else axis for axis, size in zip(axes, shape, strict=True))


def made(name: str, size: int) -> str:
    """Return an axis that only a result has, whole on every rank."""
    return f"{name}_{size}^"


def axes_but(rank: int, whole: Collection[int]) -> list[str]:
    """Return one axis per dim; those of `whole` are marked as needed whole."""
    return [LETTERS[d] + ("^" if d in whole else "") for d in range(rank)]


def whole_numbers(value: Any) -> list[int]:
    """Return one integer or a list of them as a list. Raises NotKnownError for anything else."""
    listed = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in listed):
        raise NotKnownError
    return list(listed)
