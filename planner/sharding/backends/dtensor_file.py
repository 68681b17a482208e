"""A plan as a Python file of PyTorch: parameters distributed, inputs and outputs of modules redistributed as DTensors.

The file needs torch alone. A linear layer that the plan shards as Megatron does becomes `ColwiseParallel` or
`RowwiseParallel`; every other module with parameters gets the style that the file defines, with its placements written
out. Operators between modules are left to DTensor's propagation, which starts from the planned placements of each
module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from planner.sharding.frontends.captured import USED, CapturedProblem
from planner.sharding.layouts.layout import Layout, placements_of
from planner.sharding.ops.routed import ROUTED, SENT
from planner.sharding.plans.plan import ShardingPlan
from simulator.sharded.graph import INPUT, PARAMETER, CapturedGraph
from topology.errors import Infeasible

_HEAD = '''"""{title}

Placements chosen by meshwright. `parallelize(module, mesh)` distributes the parameters of the module and \
redistributes what
goes in and out of its parts; run it on every rank:

    mesh = init_device_mesh(device, {shape}, mesh_dim_names={names})
    module = parallelize(module, mesh)
    with implicit_replication():
        y = module(*placed_inputs(mesh, ...))
"""

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import Module, Parameter
from torch.nn.utils.parametrize import register_parametrization

MESH_SHAPE, MESH_NAMES = {shape}, {names}


class Gathered(Module):
    """A parameter as the computation uses it: redistributed from where it rests, its gradient back."""

    def __init__(self, placements):
        super().__init__()
        self.placements = placements

    def forward(self, parameter):
        return parameter.redistribute(placements=self.placements)


class Placed(ParallelStyle):
    """Parameters as `rest`, used as `used` where that differs; the first input as `takes` and the result as `gives`."""

    def __init__(self, rest, used=None, takes=None, gives=None):
        super().__init__()
        self.rest, self.used, self.takes, self.gives = rest, used or {{}}, takes, gives

    def _apply(self, module, mesh):
        for name, placements in self.rest.items():
            whole = getattr(module, name)
            setattr(module, name, Parameter(distribute_tensor(whole.detach(), mesh, placements), whole.requires_grad))
        for name, placements in self.used.items():
            register_parametrization(module, name, Gathered(placements), unsafe=True)
        if self.takes is not None:
            module.register_forward_pre_hook(lambda _, args: (as_placed(args[0], mesh, self.takes), *args[1:]))
        if self.gives is not None:
            module.register_forward_hook(lambda _, args, result: as_placed(result, mesh, self.gives))
        return module


def as_placed(value, mesh, placements):
    """Return `value` in `placements`; a plain tensor is one that every rank has whole."""
    if not isinstance(value, DTensor):
        value = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return value.redistribute(placements=placements)

'''
_TAIL = '''

def parallelize(module, mesh):
    """Distribute `module` over `mesh`, in place."""
    if mesh.ndim == 1:
        parallelize_module(module, mesh, {name: style for name, style in STYLES.items() if name})
    else:
        for name, style in STYLES.items():
            if name:
                style._apply(module.get_submodule(name), mesh)
    if "" in STYLES:
        STYLES[""]._apply(module, mesh)
    module.register_forward_hook(lambda _, args, result: placed_outputs(mesh, result))
    return module


def placed_outputs(mesh, result):
    """Return the module's result, or each of its results, as the plan places it."""
    if isinstance(result, tuple | list):
        return type(result)(as_placed(one, mesh, placements) for one, placements in zip(result, OUTPUTS, strict=True))
    return as_placed(result, mesh, OUTPUTS[0])


def placed_inputs(mesh, *values):
    """Return whole inputs of the module, in order, as the plan places them."""
    return [distribute_tensor(value, mesh, placements) for value, placements in zip(values, INPUTS, strict=True)]
