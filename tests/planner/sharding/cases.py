"""Sharding cases of our own, written short, with what they must cost in closed form."""

from __future__ import annotations

import ast
import re

import numpy as np

from planner.sharding.problem.problem import parse_problem

INTEGERS = ("ids", "targets")


def case(name, mesh, ops, inputs, sizes, pins=None, **more):
    """`inputs` as `{"w": "f h: R S(0)"}` (dims, placements, and a type if not bf16), `mesh` as `{"dp": 2, "tp": 4}`."""
    tensors = {}
    for tensor, text in inputs.items():
        dims, _, tokens = text.partition(":")
        axes, tokens = dims.split(), tokens.split()
        dtype = tokens.pop() if tokens and re.fullmatch(r"[a-z]+\d+", tokens[-1]) else "bf16"
        tensors[tensor] = {
            "axes": axes,
            "shape": [sizes[a] for a in axes],
            "dtype": dtype,
            "placements": tokens or None,
        }
    return {
        "id": name,
        "mesh": {"names": list(mesh), "shape": list(mesh.values())},
        "axes": sizes,
        "ops": ops,
        "inputs": tensors,
        "pins": {tensor: tokens.split() for tensor, tokens in (pins or {}).items()},
        **more,
    }


def names_in(formula):
    """The names that a formula reads."""
    return [node.id for node in ast.walk(ast.parse(formula.strip())) if isinstance(node, ast.Name)]


def values(problem, seed=0):
    """Random arrays for the inputs of a problem."""
    rng = np.random.default_rng(seed)
    out = {}
    for name in problem.inputs:
        tensor = problem.tensors[name]
        whole = tensor.dtype.startswith("i")
        out[name] = rng.integers(0, 8, size=tensor.shape) if whole else rng.normal(size=tensor.shape)
    return out


MLP = ["u = linear(x, w1) :: t h+, f h+ -> t f", "a = gelu(u) :: t f -> t f", "y = linear(a, w2) :: t f+, h f+ -> t h"]
BACKWARD = [
    *MLP[:2],
    "da = dy @ w2 :: t h+, h+ f -> t f",
    "du = gelu_bwd(da, u) :: t f, t f -> t f",
    "dw2 = dy.T @ a :: t+ h, t+ f -> h f",
    "dw1 = du.T @ x :: t+ f, t+ h -> f h",
    "dx = du @ w1 :: t f+, f+ h -> t h",
]
T, H, F = 24, 12, 48
S = {"t": T, "h": H, "f": F}
X, P = T * H * 2, F * H * 2  # bytes of the activations and of a weight
TP, DP = {"tp": 4}, {"dp": 4}
ATTN = "o = attn(q, k, v) :: b h s d^, b h z+ d^, b h z+ d^ -> b h s d"
HEADS = {"b": 2, "h": 8, "s": 16, "z": 16, "d": 4}
B = 2 * 8 * 16 * 4 * 2  # bytes of q, k or v


