"""The entry of an operator: its names, its effect on axes, its derivative, its capture, and what its kernels save.

An operator is one `Op` in the file of its family; `table.py` lists the families. All other modules ask the table.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from planner.sharding.layouts.layout import Layout
from planner.sharding.ops.annotation import arguments_of, called_name, number_of
from planner.sharding.ops.aten import AtenCall, Statement
from planner.sharding.ops.axis_flow import NotUnderstood
from planner.sharding.ops.walker import Rule

Dims = tuple[int, ...]


class Saves(Enum):
    """Tensors of the forward pass that a kernel's derivative needs."""

    OPERANDS = "operands"
    RESULT = "result"
    BOTH = "operands and result"
    NOTHING = "nothing"
    OTHERS = "operands but the first"
    VIEW = "nothing, and the result has no memory of its own"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of the forward pass: the call, the name of its result and of the result's gradient.

    `emit` adds an operator to the backward pass and returns its name; `shape` returns a tensor's shape. `parts` are the
    gradients of all results if a call has several; empty for a result without one.
    """

    call: ast.Call
    result: str
    gradient: str
    emit: Callable[[str], str]
    shape: Callable[[str], Dims]
    parts: Sequence[str] = ()

    @property
    def name(self) -> str:
        return called_name(self.call)

    @property
    def arguments(self) -> list[ast.expr]:
        return arguments_of(self.call)

    @property
    def weights(self) -> list[str]:
        """The tensors after the first argument: weight and bias of a norm."""
        return [n.id for n in self.arguments[1:] if isinstance(n, ast.Name)]

    def tensor(self, at: int) -> str:
        """Return the name of the tensor in argument `at`. Raises NotUnderstood."""
        argument = self.argument(at)
        if not isinstance(argument, ast.Name):
            raise NotUnderstood(f"{self.name} whose argument {at} is no tensor")
        return argument.id

    def number(self, at: int, keyword: str, default: int) -> int:
        """Return an integer argument. Raises NotUnderstood."""
        node = self.argument(at, keyword)
        found = default if node is None else number_of(node)
        if found is None:
            raise NotUnderstood(f"{self.name} whose {keyword} is no number")
        return found

    def argument(self, at: int, keyword: str = "") -> ast.expr | None:
        named = next((k.value for k in self.call.keywords if k.arg == keyword), None)
        return named or (self.arguments[at] if at < len(self.arguments) else None)


@dataclass(frozen=True, slots=True)
class View:
    """A view through which a gradient goes back: its numbers, and the shapes before and after it."""

    name: str
    numbers: Sequence[int | None]
    before: Dims
    after: Dims

    def dim(self, at: int) -> int:
        """Return number `at` as a dim of the viewed tensor."""
        return (self.numbers[at] or 0) % len(self.before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One kernel of an operator that exchanges statistics, or the reduction of one.

    `reads` are operands or the names of earlier phases, `reduce` the reducer; the output of a kernel before its
    reduction is pending the reducer in `waits`. The last phase has no name: it writes the operator's result. `shape`
    and `layout` are those of a phase's output.
    """

    name: str = ""
    reads: tuple[str, ...]
    op: str = ""
    args: tuple[Any, ...] = ()
    reduce: str = ""
    waits: str = ""
    shape: Dims = ()
    layout: Layout | None = None
    dtype: str = "f32"
    share: float = 0.0


Partials = Callable[[Sequence[str], str], list[tuple[int, str]]]  # by position of an argument
Gradient = Callable[[Step], dict[str, str]]  # by tensor the formula of its gradient
Capture = Callable[[AtenCall], list[Statement]]
# for a statement, by the layouts of its first operand and of its result
Phases = Callable[[Statement, Layout, Layout], list[Phase]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """Operators of one kind. Words are separated by spaces.

    `names` are those in formulas, and `axes` the effect of the functions along every axis of their arguments. `kind`
    says how pieces over a sharded axis are combined: `sum`, `avg`, `max`, `min`, `product` leave a pending reduction;
    other kinds are computed from statistics of pieces if the operator `merges` them, by the kernels of `phases`. `aten`
    names the operators of PyTorch that `capture` writes as formulas, and `kernels` what the executor runs for them,
    whose derivative needs what it `saves`.
    """

    names: str = ""
    axes: Rule | None = None
    kind: str = "sum"
    merges: bool = False
    statistics: tuple[tuple[str, str], ...] = ()  # for a merged axis: what is exchanged, and its reducer
    pointwise: bool = False  # element by element
    sloped: bool = True  # the derivative is not zero everywhere
    keeps_zeros: bool = False  # f(0) = 0, and the slope at 0 is finite
    several: bool = False  # it has several results
    rearranges: bool = False  # a rearrangement of one tensor's elements
    back: Callable[[str, View], str] | None = None  # for a view: the formula that takes a gradient back through it
    partials: Partials | None = None  # for a pointwise function: the gradients of its arguments, from them and its own
    gradient: Gradient | None = None
    gradient_axes: Rule | None = None  # of `NAME_bwd(gradient, ...)`
    aten: str = ""
    capture: Capture | None = None
    kernels: str = ""
    saves: Saves = Saves.OPERANDS
    phases: Phases | None = None


def view(
    names: str, axes: Rule, capture: Capture | None = None, *, aten: str | None = None, kernels: str = "", **more: Any
) -> Op:
    """Return a rearrangement of one tensor's elements, captured under its names in formulas unless `aten` has others;
    its kernel makes no memory.
    """
    captured = (names if aten is None else aten) if capture else ""
    saves = Saves.VIEW if kernels else Saves.OPERANDS
    return Op(
        names=names, axes=axes, rearranges=True, aten=captured, capture=capture, kernels=kernels, saves=saves, **more
    )


def no_gradient(step: Step) -> dict[str, str]:
    """Functions of numbers and orders, without gradients."""
    del step
    return {}


def summed(text: str, leading: int) -> str:
    """Return the formula of `text` summed over this number of leading dims."""
    return f"({text}).sum({tuple(range(leading))!r})" if leading > 1 else f"({text}).sum(0)" if leading else text


def padded(text: str, at: int, before: int, after: int, rank: int) -> str:
    """Return the formula of `text` padded with zeros before and after it along dim `at` of `rank`."""
    return f"pad({text}, ({'0, 0, ' * (rank - 1 - at)}{before}, {after}))" if before or after else text


def tensor(name: str) -> dict[str, str]:
    """Return a tensor as an argument of a kernel."""
    return {"tensor": name}


def statistic(layout: Layout, shape: Dims, dim: int) -> dict[str, Any]:
    """Return shape and layout of one number for each row, the row's dim kept with one element."""
    dims = tuple(() if d == dim else spec for d, spec in enumerate(layout.dims))
    return {"shape": tuple(1 if d == dim else n for d, n in enumerate(shape)), "layout": Layout(dims)}


def reduced_phase(
    name: str, op: str, reads: tuple[str, ...], args: tuple[Any, ...], how: str, **more: Any
) -> list[Phase]:
    """Return the kernel of a statistic and its reduction, which is called `name`."""
    return [
        Phase(name=f"{name}.own", reads=reads, op=op, args=args, waits=how, share=0.3, **more),
        Phase(name=name, reads=(f"{name}.own",), reduce=how, **more),
    ]
