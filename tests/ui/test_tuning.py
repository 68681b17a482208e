"""The page of a tuning: the example's trials and finalists, and files that are no state."""

from __future__ import annotations

import pytest

from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.conftest import ROOT, metrics, said, table

EXAMPLE = ROOT / "examples" / "tune" / "vtrain.jsonl"


def test_the_example_shows_its_trials_and_what_is_left(explorer, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)

    test = explorer("tuning")

    assert not test.error
    assert metrics(test)["Best step"] == "0.1316 s"
    shown = table(test, "measured, s")
    assert list(shown["status"]) == ["finished"] * 7
    assert shown["measured, s"].min() == pytest.approx(0.1316, abs=1e-4)


def test_a_damaged_state_in_the_folder_is_said_to_be_one(explorer, monkeypatch, tmp_path) -> None:
    folder = tmp_path / "meshwright-tune-2"
    folder.mkdir()
    (folder / "state.jsonl").write_text(EXAMPLE.read_text().replace('"kind":"candidate"', '"kind":"else"', 1))
    monkeypatch.chdir(tmp_path)

    test = explorer("tuning")

    assert "neither a candidate nor a trial" in said(test) + " ".join(str(one.value) for one in test.error)


def test_the_posterior_of_every_finalist_shrinks_to_its_measurement() -> None:
    from planner.tune.history import history
    from planner.tune.sessions.session import shown
    from planner.tune.state import read_state
    from ui.charts.measured import better_left, posterior

    view = shown(read_state(EXAMPLE))
    found = history(view, within=0.01)

    for plan in {one.plan for one in found.finalists}:
        mine = [one for one in found.finalists if one.plan == plan]
        assert [one.trials for one in mine] == list(range(len(view.trials) + 1))
        if mine[-1].measured_s:
            assert mine[-1].low <= mine[-1].measured_s * 1.02
            assert mine[-1].high / mine[-1].low < mine[0].high / mine[0].low
    assert found.better_plan_left[-1] == view.outlook.probability < found.better_plan_left[0]
    for chart in (*posterior(found, dark=False).values(), better_left(found.better_plan_left, dark=True)):
        assert chart.to_dict()
