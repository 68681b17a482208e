"""Parse a sharding case: a mesh, operators over tensors, the placements of inputs, and the placements that are pinned.

Files are untrusted: sizes are bounded, formulas are parsed and never run, and unknown keys are an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from planner.sharding.layouts.layout import (
    REDUCERS,
    Layout,
    Mesh,
    SplitMesh,
    make_mesh,
    normalize_spec,
    parse_placements,
    placements_of,
    split_mesh,
)
from planner.sharding.layouts.loop_domain import parse_schedule_of
from planner.sharding.operators.backward import add_backward
from planner.sharding.operators.graph import Graph, GraphBuilder
from planner.sharding.operators.operator import Operator, Tensor
from planner.sharding.problem.deadline import NO_DEADLINE, Deadline
from planner.sharding.problem.pipeline_stages import (
    PipelineStages,
    assign_stages,
    mesh_without_axis,
    parse_stage_assignment,
    placements_without_stage_axis,
)
from planner.sharding.problem.schedule import Schedule, parse_schedule
from planner.sharding.problem.token_routing import TokenRouting, parse_routings
from simulator.calibration.calibration import Calibration
from topology.cluster import Cluster
from topology.codec import JsonObject
from topology.errors import BadInput, Infeasible
from topology.rates.reach import reach

MAX_CASES = 2000
POLICIES = ("min_ring_bytes", "min_time", "follow_weights")


class _MeshText(msgspec.Struct, forbid_unknown_fields=True):
    names: list[str]
    shape: list[int]
    split: dict[str, dict[str, int]] = {}


class _NamedLayoutText(msgspec.Struct, forbid_unknown_fields=True):
    axes: dict[str, list[str | int]] = {}
    partial: dict[str, str] = {}


class _TensorText(msgspec.Struct, forbid_unknown_fields=True):
    shape: list[int]
    dtype: str = "bf16"
    axes: list[str] = []
    placements: list[str] | None = None
    named: _NamedLayoutText | None = None
    domain: str | None = None


# Keys of a case that are allowed and ignored: prose, and the answer that its source expects.
IGNORED_KEYS = frozenset(
    ["group", "kind", "title", "notes", "note", "source", "extra", "plan", "reference", "alternatives", "verified"]
) | {"expect", "expected_collectives", "expected_ring_send_bytes_per_rank"}


class CaseText(msgspec.Struct):
    """A case as written in the file."""

    id: str
    mesh: _MeshText
    ops: list[str] = []
    inputs: dict[str, _TensorText] = {}
    parameters: list[str] = []
    functions: list[str] = []
    backward: dict[str, str] = {}
    with_respect_to: list[str] = []
    axes: dict[str, int] = {}
    axis_map: dict[str, str | list[str]] = {}
    pins: dict[str, list[str]] = {}
    policy: str | None = None
    schedule: JsonObject = {}
    stages: Any = None
    routed: JsonObject = {}


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that a program runs on: rank r of the mesh on GPU r of the cluster, in order."""

    cluster: Cluster
    calibration: Calibration | None = None

    def require_ranks(self, ranks: int) -> None:
        """Raise Infeasible unless the machine has this number of GPUs and they are connected."""
        found = self.cluster.gpu_count
        if ranks > found:
            raise Infeasible(
                f"{self.cluster.name} has {found} GPU(s), the mesh {ranks} ranks",
                remedy="a larger --cluster, or more nodes of it with --gpus",
            )
        joined = reach(self.cluster)
        if ranks > joined.gpus:
            raise Infeasible(f"a mesh of {ranks} ranks cannot run on {self.cluster.name}", why=joined.why)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """A limit of a rank's memory when the backward pass begins: parameters with their state, and saved tensors.

    `state_bytes_per_parameter` come with every parameter besides its own bytes: the gradient in bf16, and Adam's two
    moments and master weight in float32, unless said otherwise. With `counts_saved` false, saved tensors are not
    counted, since they can be recomputed in the backward pass. `spare_bytes` are reserved for what is not counted but
    exists at the peak of a program.
    """

    limit_bytes: float
    state_bytes_per_parameter: float = 14.0
    counts_saved: bool = True
    spare_bytes: float = 0.0

    @property
    def counted_bytes(self) -> float:
        return self.limit_bytes - self.spare_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingProblem:
    """A problem: the sharding of `graph` over `mesh`.

    `input_layouts` are of the inputs that have placements, `pins` of results whose layout is prescribed; the solver
    places all other tensors. With pipeline stages, `mesh` is the mesh of one stage. With a `machine`, cost is time,
    else ring bytes; the best answer found by `deadline` is returned with its gap. If the graph has no backward pass and
    will run with the dual of every step (`planner.sharding.backends.duals`), `differentiated` are the tensors with
    gradients, whose time counts too. A `hidden_share` of the exchanges of rows takes no time in the choice, as if
    products hid it; the choice's cost is stated without this.
    """

    mesh: Mesh
    graph: Graph
    input_layouts: Mapping[str, Layout] = field(default_factory=dict)
    pins: Mapping[str, Layout] = field(default_factory=dict)
    policy: str | None = None
    schedule: Mapping[str, Schedule] = field(default_factory=dict)
    stages: PipelineStages | None = None
    routed: Mapping[str, TokenRouting] = field(default_factory=dict)
    machine: Machine | None = None
    memory: MemoryLimit | None = None
    deadline: Deadline = NO_DEADLINE
    differentiated: frozenset[str] = frozenset()
    hidden_share: float = 0.0

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self.graph.tensors

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.graph.inputs

    @property
    def operators(self) -> tuple[Operator, ...]:
        return self.graph.operators

    def state_bytes(self, parameter: str) -> float:
        """Return the bytes that a memory limit counts for an element of a parameter besides its own; 0 for a frozen
        one.
        """
        assert self.memory is not None  # noqa: S101 - by the caller
        frozen = self.differentiated and parameter not in self.differentiated
        return 0.0 if frozen else self.memory.state_bytes_per_parameter


