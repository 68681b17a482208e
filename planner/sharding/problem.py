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
from planner.sharding.layout import REDUCERS, Layout, layout_of, tokens_of, trimmed
from planner.sharding.mesh import Mesh, Refined, mesh_of, refined
from planner.sharding.operator import Operator, Tensor, operators_of
from planner.sharding.routing import Routing, routings_of
from planner.sharding.schedule import Schedule, schedule_of
from planner.sharding.stages import Stages, stage_axis, stages_of, tokens_without, without_axis
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
    split: dict[str, dict[str, int]] = {}


class _NamedText(msgspec.Struct, forbid_unknown_fields=True):
    axes: dict[str, list[str | int]] = {}
    partial: dict[str, str] = {}


class _TensorText(msgspec.Struct, forbid_unknown_fields=True):
    shape: list[int]
    dtype: str = "bf16"
    axes: list[str] = []
    placements: list[str] | None = None
    named: _NamedText | None = None


# What may stand beside a question and is not read: prose, and what its source expects of an answer.
BESIDE = frozenset(
    ["group", "kind", "title", "notes", "note", "source", "extra", "plan", "reference", "alternatives", "verified"]
) | {"expect", "expected_collectives", "expected_ring_send_bytes_per_rank"}


class CaseText(msgspec.Struct):
    """A case as written."""

    id: str
    mesh: _MeshText
    ops: list[str] = []
    inputs: dict[str, _TensorText] = {}
    axes: dict[str, int] = {}
    axis_map: dict[str, str | list[str]] = {}
    pins: dict[str, list[str]] = {}
    policy: str | None = None
    schedule: dict[str, Any] = {}
    stages: Any = None
    routed: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A case understood. `given` has a layout for every input that is placed, `pins` for results that must be.

    `mesh` is that of one stage where there are stages.
    """

    mesh: Mesh
    tensors: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    operators: tuple[Operator, ...]
    given: Mapping[str, Layout]
    pins: Mapping[str, Layout]
    policy: str | None = None
    schedule: Mapping[str, Schedule] = field(default_factory=dict)
    stages: Stages | None = None
    routed: Mapping[str, Routing] = field(default_factory=dict)


def case_texts(data: Any, *, where: str) -> list[dict[str, Any]]:
    """Return the cases of a file: a list of them, an object with `cases`, or one case. Raises BadInput."""
    cases = data.get("cases", [data]) if isinstance(data, dict) else data
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise BadInput(
            f"{where} holds no sharding cases",
            why="expected a list of objects, or an object with a list `cases`",
            remedy="each with id, mesh, ops, inputs; see examples/sharding/README.md",
        )
    if not cases:
        raise BadInput(f"{where} holds no case", remedy="give at least one")
    if len(cases) > MAX_CASES:
        raise BadInput(
            f"{where} holds {len(cases)} cases", why=f"at most {MAX_CASES} are read", remedy="split the file"
        )
    return cases


def unread(data: Mapping[str, Any]) -> list[str]:
    """Return the keys of a case that nobody knows: a misspelt one would otherwise be a setting ignored."""
    return [key for key in data if key not in BESIDE and key not in CaseText.__struct_fields__]


def problem_of(data: Mapping[str, Any]) -> Problem:
    """Return the problem that a case states. Raises BadInput where it states none."""
    if strange := unread(data):
        raise BadInput(
            f"a sharding case has no {', '.join(repr(key[:40]) for key in strange[:4])}",
            why="a misspelt key would otherwise be ignored silently",
            remedy="remove or rename it; examples/sharding/README.md lists them",
        )
    try:
        case = msgspec.convert(data, CaseText, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadInput("not a sharding case", why=str(error), remedy="see examples/sharding/README.md") from error
    fine = refined(mesh_of(case.mesh.names, case.mesh.shape), case.mesh.split)
    everything = fine.mesh
    axis = None if case.stages is None else stage_axis(case.stages, everything)
    mesh = everything if axis is None else without_axis(everything, axis)

    def placed(tokens: list[str], name: str) -> Layout:
        tokens = fine.tokens(tokens)
        if axis is not None:
            tokens = tokens_without(tokens, everything.names.index(axis), everything, of=name)
        return layout_of(tokens, tensors[name].shape, mesh, of=name)

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
            given[name] = placed(text.placements, name)
        elif text.named is not None or case.axis_map:
            given[name] = _by_names(tensors[name], text.named or _mapped(case.axis_map, text.axes), fine, mesh)
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
        pins[name] = placed(tokens, name)
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
        stages=None if axis is None else stages_of(case.stages, everything, operators),
        routed=routings_of(case.routed, mesh, frozenset(operator.result.name for operator in operators)),
    )


def _mapped(axis_map: Mapping[str, str | list[str]], axes: list[str]) -> _NamedText:
    """Return the layout of a tensor from the map for all tensors, as Haliax has it: {axis: mesh axis or several}."""
    cuts = {axis: axis_map[axis] for axis in axes if axis in axis_map}
    return _NamedText(axes={axis: [over] if isinstance(over, str) else [*over] for axis, over in cuts.items()})


def _by_names(tensor: Tensor, named: _NamedText, fine: Refined, mesh: Mesh) -> Layout:
    """Return the layout that axes by name say. Raises BadInput."""
    cuts = {
        axis: tuple(part for item in items for part in (fine.named(item) if isinstance(item, str) else (item,)))
        for axis, items in named.axes.items()
    }
    partial = {part: reducer for axis, reducer in named.partial.items() for part in fine.named(axis)}
    used = [item for items in cuts.values() for item in items if isinstance(item, str)] + list(partial)
    strange = [axis for axis in cuts if tensor.axes.count(axis) != 1] or [a for a in used if a not in mesh.names]
    if strange or len(set(used)) != len(used) or not set(partial.values()) <= set(REDUCERS):
        raise BadInput(
            f"{tensor.name}: the axes {strange or used} cannot be placed so",
            why="an axis is one of the tensor's, and each mesh axis is used once",
            remedy='{"axes": {"f": ["tp"]}, "partial": {}}',
        )
    dims = tuple(trimmed(cuts.get(axis, ())) for axis in tensor.axes) or ((),) * len(tensor.shape)
    pending = tuple((axis, partial[axis]) for axis in mesh.names if axis in partial)
    written = Layout(dims, pending)
    return layout_of(tokens_of(written, mesh), tensor.shape, mesh, of=tensor.name)


def _tensor(name: str, text: _TensorText) -> Tensor:
    if not name.isidentifier() or len(name) > 64:
        raise BadInput(f"{name[:64]!r} is no name for a tensor", remedy="letters, digits and _")
    if text.dtype not in DTYPE_BYTES:
        raise BadInput(f"{name}: unknown dtype {text.dtype[:20]!r}", remedy=f"one of {', '.join(DTYPE_BYTES)}")
    if text.axes and len(text.axes) != len(text.shape):
        raise BadInput(f"{name} has {len(text.shape)} dims and {len(text.axes)} axes", remedy="one name per dim")
    found = Tensor(name=name, shape=tuple(text.shape), dtype=text.dtype, axes=tuple(text.axes))
    _bounded(found)
    return found


def _bounded(tensor: Tensor) -> None:
    if any(size < 1 for size in tensor.shape) or prod(tensor.shape) > MAX_ELEMENTS or len(tensor.shape) > MAX_DIMS:
        raise BadInput(
            f"{tensor.name} has shape {list(tensor.shape)[:MAX_DIMS]}",
            why=f"sizes are positive, at most {MAX_DIMS} dims and {MAX_ELEMENTS:,} elements",
        )
