"""A question: a mesh, operators over tensors, the placements that are given, and those that are wanted.

Files are untrusted: sizes are bounded, texts are parsed and never run, and unknown keys are named in an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import msgspec

from planner.sharding.collectives import DTYPE_BYTES
from planner.sharding.layout import Layout, layout_of
from planner.sharding.mesh import Mesh, mesh_of
from planner.sharding.operator import Operator, Tensor, operators_of
from planner.sharding.schedule import Schedule, schedule_of
from topology.errors import BadInput

MAX_CASES = 2000
MAX_OPERATORS = 200
MAX_TENSORS = 400
MAX_DIMS = 8
MAX_ELEMENTS = 1 << 50
POLICIES = ("min_ring_bytes", "follow_weights")


class _MeshText(msgspec.Struct, forbid_unknown_fields=True):
    names: list[str]
    shape: list[int]


class _TensorText(msgspec.Struct, forbid_unknown_fields=True):
    shape: list[int]
    dtype: str = "bf16"
    axes: list[str] = []
    placements: list[str] | None = None
    named: Any = None


class CaseText(msgspec.Struct):
    """A case as written. What a source expects of an answer (`expect`, `plan`, ...) may stand beside and is not read."""

    id: str
    mesh: _MeshText
    ops: list[str] = []
    inputs: dict[str, _TensorText] = {}
    axes: dict[str, int] = {}
    pins: dict[str, list[str]] = {}
    policy: str | None = None
    schedule: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A case understood. `given` has a layout for every input that is placed, `pins` for results that must be."""

    mesh: Mesh
    tensors: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    operators: tuple[Operator, ...]
    given: Mapping[str, Layout]
    pins: Mapping[str, Layout]
    policy: str | None = None
    schedule: Mapping[str, Schedule] = field(default_factory=dict)


def case_texts(data: Any, *, where: str) -> list[dict[str, Any]]:
    """Return the cases of a file: a list of them, an object with `cases`, or one case. Raises BadInput."""
    cases = data.get("cases", [data]) if isinstance(data, dict) else data
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise BadInput(
            f"{where} holds no sharding cases",
            why="expected a list of objects, or an object with a list `cases`",
            remedy="each with id, mesh, ops, inputs; see examples/sharding/mlp.json",
        )
    if not cases:
        raise BadInput(f"{where} holds no case", remedy="give at least one")
    if len(cases) > MAX_CASES:
        raise BadInput(
            f"{where} holds {len(cases)} cases", why=f"at most {MAX_CASES} are read", remedy="split the file"
        )
    return cases


def problem_of(data: Mapping[str, Any]) -> Problem:
    """Return the problem that a case states. Raises BadInput where it states none."""
    try:
        case = msgspec.convert(data, CaseText, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadInput("not a sharding case", why=str(error), remedy="see examples/sharding/mlp.json") from error
    mesh = mesh_of(case.mesh.names, case.mesh.shape)
    if len(case.ops) > MAX_OPERATORS or len(case.inputs) > MAX_TENSORS:
        raise BadInput(
            f"{len(case.ops)} operators and {len(case.inputs)} inputs",
            why=f"at most {MAX_OPERATORS} and {MAX_TENSORS} are read",
            remedy="split the graph; layers that are alike have one answer",
        )
    policy = None if case.policy == "none" else case.policy
    if policy is not None and policy not in POLICIES:
        raise BadInput(f"unknown policy {policy[:40]!r}", remedy=f"one of {', '.join(POLICIES)}, or none")
    tensors: dict[str, Tensor] = {}
    given: dict[str, Layout] = {}
    for name, text in case.inputs.items():
        tensors[name] = _tensor(name, text)
        if text.placements is not None:
            given[name] = layout_of(text.placements, tensors[name].shape, mesh, of=name)
    operators: list[Operator] = []
    for text_of_op in case.ops:
        for operator in operators_of(text_of_op, tensors, case.axes):
            _bounded(operator.result)
            tensors[operator.result.name] = operator.result
            operators.append(operator)
    pins = {}
    for name, tokens in case.pins.items():
        if name not in tensors:
            raise BadInput(f"{name[:60]!r} is pinned, and no operator makes it", remedy="pin a tensor of the graph")
        pins[name] = layout_of(tokens, tensors[name].shape, mesh, of=name)
        if name in case.inputs and given.setdefault(name, pins[name]) != pins[name]:
            raise BadInput(f"{name} is given as {given[name]} and pinned to {pins[name]}", remedy="say it once")
    return Problem(
        mesh=mesh,
        tensors=tensors,
        inputs=tuple(case.inputs),
        operators=tuple(operators),
        given=given,
        pins={name: layout for name, layout in pins.items() if name not in case.inputs},
        policy=policy,
        schedule={name: schedule_of(name, value, tensors) for name, value in case.schedule.items()},
    )


def _tensor(name: str, text: _TensorText) -> Tensor:
    if not name.isidentifier() or len(name) > 64:
        raise BadInput(f"{name[:64]!r} is no name for a tensor", remedy="letters, digits and _")
    if text.dtype not in DTYPE_BYTES:
        raise BadInput(f"{name}: unknown dtype {text.dtype[:20]!r}", remedy=f"one of {', '.join(DTYPE_BYTES)}")
    found = Tensor(name=name, shape=tuple(text.shape), dtype=text.dtype, axes=tuple(text.axes))
    _bounded(found)
    return found


def _bounded(tensor: Tensor) -> None:
    if any(size < 1 for size in tensor.shape) or prod(tensor.shape) > MAX_ELEMENTS or len(tensor.shape) > MAX_DIMS:
        raise BadInput(
            f"{tensor.name} has shape {list(tensor.shape)[:MAX_DIMS]}",
            why=f"sizes are positive, at most {MAX_DIMS} dims and {MAX_ELEMENTS:,} elements",
        )
