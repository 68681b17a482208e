"""A captured graph as a problem for the compiler: its operators by rule, placements of its inputs, pins of outputs.

Placements may be said by names of dims, which two maps give mesh axes, as in Haliax
(`haliax.partitioning.fsdp(param_map, compute_map)`): a parameter is stored in the layout of the parameter map and used
in that of the compute map, which inputs and results have, too. FSDP is then

    axes       {"x": "batch seq embed", "*.weight": "out embed"}
    parameters {"embed": "data"}
    compute    {"batch": "data"}

and tensor parallelism `{"heads": "model", "mlp": "model"}` in both. No collective is named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from planner.sharding.frontends.stages import ONE_F_ONE_B, Stages
from planner.sharding.layouts.layout import DimSpec, Layout, Mesh, parse_placements, placements_of
from planner.sharding.operators.graph import GraphBuilder
from planner.sharding.operators.operator import Operator
from planner.sharding.ops.aten import Statement
from planner.sharding.ops.rotary import with_rotations
from planner.sharding.ops.table import rule_of, statements
from planner.sharding.problem.problem import Machine, ShardingProblem
from simulator.sharded.graph import PARAMETER, CapturedGraph, GraphInput, renamed
from topology.errors import BadInput

USED = "_used"  # suffix of a parameter's name in the layout of the computation
AxisMap = Mapping[str, str | Sequence[str]]
UNNAMED = "_"


@dataclass(frozen=True, slots=True)
class CapturedProblem:
    """The problem, and by name of its result the statement from which each operator was made."""

    problem: ShardingProblem
    statements: Mapping[str, Statement]
    micro_batches: int = 1
    interleaved: bool = False  # whether forward and backward passes of micro batches alternate (1F1B)

    @property
    def opaque(self) -> tuple[str, ...]:
        """The results of operators without a rule: they are computed whole on every rank."""
        return tuple(one.result for one in self.statements.values() if not one.known)


def graph_statements(graph: CapturedGraph) -> tuple[Statement, ...]:
    """Return the statements of all operators on which a result of the graph depends, in order."""
    shapes = {one.name: one.shape for one in graph.inputs} | {one.name: one.shape for one in graph.nodes}
    dtypes = {one.name: one.dtype for one in graph.inputs} | {one.name: one.dtype for one in graph.nodes}
    needed = set(graph.outputs)
    kept = []
    for node in reversed(graph.nodes):
        if node.name in needed:
            needed |= set(node.operands())
            kept.append(node)
    return tuple(line for node in reversed(kept) for line in statements(node, shapes, dtypes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """A user's constraints on the sharding of a graph.

    `placements` are those of inputs and results, one token per mesh axis or a layout. `axes` names dims of inputs;
    `parameters` and `compute` map names to mesh axes. Inputs in `choose` are placed by the solver. Inputs without a
    constraint are replicated.
    """

    placements: Mapping[str, Sequence[str] | Layout] = field(default_factory=dict)
    axes: Mapping[str, str] = field(default_factory=dict)
    parameters: AxisMap = field(default_factory=dict)
    compute: AxisMap = field(default_factory=dict)
    choose: Sequence[str] = ()
    policy: str | None = None
    open_outputs: bool = False


def captured_problem(
    graph: CapturedGraph,
    mesh: Mesh,
    constraints: Constraints,
    stages: Stages | None = None,
    machine: Machine | None = None,
) -> CapturedProblem:
    """Return the problem of sharding `graph` over `mesh`, which with pipeline stages is the mesh of one stage.

    Stages without constraints are cut by time on `machine`. Raises BadInput if the constraints do not fit the graph.
    """
    captured_names = {node.name for node in graph.nodes}
    graph = with_rotations(graph, constraints.placements)
    names = named_inputs(graph, constraints.axes)
    check_maps(names, constraints.parameters, constraints.compute)
    resting, used_as = _layouts_of_inputs(graph, mesh, constraints, names)
    lines = graph_statements(graph)
    uses = {name for line in lines for name in line.operands} | set(graph.outputs)
    gathered = [one for one in graph.inputs if one.name in uses and used_as[one.name] != resting[one.name]]
    lines = _with_uses(lines, gathered)
    builder = GraphBuilder(
        {axis: size for line in lines for axis, size in line.sizes.items()}, _annotated_functions(lines)
    )
    for one in graph.inputs:
        if one.name in uses:
            builder.add_input(one.name, one.shape, one.dtype, parameter=one.kind == PARAMETER, origin=one.target)
    for line in lines:
        _apply(builder, line)
    there = {*builder.tensors, *(one.name for one in graph.inputs)}
    asked = [*constraints.placements, *(name for name in constraints.choose if name not in captured_names)]
    unknown = [name for name in asked if name not in there]
    if unknown:
        raise BadInput(f"{unknown[0][:60]!r} is placed, and the graph has no such tensor", remedy="a name of the graph")
    all_names = result_names(builder.operators, names)
    pins = _pins(graph, mesh, constraints, all_names, builder)
    for name, tensor in builder.tensors.items():
        builder.tensors[name] = replace(tensor, axes=_distinct(all_names.get(name, ())))
    built = builder.build(outputs=graph.outputs)
    pins |= {f"{one.name}{USED}": used_as[one.name] for one in gathered}
    problem = ShardingProblem(
        mesh=mesh,
        graph=built,
        input_layouts={name: resting[name] for name in builder.inputs if name not in constraints.choose},
        pins=pins,
        policy=constraints.policy,
        stages=None if stages is None else stages.of_operators(built, mesh, machine),
    )
    batches = 1 if stages is None else stages.micro_batches
    return CapturedProblem(
        problem=problem,
        statements={line.result: line for line in lines},
        micro_batches=batches,
        interleaved=stages is not None and stages.schedule == ONE_F_ONE_B,
    )


def _annotated_functions(lines: Sequence[Statement]) -> set[str]:
    """Return the functions in formulas whose annotations are trusted."""
    called = {line.formula.partition("(")[0] for line in lines if line.annotation}
    return {name for name in called if rule_of(name) is None}


def _layouts_of_inputs(
    graph: CapturedGraph, mesh: Mesh, constraints: Constraints, names: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """Return the layouts in which inputs are stored, and those in which the computation uses them."""
    resting: dict[str, Layout] = {}
    used: dict[str, Layout] = {}
    for one in graph.inputs:
        given = constraints.placements.get(one.name)
        if given is not None:
            resting[one.name] = (
                given if isinstance(given, Layout) else parse_placements(given, one.shape, mesh, of=one.name)
            )
            used[one.name] = resting[one.name]
            continue
        own = names.get(one.name, (UNNAMED,) * len(one.shape))
        used[one.name] = layout_by_names(own, one.shape, constraints.compute, mesh, of=one.name)
        resting[one.name] = used[one.name]
        if one.kind == PARAMETER:
            resting[one.name] = layout_by_names(own, one.shape, constraints.parameters, mesh, of=one.name)
    return resting, used


def _with_uses(lines: Sequence[Statement], gathered: Sequence[GraphInput]) -> tuple[Statement, ...]:
    """Return the statements, with inputs that are stored in another layout redistributed before their first use."""
    waiting = {one.name: one for one in gathered}
    uses = {name: f"{name}{USED}" for name in waiting}
    out: list[Statement] = []
    for line in lines:
        for name in line.operands:
            one = waiting.pop(name, None)
            if one is not None:
                out.append(
                    Statement(
                        result=uses[name],
                        formula=f"set({name})",
                        op="same",
                        args=({"tensor": name},),
                        shape=one.shape,
                        dtype=one.dtype,
                    )
                )
        formula = line.formula
        for name in line.operands:
            if name in uses:
                formula = re.sub(rf"\b{name}\b", uses[name], formula)
        args, kwargs = renamed(line.args, uses), renamed(line.kwargs, uses)
        out.append(replace(line, formula=formula, args=args, kwargs=kwargs))
    return tuple(out)


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Return names as a tensor declares them; none if two dims share one or one is not a word."""
    return tuple(names) if len(set(names)) == len(names) and all(n.isidentifier() for n in names) else ()


