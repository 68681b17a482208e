"""Functions that are known: what they do along each axis goes before what an annotation says, and is what they
compute.
"""

import numpy as np
import pytest

from planner.sharding.operators.graph import GraphBuilder
from planner.sharding.solver.candidates import enumerate_candidates
from tests.planner.sharding import cases, virtual_ranks
from tests.planner.sharding.cases import report_case
from topology.errors import BadInput

SIZES = {
    "t": 4,
    "h": 8,
    "f": 4,
    "k": 4,
    "v": 8,
    "b": 2,
    "s": 4,
    "z": 8,
    "d": 4,
    "c": 4,
    "o": 4,
    "l": 8,
    "w": 3,
    "two": 2,
}
TENSORS = {
    "x": "t h",
    "y": "t h",
    "m": "f h",
    "g": "h",
    "e": "h",
    "q": "b t s d",
    "r": "b t z d",
    "u": "b t z d",
    "n": "b c l",
    "p": "o c w",
    "ids": "t: i64",
}
# Formulas, and on the right the axes that may be sharded over a mesh axis of 2.
KNOWN = [
    ("softmax(x, -1) :: t h -> t h", "t h"),
    ("gelu(softmax(x, -1)) :: t h -> t h", "t"),
    ("x[:, 0] :: t h -> t", "t"),
    ("x[1] :: t h -> h", "h"),
    ("x[:, 2:6] :: t h -> t k", "t"),
    ("x.sort(-1).values :: t h -> t h", "t"),
    ("x.cumsum(-1) :: t h -> t h", "t"),
    ("torch.roll(x, 1, 1) :: t h -> t h", "t"),
    ("x.flip(0) :: t h -> t h", "h"),
    ("layernorm(x, g, e) :: t h, h, h -> t h", "t h"),
    ("F.layer_norm(x, (8,), g, e) :: t h, h, h -> t h", "t h"),
    ("rmsnorm(x, g) :: t h, h -> t h", "t h"),
    ("F.conv1d(n, p) :: b c l, o c w -> b o z", "b c o"),
    ("attn(q, r, u) :: b t s d, b t z d, b t z d -> b t s d", "b t s z"),
    ("attn(q, r, u, True) :: b t s d, b t z d, b t z d -> b t s d", "b t s z"),
    ("x.topk(2, -1).values :: t h -> t two", "t h"),
    ("logsumexp(x, -1) :: t h -> t", "t h"),
    ("cross_entropy(x, ids) :: t h, t -> t", "t h"),
    ("x / x.sum(-1, keepdims=True) :: t h -> t h", "t"),
    ("x.var(1) :: t h -> t", "t"),
    ("(x * y).sum(1) :: t h, t h -> t", "t h"),
    ("relu(x @ m.T) :: t h, f h -> t f", "t f"),
    ("(x @ m.T).sum(0) :: t h, f h -> f", "t h f"),
    ("x - x.mean(0) :: t h -> t h", "h"),
    ("cat([x, y], -1) :: t h, t h -> t (two h)", "t h"),
    ("cat([x, y], -1)[:, 0:8] :: t h, t h -> t h", "t"),
    ("x.unsqueeze(1) :: t h -> t 1 h", "t h"),
    ("x.chunk(2, -1)[0] :: t h -> t k", "t"),
    ("exp(x.sum(1)) :: t h -> t", "t"),
    ("x.sum(1) + ids :: t h, t -> t", "t"),
    ("linear(x, m) * 2.0 :: t h, f h -> t f", "t h f"),
]


def problem_of(text, mesh=None):
    formula, _, _ = text.partition("::")
    names = [n for n in TENSORS if n in set(cases.names_in(formula))]
    inputs = {n: TENSORS[n] for n in names}
    sizes = {**SIZES, **({"z": 6} if "conv" in text else {})}
    case = cases.case("one", mesh or {"i": 2}, [f"out = {text}"], inputs, sizes, policy="min_ring_bytes")
    return cases.problem(case)


