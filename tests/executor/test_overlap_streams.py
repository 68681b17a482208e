"""The order that streams give to exchanges: ranks issue everything at once, and a scheduler runs any stream that can.

Hosts run ahead of their GPUs, so what keeps a call's flags and buffers apart from the next one's is only what the
streams were given. Here every stream is a queue of what a host has issued, a random one of those whose head can run
goes on, and what is asserted is that all queues empty and the right rows were there whenever a product looked. Kernels
that wait are played: the fused product, which lowers its flags at its end.
"""

import ctypes
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: nothing can be moved")

from executor.gpu import stream_ops  # noqa: E402 - after the check for torch
from executor.gpu import symmetric_memory as symmetric  # noqa: E402 - after the check for torch
from executor.overlap import push, relay  # noqa: E402 - as above
from simulator.step.symmetric_memory import PAGE_BYTES, buffer_bytes  # noqa: E402 - as above

CPU = torch.device("cpu")
CURRENT, SIDE, SIGNALS, SECOND = 0, 1, 2, 3
STREAMS = {"copies": SIDE, "signals": SIGNALS, "products 1": SECOND}
ALWAYS: Callable[[], bool] = lambda: True  # noqa: E731 - a name for what it says


def word(address: int) -> ctypes.c_int32:
    return ctypes.c_int32.from_address(address)


@dataclass(eq=False, kw_only=True)
class Group:
    """Stands in for a process group, seen from one rank; counts what this rank has made and issued."""

    rank: int
    size: int
    group_name: str = "all"
    made: int = 0


class Machine:
    """Ranks of three streams each; the one whose turn it is to issue is `rank`."""

    def __init__(self, world: int) -> None:
        self.world, self.rank, self.lane = world, 0, CURRENT
        self.queues: list[list[deque[tuple[Callable[[], bool], Callable[[], object]]]]] = [
            [deque() for _ in STREAMS | {"current": CURRENT}] for _ in range(world)
        ]
        self.groups = [Group(rank=rank, size=world) for rank in range(world)]
        self.memory: list[list[Any]] = []

    def issue(self, stream: int, run: Callable[[], object], ready: Callable[[], bool] = ALWAYS) -> None:
        self.queues[self.rank][stream].append((ready, run))

    def order(self, *, first: int, then: int | tuple[int, ...]) -> None:
        reached: list[bool] = []
        self.issue(first, lambda: reached.append(True))
        for stream in then if isinstance(then, tuple) else (then,):
            self.issue(stream, lambda: None, lambda: bool(reached))

    def run(self, seed: int) -> None:
        choose = random.Random(seed)
        # Some seeds let one rank's streams hardly run, as a slow or delayed GPU does.
        weights = [choose.choice((1, 1, 30)) for _ in range(4 * self.world)]
        while any(queue for queues in self.queues for queue in queues):
            heads = [
                (weight, queue)
                for weight, queue in zip(weights, (q for queues in self.queues for q in queues), strict=True)
                if queue and queue[0][0]()
            ]
            assert heads, "the streams wait for each other for ever"
            queue = choose.choices([queue for _, queue in heads], [weight for weight, _ in heads])[0]
            queue.popleft()[1]()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Machine:
    made = Machine(request.param)

    class Memory:
        def __init__(self, nbytes: int, group: Any, _: Any) -> None:
            if group.made == len(made.memory):
                made.memory.append([torch.zeros(nbytes, dtype=torch.uint8) for _ in range(group.size)])
            self.all = made.memory[group.made]
            group.made += 1
            self.rank, self.world, self.local = group.rank, group.size, self.all[group.rank]
            self.at = tuple(held.data_ptr() for held in self.all)

        def on(self, rank: int, shape: tuple[int, ...], dtype: Any, offset_bytes: int = 0) -> Any:
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            return self.all[rank][offset_bytes : offset_bytes + nbytes].view(dtype).view(shape)

    def copy(target: int, source: int, nbytes: int, stream: int) -> None:
        made.issue(stream, lambda: ctypes.memmove(target, source, nbytes))

    def write(address: int, value: int, stream: int) -> None:
        made.issue(stream, lambda: setattr(word(address), "value", value))

    def wait(address: int, value: int, stream: int) -> None:
        made.issue(stream, lambda: None, lambda: word(address).value >= value)

    monkeypatch.setattr(symmetric, "Allocation", Memory)
    monkeypatch.setattr(symmetric, "Order", lambda _: made.order)
    monkeypatch.setattr(symmetric, "_workspaces", {})
    monkeypatch.setattr(symmetric.Workspace, "is_capturing", staticmethod(lambda: False))
    monkeypatch.setattr(stream_ops, "current_stream", lambda _: CURRENT)
    for name, call in (("copy", copy), ("write_word", write), ("wait_word", wait)):
        monkeypatch.setattr(stream_ops, name, call)
    for module in (push, relay):
        monkeypatch.setattr(
            module, "side_stream", lambda _, name="copies", **__: SimpleNamespace(cuda_stream=STREAMS[name])
        )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=CURRENT))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(made, "lane", stream.cuda_stream))
    monkeypatch.setattr(push.CopyScatter, "_add_kernel", lambda self, _: adding(made, self))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group.size)
    monkeypatch.setattr(torch.distributed, "barrier", lambda _: None)
    return made


def adding(machine: Machine, exchange: push.CopyScatter) -> Callable[..., None]:
    slots, rank, world = exchange.slots, exchange.space.rank, exchange.space.world

    def add(address: int) -> None:
        nbytes = slots[0].numel() * slots.element_size()
        own = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=slots.dtype)
        for source in range(world):
            if source != rank:
                own += slots[source].flatten()

    return lambda stream, address: machine.issue(stream, lambda: add(address))


