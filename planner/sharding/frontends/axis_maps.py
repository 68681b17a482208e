"""Names for the dims of a captured graph, and maps from names to mesh axes: one for parameters, one for compute.

As in Haliax (`haliax.partitioning.fsdp(param_map, compute_map)`), a parameter is stored in the layout of the parameter
map and used in that of the compute map; inputs and results of the computation have the layout of the compute map.

FSDP is then

    axes       {"x": "batch seq embed", "*.weight": "out embed"}
    parameters {"embed": "data"}
    compute    {"batch": "data"}

and tensor parallelism `{"heads": "model", "mlp": "model"}` in both. No collective is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from planner.sharding.layouts.layout import DimSpec, Layout, Mesh, parse_placements, placements_of
from planner.sharding.operators.operator import Operator
from simulator.sharded.graph import CapturedGraph
from topology.errors import BadInput

AxisMap = Mapping[str, str | Sequence[str]]
UNNAMED = "_"


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
