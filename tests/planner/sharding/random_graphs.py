"""Random graphs of known functions on random meshes with random placements, for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from planner.sharding.layouts.layout import make_mesh, parse_placements
from planner.sharding.operators.backward import add_backward
from planner.sharding.operators.graph import GraphBuilder
from planner.sharding.problem.problem import ShardingProblem
from topology.errors import BadInput

B, S, E = 4, 4, 8
# Steps from a tensor `x` of [B, S, E] to another of that shape; `w` stands for new weights.
STEPS = [
    "gelu({x})",
    "{x} * {y}",
    "{x} + {y}",
    "{x} - {y} * 0.5",
    "silu({x}) * {y}",
    "rms_norm({x}, {g})",
    "layer_norm({x}, {g}, {h})",
    "softmax({x}, -1)",
    "linear({x}, {w})",
    "linear({x}, {w}, {g})",
    "linear(gelu(linear({x}, {up})), {down})",
    "{x} @ {w}",
    "{x} + linear({x}, {w})",
    "{x}.view(4, 4, 2, 4).transpose(1, 2).transpose(1, 2).reshape(4, 4, 8)",
    "{x}.transpose(0, 1) * {y}",
    "{x} * {x}.mean(-1, keepdim=True)",
    "{x} - {x}.sum(1, keepdim=True)",
    "einsum('bse,bte->bst', {x}, {y}) @ {y}",
    (
        "attn({x}.view(4, 4, 2, 4).transpose(1, 2), {y}.view(4, 4, 2, 4).transpose(1, 2),"
        " {x}.view(4, 4, 2, 4).transpose(1, 2), True).transpose(1, 2).reshape(4, 4, 8)"
    ),
    "cat([{x}.chunk(2, -1)[1], {y}.chunk(2, -1)[0]], -1)",
    "{x}.cumsum(1)",
    "exp({x} * 0.1)[:, 0].unsqueeze(1) * {y}",
    "{x}.flatten(0, 1).unflatten(0, (4, 4))",
    "{x} * {y}.amax(0)",
]
WEIGHTS = {"w": (E, E), "g": (E,), "h": (E,), "up": (2 * E, E), "down": (E, 2 * E)}


@st.composite
def graphs(draw, *, backward):
    builder = GraphBuilder()
    builder.add_input("x0", (B, S, E), "f64", parameter=True)
    builder.add_input("x1", (B, S, E), "f64")
    have = ["x0", "x1"]
    for number in range(draw(st.integers(1, 3))):
        step = draw(st.sampled_from(STEPS))
        names = {"x": draw(st.sampled_from(have[-2:])), "y": draw(st.sampled_from(have))}
        for key, shape in WEIGHTS.items():
            if "{" + key + "}" in step:
                names[key] = f"{key}{number}"
                builder.add_input(names[key], shape, "f64", parameter=True)
        builder.apply(f"y{number} = {step.format(**names)}")
        have.append(f"y{number}")
    graph = builder.build()
    return add_backward(graph, {have[-1]: "dy"}) if backward else graph


@st.composite
def placed(draw, strategy):
    """A problem: the graph on a mesh, most inputs placed, the result and some gradients pinned."""
    graph = draw(strategy)
    sizes = draw(st.sampled_from([(2,), (4,), (2, 2), (4, 2), (2, 2, 2)]))
    mesh = make_mesh(["a", "b", "c"][: len(sizes)], sizes)

    def layout(name):
        shape = graph.tensors[name].shape
        tokens = ["R", *(f"S({dim})" for dim in range(len(shape)))]
        return parse_placements([draw(st.sampled_from(tokens)) for _ in sizes], shape, mesh, of=name)

    given = {}
    for name in graph.inputs:
        if draw(st.integers(0, 3)):
            try:
                given[name] = layout(name)
            except BadInput:
                given[name] = parse_placements(["R"] * len(sizes), graph.tensors[name].shape, mesh, of=name)
    pins = {name: layout(name) for name in graph.outputs[:2] if name not in graph.inputs and draw(st.booleans())}
    policy = draw(st.sampled_from([None, "min_ring_bytes"]))
    return ShardingProblem(mesh=mesh, graph=graph, input_layouts=given, pins=pins, policy=policy)