def policy_named(name: str | None) -> str | None:
    """Return a policy; None for `none`. Raises BadInput for an unknown one."""
    if name not in {None, "none", *POLICIES}:
        raise BadInput(f"unknown policy {str(name)[:40]!r}", remedy=f"one of {', '.join(POLICIES)}, or none")
    return None if name == "none" else name


def split_cases(data: Any, *, where: str) -> list[JsonObject]:
    """Return the cases of a file: a list, an object with a list `cases`, or one case. Raises BadInput."""
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


def unknown_keys(data: Mapping[str, Any]) -> list[str]:
    """Return the keys of a case that are not part of the format."""
    return [key for key in data if key not in IGNORED_KEYS and key not in CaseText.__struct_fields__]


def parse_problem(data: Mapping[str, Any]) -> ShardingProblem:
    """Parse a case. Raises BadInput."""
    if unknown := unknown_keys(data):
        raise BadInput(
            f"a sharding case has no {', '.join(repr(key[:40]) for key in unknown[:4])}",
            why="a misspelt key would otherwise be ignored silently",
            remedy="remove or rename it; examples/sharding/README.md lists them",
        )
    try:
        case = msgspec.convert(data, CaseText, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadInput("not a sharding case", why=str(error), remedy="see examples/sharding/README.md") from error
    split = split_mesh(make_mesh(case.mesh.names, case.mesh.shape), case.mesh.split)
    full_mesh = split.mesh
    assignment = None if case.stages is None else parse_stage_assignment(case.stages, full_mesh)
    mesh = full_mesh if assignment is None else mesh_without_axis(full_mesh, assignment.axis)

    def parse_layout(tokens: list[str], name: str) -> Layout:
        tokens = split.expand_placements(tokens)
        if assignment is not None:
            tokens = placements_without_stage_axis(tokens, full_mesh.names.index(assignment.axis), full_mesh, of=name)
        return parse_placements(tokens, tensors[name].shape, mesh, of=name)

    policy = policy_named(case.policy)
    builder = GraphBuilder(case.axes, case.functions)
    tensors = builder.tensors
    input_layouts: dict[str, Layout] = {}
    for name, text in case.inputs.items():
        builder.add_input(name, text.shape, text.dtype, axes=text.axes, parameter=name in case.parameters)
        if text.domain is not None and (text.placements is not None or text.named is not None):
            raise BadInput(f"{name[:60]!r} has a domain and another placement", remedy="one of the two")
        if text.placements is not None:
            input_layouts[name] = parse_layout(text.placements, name)
        elif text.domain is not None:
            input_layouts[name] = parse_schedule_of(text.domain, tensors[name].shape, mesh, of=name)
        elif text.named is not None or case.axis_map:
            input_layouts[name] = _parse_named_layout(
                tensors[name], text.named or _layout_text_from_map(case.axis_map, text.axes), split, mesh
            )
    for line in case.ops:
        builder.apply(line)
    unknown = [name for name in case.parameters if name not in case.inputs]
    if unknown:
        raise BadInput(f"{unknown[0][:60]!r} is a parameter, and no input", remedy="name an input")
    graph = builder.build()
    if case.backward:
        graph = add_backward(graph, case.backward, with_respect_to=case.with_respect_to)
    tensors, operators = dict(graph.tensors), graph.operators
    pins = {}
    for name, tokens in case.pins.items():
        if name not in tensors:
            raise BadInput(f"{name[:60]!r} is pinned, and no operator makes it", remedy="pin a tensor of the graph")
        pins[name] = parse_layout(tokens, name)
        if name in graph.inputs and input_layouts.setdefault(name, pins[name]) != pins[name]:
            raise BadInput(f"{name} is given as {input_layouts[name]} and pinned to {pins[name]}", remedy="say it once")
    return ShardingProblem(
        mesh=mesh,
        graph=graph,
        input_layouts=input_layouts,
        pins={name: layout for name, layout in pins.items() if name not in graph.inputs},
        policy=policy,
        schedule={name: parse_schedule(name, value, tensors) for name, value in case.schedule.items()},
        stages=None if assignment is None else assign_stages(assignment, full_mesh, operators),
        routed=parse_routings(case.routed, mesh, frozenset(operator.result.name for operator in operators)),
    )


def _layout_text_from_map(axis_map: Mapping[str, str | list[str]], axes: list[str]) -> _NamedLayoutText:
    """Return the layout of a tensor from a Haliax-like map for all tensors: {axis: mesh axis, or several}."""
    cuts = {axis: axis_map[axis] for axis in axes if axis in axis_map}
    return _NamedLayoutText(axes={axis: [over] if isinstance(over, str) else [*over] for axis, over in cuts.items()})


def _parse_named_layout(tensor: Tensor, named: _NamedLayoutText, split: SplitMesh, mesh: Mesh) -> Layout:
    """Parse a layout given by axis names. Raises BadInput."""
    specs = {
        axis: tuple(part for item in spec for part in (split.parts_of(item) if isinstance(item, str) else (item,)))
        for axis, spec in named.axes.items()
    }
    partial = {part: reducer for axis, reducer in named.partial.items() for part in split.parts_of(axis)}
    used = [item for spec in specs.values() for item in spec if isinstance(item, str)] + list(partial)
    misplaced = [axis for axis in specs if tensor.axes.count(axis) != 1] or [a for a in used if a not in mesh.names]
    if misplaced or len(set(used)) != len(used) or not set(partial.values()) <= set(REDUCERS):
        raise BadInput(
            f"{tensor.name}: the axes {misplaced or used} cannot be placed so",
            why="an axis is one of the tensor's, and each mesh axis is used once",
            remedy='{"axes": {"f": ["tp"]}, "partial": {}}',
        )
    dims = tuple(normalize_spec(specs.get(axis, ())) for axis in tensor.axes) or ((),) * len(tensor.shape)
    pending = tuple((axis, partial[axis]) for axis in mesh.names if axis in partial)
    layout = Layout(dims, pending)
    return parse_placements(placements_of(layout, mesh), tensor.shape, mesh, of=tensor.name)
