"""Fresh runs: what is drawn depends on the seed alone and can be run; the ledger forgets nothing; tables add up."""

import json

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from simulator.config.plan import Plan
from tests.bench.fresh_draw import LONGEST_STEP_S, draw, predicted_if_runnable, words
from tests.bench.fresh_pool import summary
from tests.bench.fresh_runs import TABLES, append, ledger_rows, read_ledger, write_tables
from tests.bench.fresh_table import statistics, tables
from tests.bench.fresh_worker import covered
from topology.catalog.cluster_file import load_cluster
from topology.catalog.platform import take_gpus
from topology.errors import BadInput


@pytest.fixture(scope="module")
def machine():
    return take_gpus(load_cluster("h200x4"), 4)


def test_a_seed_draws_the_same_runs_and_another_one_others(machine):
    first, again, other = (
        [words(drawn) for drawn, _ in draw(seed, machine, 2)]
        for seed in ("2026-11-22.1", "2026-11-22.1", "2026-11-23.1")
    )

    assert first == again
    assert first != other


def test_what_is_drawn_fits_the_machine_and_is_short(machine):
    for drawn, estimate in draw("any", machine, 3):
        assert drawn.plan.gpus in {1, 2, 4}
        assert estimate.memory.fits
        assert estimate.step_s.value <= LONGEST_STEP_S
        assert drawn.workload.global_batch_size % (drawn.plan.data_parallel * drawn.plan.micro_batch_size) == 0


def test_what_a_runtime_cannot_run_is_not_drawn(machine):
    drawn = draw("any", machine, 1)[0][0]
    whole = {**{name: getattr(drawn, name) for name in ("model", "workload", "runtime")}}

    impossible = type(drawn)(**whole, plan=Plan(tp=4 * drawn.model.heads))

    with pytest.raises(Exception, match="GPUs"):
        predicted_if_runnable(impossible, machine)
    assert predicted_if_runnable(type(drawn)(**whole, plan=Plan(tp=2, cp=2, micro_batch_size=7)), machine) is None


# --- the ledger ---


def written(folder, *, ended):
    """A draw of two runs, of which `ended` have a line."""
    runs = [row(f"d.1/{index:02d}") for index in range(2)]
    shared = {
        "commit": "abc", "predicted_at": "then", "calibration": "", "shipped_profile": "", "command": "c",
        "host": {"id": "h", "gpu": "G", "gpus": 4, "cpus": 8, "driver": "d", "python": "3", "versions": {"torch": "2"}},
    }  # fmt: skip
    folder.mkdir()
    (folder / "draw.json").write_text(json.dumps({**shared, "runs": runs}))
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in ended))
    return folder


def row(name, *, predicted_s=1.0):
    estimate = {
        "step_s": predicted_s, "step_low_s": 0.9, "step_high_s": 1.1, "reserved_bytes": 90.0,
        "reserved_low_bytes": 80.0, "reserved_high_bytes": 95.0, "breakdown_s": {},
    }  # fmt: skip
    plan = {"dp_replicate": 1, "dp_shard": 4, "tp": 1, "cp": 1, "pp": 1, "recompute": "none"}
    return {
        "id": name, "draw": "d.1", "date": "d", "words": "a run", "kind": "fsdp4", "types": "mixed", "plan": plan,
        "model": {"moe": None, "latent": None}, "runtime": {"name": "torchtitan", "compile": False},
        "predicted": {"datasheet": estimate},
    }  # fmt: skip


def over(name, *, step_s=1.25):
    measured = {"step_s": step_s, "steps_s": [step_s], "reserved_bytes": 100, "retries": 0, "profiled": None}
    return {"id": name, "ran_at": "now", "status": "ok", "cause": "", "measured": measured, "seconds": 1.0}


def test_what_was_cut_off_is_a_row_too(tmp_path):
    rows = ledger_rows(written(tmp_path / "out", ended=[over("d.1/00")]))

    assert [one["status"] for one in rows] == ["ok", "not run"]
    assert rows[0]["host"]["id"] == "h"
    assert rows[0]["commit"] == "abc"


def test_a_draw_is_added_once_and_nothing_is_replaced(tmp_path):
    out, ledger = written(tmp_path / "out", ended=[over("d.1/00")]), tmp_path / "ledger.jsonl"
    append(out, ledger)
    before = ledger.read_text()

    with pytest.raises(BadInput, match="this draw"):
        append(out, ledger)

    assert ledger.read_text() == before
    assert len(read_ledger(ledger)) == 2


def test_errors_and_coverage_of_a_known_ledger():
    """Predicted 1 s, measured 1.25 and 1: errors of -20% and 0, one of two inside 0.9 to 1.1. Memory 90 of 100:
    -10%.
    """
    rows = [{**row("a"), **over("a")}, {**row("b"), **over("b", step_s=1.0)}]

    assert statistics("all", rows, "datasheet") == (
        "| all | 2 | 10.0% | -10.0% | -20.0% | 50% | 10.0% | -10.0% | -10.0% | 0% |"
    )


def test_the_page_keeps_what_was_written_above_its_tables(tmp_path):
    out, ledger, page = written(tmp_path / "out", ended=[over("d.1/00")]), tmp_path / "l.jsonl", tmp_path / "l.md"
    append(out, ledger)
    page.write_text(f"# Causes\n\n{TABLES}\nold")

    write_tables(ledger, page)

    text = page.read_text()
    assert text.startswith("# Causes")
    assert "old" not in text
    assert "1 measured, 0 out of memory, 0 failed, 1 not run" in text
    assert tables(read_ledger(ledger)) in text


# --- how a run ended ---


def test_a_rank_without_memory_decides_the_status():
    said = [{"phase": "warming up"}, {"status": "out of memory", "cause": "tried to allocate 2 GiB"}]

    ended = summary(said, ["", ""], None)

    assert (ended["status"], ended["cause"]) == ("out of memory", "tried to allocate 2 GiB")


def test_a_run_that_hangs_says_where():
    ended = summary([{"phase": "timing"}, {}], ["", ""], 60.0)

    assert ended["status"] == "failed"
    assert ended["cause"] == "not over after 60 s: timing, starting"


def test_memory_is_the_fullest_ranks_and_the_step_the_median():
    said = [{"steps_s": [1.0, 5.0, 2.0], "reserved_bytes": 3}, {"steps_s": [1.0, 5.0, 2.0], "reserved_bytes": 7}]

    measured = summary(said, ["", ""], None)["measured"]

    assert (measured["step_s"], measured["reserved_bytes"]) == (2.0, 7)


def test_kernels_at_once_count_once():
    """0 to 2 and 1 to 3 overlap, 5 to 6 stands alone: 4 seconds."""
    assert covered([(5.0, 6.0, "c"), (0.0, 2.0, "a"), (1.0, 3.0, "b")]) == 4.0
