"""Products: tensor, sequence, data and fully sharded parallel layers, forward and backward."""

from __future__ import annotations

from tests.planner.sharding.cases import BACKWARD, DP, MLP, TP, F, H, P, S, T, X, case

PRODUCTS = [
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
    (  # unannotated, the bias is added after the sum
        case("bias after", TP, ["y = linear(x, w, b)"], {"x": "t f: S(1)", "w": "h f: S(1)", "b": "h: R"}, S),
        [("all_reduce", "tp", 2 * 3 / 4 * X)],
        {"y": "R"},
    ),
    (  # of pinned results alone: operators before them are sharded as these need them
        case(
            "results pinned",
            TP,
            ["a = gelu(x)", "y = linear(a, w)"],
            {"x": "t h: R", "w": "f h: R"},
            S,
            {"y": "S(0)"},
        ),
        [],
        {"a": "S(0)", "y": "S(0)"},
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
]