# (case, [(kind, mesh axes, ring bytes)], {tensor: placements})
KNOWN = [
    (
        case("tp", TP, MLP, {"x": "t h: R", "w1": "f h: S(0)", "w2": "h f: S(1)"}, S, {"y": "R"}),
        [("all_reduce", "tp", 2 * 3 / 4 * X)],
        {"u": "S(1)", "a": "S(1)"},
    ),
    (
        case("left pending", TP, MLP, {"x": "t h: R", "w1": "f h: S(0)", "w2": "h f: S(1)"}, S),
        [],
        {"y": "P(sum)"},
    ),
    (
        case("sp", TP, MLP, {"x": "t h: S(0)", "w1": "f h: S(0)", "w2": "h f: S(1)"}, S, {"y": "S(0)"}),
        [("all_gather", "tp", 3 / 4 * X), ("reduce_scatter", "tp", 3 / 4 * X)],
        {"a": "S(1)"},
    ),
    (
        case(
            "residual",
            TP,
            [*MLP, "z = x + y :: t h, t h -> t h"],
            {"x": "t h: S(0)", "w1": "f h: S(0)", "w2": "h f: S(1)"},
            S,
        ),
        [("all_gather", "tp", 3 / 4 * X), ("reduce_scatter", "tp", 3 / 4 * X)],
        {"y": "S(0)", "z": "S(0)"},
    ),
    (
        case(
            "ddp backward",
            DP,
            BACKWARD,
            {"x": "t h: S(0)", "w1": "f h: R", "w2": "h f: R", "dy": "t h: S(0)"},
            S,
            {"dw1": "R", "dw2": "R"},
        ),
        [("all_reduce", "dp", 2 * 3 / 4 * P)] * 2,
        {"dx": "S(0)"},
    ),
    (
        case(
            "fsdp backward",
            DP,
            [
                "g1 = set(w1) :: f h -> f h",
                "g2 = set(w2) :: h f -> h f",
                *(o.replace("w1)", "g1)").replace("@ w1", "@ g1").replace("@ w2", "@ g2") for o in BACKWARD),
            ],
            {"x": "t h: S(0)", "w1": "f h: S(0)", "w2": "h f: S(1)", "dy": "t h: S(0)"},
            S,
            {"dw1": "S(0)", "dw2": "S(1)"},
        ),
        [("all_gather", "dp", 3 / 4 * P)] * 2 + [("reduce_scatter", "dp", 3 / 4 * P)] * 2,
        {"g1": "R", "dx": "S(0)"},
    ),
    (
        case(
            "sp backward",
            TP,
            BACKWARD,
            {"x": "t h: S(0)", "w1": "f h: S(0)", "w2": "h f: S(1)", "dy": "t h: S(0)"},
            S,
            {"dx": "S(0)"},
        ),
        [("all_gather", "tp", 3 / 4 * X)] * 2 + [("reduce_scatter", "tp", 3 / 4 * X)],
        {"dw1": "S(0)", "dw2": "S(1)"},
    ),
    (
        case(
            "dp x tp",
            {"dp": 2, "tp": 4},
            MLP,
            {"x": "t h: S(0) R", "w1": "f h: R S(0)", "w2": "h f: R S(1)"},
            S,
            {"y": "S(0) R"},
        ),
        [("all_reduce", "tp", 2 * 3 / 4 * X / 2)],
        {"u": "S(0) S(1)"},
    ),
    (
        case(
            "bias is added once",
            TP,
            ["y = linear(x, w, c) :: t h+, f h+, f -> t f"],
            {"x": "t h: S(1)", "w": "f h: S(1)", "c": "f: R"},
            S,
            {"y": "S(0)"},
        ),
        [("reduce_scatter", "tp", 3 / 4 * T * F * 2)],
        {},
    ),
    (
        case(
            "partials meet first",
            TP,
            [
                "p = linear(a, w) :: t f+, h f+ -> t h",
                "q = linear(b, v) :: t f+, h f+ -> t h",
                "y = p + q :: t h, t h -> t h",
            ],
            {"a": "t f: S(1)", "b": "t f: S(1)", "w": "h f: S(1)", "v": "h f: S(1)"},
            S,
            {"y": "R"},
        ),
        [("all_reduce", "tp", 2 * 3 / 4 * X)],
        {"p": "P(sum)", "q": "P(sum)"},
    ),
    (
        case(
            "gated, fused weight",
            TP,
            ["u = einsum('th,wfh->twf', x, w) :: t h+, w f h+ -> t w f", "a = silu(u[:,0]) * u[:,1] :: t w^ f -> t f"],
            {"x": "t h: R", "w": "w f h: S(1)"},
            {**S, "w": 2},
        ),
        [],
        {"u": "S(2)", "a": "S(1)"},
    ),
    (
        case(
            "fsdp of a tp weight",
            {"dp": 2, "tp": 4},
            ["g = set(w) :: f h -> f h"],
            {"w": "f h: SS(0,4) S(0)"},
            S,
            {"g": "R S(0)"},
        ),
        [("all_gather", "dp", P / 8)],
        {},
    ),
    (
        case("ulysses", {"cp": 4}, [ATTN], dict.fromkeys("qkv", "b h s d: S(2)"), HEADS, {"o": "S(2)"}),
        [("all_to_all", "cp", 3 / 4 * B / 4)] * 4,
        {},
    ),
    (
        case(
            "keys gathered", {"cp": 4}, [ATTN], dict.fromkeys("qkv", "b h s d: S(2)"), {**HEADS, "h": 2}, {"o": "S(2)"}
        ),
        [("all_gather", "cp", 3 / 4 * B / 4)] * 2,
        {},
    ),
    (
        case(
            "ring",
            {"cp": 4},
            [ATTN],
            dict.fromkeys("qkv", "b h s d: S(2)"),
            {**HEADS, "h": 2},
            {"o": "S(2)"},
            schedule={"o": "ring"},
        ),
        [("collective_permute", "cp", 2 * B / 16)] * 3,
        {},
    ),
    (
        case(
            "decode over cut keys",
            {"cp": 4},
            [ATTN],
            {"q": "b h s d: R", "k": "b h z d: S(2)", "v": "b h z d: S(2)"},
            {**HEADS, "s": 1},
        ),
        [("all_reduce", "cp", 1.5 * n * 4) for n in (2 * 8, 2 * 8, 2 * 8 * 4)],
        {"o": "R"},
    ),
    (
        case("heads", TP, [ATTN], {"q": "b h s d: S(1)", "k": "b h z d: S(1)", "v": "b h z d: S(1)"}, HEADS),
        [],
        {"o": "S(1)"},
    ),
    (
        case(
            "embedding",
            TP,
            ["y = embedding(ids, w) :: b s, v+ e -> b s e"],
            {"ids": "b s: R i64", "w": "v e: S(0)"},
            {"b": 2, "s": 8, "v": 32, "e": 4},
            {"y": "R"},
        ),
        [("all_reduce", "tp", 1.5 * 2 * 8 * 4 * 2)],
        {},
    ),
    (
        case(
            "rows of the gradient",
            TP,
            ["dw = embedding_bwd(dy, ids, 32) :: b+ s+ e, b+ s+ -> v e"],
            {"ids": "b s: R i64", "dy": "b s e: R"},
            {"b": 2, "s": 8, "v": 32, "e": 4},
        ),
        [],
        {},
    ),
    (
        case(
            "softmax",
            TP,
            ["y = softmax(x, -1) :: t v* -> t v"],
            {"x": "t v: S(1) f32"},
            {"t": 6, "v": 32},
            {"y": "S(1)"},
        ),
        [("all_reduce", "tp", 1.5 * 6 * 4)] * 2,
        {},
    ),
    (
        case("rms", TP, ["y = rmsnorm(x, w) :: t h*, h -> t h"], {"x": "t h: S(1)", "w": "h: S(0)"}, S, {"y": "S(1)"}),
        [("all_reduce", "tp", 1.5 * T * 4)],
        {},
    ),
    (
        case(
            "best k", TP, ["y = x.topk(2,-1).values :: t v+ -> t k"], {"x": "t v: S(1) f32"}, {"t": 3, "v": 32, "k": 2}
        ),
        [("all_gather", "tp", 3 * 3 * 2 * 4)],
        {"y": "R"},
    ),
    (
        case(
            "experts",
            {"ep": 4},
            [
                "g = einsum('wech,ehf->wecf', x, a) :: w E c h+, E h+ f -> w E c f",
                "y = einsum('wecf,efh->wech', relu(g), b) :: w E c f+, E f+ h -> w E c h",
            ],
            {"x": "w E c h: S(0)", "a": "E h f: S(0)", "b": "E f h: S(0)"},
            {"w": 4, "E": 8, "c": 2, "h": 4, "f": 6},
            {"y": "S(0)"},
        ),
        [("all_to_all", "ep", 3 / 4 * 8 * 2 * 4 * 2)] * 2,
        {"g": "S(1)"},
    ),
    (
        case(
            "few key heads",
            {"kv": 2, "rep": 4},
            [
                "q = einsum('te,hde->thd', x, w) :: t e+, H d e+ -> t H d",
                "k = einsum('te,hde->thd', x, v) :: t e+, K d e+ -> t K d",
            ],
            {"x": "t e: R R", "w": "H d e: S(0) S(0)", "v": "K d e: S(0) R"},
            {"t": 3, "e": 8, "H": 16, "K": 2, "d": 2},
        ),
        [],
        {"q": "S(1) S(1)", "k": "S(1) R"},
    ),
    (
        case(
            "split and merged dims",
            TP,
            ["q = m.reshape(2,6,-1,4) :: b s (h d) -> b s h d", "y = q.reshape(2,6,-1) :: b s h d -> b s (h d)"],
            {"m": "b s f: S(2)"},
            {"b": 2, "s": 6, "f": 32},
        ),
        [],
        {"q": "S(2)", "y": "S(2)"},
    ),
    (
        case(
            "merged batch and sequence",
            TP,
            ["y = x.reshape(-1, 12) :: b s h -> (b s) h"],
            {"x": "b s h: S(1)"},
            {"b": 2, "s": 8, "h": 12},
        ),
        [],
        {"y": "SS(0,2)"},  # DTensor 2.11 refuses, 2.13 says _StridedShard(0, sf=2)
    ),
    (
        case(
            "sort",
            TP,
            ["y = x.sort(-1).values :: t v^ -> t v"],
            {"x": "t v: S(1)"},
            {"t": 8, "v": 8},
            {"y": "S(0)"},
            policy="min_ring_bytes",
        ),
        [("all_to_all", "tp", 3 / 4 * 8 * 2 * 2)],
        {},
    ),
    (
        case("maximum", TP, ["y = x.amax(0) :: t+ h -> h"], {"x": "t h: S(0)"}, S, {"y": "R"}),
        [("all_reduce", "tp", 1.5 * H * 2)],
        {},
    ),
    (
        case(
            "scaled while pending",
            TP,
            ["u = linear(x, w) :: t h+, f h+ -> t f", "y = u * 2.0 :: t f -> t f"],
            {"x": "t h: S(1)", "w": "f h: S(1)"},
            S,
        ),
        [],
        {"u": "P(sum)", "y": "P(sum)"},
    ),
    (
        case(
            "nonlinear after a sum",
            TP,
            ["u = linear(x, w) :: t h+, f h+ -> t f", "y = gelu(u) :: t f -> t f"],
            {"x": "t h: S(1)", "w": "f h: S(1)"},
            S,
            {"y": "R"},
        ),
        [("all_reduce", "tp", 1.5 * T * F * 2)],
        {},
    ),
    (
        case(
            "activations move to the weight",
            TP,
            [MLP[0]],
            {"x": "t h: S(0)", "w1": "f h: S(0)"},
            {"t": 400, "h": 4, "f": 8},
            policy="follow_weights",
        ),
        [("all_gather", "tp", 3 * 100 * 4 * 2)],
        {"u": "S(1)"},
    ),
    (
        case(
            "tiles of a pipelined product",
            TP,
            ["y = x @ w :: m k+, k+ n -> m n"],
            {"x": "m k: S(1)", "w": "k n: S(0)"},
            {"m": 16, "k": 8, "n": 6},
            {"y": "SS(0,2)"},
        ),
        [("reduce_scatter", "tp", 3 * 2 * 6 * 2)] * 2,
        {},
    ),
    (
        case(
            "replicas and shards",
            {"rep": 2, "shard": 4},
            ["dw = dy.T @ x :: t+ f, t+ h -> f h"],
            {"x": "t h: S(0) S(0)", "dy": "t f: S(0) S(0)"},
            S,
            {"dw": "R S(0)"},
        ),
        [("reduce_scatter", "shard", 3 / 4 * P), ("all_reduce", "rep", P / 4)],
        {},
    ),
    (
        case(
            "halves of an all-reduce",
            TP,
            ["s = x.sum(0) :: t+ h -> h"],
            {"x": "t h: S(0) f32"},
            S,
            {"s": "R"},
            schedule={"s": "scatter_gather"},
        ),
        [("reduce_scatter", "tp", 3 / 4 * H * 4), ("all_gather", "tp", 3 / 4 * H * 4)],
        {},
    ),
    (
        case(
            "in pieces",
            TP,
            MLP,
            {"x": "t h: R", "w1": "f h: S(0)", "w2": "h f: S(1)"},
            S,
            {"y": "R"},
            schedule={"y": "chunked:3"},
        ),
        [("all_reduce", "tp", 2 * 3 / 4 * X / 3)] * 3,
        {},
    ),
    (
        case(
            "rows that do not divide",
            DP,
            MLP,
            {"x": "t h: S(0)", "w1": "f h: R", "w2": "h f: R"},
            {**S, "t": 10},
            {"y": "R"},
        ),
        [("all_gather", "dp", 3 * 3 * H * 2)],  # pieces of 3 rows, padded
        {"u": "S(0)"},
    ),
    (
        case(
            "sum scattered unevenly",
            TP,
            ["y = linear(x, w) :: t h+, f h+ -> t f"],
            {"x": "t h: S(1)", "w": "f h: S(1)"},
            {**S, "t": 10},
            {"y": "S(0)"},
        ),
        [("reduce_scatter", "tp", 3 * 3 * F * 2)],
        {},
    ),
    (
        case(
            "three axes",
            {"x": 2, "y": 2, "z": 2},
            ["o = p @ q :: m k+, k+ n -> m n"],
            {"p": "m k: S(0) S(1) R", "q": "k n: R S(0) S(1)"},
            {"m": 4, "k": 6, "n": 8},
            {"o": "S(0) R S(1)"},
        ),
        [("all_reduce", "y", 2 * 4 * 2)],
        {},
    ),
    (
        case(
            "gradient of few key heads",
            {"kv": 2, "rep": 4},
            ["dk = g.sum(1) :: K r+ t d -> K t d"],
            {"g": "K r t d: S(0) S(1)"},
            {"K": 2, "r": 8, "t": 3, "d": 4},
            {"dk": "S(0) R"},
        ),
        [("all_reduce", "rep", 1.5 * 3 * 4 * 2)],
        {},
    ),
    (
        case(
            "an axis of one rank",
            {"dp": 1, "tp": 4},
            MLP,
            {"x": "t h: S(0) R", "w1": "f h: R S(0)", "w2": "h f: R S(1)"},
            S,
            {"y": "R R"},
        ),
        [("all_reduce", "tp", 2 * 3 / 4 * X)],
        {},
    ),
    (
        case(
            "a sum over an axis of one rank",
            {"dp": 1, "tp": 4},
            ["s = x.sum(0) :: t+ h -> h"],
            {"x": "t h: S(0) S(0)"},
            S,
            {"s": "R R"},
        ),
        [("all_reduce", "tp", 2 * 3 / 4 * H * 2)],
        {},
    ),
    (
        case(
            "softmax on one rank",
            {"tp": 1},
            ["y = softmax(x, -1) :: t v* -> t v"],
            {"x": "t v: S(1) f32"},
            {"t": 6, "v": 32},
        ),
        [],
        {"y": "S(1)"},
    ),
]


def problem(of):
    return parse_problem(of)
