"""The backward pass that is derived: against finite differences on one process, and sharded against one process."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.sharding.layouts.layout import make_mesh, parse_placements
from planner.sharding.operators.backward import add_backward
from planner.sharding.operators.graph import GraphBuilder
from planner.sharding.operators.operator import Tensor, parse_operators
from planner.sharding.plans.plan import TensorMove, plan_sharding
from planner.sharding.problem.problem import ShardingProblem
from tests.planner.sharding import cases, virtual_ranks
from tests.planner.sharding.random_graphs import graphs, placed
from topology.errors import BadInput

SHAPES = {
    "x": (2, 4, 8),
    "z": (2, 4, 8),
    "w": (6, 8),
    "v": (8, 6),
    "g": (8,),
    "e": (8,),
    "q": (2, 4, 4, 2),
    "k": (2, 2, 4, 2),
    "u": (2, 2, 4, 2),
    "cos": (4, 2),
    "sin": (4, 2),
    "m": (2, 8, 6),
    "table": (8, 6),
    "ids": (2, 4),
    "t": (4, 8),
    "p": (2, 8, 3),
    "ends": (2,),
}
FORMULAS = [
    "linear(x, w)",
    "linear(x, w) @ v.T",
    "x @ v",
    "x @ m",
    "einsum('bse,nbe->sn', x, z.reshape(4, 2, 8))",
    "gelu(x) * z - x / (2.0 + z * z)",
    "silu(x) ** 2",
    "x * g + e",
    "sub(x, mul(z, z))",
    "where(x >= z, x, z * z)",
    "softmax(x, -1)",
    "log_softmax(x, 1)",
    "logsumexp(x, -1)",
    "cross_entropy(x, ids)",
    "rms_norm(x, g)",
    "layer_norm(x, g, e)",
    "attn(q, k, u)",
    "attn(q, k, u, True)",
    "rope(q, cos, sin)",
    "embedding(ids, table)",
    "x.view(2, 4, 2, 4).transpose(1, 2).reshape(2, 2, 16)",
    "x.permute(2, 0, 1).flatten(1, 2)",
    "x.unsqueeze(1).expand(2, 3, 4, 8)",
    "x[:, 1:3, :].sum(1)",
    "x[:, 0] * 2.0",
    "x.mean((0, 2))",
    "x.sum(-1, keepdim=True) * z",
    "cat([x, z, x], 1)",
    "x.chunk(2, -1)[0] * x.chunk(2, -1)[1]",
    "x.chunk(4, -1)[1] * 2.0",
    "x.cumsum(1)",
    "x.flip(1)",
    "x.repeat_interleave(2, 1)",
    "x.amax(-1)",
    "grouped_mm(t, p, ends)",
    "exp(x).sum((0, 1))",
]
INTEGERS = {"ids", "ends"}


def graph_of(formula):
    builder = GraphBuilder()
    names = [n for n in SHAPES if n in set(cases.names_in(formula))]
    for name in names:
        builder.add_input(name, SHAPES[name], "i64" if name in INTEGERS else "f64", parameter=name not in INTEGERS)
    builder.apply(f"y = {formula}")
    return builder.build()


def values_of(graph, rng):
    whole = {n: rng.normal(size=graph.tensors[n].shape) for n in graph.inputs}
    return {**whole, **{n: rng.integers(0, 8, size=whole[n].shape) for n in INTEGERS & set(whole)}, **_ends(whole)}


def _ends(whole):
    return {"ends": np.array([3, 4])} if "ends" in whole else {}


def computed(graph, inputs):
    """Every tensor of a graph, on one process."""
    whole = {name: np.asarray(value, float) for name, value in inputs.items()}
    for operator in graph.operators:
        whole[operator.result.name] = virtual_ranks._computed(operator, whole)
        assert whole[operator.result.name].shape == operator.result.shape, operator.text
    return whole


def test_no_gradient_passes_what_is_detached() -> None:
    graph = add_backward(graph_of("x * z.detach() + softmax(detach(z), -1)"), {"y": "dy"})
    inputs = values_of(graph, np.random.default_rng(2))

    assert set(graph.gradients) == {"x"}
    np.testing.assert_allclose(computed(graph, inputs)[graph.gradients["x"]], inputs["dy"] * inputs["z"])


@pytest.mark.parametrize("formula", FORMULAS)
def test_gradients_are_what_finite_differences_say(formula) -> None:
    forward = graph_of(formula)
    graph = add_backward(forward, {"y": "dy"})
    rng = np.random.default_rng(1)
    inputs = values_of(graph, rng)
    found = computed(graph, inputs)
    assert set(graph.gradients) == set(forward.inputs) - INTEGERS - {"cos", "sin"}  # angles are constants

    for name, gradient in graph.gradients.items():
        direction, step = rng.normal(size=inputs[name].shape), 1e-5

        def along(sign, name=name, direction=direction, step=step):
            moved = {**inputs, name: inputs[name] + sign * step * direction}
            return (computed(forward, {n: moved[n] for n in forward.inputs})["y"] * inputs["dy"]).sum()

        slope = (along(1) - along(-1)) / (2 * step)
        assert found[gradient].shape == inputs[name].shape
        assert (found[gradient] * direction).sum() == pytest.approx(slope, rel=2e-6, abs=2e-6), name


def test_a_function_without_a_gradient_is_named() -> None:
    builder = GraphBuilder()
    builder.add_input("x", (4, 8), parameter=True)
    builder.apply("y = x.sort(-1).values")

    with pytest.raises(BadInput, match="no gradient"):
        add_backward(builder.build(), {"y": "dy"})
    with pytest.raises(BadInput, match="no gradient of 'q'"):
        add_backward(builder.build(), {"q": "dq"})
    for formula in ("lerp(x, z, g)", "addcmul(x, z, z)", "atan2(x, z)"):  # slopes in more than the first tensor
        with pytest.raises(BadInput, match="several tensors"):
            add_backward(graph_of(formula), {"y": "dy"})


def test_derived_annotations_are_of_the_operands_in_the_formulas_order() -> None:
    """Keys that are named as the annotation happens to name queries are still the keys."""
    given = {
        "g": "a0 a2 a1 a3",
        "q": "a1 a2 a0 a3",
        "k": "a0 a2 a1 a3",
        "v": "a1 a2 a0 a3",
        "rows": "a1 a2 a0",
        "along": "a0 a2 a1",
    }
    axes = {name: tuple(text.split()) for name, text in given.items()}
    tensors = {n: Tensor(name=n, shape=(4, 2, 4, 4)[: len(a)], dtype="f64", axes=a) for n, a in axes.items()}
    (found,) = parse_operators(f"d_q = attention_bwd_q({', '.join(given)}, True)", tensors, {})

    assert [name for name, _ in found.operands] == list(given)
    assert found.dims == found.operands[1][1]


def test_the_gradient_of_shared_heads_is_pending_over_the_ranks_that_share_them() -> None:
    """Two key heads on four ranks: each is on two, and the sum over its query heads is finished between those."""
    builder = GraphBuilder()
    builder.add_input("x", (2, 4, 8), axes=("b", "s", "e"))
    builder.add_input("wq", (2, 2, 3, 8), axes=("K", "g", "d", "e"), parameter=True)
    for name in ("wk", "wv"):
        builder.add_input(name, (2, 3, 8), axes=("K", "d", "e"), parameter=True)
    builder.apply("q = einsum('bse,Kgde->bKgsd', x, wq).flatten(1, 2)")
    builder.apply("k = einsum('bse,Kde->bKsd', x, wk)")
    builder.apply("v = einsum('bse,Kde->bKsd', x, wv)")
    builder.apply("o = attn(q, k, v)")
    mesh = make_mesh(["kv", "rep"], [2, 2])
    graph = add_backward(builder.build(), {"o": "do"})
    placements = {"x": "R R", "wq": "S(0) S(1)", "wk": "S(0) R", "wv": "S(0) R", "do": "S(1) S(1)"}
    problem = ShardingProblem(
        mesh=mesh,
        graph=graph,
        input_layouts={
            n: parse_placements(text.split(), graph.tensors[n].shape, mesh, of=n) for n, text in placements.items()
        },
        pins={
            graph.gradients[n]: parse_placements(["S(0)", "R"], graph.tensors[n].shape, mesh, of=n)
            for n in ("wk", "wv")
        },
    )
    found = virtual_ranks.run(problem, cases.values(problem))

    reduced = [c for c in found.collectives if c.kind == "all_reduce"]
    assert {c.tensor for c in reduced} <= {"d_k", "d_v", "d_wk", "d_wv"}
    assert {c.mesh_dim for c in reduced} == {"rep"}


@settings(max_examples=int(os.environ.get("MESHWRIGHT_SHARDING_EXAMPLES", "4")), deadline=None)
@given(st.data())
def test_random_graphs_with_their_backward_pass_compute_the_same_on_every_mesh(data) -> None:
    problem = data.draw(placed(graphs(backward=True)))

    found = virtual_ranks.run(problem, cases.values(problem))

    for step in found.steps:
        if isinstance(step, TensorMove):
            assert step.steps or step.source == step.target


@settings(max_examples=int(os.environ.get("MESHWRIGHT_SHARDING_EXAMPLES", "10")), deadline=None)
@given(st.data())
def test_random_graphs_compute_the_same_on_every_mesh(data) -> None:
    problem = data.draw(placed(graphs(backward=False)))

    virtual_ranks.run(problem, cases.values(problem), found=plan_sharding(problem))
