"""`tests/on_gpus.sh`: what it would run is legal and covers what there is, what ended is not run again, and its
table.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from executor.launch.legal import check
from simulator.config.overlap_sites import MODES, modes_in
from simulator.config.plan import MESH_AXES
from tests.on_gpus import parts, plans, rows
from tests.on_gpus.__main__ import Results, out_of_time
from tests.on_gpus.rows import FAILED, NO_TIME, NOT_RUN, OK, Machine, Row
from topology.catalog.cluster_file import load_cluster
from topology.catalog.platform import take_gpus

EVERY = {**plans.ONE, **plans.TWO}
H100 = Machine(device="NVIDIA H100", gpus=1, driver="580", versions="torch 2.11", commit="abc")


@pytest.mark.parametrize("name", EVERY)
def test_every_plan_is_legal_where_it_runs(name: str) -> None:
    case = EVERY[name]
    content = plans.content_of(case, take_gpus(load_cluster("dgx-h100"), case.plan.gpus))

    check(content.plan, content.model, content.workload, content.runtime)
    assert content.estimate.memory.fits == (case.ends == "finished")


def test_every_parallelism_and_every_overlap_mode_is_among_them() -> None:
    used = {mode for case in EVERY.values() for mode in modes_in(case.plan.tp_overlap)}
    assert used == set(MODES) - {"none"}
    for axis in (*MESH_AXES, "ep"):
        compiled = {case.compiled for case in EVERY.values() if getattr(case.plan, axis) > 1}
        assert compiled == {False, True}, axis
    assert {case.plan.cp_method for case in EVERY.values()} >= {"ring", "all_gather", "all_to_all"}


def test_what_two_ranks_on_one_gpu_cannot_do_is_said() -> None:
    left_out = {name for name, case in plans.TWO.items() if plans.not_shared(case)}
    assert {"CP ring", "PP 1F1B"} <= left_out
    assert {"TP fused", "TP copy_engine", "TP fused and copy_engine", "DDP", "FSDP", "EP"} <= set(plans.TWO) - left_out


PEAKS = [{"peak_allocated_bytes": 2**30}, {"peak_allocated_bytes": 5 * 2**30}]


def report(**changes: Any) -> dict[str, Any]:
    exact = {"gradient": 6e-16, "tolerance": 2.3e-13}
    types = {"gradients_compared": True, "dtype": "bfloat16", "gradient": 0.01, "allowed": 0.1}
    found = {
        "status": "finished",
        "failure": None,
        "seconds": 12.0,
        "verified": exact,
        "verified_types": types,
        "kernels": [{"difference": 0.02, "tolerance": 0.1}, {"difference": 0.05, "tolerance": 0.1}],
        "predicted": {
            "step_s": {"value": 1.1, "low": 0.9, "high": 1.2},
            "memory": {"peak_bytes": {"value": 3 * 2**30, "low": 2**31, "high": 2**32}},
        },
        "measured": {"step_s": {"median": 1.0}, "memory_by_rank": PEAKS},
    }
    return found | changes


def test_a_run_becomes_a_row() -> None:
    row = plans.row_of("plans", "TP fused", report())

    assert (row.result, row.said) == (OK, "")
    assert row.numbers == "6.0e-16 (2.3e-13); bfloat16 1.0e-02 (1.0e-01); kernels 50%"
    assert row.step == "1.1 (0.9 to 1.2), 1: +10.0%"
    assert row.memory == "3 (2 to 4), 5: -40.0%, outside"  # of the rank that needs most

    wrong = plans.row_of("plans", "a", report(status="wrong_numbers", failure={"message": "worst at w"}))
    assert (wrong.result, wrong.said) == (FAILED, "wrong_numbers: worst at w")
    endless = plans.row_of("plans", "a", report(verified={"gradient": None, "tolerance": 1e-3}, verified_types=None))
    assert endless.numbers.startswith("infinite (1.0e-03)")
    slow = plans.row_of("plans", "a", report(measured={"step_s": {"median": 2.0}, "memory_by_rank": PEAKS}))
    assert slow.step.endswith("-45.0%, outside")
    # A run that is to fail, and one for which there was no time.
    full = report(status="out_of_memory", failure={"message": "memory is full"})
    assert [plans.row_of("plans", "a", full, ends).result for ends in ("out_of_memory", "finished")] == [OK, FAILED]
    assert plans.row_of("plans", "a", report(status="out_of_time", failure={})).result == NO_TIME
    cut, hung = ({"message": message} for message in ("the budget ended", "a collective timed out"))
    found = [plans.row_of("plans", "a", report(status="timeout", failure=failure)).result for failure in (cut, hung)]
    assert found == [NO_TIME, FAILED]


def test_a_sharded_module_that_computes_something_else_is_no_good_row() -> None:
    def row(**one: Any) -> str:
        return parts.sharded_row({"what": "block", "seconds": 1.0, **one}).result

    assert [row(error_of_largest=off) for off in (0.008, 1.3, float("nan"))] == [OK, FAILED, FAILED]
    assert [row(failed="a rank died"), row(skipped="no transformers")] == [FAILED, NOT_RUN]


def test_what_ended_is_not_run_again_on_the_same_code_and_machine(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first = Results(path, H100, again=False)
    for what, result in (("a", OK), ("b", FAILED), ("c", NO_TIME), ("d", NOT_RUN)):
        first.tell(Row(part="plans", what=what, result=result))

    assert {what for _, what in Results(path, H100, again=False).settled} == {"a", "b", "d"}
    assert {what for _, what in Results(path, H100, again=True).settled} == {"a", "d"}
    assert Results(path, H100, again=True).failed("plans")
    assert Results(path, replace(H100, commit="other"), again=False).settled == set()


def test_a_part_that_had_no_time_is_said_until_it_has_run(tmp_path: Path) -> None:
    results = Results(tmp_path / "rows.jsonl", H100, again=False)
    results.tell(out_of_time("tune"))
    assert [row.result for _, _, row in rows.read(results.path)] == [NO_TIME]

    results.tell(Row(part="tune", what="llama3.2-1b", result=OK))
    assert [row.what for _, _, row in rows.read(results.path)] == ["llama3.2-1b"]


def test_the_page_keeps_each_machine_once(tmp_path: Path) -> None:
    old = [(replace(H100, commit="old"), "2026-01-01", Row(part="plans", what="a", result=FAILED))]
    two = [(replace(H100, gpus=2), "2026-01-02", Row(part="plans", what="a | b", result=OK, numbers="1e-16"))]
    new = [(H100, "2026-01-03", Row(part="plans", what="a", result=result)) for result in (FAILED, OK)]

    whole = rows.kept(rows.kept(old, two), new)
    rows.write(tmp_path / "rows.jsonl", whole)

    assert rows.read(tmp_path / "rows.jsonl") == whole
    unmeasured = replace(new[0][2], result=NO_TIME)
    later = [(replace(H100, commit="def"), "2026-01-04", row) for row in (unmeasured, replace(unmeasured, what="c"))]
    assert [row.what for _, _, row in rows.kept(whole, later)] == [row.what for _, _, row in whole] + ["c"]
    assert [asdict(machine)["commit"] for machine, _, _ in whole] == ["abc", "abc"]
    assert "No machine with two GPUs" in rows.page(new)
    text = rows.page(whole)
    assert "No machine with two GPUs" not in text
    assert "## 2 x NVIDIA H100" in text
    assert "| plans | a / b | ok | 1e-16 |" in text
    assert "driver 580, torch 2.11. 1 ok, 0 failed, 0 not run." in text
    assert "| 2026-01-03, abc |" in text
    assert "- Not run, there was no time: plans: c." in rows.page(rows.kept(whole, later))
