"""What the host issues for exchanges by copy engines, played by threads that are ranks, on memory of this process.

Each call does at once what a stream would do later, in the order in which the host issues it: the very order that has
to lead to an end on any hardware. A wait that nobody ends fails after seconds. Bytes go where the plans' addresses say,
so what is asserted is that the right rows arrive in the right places, call after call, with ranks out of step.
"""

import ctypes
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: nothing can be moved")

from executor.gpu import stream_ops  # noqa: E402 - after the check for torch
from executor.gpu import symmetric_memory as symmetric  # noqa: E402 - after the check for torch
from executor.overlap import push, relay  # noqa: E402 - as above

pytestmark = pytest.mark.slow

PATIENCE_S = 20.0
CALLS = 5


class SharedMemory:
    """Stands in for `symmetric.Allocation`: every rank's bytes in this process."""

    made: dict[int, list[Any]]
    lock: threading.Lock

    def __init__(self, nbytes: int, group: Any, device: Any) -> None:
        self.rank, self.world = group.rank, group.size
        count = group.allocations[0]
        group.allocations[0] += 1
        with self.lock:
            self.all = self.made.setdefault(count, [None] * group.size)
        self.all[self.rank] = self.local = torch.zeros(nbytes, dtype=torch.uint8)
        group.barrier.wait(PATIENCE_S)
        self.at = tuple(held.data_ptr() for held in self.all)
        self.addresses = torch.tensor(self.at)

    def on(self, rank: int, shape: tuple[int, ...], dtype: Any, offset_bytes: int = 0) -> Any:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return self.all[rank][offset_bytes : offset_bytes + nbytes].view(dtype).view(shape)


@dataclass(eq=False, kw_only=True)
class Group:
    """Stands in for a process group, seen from one rank."""

    rank: int
    size: int
    barrier: threading.Barrier
    group_name: str = "all"
    allocations: list[int] = field(default_factory=lambda: [0])


def word(address: int) -> ctypes.c_int32:
    return ctypes.c_int32.from_address(address)


