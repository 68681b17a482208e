"""Single functions: views, norms, softmax, losses, indices, and layouts with blocks."""

from __future__ import annotations

from tests.planner.sharding.cases import TP, H, P, S, T, case

FUNCTIONS = [
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
