"""Draws of the ledger: errors by hand, and those that the ledger's own tables print."""

from __future__ import annotations

import json

from tests.bench.fresh_table import measured, memory_error, step_error
from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.conftest import ROOT
from ui.ledger import draw_rows

HOST = {"gpus": 2, "gpu": "H100"}


def row(draw, predicted_s, measured_s, status="ok"):
    known = {"step_s": predicted_s, "step_low_s": 0.9 * predicted_s, "step_high_s": 1.2 * predicted_s}
    found = {"step_s": measured_s, "reserved_bytes": 10}
    return {
        "draw": draw,
        "host": HOST,
        "status": status,
        "predicted": {"datasheet": {**known, "reserved_bytes": 9}},
        "measured": found if status == "ok" else None,
    }


def test_a_draw_has_the_errors_of_what_was_measured():
    newer, older = draw_rows([row("1", 1.0, 1.0), row("2", 1.1, 1.0), row("2", 0.6, 1.0), row("2", 9.9, 1.0, "failed")])

    assert newer == {
        "draw": "2",
        "GPUs": "2 x H100",
        "runs": 2,
        "step, from datasheets": "25.0% (worst -40%)",
        "step, calibrated there": "-",
        "in the 80 % range": "50%",
        "memory": "10.0% (worst -10%)",
    }
    assert older["runs"] == 1


def test_the_figures_are_those_of_the_ledger_s_own_tables():
    ledger = [json.loads(line) for line in (ROOT / "examples" / "validation" / "fresh.jsonl").read_text().splitlines()]
    newest = draw_rows(ledger)[0]
    ran = measured(one for one in ledger if one["draw"] == newest["draw"])
    steps = [abs(step_error(one, "calibrated")) for one in ran]
    held = [abs(memory_error(one, "calibrated")) for one in ran]

    assert newest["runs"] == len(ran)
    assert str(newest["step, calibrated there"]).startswith(f"{sum(steps) / len(steps):.1%}")
    assert str(newest["memory"]).startswith(f"{sum(held) / len(held):.1%}")
