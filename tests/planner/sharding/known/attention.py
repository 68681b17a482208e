"""Attention over sharded heads and sequences."""

from __future__ import annotations

from tests.planner.sharding.cases import ATTN, HEADS, TP, B, case

ATTENTION = [
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
]
