"""Collectives that are carried out in other ways: rings, chunks, stages, routed tokens."""

from __future__ import annotations

from tests.planner.sharding.cases import ATTN, HEADS, MLP, TP, B, H, S, X, case

EXECUTIONS = [
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
]
