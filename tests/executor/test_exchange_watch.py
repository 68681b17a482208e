"""The watch over streams that wait: it speaks when calls are due and none ends, and only then."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from executor.gpu.exchange_watch import EXIT_CODE, CallCounter, Watch  # noqa: E402 - after the check for torch

LATEST = (1 << 31) - 1


@pytest.fixture
def words() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.int32)


def watch_over(words: torch.Tensor, said: list[str]) -> Watch:
    return Watch(words, said.append, stall_s=60.0)


def test_a_call_that_does_not_end_is_named(words: torch.Tensor) -> None:
    said: list[str] = []
    watch = watch_over(words, said)
    idle, stuck = watch.add_counter("gather, group 0"), watch.add_counter("scatter, group 1")
    assert (idle.address, stuck.address) == (words.data_ptr(), words.data_ptr() + 4)
    for what in ("a reduce-scatter", "a relayed reduce-scatter", "a third"):
        stuck.issue(what)
    words[1] = 1  # the first has ended
    assert not watch.check(1000.0)
    assert not watch.check(1059.0)
    assert said == []
    assert watch.check(1060.0)
    assert said[0].startswith("a relayed reduce-scatter (call 2 of scatter, group 1) has not ended")


def test_progress_and_idleness_start_the_clock_again(words: torch.Tensor) -> None:
    said: list[str] = []
    watch = watch_over(words, said)
    counter = watch.add_counter("gather")
    for now in range(0, 1000, 50):  # always due, always going on
        counter.issue("an all-gather")
        assert not watch.check(float(now))
        words[0] += 1
    assert not watch.check(1000.0)  # nothing is due for an hour
    assert not watch.check(4600.0)
    counter.issue("an all-gather")
    assert not watch.check(4601.0)
    assert not watch.check(4660.0)
    assert watch.check(4661.0)


def test_counts_wrap_as_words_do(words: torch.Tensor) -> None:
    counter = CallCounter("gather", words.data_ptr())
    counter._issued = words[0] = LATEST - 1
    assert [counter.issue("one"), counter.issue("two"), counter.issue("three")] == [LATEST, 0, 1]
    counter.stalled(10.0)
    words[0] = 0
    assert counter.stalled(11.0) == (0.0, 1, "three")
    words[0] = 1
    assert counter.stalled(12.0) is None


def test_a_process_whose_wait_does_not_end_says_so_and_leaves() -> None:
    """As on a GPU: the main thread sits in a call that does not return."""
    script = (
        "import executor.gpu.exchange_watch as w, threading\n"
        "w.STALL_S, w.POLL_S = 0.2, 0.05\n"
        "w.process_watch().add_counter('gather, group 0').issue('an all-gather')\n"
        "threading.Event().wait(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == EXIT_CODE
    assert "an all-gather (call 1 of gather, group 0) has not ended" in done.stderr
    assert "most recent call first" in done.stderr
