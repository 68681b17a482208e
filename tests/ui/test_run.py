"""Runs from the page: started, stopped, and kept by the queue of the service in this process."""

from __future__ import annotations

import time
from io import BytesIO

import pytest

from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.conftest import ROOT, metrics, said, table

for _name in ("fastapi", "sqlalchemy", "alembic"):
    pytest.importorskip(_name, reason=f"{_name} is not installed: pip install 'meshwright[service]'")

from ui import jobs  # noqa: E402 - after the packages that it needs
from ui.background import service  # noqa: E402 - after the packages that it needs
from ui.charts.curves import points_of  # noqa: E402 - as above
from ui.question.state import Inputs  # noqa: E402 - as above

PATIENT_S = 120.0


@pytest.fixture
def queue():
    service.queue.clear()
    service.jobs.clear()
    found = service.queue()
    yield found
    found.dispatcher.stop()
    service.queue.clear()
    service.jobs.clear()


def begin(explorer):
    test = explorer("run", model="tiny-llama", cluster="h200x4", gpus="2", seq="256", batch="4")
    test.segmented_control[0].set_value("cpu")
    test.button[0].click().run()
    return test


def settled(test, words):
    ends = time.monotonic() + PATIENT_S
    while not any(word in said(test) for word in words):
        assert time.monotonic() < ends, said(test)
        time.sleep(0.5)
        test.run()


@pytest.mark.nightly  # a run that is started and stopped, and kept runs next to their predictions, are in the gate
def test_a_run_is_started_and_its_measurement_shown(explorer, queue):
    pytest.importorskip("torch", reason="torch runs plans")
    test = begin(explorer)
    (kept,) = queue.jobs.newest(service.USER, 10)
    seen = []
    ends = time.monotonic() + PATIENT_S
    while service.read(kept["id"])["state"] in {"queued", "running"}:
        assert time.monotonic() < ends
        seen.append(points_of(service.jobs().so_far(kept["id"]).decode(), "run"))
        time.sleep(0.1)
    settled(test, ["The run:"])

    assert any(0 < len({point["step"] for point in points}) < 10 for points in seen)  # while it ran
    assert "Its steps" in said(test)
    assert "finished" in said(test)
    assert "those of one process" in said(test)
    shown = table(test, "measured")
    assert shown.set_index("quantity").loc["step", "measured"].endswith("s")
    (kept,) = queue.jobs.newest(service.USER, 10)
    assert (kept["command"], kept["state"]) == ("apply", "done")


def test_a_run_is_stopped_at_once(explorer, queue):
    test = begin(explorer)
    settled(test, ["Queued", "Running", "The run:"])
    (kept,) = queue.jobs.newest(service.USER, 10)
    if kept["state"] in {"queued", "running"}:
        test.button(key="stop_run").click().run()
        settled(test, ["stopped before it ended"])
        assert queue.jobs.newest(service.USER, 10)[0]["state"] == "cancelled"


def test_a_link_to_a_run_that_is_not_here_says_so(explorer, queue):
    test = explorer("run", model="tiny-llama", cluster="h200x4", gpus="2", job="0" * 32)

    assert "There is no such run" in said(test)


def test_a_tuning_on_recorded_runs_is_followed_and_ends_with_its_best_plan(explorer, queue):
    """What a trial would measure is looked up, so no GPU is needed; trials and beliefs are those of the state file."""
    recorded = (ROOT / "tests" / "data" / "tune" / "vtrain_two_questions.json").read_bytes()
    said_ = jobs.tune_request(Inputs(), "meshwright", "cuda", 5, 2, BytesIO(recorded))
    job = service.jobs().submit("tune", said_)
    seen = set()
    ends = time.monotonic() + PATIENT_S
    while (found := service.read(job))["state"] not in {"done", "failed"}:
        assert time.monotonic() < ends
        seen.add(service.jobs().so_far(job)[:20])
        time.sleep(0.2)
    assert found["state"] == "done", found["error"]

    test = explorer("tuning", job=job)
    assert metrics(test)["Best step"].endswith(" s")
    assert len(table(test, "measured, s")) == len(found["result"]["trials"]) == 2


def test_a_machine_without_gpus_is_known_before_the_click(explorer, queue, monkeypatch):
    monkeypatch.setattr("ui.jobs.gpus_here", lambda: 0)
    test = explorer("run", model="tiny-llama", cluster="h200x4", gpus="2", seq="256", batch="4")
    assert "This machine has no GPU, and the plan needs 2" in said(test)

    test.button[0].click().run()
    assert "choose cpu" in test.warning[0].value
    assert queue.jobs.newest(service.USER, 10) == []


def test_a_job_for_a_scheduler_is_written_and_what_does_not_go_together_is_refused(explorer, queue):
    test = explorer("run", model="tiny-llama", cluster="h200x4", gpus="2", seq="256", batch="4")
    test.checkbox[0].check()
    test.button[0].click().run()
    assert "choose one of them" in test.warning[0].value
    assert queue.jobs.newest(service.USER, 10) == []

    test.checkbox[0].uncheck()
    next(box for box in test.selectbox if box.label == "Launcher").set_value("slurm")
    test.button[0].click().run()
    (job,) = (row["id"] for row in queue.jobs.newest(service.USER, 10))
    ends = time.monotonic() + PATIENT_S
    while (found := service.read(job))["state"] not in {"done", "failed"}:
        assert time.monotonic() < ends
        time.sleep(0.2)
    assert found["state"] == "done", found["error"]
    texts = [service.jobs().content(one).decode() for one in found["artifacts"]]
    assert any("#SBATCH" in text for text in texts)
    test.run()
    assert "sbatch" in said(test)
    assert any("#SBATCH" in code.value for code in test.code)