def draw(*shape: int, seed: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


KEPT: list[Any] = []  # what queued copies read; ranks issue long before anything runs


def gather(machine: Machine, group: Any, seed: int) -> None:
    whole = draw(machine.world, 3, 2, seed=seed)
    exchange = push.CopyGather(whole[group.rank].clone(), group, pieces=1, keep=True)
    KEPT.append((exchange.x, whole))
    for step in range(1, machine.world):
        source = (group.rank + step) % machine.world
        piece = exchange.wait_for_piece(source, 0)
        machine.issue(CURRENT, lambda piece=piece, source=source: same(piece, whole[source]))
    exchange.finish()
    machine.issue(CURRENT, lambda: same(exchange.plan.gathered, whole.flatten(0, 1)))


def fused_gather(machine: Machine, group: Any, seed: int) -> None:
    """As `fused._gather_matmul`: one kernel waits for all flags, reads, and lowers them."""
    whole = draw(machine.world, 3, 2, seed=seed)
    exchange = push.CopyGather(whole[group.rank].clone(), group, pieces=1, keep=False)
    KEPT.append((exchange.x, whole))
    others = [rank for rank in range(machine.world) if rank != group.rank]
    flags = [exchange.flag_at(group.rank, other) for other in others]
    pieces = [exchange.plan.pieces[other][0] for other in others]

    def product() -> None:
        for other, piece in zip(others, pieces, strict=True):
            same(piece, whole[other])

    machine.issue(CURRENT, product, lambda: all(word(flag).value >= 1 for flag in flags))
    machine.issue(CURRENT, lambda: [setattr(word(flag), "value", 0) for flag in flags])
    exchange.finish()


def scatter(machine: Machine, group: Any, seed: int) -> None:
    parts = draw(machine.world, machine.world, 3, 2, seed=seed)  # of rank, for rank
    KEPT.append(parts)

    def make(shard: int, out: Any) -> None:
        KEPT.append(out)
        machine.issue(CURRENT, lambda: out.copy_(parts[group.rank, shard]))

    found = push.scatter_sum(make, (3, 2), parts.dtype, group, CPU)
    KEPT.append(found)
    machine.issue(CURRENT, lambda: same(found, parts[:, group.rank].sum(0)))


def relayed_on_two_streams(machine: Machine, group: Any, seed: int) -> None:
    relayed(machine, group, seed, lanes=2)


def relayed(machine: Machine, group: Any, seed: int, lanes: int = 1) -> None:
    parts = draw(machine.world, machine.world, 4, 2, seed=seed)

    def multiply(shard: int, first: int, last: int, out: Any, add: bool) -> None:
        part = parts[group.rank, shard, first:last]
        machine.issue(machine.lane, lambda: out.copy_(out + part if add else part))

    found = relay.relay_sum(multiply, (4, 2), parts.dtype, group, CPU, pieces=2, lanes=lanes)
    KEPT.append(found)
    machine.issue(CURRENT, lambda: same(found, parts[:, group.rank].sum(0)))


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected)


CALLS = (gather, fused_gather, scatter, relayed, relayed_on_two_streams)


def play(machine: Machine, calls: list[Callable[..., None]], seed: int) -> None:
    KEPT.clear()
    for rank, group in enumerate(machine.groups):
        machine.rank = rank
        for number, call in enumerate(calls):
            call(machine, group, 100 * seed + number)
    machine.run(seed)


@pytest.mark.parametrize("machine", [2, 3], indirect=True)
@pytest.mark.parametrize("seed", range(6))
def test_any_calls_in_any_order_of_streams_end_with_the_right_rows(machine: Machine, seed: int) -> None:
    choose = random.Random(seed)
    for trial in range(8):
        calls = [choose.choice(CALLS) for _ in range(10)]
        play(machine, calls, 1000 * seed + trial)


@pytest.mark.parametrize("machine", [2], indirect=True)
def test_layers_in_a_row_end(machine: Machine) -> None:
    """Forward and backward of a column-parallel layer in the fused mode."""
    for seed in range(30):
        play(machine, 5 * [fused_gather, gather, scatter], seed)


@pytest.mark.parametrize("machine", [2], indirect=True)
def test_waits_of_streams_are_counted_for_the_watch(machine: Machine) -> None:
    play(machine, [gather, fused_gather, relayed, scatter], 0)
    for space in symmetric.workspaces():  # the fused gather's kernel waits itself
        assert word(space.call_counter.address).value == {"gather": 1, "scatter": 2}[space.purpose]
        assert space.call_counter.stalled(1e9) is None


@pytest.mark.parametrize("machine", [2, 3], indirect=True)
@pytest.mark.parametrize("rows", [4, 200_000])
def test_the_simulator_knows_how_much_memory_a_rank_holds(machine: Machine, rows: int) -> None:
    """What all ranks' (rows, columns) take, gathered and scattered, in the simulator's formula."""
    columns, group = 3, machine.groups[0]
    for call in range(2):
        x = draw(rows, columns, seed=call)
        push.CopyGather(x, group, pieces=1, keep=False).finish()
        push.CopyScatter((rows, columns), x.dtype, group, CPU)
        KEPT.append(x)

    held = sum(-(-ranks[0].numel() // PAGE_BYTES) * PAGE_BYTES for ranks in machine.memory)
    assert held == 2 * buffer_bytes(machine.world * rows * columns * 8)
    assert symmetric.workspace_bytes() == sum(ranks[0].numel() for ranks in machine.memory)
