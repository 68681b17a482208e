"""An operator of PyTorch as it was captured, and the statements of a case that it is written as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simulator.sharded.graph import GraphNode, tensors_in
from topology.codec import JsonObject

Shape = tuple[int, ...]
LETTERS = "abcdefgijklmnopq"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One operator of the case: `result = formula :: annotation`, and the kernel `op(*args)` that computes it.

    Without an annotation, the axes follow from the formula. That of a function which `ops` does not have is believed:
    its arguments (windows, groups) stand in the kernel alone. `sizes` are those of axes that no operand has by itself.
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
    """The operator, with these arguments, has no rule."""


@dataclass(frozen=True, slots=True)
class AtenCall:
    """A node with the shapes of its operands at hand."""

    node: GraphNode
    shapes: Mapping[str, Shape]

    @property
    def name(self) -> str:
        """The operator's name without namespace and overload."""
        return self.node.op.removeprefix("aten.").split(".", maxsplit=1)[0]

    def tensor(self, position: int) -> str:
        """Return the tensor that an argument is. Raises NotKnownError if it is none."""
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
        """Return the statement of this node; by default its kernel is the operator itself."""
        given = {
            "op": self.node.op,
            "args": self.node.args,
            "kwargs": self.node.kwargs,
            "result": self.node.name,
            "shape": self.node.shape,
            "dtype": self.node.dtype,
            "index": self.node.index if more.get("op", self.node.op) == self.node.op else None,
        }
        return Statement(formula=formula, annotation=annotation, **{**given, **more})


def result_axes(shape: Shape, positions: Sequence[int] | None = None) -> tuple[list[str], dict[str, int]]:
    """Return axes that only a result has, named by position and size and marked as made whole, and their sizes."""
    chosen = range(len(shape)) if positions is None else positions
    names = [f"r{LETTERS[d]}{shape[d]}^" if shape[d] > 1 else "1" for d in chosen]
    return names, {f"r{LETTERS[d]}{shape[d]}": shape[d] for d in chosen if shape[d] > 1}


def letters(shape: Shape) -> list[str]:
    return [LETTERS[d] if n > 1 else "1" for d, n in enumerate(shape)]


def written(dims: Sequence[str], marks: dict[int, str] | None = None) -> str:
    """Return dims as an annotation, with marks by position; dims of one element carry none."""
    return " ".join(d + ((marks or {}).get(i, "") if d != "1" else "") for i, d in enumerate(dims))