'''


@dataclass(slots=True)
class _Part:
    """A module with parameters of its own: their resting and used placements, its inputs and outputs."""

    rest: dict[str, Layout] = field(default_factory=dict)
    used: dict[str, Layout] = field(default_factory=dict)
    takes: Layout | None = None
    gives: Layout | None = None
    linear: bool = False


def write_dtensor_file(captured: CapturedProblem, graph: CapturedGraph, plan: ShardingPlan, *, title: str) -> str:
    """Return the text of the file. Raises Infeasible if an output is pending, which a caller cannot use."""
    problem, layouts = captured.problem, plan.choice.layouts
    mesh = problem.mesh
    if any(layouts[name].pending for name in graph.outputs):
        raise Infeasible("an output is left pending", remedy="pin the outputs")
    if any(one.op in {ROUTED, SENT} for one in captured.statements.values()):
        raise Infeasible(
            "tokens that are sent to their experts have no placements of DTensors",
            remedy='"routes": "all_gather", or the program (--program)',
        )

    def written(layout: Layout) -> str:
        return f"[{', '.join(_constructor(token) for token in placements_of(layout, mesh))}]"

    parts = _parts(captured, graph, plan)
    lines = ["STYLES = {"]
    for name, part in parts.items():
        lines.append(f"    {name!r}: {_style(part, len(mesh.names), written)},")
    lines.append("}")
    inputs = [one.name for one in graph.inputs if one.kind == INPUT]
    whole = Layout(())
    lines.append("INPUTS = [")
    for name in inputs:
        layout = layouts.get(name, whole)
        text = written(layout) if name in layouts else f"[{', '.join(['Replicate()'] * len(mesh.names))}]"
        lines.append(f"    {text},  # {name}")
    lines.append("]")
    lines.append(f"OUTPUTS = [{', '.join(written(layouts[name]) for name in graph.outputs)}]")
    safe_title = title.replace("\\", "/").replace('"', "'").replace("\n", " ")[:100]
    head = _HEAD.format(title=safe_title, shape=tuple(mesh.shape), names=tuple(mesh.names))
    return head + "\n" + "\n".join(lines) + "\n" + _TAIL


def _constructor(token: str) -> str:
    """Return the PyTorch expression of a placement token."""
    if token == "R":  # noqa: S105 - a placement
        return "Replicate()"
    name, inside = token[:-1].split("(")
    if name == "SS":
        dim, factor = inside.split(",")
        return f"_StridedShard({dim}, split_factor={factor.strip()})"
    return f"Shard({inside})" if name == "S" else f"Partial({inside!r})"


def _parts(captured: CapturedProblem, graph: CapturedGraph, plan: ShardingPlan) -> dict[str, _Part]:
    """Return the modules that own parameters, by path, in the order in which they are first called."""
    layouts, operators = plan.choice.layouts, captured.problem.operators
    options = {o.result.name: option for o, option in zip(operators, plan.choice.options, strict=True)}
    owners = {one.name: one.target.rpartition(".") for one in graph.inputs if one.kind == PARAMETER}
    parts: dict[str, _Part] = {}
    for name, (path, _, own) in owners.items():
        if name not in layouts:
            continue
        part = parts.setdefault(path, _Part())
        part.rest[own] = layouts[name]
        if f"{name}{USED}" in layouts:
            part.used[own] = layouts[f"{name}{USED}"]
    calls: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.name in options:
            calls.setdefault(node.module, []).append(node.name)
    for path, names in calls.items():
        found = parts.get(path)
        if found is None or not path:
            continue
        found.gives = layouts[names[-1]]
        first = next(n for n in graph.nodes if n.name == names[0])
        found.linear = len(names) == 1 and first.op == "aten.linear.default"
        entering = [n for n in first.operands() if n not in owners]
        product = options.get(f"{first.name}_product", options[first.name])
        found.takes = dict(product.operands).get(entering[0]) if entering else None
    return parts


def _style(part: _Part, axes: int, written: Callable[[Layout], str]) -> str:
    """Return the expression of a module's style."""
    weight, bias = part.rest.get("weight"), part.rest.get("bias")
    if axes == 1 and part.linear and not part.used and weight is not None and part.takes and part.gives:
        takes, gives = written(part.takes)[1:-1], written(part.gives)[1:-1]
        ends = f"input_layouts={takes}, output_layouts={gives}, use_local_output=False"
        if weight.dims[0] and not weight.dims[1] and (bias is None or bias.dims[0]) and not any(part.takes.dims):
            return f"ColwiseParallel({ends})"
        if weight.dims[1] and not weight.dims[0] and (bias is None or not bias.dims[0]) and part.takes.dims[-1]:
            return f"RowwiseParallel({ends})"
    named = _named({name: written(layout) for name, layout in part.rest.items()})
    arguments = [named]
    if part.used:
        arguments.append(f"used={_named({name: written(layout) for name, layout in part.used.items()})}")
    if part.takes is not None:
        arguments.append(f"takes={written(part.takes)}")
    if part.gives is not None:
        arguments.append(f"gives={written(part.gives)}")
    return f"Placed({', '.join(arguments)})"


def _named(values: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{name!r}: {text}" for name, text in values.items()) + "}"
