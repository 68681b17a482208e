"""Who is blamed for a hang, from what ranks last said."""

import json
import os
import threading

from executor.launch.heartbeat import Heartbeat, HeartbeatRecord, find_suspects, read_heartbeats


def beat(rank: int, *, written: float = 100.0, **more) -> HeartbeatRecord:
    fields = {"phase": "step 3", "where": "executor/parallel/train_step.py:9", "waiting": True, **more}
    return HeartbeatRecord(rank=rank, pid=1000 + rank, written=written, **fields)


def test_a_rank_that_fell_silent_is_blamed_not_those_that_waited() -> None:
    said = find_suspects([beat(0), beat(1, written=90.0), beat(2, written=99.5)], 3)

    assert len(said) == 1
    assert said[0].startswith("rank 1 (pid 1001) stopped answering 10 s before the others, in step 3")


def test_a_rank_that_left_by_itself_is_silent_for_a_reason() -> None:
    """Rank 0 waited too long and went; rank 1, which kept it waiting, was ended later."""
    said = find_suspects(
        [
            beat(0, written=90.0, exited=True, entered={"0,1#0": 5}),
            beat(1, waiting=False, entered={"0,1#0": 4}),
        ],
        2,
    )

    assert [line[:6] for line in said] == ["rank 1"]


def test_a_rank_that_is_busy_elsewhere_is_blamed_by_its_line() -> None:
    said = find_suspects([beat(0), beat(1, waiting=False, where="executor/parallel/train_step.py:20"), beat(2)], 3)

    assert said == ["rank 1 (pid 1001) was in step 3 at executor/parallel/train_step.py:20 while others waited for it"]


def test_a_rank_that_never_came_is_blamed() -> None:
    assert find_suspects([beat(0)], 2) == ["rank 1 never started"]
    assert find_suspects([], 2) == ["no rank got as far as its first line"]


def test_nobody_is_blamed_when_all_wait() -> None:
    """Everyone waits for everyone: a lost message, not a lost rank."""
    assert find_suspects([beat(0), beat(1)], 2) == []


def test_the_rank_that_has_not_entered_is_blamed_not_those_that_wait_in_a_synchronisation() -> None:
    """On GPUs nobody stands inside a collective: three ranks wait for their device, one reads its batch."""
    said = find_suspects(
        [
            beat(0, waiting=False, stack_tells_waiting=False, entered={"0,1,2,3#0": 41}),
            beat(1, waiting=False, stack_tells_waiting=False, entered={"0,1,2,3#0": 41}),
            beat(
                2,
                waiting=False,
                stack_tells_waiting=False,
                entered={"0,1,2,3#0": 40},
                where="executor/parallel/train_step.py:20",
            ),
            beat(3, waiting=False, stack_tells_waiting=False, entered={"0,1,2,3#0": 41}),
        ],
        4,
    )

    assert len(said) == 1
    assert said[0].startswith("rank 2 (pid 1002) was in step 3 at executor/parallel/train_step.py:20")
    assert "3 of its group" in said[0]


def test_a_rank_that_is_late_because_it_waits_elsewhere_is_not_blamed() -> None:
    """Rank 1 is stuck; 0 waits for it in their group, 2 waits for 0 in another."""
    said = find_suspects(
        [
            beat(0, waiting=True, entered={"0,1#0": 5, "0,2#0": 7}),
            beat(1, waiting=False, entered={"0,1#0": 4, "1,3#0": 7}),
            beat(2, waiting=True, entered={"2,3#0": 5, "0,2#0": 8}),
            beat(3, waiting=True, entered={"2,3#0": 5, "1,3#0": 8}),
        ],
        4,
    )

    assert [line[:6] for line in said] == ["rank 1"]


def test_where_a_rank_of_a_gpu_stands_proves_nothing() -> None:
    beats = [
        beat(0, stack_tells_waiting=False, entered={"0,1#0": 5}),
        beat(1, stack_tells_waiting=False, waiting=False, entered={"0,1#0": 5}),
    ]

    assert find_suspects(beats, 2) == []


def test_beats_are_written_and_read(tmp_path) -> None:
    Heartbeat(tmp_path, 0).set_phase("step 1")
    (tmp_path / "rank1.beat").write_text('{"pid": 1')  # cut short

    (read,) = read_heartbeats(tmp_path, 3)

    assert (read.rank, read.pid, read.phase, read.waiting) == (0, os.getpid(), "step 1", False)
    assert threading.active_count() >= 2
    assert json.loads((tmp_path / "rank0.beat").read_text())["phase"] == "step 1"
