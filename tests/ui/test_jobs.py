"""Long work has processes of its own: bounded in number, time and memory, ended at once, in nobody's way."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import psutil
import pytest

from planner.io.figures import last_digit_s, seconds_text
from planner.jobs import processes as jobs
from planner.question.flags import Flags
from planner.question.prediction import Method
from planner.search.answer import answer
from planner.search.plan_space.candidates import Bounds
from planner.search.result import PRELIMINARY
from planner.search.search import SearchOptions
from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.conftest import metrics, said
from topology.errors import Infeasible

from ui.background import waiting  # isort: skip
from ui.background.shared_jobs import SharedJobs  # isort: skip

WITHOUT_PIPELINES = SearchOptions(bounds=Bounds(max_pp=1))
SHORT = (Flags(model="tiny-llama", cluster="h200x4", gpus=(2,), global_batch=8), "torchtitan", WITHOUT_PIPELINES)
LONG = (Flags(model="llama3-405b", gpus=(16384,)), "torchtitan", SearchOptions())
PATIENT_S = 100.0


@pytest.fixture
def workers():
    found = jobs.Workers("ui.background.work")
    yield found
    found.close()


def running(job):
    """Return the process of a job that has begun to work."""
    ends = time.monotonic() + PATIENT_S
    while not (job._process and job.line and "waiting" not in job.line):
        assert time.monotonic() < ends
        assert not job.done.is_set(), job.error
        time.sleep(0.02)
    return psutil.Process(job._process.pid)


@pytest.fixture(scope="module")
def answered():
    """Return workers, a job that one of them has done, and what it answered early."""
    found = jobs.Workers("ui.background.work")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "LONG_S", PATIENT_S)  # a busy machine makes every question a long one
        shown = []
        job = jobs.Job(found, "search", *SHORT, on_progress=lambda: shown.append(job.early))
        assert job.ask(PATIENT_S)
        yield found, job, [early for i, early in enumerate(shown) if early is not None and early not in shown[:i]]
    found.close()


def test_a_worker_answers_as_this_process_does(answered):
    _, job, _ = answered
    here = answer(*SHORT)
    assert [ranked.plan for ranked in job.result.plans] == [ranked.plan for ranked in here.plans]
    assert [r.estimate.step_s for r in job.result.plans] == [r.estimate.step_s for r in here.plans]


def test_the_next_question_finds_the_process_warm(answered):
    workers, *_ = answered
    time.sleep(0.2)
    (idle,) = workers._idle
    second = jobs.Job(workers, "search", *SHORT)
    assert second.ask(PATIENT_S)
    time.sleep(0.2)

    assert workers._idle == [idle]


def test_stop_kills_the_process_at_once(workers):
    job = jobs.Job(workers, "search", *LONG)
    process = running(job)

    job.stop()

    assert job.ask(PATIENT_S)
    assert isinstance(job.error, jobs.Stopped)
    assert psutil.wait_procs([process], timeout=10)[1] == []


@pytest.mark.parametrize(("limit", "error"), [("limit_s", "no answer within"), ("forgotten_s", "stopped")])
def test_a_job_ends_at_its_time_limit_and_when_nobody_asks(workers, limit, error):
    job = jobs.Job(workers, "search", *LONG)
    process = running(job)

    job._bounds = replace(job._bounds, **{limit: 0.0})

    assert job.done.wait(PATIENT_S)
    assert error in job.error.what
    assert psutil.wait_procs([process], timeout=10)[1] == []


def test_a_search_answers_twice_before_it_ends(answered):
    """First by the analytical model, as preliminary; then simulated, without what would change the answer."""
    _, job, (first, then) = answered
    final = job.result
    assert first.search.status == PRELIMINARY
    assert {one.method for one in first.plans} == {Method.ANALYTICAL}
    assert first.search.legal == final.search.legal
    assert [one.plan for one in then.plans] == [one.plan for one in final.plans]
    assert [one.estimate for one in then.plans] == [one.estimate for one in final.plans]
    assert {one.method for one in then.plans} == {Method.SIMULATION}
    assert not any(one.flips for one in then.plans)


def test_the_early_answer_is_shown_while_plans_are_simulated(explorer, monkeypatch):
    flags = Flags(model="llama3.2-1b", cluster="h200x4", gpus=(4,), seq_len=4096, global_batch=12)
    shown = []

    class EnoughError(Exception):
        pass

    def first(early):
        shown.append(early)
        raise EnoughError

    with pytest.raises(EnoughError):
        answer(flags, "torchtitan", SearchOptions(top=10), early=first)
    (found,) = shown

    class Searching:
        started, line, result, error, early = time.monotonic(), "simulating plan 1 of 10", None, None, found

        def ask(self, _patience_s):
            return False

        def stop(self):
            pass

    shared = SharedJobs(lambda _: True)
    monkeypatch.setattr(waiting, "_shared", lambda: shared)
    monkeypatch.setattr(waiting, "Job", lambda *_: Searching())
    test = explorer("plans", model="llama3.2-1b", cluster="h200x4", batch="12")

    assert "Preliminary" in said(test)
    assert "simulating plan 1 of 10" in said(test)
    step = found.plans[0].estimate.step_s
    assert metrics(test)["Best step"] == seconds_text(step.value, last_digit_s(step))


class Running:
    """A job that runs until it is stopped."""

    def __init__(self):
        self.error = None

    def stop(self):
        self.error = jobs.Stopped("stopped")


def test_sessions_share_the_job_of_a_question_and_the_last_to_leave_ends_it():
    shared = SharedJobs(lambda _: True)
    first = shared.join("one", "search", "a", Running)

    assert shared.join("two", "search", "a", Running) is first
    assert shared.join("one", "search", "b", Running) is not first
    shared.leave("one", "search", "a")
    assert first.error is None
    shared.leave("two", "search", "a")
    assert first.error is not None
    assert shared.join("two", "search", "a", Running) is not first


def test_a_reload_joins_the_search_that_runs_and_what_closed_pages_have_left_ends():
    pages = {"before"}
    shared = SharedJobs(lambda session: session in pages)
    reloaded, left = shared.join("before", "search", "a", Running), shared.join("before", "search", "b", Running)
    pages = {"after"}

    assert shared.join("after", "search", "a", Running) is reloaded
    assert reloaded.error is None
    assert left.error is not None


def test_a_short_question_is_answered_while_long_ones_run(workers, monkeypatch):
    """As many as there are places run long; a short one still gets in, and they step aside for it."""
    monkeypatch.setattr(jobs, "LONG_S", 0.2)
    held = [jobs.Job(workers, "search", *LONG) for _ in range(jobs.SLOTS)]
    processes = [running(job) for job in held]
    time.sleep(0.4)
    short = jobs.Job(workers, "search", *SHORT)

    assert short.ask(PATIENT_S)
    assert short.error is None
    assert not any(job.done.is_set() for job in held)
    assert min(process.nice() for process in processes) >= jobs.NICE
    for job in held:
        job.stop()
        assert job.ask(PATIENT_S)


def test_more_questions_than_places_wait_their_turn(workers, monkeypatch):
    workers._slots = 1
    monkeypatch.setattr(jobs, "LONG_S", PATIENT_S)  # a busy machine makes every question a long one, which steps aside
    first = jobs.Job(workers, "search", *LONG)
    running(first)
    second = jobs.Job(workers, "search", *SHORT)
    assert not second.ask(0.5)
    assert "waiting for 1 other" in second.line

    first.stop()

    assert second.ask(PATIENT_S)
    assert second.error is None


def test_errors_arrive_as_they_were_raised(workers):
    job = jobs.Job(workers, "search", Flags(model="llama3-405b", gpus=(8,)), "torchtitan", SearchOptions())

    assert job.ask(PATIENT_S)
    assert isinstance(job.error, Infeasible)
    assert "does not fit on 8 GPUs" in job.error.what
    assert job.error.remedy


def test_a_process_that_somebody_ends_is_said_and_replaced(workers):
    """So is one whose end nobody can report, since the process that forked it was ended first."""
    for also_who_forks in (False, True):
        job = jobs.Job(workers, "search", *LONG)
        process = running(job)
        if also_who_forks:
            workers.warm()._process.kill()
        process.kill()

        assert job.ask(PATIENT_S)
        assert isinstance(job.error, jobs.ProcessEnded)
        assert job.error.killed
    again = jobs.Job(workers, "search", *SHORT)
    assert again.ask(PATIENT_S)
    assert again.error is None


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="the limit of private memory is Linux's")
def test_the_memory_of_a_worker_is_bounded(workers):
    job = jobs.Job(workers, "search", *LONG, bounds=jobs.Bounds(memory_bytes=3 << 30))
    process = running(job)

    assert process.rlimit(psutil.RLIMIT_DATA)[0] == 3 << 30
    job.stop()
    assert job.ask(PATIENT_S)
