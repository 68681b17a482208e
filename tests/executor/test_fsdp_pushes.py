"""FSDP's exchanges by copy engines, played by threads that are ranks (`tests.executor.test_overlap_copies`)."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: nothing can be moved")

from executor.gpu import exchange_watch, stream_ops  # noqa: E402 - after the check for torch
from executor.overlap.fsdp_exchange import PushedGather, PushedScatter, Pushes, padded_numel  # noqa: E402 - as above
from simulator.step.symmetric_memory import GATHER_SETS, SCATTER_SETS  # noqa: E402 - as above
from tests.executor.test_overlap_copies import CPU, draw, inline, on_ranks  # noqa: E402, F401 - a fixture

pytestmark = pytest.mark.slow

CALLS, SIZES = 8, (5, 9, 3)  # numbers of a rank's shard, in turn: as large blocks and small ones take turns


def shards(world: int, call: int) -> Any:
    return draw(world, SIZES[call % len(SIZES)], seed=call)


def gathers_late(world: int, sets: int, slow: Sequence[int]) -> bool:
    """Gather as FSDP2 does at its laziest: a result is used just before the gather after the next. Return whether all
    results were right on all ranks; the ranks `slow` use them late.
    """
    right = []

    def run(group: Any) -> None:
        gather = PushedGather(Pushes("all-gather", sets, 8 * world * max(SIZES), group, CPU))
        found: list[Any] = []

        def used(call: int) -> bool:
            time.sleep(0.01 if group.rank in slow else 0.0)
            return torch.equal(found[call].view(world, -1), shards(world, call))

        for call in range(CALLS):
            if call >= 2:
                right.append(used(call - 2))
            mine = shards(world, call)[group.rank]
            whole = gather.allocate((world * mine.numel(),), dtype=mine.dtype, device=CPU)
            place = whole.view(world, -1)[group.rank]
            place.copy_(mine)
            gather(whole, place, group)
            found.append(whole)
        right.extend(used(call) for call in range(CALLS - 2, CALLS))

    on_ranks(world, run)
    return all(right)


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(("world", "slow"), [(2, [0]), (3, [1]), (4, [0, 2])])
def test_what_was_gathered_is_whole_until_it_is_used(world: int, slow: list[int]) -> None:
    assert gathers_late(world, GATHER_SETS, slow)


@pytest.mark.usefixtures("inline")
def test_with_one_set_less_a_fast_rank_overwrites_what_is_still_to_be_used() -> None:
    assert not gathers_late(2, GATHER_SETS - 1, [0])


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_rank_gets_the_sum_of_its_parts(world: int) -> None:
    def run(group: Any) -> None:
        scatter = PushedScatter(Pushes("reduce-scatter", SCATTER_SETS, 8 * world * max(SIZES), group, CPU))
        for call in range(CALLS):
            size = SIZES[call % len(SIZES)]
            parts = draw(world, world, size, seed=call)  # by source and owner
            out = torch.empty(size, dtype=parts.dtype)
            time.sleep(0.005 * (group.rank == call % world))
            scatter(out, parts[group.rank].flatten(), group, torch.distributed.ReduceOp.SUM)
            wanted = parts[0, group.rank] + parts[1, group.rank]
            for source in range(2, world):  # in the order of ranks: the same bits whatever arrives first
                wanted = wanted + parts[source, group.rank]
            assert torch.equal(out, wanted)

    on_ranks(world, run)


@pytest.mark.usefixtures("inline")
def test_every_wait_is_watched_and_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_ops, "wait_word", lambda *_: None)
    watch = exchange_watch.Watch(torch.zeros(8, dtype=torch.int32), lambda _: None, stall_s=60.0)
    monkeypatch.setattr("executor.gpu.symmetric_memory.process_watch", lambda: watch)
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(stream_ops, "write_word", lambda at, value, _: ended.append((at, value)))

    def run(group: Any) -> None:
        pushes = Pushes("all-gather", GATHER_SETS, 1 << 16, group, CPU)
        with pytest.raises(ValueError, match="do not fit"):
            pushes.received(((1 << 13) + 1,), torch.float64)
        for number in (1, 2):
            pushes.exchange([0], 0)
            assert ended[-1] == (pushes.space.call_counter.address, number)  # the stream reports each call that ended

    on_ranks(1, run)


def test_a_units_buffer_counts_the_rows_that_fsdp_pads() -> None:
    module = torch.nn.Linear(3, 5)  # 5 rows of 3 and 5 numbers: over four ranks 8 of each

    assert [padded_numel(module, ranks) for ranks in (1, 4)] == [5 * 3 + 5, 8 * 3 + 8]
