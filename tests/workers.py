"""`pytest -n 2`: two processes run the tests, forked once everything is imported and collected.

pytest-xdist's workers import and collect everything once each, which is a tenth of what our tests cost. A worker takes
the next file when it comes to the last test of the one before, so fixtures of a module are made once and those of a
session once a worker. Reports go to the first process, which counts and prints them.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    # Small letters are kept for pytest and its plugins, of which this is one; it takes the place of xdist's.
    parser.getgroup("general")._addoption(
        "-n", dest="workers", type=int, default=0, metavar="N", help="run the files of tests in N processes"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    config = session.config
    if config.option.workers < 1 or config.option.collectonly or session.testsfailed:
        return None  # pytest's own loop
    config._tmp_path_factory.getbasetemp()  # one folder for all workers
    running = _Run(session)
    try:
        running.run()
    finally:
        for worker in running.workers.values():
            worker.process.kill()
    return True


@dataclass
class _Worker:
    process: Any
    files: list[int]  # the numbers of tests it was given and has not ended; it runs the first of them
    name: str


@dataclass
class _Run:
    """The first process's side: which files wait, and who runs what."""

    session: pytest.Session
    files: deque[list[int]] = field(init=False)
    workers: dict[Connection, _Worker] = field(default_factory=dict)
    names: Iterator[str] = field(default_factory=lambda: (f"gw{number}" for number in itertools.count()))

    def __post_init__(self) -> None:
        numbers = range(len(self.session.items))
        by_file = itertools.groupby(numbers, key=lambda number: self.session.items[number].path)
        self.files = deque(list(file) for _, file in by_file)

    def run(self) -> None:
        for _ in range(min(self.session.config.option.workers, len(self.files))):
            self._start()
        while self.workers:
            for pipe in wait(list(self.workers)):
                try:
                    self._take(pipe, pipe.recv())
                except (EOFError, OSError):
                    self._died(self.workers.pop(pipe))
            if self.session.shouldfail:
                raise self.session.Failed(self.session.shouldfail)
            if self.session.shouldstop:
                raise self.session.Interrupted(self.session.shouldstop)

    def _start(self) -> None:
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(
            target=_work, args=(self.session, there, list(self.workers))
        )
        process.start()
        there.close()
        self.workers[here] = _Worker(process, [], next(self.names))

    def _take(self, pipe: Connection, said: tuple[str, Any]) -> None:
        kind, what = said
        worker, hook = self.workers[pipe], self.session.config.hook
        if kind == "next file":
            file = self.files.popleft() if self.files else []
            worker.files += file
            pipe.send(file)
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=self.session.config, data=what)
            # By these names pytest's terminal shows workers.
            report.node = SimpleNamespace(gateway=SimpleNamespace(id=worker.name), _workerinfocache=worker.name)
            hook.pytest_runtest_logreport(report=report)
        elif kind == "ended":
            worker.files.remove(what)
        elif kind == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=what)
        elif kind == "done":
            worker.process.join()
            del self.workers[pipe]

    def _died(self, worker: _Worker) -> None:
        """Say of which test a process died, and let another go on with the rest."""
        worker.process.join()
        if not worker.files:
            raise RuntimeError(f"a worker died between two tests, exit code {worker.process.exitcode}")
        broken, *rest = worker.files
        item = self.session.items[broken]
        self.session.config.hook.pytest_runtest_logreport(
            report=pytest.TestReport(
                nodeid=item.nodeid,
                location=item.location,
                keywords={},
                outcome="failed",
                longrepr=f"the process of this test died, exit code {worker.process.exitcode}",
                when="call",
            )
        )
        if rest:
            self.files.appendleft(rest)
        self._start()


def _work(session: pytest.Session, pipe: Connection, others: list[Connection]) -> None:
    """A worker's side: run the tests of one file after the other."""
    for other in others:
        other.close()
    sys.modules["__main__"] = ModuleType("__main__")  # processes that tests start need not import pytest again
    config = session.config
    config.pluginmanager.unregister(name="terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are those of the first process
    capture.start_global_capturing()
    sender = _Sender(config, pipe)
    config.pluginmanager.register(sender)
    sender.began = True
    # A pair is made when its second part is there: a file is asked for before the last test of another.
    for number, following in itertools.pairwise(itertools.chain(_numbers(pipe), [None])):
        item, after = session.items[number], None if following is None else session.items[following]
        config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        pipe.send(("ended", number))
        if session.shouldfail or session.shouldstop:
            break
    pipe.send(("done", None))


def _numbers(pipe: Connection) -> Iterator[int]:
    """Yield the numbers of the tests to run."""
    while True:
        pipe.send(("next file", None))
        file = pipe.recv()
        if not file:
            return
        yield from file


@dataclass(eq=False)  # pytest keeps plugins in sets
class _Sender:
    config: pytest.Config
    pipe: Connection
    began: bool = False  # every plugin that comes is given the warnings of the time before

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self.config.hook
        self.pipe.send(("report", hook.pytest_report_to_serializable(config=self.config, report=report)))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        if not self.began:
            return
        # As text, for not every warning's class can be sent.
        text = UserWarning(f"{warning_message.category.__name__}: {warning_message.message}")
        sent = warnings.WarningMessage(text, UserWarning, warning_message.filename, warning_message.lineno)
        what = {"warning_message": sent, "when": when, "nodeid": nodeid, "location": location}
        self.pipe.send(("warning", what))
