"""A captured graph and the constraints on its sharding as one JSON document, which the Python function sends."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from planner.sharding.frontends.captured import Constraints
from planner.sharding.frontends.stages import Stages, read_stages
from planner.sharding.layouts.collectives import ALL_GATHER, ALL_TO_ALL
from planner.sharding.layouts.layout import Layout, Mesh, make_mesh
from planner.sharding.layouts.loop_domain import Streamed, parse_domain
from planner.sharding.problem.pipeline_stages import mesh_without_axis, placements_without_stage_axis
from planner.sharding.problem.problem import policy_named
from simulator.sharded.graph import CapturedGraph, read_graph
from topology.codec import JsonObject
from topology.errors import BadInput

ROUTES = (ALL_TO_ALL, ALL_GATHER)


class _MeshText(msgspec.Struct, forbid_unknown_fields=True):
    names: list[str]
    shape: list[int]


class RequestText(msgspec.Struct, forbid_unknown_fields=True):
    """The document. Tensors have their names in the graph or in the module, or a pattern of either.

    `domains` places them in nvFuser's notation; with `open_outputs` an output without a constraint keeps the layout in
    which it is made.
    """

    graph: JsonObject
    mesh: _MeshText
    id: str = "captured graph"
    placements: dict[str, list[str]] = {}
    domains: dict[str, str] = {}
    open_outputs: bool = False
    axes: dict[str, str] = {}
    parameters: dict[str, str | list[str]] = {}
    compute: dict[str, str | list[str]] = {}
    choose: list[str] = []
    policy: str | None = None
    backward: bool = False
    gradients: list[str] = []
    chunks: dict[str, int | str] | None = None
    stages: JsonObject | None = None
    routes: str | None = None


class Request(msgspec.Struct, frozen=True):
    """A decoded request: names are those of the graph, placements and `mesh` those of one stage if there are stages."""

    id: str
    graph: CapturedGraph
    mesh: Mesh
    constraints: Constraints
    backward: bool
    gradients: tuple[str, ...]
    chunks: dict[str, int | str] | None = None
    stages: Stages | None = None
    streamed: dict[str, Streamed] = {}  # by result of a product, its loop schedule
    orders: dict[str, tuple[int, ...]] = {}  # by tensor, its dims in memory order, outermost first
    routes: str | None = None  # how tokens are sent to experts on other ranks: one of ROUTES, or None for the cheaper


def is_request(data: Mapping[str, Any]) -> bool:
    return "graph" in data


def read_request(data: Mapping[str, Any], *, where: str) -> Request:
    """Return decoded JSON as a request. Raises BadInput."""
    try:
        text = msgspec.convert(data, RequestText, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadInput(f"{where} is no request to shard a graph", why=str(error)) from error
    graph = read_graph(text.graph, where=where)
    policy = policy_named(text.policy)
    if text.routes is not None and text.routes not in ROUTES:
        raise BadInput(f"unknown routes {text.routes[:40]!r}", remedy=f"{' or '.join(ROUTES)}, or none")
    mesh = make_mesh(text.mesh.names, text.mesh.shape)
    stages = None if text.stages is None else read_stages(graph, mesh, text.stages)
    if stages is not None:
        text.placements = {
            name: placements_without_stage_axis(tokens, stages.position, mesh, of=name[:60])
            for name, tokens in text.placements.items()
        }
        mesh = mesh_without_axis(mesh, stages.axis)
    shapes = {one.name: one.shape for one in graph.inputs} | {one.name: one.shape for one in graph.nodes}
    placements: dict[str, list[str] | Layout] = {
        name: tokens for pattern, tokens in text.placements.items() for name in matching(graph, pattern)
    }
    streamed: dict[str, Streamed] = {}
    orders: dict[str, tuple[int, ...]] = {}
    for pattern, calls in text.domains.items():
        for name in matching(graph, pattern):
            domain = parse_domain(calls, shapes[name], mesh, of=name)
            if domain.streamed is not None:
                streamed[name] = domain.streamed
            if domain.allocation:
                orders[name] = domain.allocation
            nothing = domain.streamed is None and not domain.allocation
            if nothing or any(domain.layout().dims):  # streams and allocations alone place nothing on devices
                placements[name] = domain.layout()
    constraints = Constraints(
        placements=placements,
        axes=text.axes,
        parameters=text.parameters,
        compute=text.compute,
        choose=tuple(n for pattern in text.choose for n in matching(graph, pattern) if n not in placements),
        policy=policy,
        open_outputs=text.open_outputs,
    )
    return Request(
        id=text.id[:200],
        graph=graph,
        mesh=mesh,
        constraints=constraints,
        backward=text.backward,
        gradients=tuple(name for pattern in text.gradients for name in matching(graph, pattern)),
        chunks=None
        if text.chunks is None
        else {name: count for pattern, count in text.chunks.items() for name in matching(graph, pattern)},
        stages=stages,
        streamed=streamed,
        orders=orders,
        routes=text.routes,
    )


def matching(graph: CapturedGraph, pattern: str) -> list[str]:
    """Return the tensors that a name or a pattern matches; `output0` is the first result. Raises BadInput if there are
    none.
    """
    if pattern.startswith("output") and pattern[6:].isdigit() and int(pattern[6:]) < len(graph.outputs):
        return [graph.outputs[int(pattern[6:])]]
    names = [(one.name, one.target) for one in graph.inputs] + [(node.name, "") for node in graph.nodes]
    found = [name for name, target in names if pattern in {name, target}]
    found = found or [n for n, target in names if fnmatchcase(n, pattern) or (target and fnmatchcase(target, pattern))]
    if not found:
        raise BadInput(
            f"{pattern[:60]!r} is no tensor of the graph",
            remedy=f"a name or pattern of {', '.join(target or name for name, target in names[:6])}, ...; or output0",
        )
    return found