def _apply(builder: GraphBuilder, line: Statement) -> None:
    """Add a statement; its result has the captured dtype. Raises BadInput if the shapes differ.

    Its dims have no names yet, so operands are matched to annotations by their order in the formula.
    """
    builder.apply(line.text)
    made = builder.operators[-1]
    if made.result.shape != line.shape:
        raise BadInput(f"{line.text[:80]} makes {list(made.result.shape)}, and was captured as {list(line.shape)}")
    result = replace(made.result, dtype=line.dtype, axes=())
    builder.operators[-1] = replace(made, result=result)
    builder.tensors[line.result] = result


def _pins(
    graph: CapturedGraph,
    mesh: Mesh,
    constraints: Constraints,
    names: Mapping[str, tuple[str, ...]],
    builder: GraphBuilder,
) -> dict[str, Layout]:
    """Return the prescribed layouts of results: those with placements, and outputs by the compute map."""
    pins: dict[str, Layout] = {}
    made = [name for name in builder.tensors if name not in builder.inputs]
    for name in made:
        shape, given = builder.tensors[name].shape, constraints.placements.get(name)
        if given is not None:
            pins[name] = given if isinstance(given, Layout) else parse_placements(given, shape, mesh, of=name)
        elif name in graph.outputs and not constraints.open_outputs:
            pins[name] = layout_by_names(names[name], shape, constraints.compute, mesh, of=name)
    return pins


