"""Steps that are timed move from processor to processor, so that none decides what a host takes."""

import os
from collections import Counter

import pytest

from executor.calibrate import processors
from executor.calibrate.processors import Processors

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system moves no threads")


@pytest.fixture
def moves(monkeypatch) -> list[tuple[int, set[int]]]:
    """The moves of the main thread, 0, and of one thread of backward passes, 7, on eight processors; another, 5, is
    never touched.
    """
    found: list[tuple[int, set[int]]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, to: found.append((thread, to)))
    monkeypatch.setattr(processors, "_threads", lambda: {5: "nccl", 7: "pt_autograd_0"})
    return found


def test_every_processor_has_as_many_steps(moves) -> None:
    with Processors() as some:
        for _ in range(16):
            some.turn()
        for thread in (0, 7):
            assert Counter(cpu for mover, to in moves if mover == thread for cpu in to) == dict.fromkeys(range(8), 2)

    assert moves[-2:] == [(0, set(range(8))), (7, set(range(8)))], "afterwards threads run anywhere"


def test_a_thread_that_was_started_meanwhile_is_not_left_on_one_processor(moves, monkeypatch) -> None:
    with Processors() as some:
        some.turn()
        monkeypatch.setattr(processors, "_threads", lambda: {5: "nccl", 7: "pt_autograd_0", 9: "loader"})

    assert (9, set(range(8))) in moves
    assert all(thread != 5 for thread, _ in moves)


def test_ranks_that_take_turns_together_never_share_a_processor(moves) -> None:
    ranks = [Processors(rank) for rank in range(4)]

    for _ in range(8):
        moves.clear()
        for one in ranks:
            one.turn()
        assert len({cpu for _, to in moves for cpu in to}) == 8


def test_where_there_are_few_processors_nothing_moves(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("moved"))

    with Processors() as some:
        some.turn()


def test_a_process_finds_its_own_threads(monkeypatch) -> None:
    """By the names that the system has of them: here by this one's."""
    monkeypatch.setattr(processors, "BACKWARD", processors._threads()[os.getpid()])

    assert os.getpid() in processors._backward_threads()
