"""Whose turn it is: what the dispatcher starts and what it lets wait, with processes that never answer."""

from __future__ import annotations

import os
import signal
import subprocess
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from tests.service import needs  # noqa: F401 - skips where a package is missing
from tests.waiting import wait_until

from planner.jobs import processes  # isort: skip
from planner.jobs.fork_server import Worker  # isort: skip
from planner.remote.settings import Settings  # isort: skip
from planner.service.queue import Queue  # isort: skip

WORKERS = 2


class NeverAnswers:
    """In the place of `ForkServer`: its workers hold the other end of their pipe and do nothing else."""

    def __init__(self, _module):
        self.processes = {}

    def fork(self):
        here, there = Pipe()
        with there:
            process = subprocess.Popen(["sleep", "1000"], pass_fds=[there.fileno()])
        self.processes[process.pid] = process
        return Worker(self, process.pid, here)

    def exit_code(self, pid):
        return self.processes[pid].poll()

    def ended(self):
        return False

    def close(self):
        pass


@pytest.fixture
def turns(database, tmp_path, monkeypatch):
    """A queue whose processes never answer and whose jobs all count as long; `take` turns until nothing starts."""
    monkeypatch.setattr(processes, "ForkServer", NeverAnswers)
    monkeypatch.setattr(processes, "LONG_S", 0.0)
    queue = Queue(Settings(folder=str(tmp_path), database=database, workers=WORKERS))
    dispatcher = queue.dispatcher

    def take():
        for _ in range(10):
            dispatcher._turn()
            wait_until(lambda: all(one.job.began is not None for one in dispatcher._running.values()))
        return sorted((one.claim.owner, one.claim.command) for one in dispatcher._running.values())

    def ask(owner, command, times):
        said = {"model": "tiny-llama", "cluster": "h200x4", "gpus": "1"}
        return [queue.ask(owner, command, {**said, "global_batch": 1 + n}) for n in range(times)]

    yield SimpleNamespace(take=take, ask=ask, queue=queue)
    for one in [*dispatcher._running.values()]:
        one.job.stop()
        one.job.done.wait(10)
    dispatcher._workers.close()


def test_long_searches_leave_slots_for_short_questions_of_one_user(turns):
    turns.ask("ada", "suggest", 6)
    assert turns.take() == [("ada", "suggest")] * WORKERS

    turns.ask("ada", "estimate", 3)
    assert turns.take().count(("ada", "estimate")) == WORKERS


def test_long_searches_of_two_users_share_and_leave_slots_for_short_questions_of_a_third(turns):
    turns.ask("ada", "suggest", 3)
    turns.ask("bob", "suggest", 3)
    searches = [(user, "suggest") for user in ("ada", "bob") for _ in range(WORKERS)]
    assert turns.take() == searches

    turns.ask("eve", "estimate", 1)
    assert turns.take() == [*searches, ("eve", "estimate")]
    turns.ask("ada", "estimate", 3)  # of who has most, in the slot that is left
    assert turns.take() == sorted([*searches, ("eve", "estimate"), ("ada", "estimate")])


def test_short_questions_of_one_user_do_not_keep_those_of_another_waiting(turns):
    first = turns.ask("ada", "estimate", 5)
    turns.ask("bob", "estimate", 1)

    assert ("bob", "estimate") in turns.take()
    assert turns.queue.read("ada", first[-1]).state == "queued"


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("command", "by", "state"),
    [("suggest", signal.SIGKILL, "queued"), ("suggest", signal.SIGABRT, "failed"), ("apply", signal.SIGKILL, "failed")],
    ids=["a question whose process is killed", "one whose process crashes", "a run whose process is killed"],
)
def test_what_others_end_costs_a_question_no_start(turns, command, by, state):
    """A crash costs one of two starts; a run, which may have been measuring, is never started again."""
    if command == "apply":
        job = turns.queue.ask("ada", "apply", {"device": "cpu", "nodes": 1})
    else:
        (job,) = turns.ask("ada", command, 1)
    running = turns.queue.dispatcher._running
    for _ in range(4):
        turns.take()
        if job not in running:
            break
        started = running[job].job
        wait_until(lambda one=started: one._process is not None)
        os.kill(started._process.pid, by)
        assert started.done.wait(20)
        turns.queue.dispatcher._follow(running[job])

    assert turns.queue.read("ada", job).state == state
