"""Pieces of a computation on several cores have the results, and the errors, of one."""

import os
import sys
import time

import pytest

from topology.cores import on_cores, several_cores
from topology.errors import Unproved
from topology.time_limit import check_time, limited

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked elsewhere")
LONG_S = 1.0


@pytest.fixture
def three_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    with several_cores():
        yield


def slow(number: int) -> tuple[int, int]:
    time.sleep(0.01)  # that every process gets to some
    return number, os.getpid()


@pytest.mark.usefixtures("three_cores")
def test_pieces_are_shared_and_results_in_order() -> None:
    found = on_cores([lambda n=n: slow(n) for n in range(20)], seconds=LONG_S)

    assert [number for number, _ in found] == list(range(20))
    assert len({pid for _, pid in found}) == 3


@pytest.mark.usefixtures("three_cores")
@pytest.mark.parametrize(("count", "seconds"), [(1, LONG_S), (20, 0.01)])
def test_nothing_is_forked_where_that_would_gain_nothing(count: int, seconds: float) -> None:
    assert {pid for _, pid in on_cores([lambda: slow(0)] * count, seconds=seconds)} == {os.getpid()}


def test_nothing_is_forked_unasked() -> None:
    assert {pid for _, pid in on_cores([lambda: slow(0)] * 4, seconds=LONG_S)} == {os.getpid()}


@pytest.mark.usefixtures("three_cores")
def test_what_children_do_not_hand_in_is_done_by_their_parent() -> None:
    here = os.getpid()

    def dies_in_a_child(number: int) -> int:
        time.sleep(0.01)
        if os.getpid() != here:
            os._exit(1)
        return number

    assert on_cores([lambda n=n: dies_in_a_child(n) for n in range(10)], seconds=LONG_S) == list(range(10))


@pytest.mark.usefixtures("three_cores")
def test_errors_and_the_end_of_the_time_are_raised_and_no_child_is_left() -> None:
    def fails(number: int) -> None:
        time.sleep(0.01)
        if number == 7:
            raise KeyError(number)

    with pytest.raises(KeyError):
        on_cores([lambda n=n: fails(n) for n in range(10)], seconds=LONG_S)
    with limited(0.0), pytest.raises(Unproved):
        on_cores([check_time] * 4, seconds=LONG_S)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