@pytest.mark.parametrize(("text", "cut"), KNOWN, ids=lambda value: value[:40])
def test_every_way_to_shard_it_computes_the_same_and_no_way_is_missing(text, cut) -> None:
    problem = problem_of(text)
    operator = problem.operators[0]
    world, rng = virtual_ranks.World(problem.mesh), np.random.default_rng(0)
    whole = {name: virtual_ranks.array(value) for name, value in cases.values(problem).items()}
    expected = virtual_ranks._computed(operator, whole)
    options = enumerate_candidates(problem).options[0]

    assert {axis for option in options for axis, _ in option.axis_specs} == set(cut.split())
    for option in options:
        pieces = {(n, at): world.scattered(whole[n], at, rng) for n, at in option.operands}
        local = virtual_ranks.ran(operator, option, pieces, world, whole)
        world.check(local, option.result, expected, f"{text} with {dict(option.axis_specs)}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("y = x[:, 0] :: b s+ -> b", "an index takes one element"),
        ("y = x.cumsum(0) :: b+ s -> b s", "in its order"),
        ("y = gelu(x) :: b s+ -> b s+", "keeps it in its result"),
        ("y = x.T :: b s -> b s", "is annotated with"),
        ("y = x.sum(1) :: b s -> b s", "1 dims and is annotated with 2"),
        ("y = x.sum(0) :: b s -> b", "is annotated with b"),
        ("y = softmax(x, -1).T :: b s -> b s", "is annotated with"),
    ],
)
def test_an_annotation_that_contradicts_its_function_is_an_error(text, why) -> None:
    builder = GraphBuilder()
    builder.add_input("x", (8, 4) if "T ::" not in text else (4, 4), axes=("b", "s"))

    with pytest.raises(BadInput) as caught:
        builder.apply(text)

    assert why in f"{caught.value.what} {caught.value.why}"


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("y = softmax(x, -1) :: b s -> b s", ["all_reduce", "all_reduce"]),
        ("y = x[:, 0] :: b s -> b", ["all_gather"]),
        ("y = x.sort(-1).values :: b s -> b s", ["all_gather"]),
        ("y = x.cumsum(1) :: b s -> b s", ["all_gather"]),
        ("y = torch.roll(x, 1, 1) :: b s -> b s", ["all_gather"]),
        ("y = x.flip(1) :: b s -> b s", ["all_gather"]),
        ("y = mystery(x) :: b s -> b s", ["all_gather"]),
    ],
)
def test_an_unmarked_axis_that_is_sharded_gets_what_its_function_needs(text, kinds) -> None:
    of = cases.case("one", {"tp": 4}, [text], {"x": "b s: S(1)"}, {"b": 2, "s": 8})

    row = report_case(of, 0)

    assert [c["kind"] for c in row["collectives"]] == kinds
    assert bool(row["warnings"]) == ("softmax" not in text)


def test_a_declared_function_is_believed() -> None:
    of = cases.case("one", {"tp": 4}, ["y = mystery(x) :: b s -> b s"], {"x": "b s: S(1)"}, {"b": 2, "s": 8})

    row = report_case({**of, "functions": ["mystery"]}, 0)

    assert (row["collectives"], row["warnings"]) == ([], [])


def test_annotations_are_derived_where_they_are_left_out() -> None:
    """A block of attention as torch writes it: heads, rows and features keep their axes through views."""
    builder = GraphBuilder()
    builder.add_input("x", (2, 8, 12), axes=("b", "s", "e"))
    for name in ("wq", "wk", "wv", "wo"):
        builder.add_input(name, (12, 12), parameter=True)
    for name in "qkv":
        builder.apply(f"{name} = linear(x, w{name}).view(2, 8, 3, 4).transpose(1, 2)")
    builder.apply("a = F.scaled_dot_product_attention(q, k, v, is_causal=True)")
    builder.apply("y = x + linear(a.transpose(1, 2).reshape(2, 8, -1), wo)")
    graph = builder.build()

    heads, attention, out = graph.operators[0], graph.operators[3], graph.operators[4]
    (_, (b, s, e)), (_, (h_and_d, contracted)) = heads.operands
    assert (contracted, len(h_and_d)) == (e, 2)
    assert heads.dims == (b, h_and_d[:1], s, h_and_d[1:])
    assert set(heads.roles.partial) == set(e)
    queries, keys = attention.operands[0][1], attention.operands[1][1]
    assert attention.roles.merged == set(keys[2])
    assert attention.roles.positional == {*queries[2], *keys[2]}
    assert out.roles.unsharded == {*out.dims[2], *out.dims[2]} or not out.roles.partial
    assert graph.tensors["y"].shape == (2, 8, 12)


def test_without_an_annotation_an_unknown_function_is_refused() -> None:
    builder = GraphBuilder()
    builder.add_input("x", (8, 4))

    with pytest.raises(BadInput, match="axes of an operator"):
        builder.apply("y = mystery(x)")
