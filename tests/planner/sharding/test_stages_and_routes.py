"""Tensors that cross between stages, and tokens that are routed to experts."""

import json

import pytest

from planner.sharding.plans.plan import plan_sharding
from tests.planner.sharding import cases, virtual_ranks
from tests.planner.sharding.cases import report_case

SIZES = {"t": 24, "h": 8, "f": 16}
LAYERS = [
    "a = gelu(x) :: t h -> t h",
    "u = linear(a, w) :: t h+, f h+ -> t f",
    "y = linear(u, v) :: t f+, h f+ -> t h",
]
INPUTS = {"x": "t h: R R", "w": "f h: R S(0)", "v": "h f: R S(1)"}
PIPE = cases.case(
    "pipe",
    {"pp": 3, "tp": 2},
    LAYERS,
    INPUTS,
    SIZES,
    {"y": "R R"},
    stages={"axis": "pp", "of": {"a": 0, "u": 1, "y": 2}, "micro_batches": 4},
)


def test_each_stage_sends_its_piece_in_micro_batches() -> None:
    """A is whole on every rank, u cut in two by tp; the last stage reduces y over tp."""
    row = report_case(PIPE, 0)
    sent = [(c["kind"], c["mesh_dim"], c["bytes_in"]) for c in row["collectives"]]

    assert sent == [
        *[("send_recv", "pp", 24 * 8 * 2 // 4)] * 4,
        *[("send_recv", "pp", 24 * 16 * 2 // 2 // 4)] * 4,
        ("all_reduce", "tp", 24 * 8 * 2),
    ]
    assert row["placements"]["u"] == ["R", "S(1)"]
    # a rank is in one stage: the busiest sends whole a, or half of u, or one all-reduce of two
    assert row["ring_send_bytes_per_rank"] == 24 * 8 * 2


def test_stages_compute_the_same_numbers() -> None:
    problem = cases.problem(PIPE)

    virtual_ranks.run(problem, cases.values(problem))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"stages": {"axis": "no", "of": {}}}, "no axis of the mesh"),
        ({"stages": {"axis": "pp", "of": {"y": 3}}}, "stages 0 to 2"),
        ({"stages": {"axis": "pp", "of": {"a": 0, "u": 1}, "micro_batches": 5}}, "does not divide"),
        ({"stages": {"of": {"y": 1}}}, "cannot read the stages"),
        ({"stages": {"axis": "pp"}}, "stages without operators"),
        ({"stages": {"axis": "pp", "of": {"y": 1}, "schedule": "1f1b"}}, "or with a schedule"),
        ({"pins": {"y": ["S(0)", "R"]}}, "cut over the stages"),
    ],
)
def test_what_is_no_pipeline_is_rejected(change, why) -> None:
    assert why in report_case({**PIPE, **change}, 0)["rejected"]


COUNTS = [[3, 1, 0, 2], [0, 0, 6, 0]]  # two ranks, two experts each: 4 and 2 tokens, then 0 and 6
ROUTED = cases.case(
    "routed",
    {"ep": 2},
    ["y = x * 2 :: w t h -> w t h"],
    {"x": "w t h: S(0)"},
    {"w": 2, "t": 6, "h": 5},
    routed={"y": {"over": "ep", "counts": COUNTS}},
)


def test_rows_go_to_their_experts_and_back() -> None:
    """Rank 0 keeps 4 of its tokens and sends 2; rank 1 keeps all 6 and gets those 2."""
    row = report_case(ROUTED, 0)
    counts, out, back = row["collectives"]
    width = 5 * 2

    assert (counts["kind"], counts["dtype"], counts["bytes_in"]) == ("all_to_all", "i64", 2 * 2 * 8)
    assert [one["kind"] for one in (out, back)] == ["all_to_all_v"] * 2
    keys = ("bytes_in", "bytes_out", "ring_send_bytes_per_rank")
    assert [[r[k] // width for k in keys] for r in out["per_rank"]] == [[6, 4, 2], [6, 8, 0]]
    assert [[r[k] // width for k in keys] for r in back["per_rank"]] == [[4, 6, 0], [8, 6, 2]]
    assert row["ring_send_bytes_per_rank"] == 2 * 2 * 8 // 2 + 2 * width
    json.dumps(row)


@pytest.mark.parametrize(
    ("routed", "why"),
    [
        ({"y": {"over": "ep", "counts": [[3, 1, 0, 2]]}}, "do not fit the mesh"),
        ({"y": {"over": "ep", "counts": [[3, 1, 2], [6, 0, 0]]}}, "do not fit the mesh"),
        ({"y": {"over": "ep", "counts": [[3, 1, 0, -2], [6, 0, 0, 0]]}}, "do not fit the mesh"),
        ({"y": {"over": "ep", "counts": [[3, 1, 0, 2], [5, 0, 0, 0]]}}, "tokens a rank"),
        ({"y": {"over": "ep", "counts": []}}, "do not fit the mesh"),
        ({"z": {"over": "ep", "counts": COUNTS}}, "a result"),
        ({"y": 3}, "cannot read"),
    ],
)
def test_what_routes_nothing_is_rejected(routed, why) -> None:
    assert why in report_case({**ROUTED, "routed": routed}, 0)["rejected"]


def test_pieces_of_very_large_tensors_are_still_compared() -> None:
    """Beyond 2^53 units of bytes an integer program in doubles would take different costs for equal."""
    sizes = {"t": (1 << 20) * 9973, "h": 9 * 4, "f": 12 * 7}
    mesh = {"dp": 1 << 10, "tp": 4}
    of = cases.case(
        "large", mesh, cases.MLP, {"x": "t h: S(0) R", "w1": "f h: R S(0)", "w2": "h f: R S(1)"}, sizes, {"y": "S(0) R"}
    )

    (one,) = plan_sharding(cases.problem(of)).collectives

    assert one.ring_send_bytes == 2 * 3 * (1 << 10) * 9973 * 36 * 2 // 4