def wait_word(address: int, value: int, _stream: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while word(address).value < value:
        if time.monotonic() > until:
            raise TimeoutError("nobody raised this flag: run one after the other, the ranks' calls do not end")
        time.sleep(1e-4)


def write_word(address: int, value: int, _stream: int) -> None:
    word(address).value = value


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that do at once what they are asked."""
    SharedMemory.made, SharedMemory.lock = {}, threading.Lock()
    monkeypatch.setattr(symmetric, "Allocation", SharedMemory)
    monkeypatch.setattr(symmetric, "Order", lambda _: lambda **_: None)
    monkeypatch.setattr(symmetric, "_workspaces", {})
    monkeypatch.setattr(stream_ops, "current_stream", lambda _: 0)
    monkeypatch.setattr(stream_ops, "copy", lambda to, source, nbytes, _: ctypes.memmove(to, source, nbytes))
    monkeypatch.setattr(stream_ops, "write_word", write_word)
    monkeypatch.setattr(stream_ops, "wait_word", wait_word)
    monkeypatch.setattr(push, "side_stream", lambda *_: SimpleNamespace(cuda_stream=1))
    monkeypatch.setattr(symmetric.Workspace, "is_capturing", staticmethod(lambda: False))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group.size)
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: group.barrier.wait(PATIENCE_S))
    monkeypatch.setattr(push.CopyScatter, "_add_kernel", adding)


def adding(self: push.CopyScatter, _: Any) -> Callable[..., None]:
    """What the kernel `add_slots` does, which has a test of its own."""

    def add(_stream: int, out: int) -> None:
        nbytes, rank = self.slots[0].numel() * self.slots.element_size(), self.space.rank
        own = torch.frombuffer((ctypes.c_char * nbytes).from_address(out), dtype=self.slots.dtype)
        for source in range(self.space.world):
            if source != rank:
                own += self.slots[source].flatten()

    return add


def on_ranks(world: int, run: Callable[[Any], None]) -> None:
    """Run `run(group)` on `world` threads; raise what any of them raised."""
    barrier, failures = threading.Barrier(world), []

    def one(rank: int) -> None:
        group = Group(rank=rank, size=world, barrier=barrier)
        try:
            run(group)
        except Exception as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE_S)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a rank is stuck"


def draw(*shape: int, seed: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CPU = torch.device("cpu")


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("pieces", [1, 3])
def test_gathering_brings_every_shard_to_its_place(world: int, pieces: int) -> None:
    def run(group: Any) -> None:
        for call in range(CALLS):
            rows = (300, 700)[call % 2]  # plans of two shapes take turns with one memory, which grows first
            whole = draw(world, rows, 8, seed=call)
            time.sleep(random.random() / 200)
            exchange = push.CopyGather(whole[group.rank], group, pieces=pieces, keep=True)
            for step in range(1, world):
                source = (group.rank + step) % world
                for number, (first, last) in enumerate(exchange.plan.bounds):
                    assert torch.equal(exchange.wait_for_piece(source, number), whole[source, first:last])
            exchange.finish()
            assert torch.equal(exchange.plan.gathered, whole.flatten(0, 1))

    on_ranks(world, run)


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("way", ["relay in 1", "relay in 2", "relay in 3", "slots", "slots and relay in 2"])
def test_partial_sums_reach_their_owner(world: int, way: str) -> None:
    def run(group: Any) -> None:
        for call in range(CALLS):
            rows, depth, columns = (9, 4, 6) if call % 2 else (7, 5, 3)
            xs, ws = draw(world, world * rows, depth, seed=call), draw(world, depth, columns, seed=100 + call)
            x, w = xs[group.rank], ws[group.rank]
            time.sleep(random.random() / 200)

            def multiply(
                shard: int, first: int, last: int, out: Any, add: bool, x: Any = x, w: Any = w, rows=rows
            ) -> None:
                part = x[shard * rows + first : shard * rows + last] @ w
                out.copy_(out + part if add else part)

            def make(shard: int, out: Any, x: Any = x, w: Any = w, rows: int = rows) -> None:
                out.copy_(x[shard * rows : (shard + 1) * rows] @ w)

            if way == "slots" or (way.startswith("slots") and call % 3 == 0):  # the two share memory and flags
                found = push.scatter_sum(make, (rows, columns), x.dtype, group, CPU)
            else:
                pieces = int(way.rsplit(maxsplit=1)[-1])
                found = relay.relay_sum(multiply, (rows, columns), x.dtype, group, CPU, pieces=pieces)
            expected = sum(a @ b for a, b in zip(xs, ws, strict=True)).chunk(world)[group.rank]
            torch.testing.assert_close(found, expected)

    on_ranks(world, run)


@pytest.mark.usefixtures("inline")
def test_a_rank_that_is_far_ahead_waits_instead_of_overwriting() -> None:
    """With one rank asleep before every call, the other issues all it can; two sets of buffers have to be enough."""

    def run(group: Any) -> None:
        for call in range(2 * CALLS):
            whole = draw(2, 4, 4, seed=call)
            exchange = push.CopyGather(whole[group.rank], group, pieces=1, keep=False)
            if group.rank:
                time.sleep(0.01)  # its shard has been sent; what has come for it lies there for a while
            assert torch.equal(exchange.wait_for_piece(1 - group.rank, 0), whole[1 - group.rank])
            exchange.finish()

    on_ranks(2, run)


@pytest.mark.usefixtures("inline")
def test_a_call_issues_no_more_than_it_has_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per piece sent: a copy and a word set; per piece awaited: a wait and a word lowered. Plans are worked out
    once.
    """
    issued: dict[int, list[str]] = {}

    def counted(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            issued.setdefault(threading.get_ident(), []).append(name)
            call(*args)

        return run

    for name in ("copy", "write_word", "wait_word"):
        monkeypatch.setattr(stream_ops, name, counted(name, getattr(stream_ops, name)))

    def run(group: Any) -> None:
        x = draw(600, 4, seed=0)
        plans = []
        for _ in range(4):
            issued[threading.get_ident()] = []
            exchange = push.CopyGather(x, group, pieces=2, keep=False)
            for source in range(3):
                for number in range(2):
                    if source != group.rank:
                        exchange.wait_for_piece(source, number)
            exchange.finish()
            plans.append(id(exchange.plan))
            counts = [issued[threading.get_ident()].count(name) for name in ("copy", "write_word", "wait_word")]
            assert counts == [2 * 2, 2 * 2 * 2 + 1, 2 * 2]  # one word more tells the host's watch that the call ended
        assert plans[:2] == plans[2:]

    on_ranks(3, run)


def test_rounds_of_tiles_fill_the_multiprocessors() -> None:
    from executor.overlap.copy_engine import rows_of_a_round

    assert rows_of_a_round(8192, 132) == 4 * 128  # 32 tiles across: four rows of tiles, 128 of 132 at work
    assert rows_of_a_round(4096, 132) == 8 * 128
    assert rows_of_a_round(100_000, 132) == 128  # never less than a row of tiles


def test_parts_are_relayed_where_adding_them_up_would_take_long() -> None:
    from executor.overlap.copy_engine import relays

    assert relays(2, 4096, 8192, 2)
    assert not relays(2, 4096, 4096, 2)
    assert relays(4, 2048, 8192, 2)  # more slots to read
    assert not relays(4, 1024, 8192, 2)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_simulator_relays_what_is_relayed(world: int) -> None:
    from executor.overlap.copy_engine import relays
    from simulator.overlap.modes import relayed

    for rows in (512, 1024, 2048, 4096, 8192):
        for columns in (1024, 4096, 8192, 16384):
            assert relays(world, rows, columns, 2) == relayed(world, 2 * rows * columns)