def named_inputs(graph: CapturedGraph, axes: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the names of the dims of inputs. `axes` has them by name or pattern, of the tensor in the graph or in
    the module.

    The first pattern that matches is used; `_` leaves a dim without a name. Raises BadInput if the number of dims
    differs or a pattern matches nothing.
    """
    found: dict[str, tuple[str, ...]] = {}
    used: set[str] = set()
    for one in graph.inputs:
        for pattern, text in axes.items():
            if fnmatchcase(one.target, pattern) or fnmatchcase(one.name, pattern):
                names = tuple(text.split())
                if len(names) != len(one.shape):
                    raise BadInput(
                        f"{one.target or one.name} has {len(one.shape)} dims, and {pattern!r} names {len(names)}",
                        remedy="one name a dim, _ for a dim without",
                    )
                used.add(pattern)
                found[one.name] = names
                break
    idle = [pattern for pattern in axes if pattern not in used]
    if idle:
        raise BadInput(
            f"{idle[0][:60]!r} names no input of the graph",
            why="an earlier pattern took what it fits, or nothing is called so",
            remedy=f"one of {', '.join(one.target or one.name for one in graph.inputs[:6])}, ...",
        )
    return found


def layout_by_names(names: Sequence[str], shape: Sequence[int], axis_map: AxisMap, mesh: Mesh, *, of: str) -> Layout:
    """Return the layout in which every named dim is sharded as `axis_map` says. Raises BadInput if that is not
    possible.
    """
    dims: list[DimSpec] = []
    for name in names:
        over = axis_map.get(name, ()) if name != UNNAMED else ()
        dims.append((over,) if isinstance(over, str) else tuple(over))
    used = [axis for spec in dims for axis in spec]
    strange = [axis for axis in used if axis not in mesh.names]
    if strange or len(set(used)) != len(used):
        raise BadInput(
            f"{of}: {' '.join(names)} over {', '.join(map(str, used))}",
            why="a mesh axis shards one dim of a tensor" if not strange else f"the mesh has no axis {strange[0]!r}",
            remedy=f"axes of the mesh ({', '.join(mesh.names)}), each once a tensor",
        )
    layout = Layout(tuple(dims))
    return parse_placements(placements_of(layout, mesh), shape, mesh, of=of)


def result_names(operators: Sequence[Operator], inputs: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the names of the dims of all tensors, passed by operators from operands to results.

    A dim made of several axes has the name of the first, and so do the dims into which it is split.
    """
    found = dict(inputs)
    for operator in operators:
        of_axis: dict[str, str] = {}
        for name, dims in operator.operands:
            for dim, given in zip(dims, found.get(name, ()), strict=False):
                if dim and given != UNNAMED:
                    of_axis.setdefault(dim[0], given)
        found[operator.result.name] = tuple(of_axis.get(dim[0], UNNAMED) if dim else UNNAMED for dim in operator.dims)
    return found


def check_maps(inputs: Mapping[str, tuple[str, ...]], *maps: AxisMap) -> None:
    """Raise BadInput if a map uses an axis that no input has: a misspelt name would be ignored otherwise."""
    known = {name for names in inputs.values() for name in names} - {UNNAMED}
    for one in maps:
        strange = [name for name in one if name not in known]
        if strange:
            raise BadInput(
                f"no input has an axis {strange[0][:40]!r}",
                remedy=f"one of {', '.join(sorted(known))}" if known else "name the axes of inputs first",
            )
