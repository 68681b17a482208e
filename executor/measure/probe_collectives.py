"""Worker, one per GPU under torchrun: times of collectives by group, message size and launch mode.

Small messages are timed twice: `eager`, a loop of torch.distributed calls that may be bound by the host, and `graph`,
replayed as a CUDA graph, which is device time. Above `EAGER_LIMIT` the host runs ahead of the device, so the loop is
device time too (`queued`). A time is the median over calls of the slowest rank.

All decisions (continue, stop, use graphs) are made by rank 0 or by vote, over gloo: ranks that disagree about the next
step would wait for each other forever.

`--device cpu` runs gloo with small sizes: it tests this file, not a machine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from executor.launch.records import Deadline, Recorder, median_and_spread
from executor.measure.measurement import load_torch, piece_parser, timed_calls
from topology.profile.profile import CollectiveSample
from topology.units import GIB, MIB

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
SMALLEST, LARGEST = 2**10, GIB
EAGER_LIMIT = 4 * MIB
WARMUP, ITERATIONS = 5, 20
PER_GRAPH = 10  # calls per graph, so that the launch of some 8 us is shared
INIT_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Rank:
    """One process of the run: torch, its rank, buffers, process groups, and the failures so far."""

    torch: Any
    dist: Any
    rank: int
    world: int
    cuda: bool
    source: Any
    sink: Any
    no_graph: set[str] = field(default_factory=set)  # ops that some rank failed to capture
    reported: set[tuple[str, str]] = field(default_factory=set)  # (op, launch) pairs with a recorded failure
    groups: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def reduce_over_ranks(self, values: Sequence[float], *, minimum: bool = False) -> list[float]:
        """Return the maximum (or minimum) of each value over all ranks. Also a barrier."""
        dist, tensor = self.dist, self.torch.tensor(values, dtype=self.torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN if minimum else dist.ReduceOp.MAX)
        return [float(value) for value in tensor]


def group_sets(world: int) -> list[tuple[tuple[int, ...], ...]]:
    """Return sets of groups that run concurrently: one group of 2, 4, ... and of all ranks, then two pairs at once."""
    sizes = [size for power in range(1, world.bit_length()) if (size := 2**power) < world]
    sets: list[tuple[tuple[int, ...], ...]] = [(tuple(range(size)),) for size in (world, *sizes) if size > 1]
    if world >= 4:
        sets.append(((0, 1), (2, 3)))
    return sets


def sizes(largest: int) -> list[list[int]]:
    """Return the message sizes in bytes of two passes: powers of 4, then the powers of 2 between them."""
    powers = range(SMALLEST.bit_length() - 1, largest.bit_length())
    return [[2**power for power in powers if power % 2 == 0], [2**power for power in powers if power % 2]]


def rounded_bytes(op: str, nbytes: int, ranks: int, element: int) -> int:
    """Return `nbytes` rounded down so that every rank's share is whole elements; at least one element each."""
    share = element * ranks if op in {"all_gather", "reduce_scatter", "all_to_all"} else element
    return max(share, nbytes // share * share)


def collective_call(me: Rank, op: str, ranks: tuple[int, ...], nbytes: int) -> Callable[[], None]:
    """Return a function that runs the collective once. `nbytes` is nccl-tests' size column: the larger buffer."""
    dist, group = me.dist, me.groups[ranks]
    count, n = nbytes // me.source.element_size(), len(ranks)
    source, sink = me.source, me.sink
    if op == "all_reduce":
        return lambda: dist.all_reduce(source[:count], group=group)
    if op == "all_gather":
        return lambda: dist.all_gather_into_tensor(sink[:count], source[: count // n], group=group)
    if op == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(sink[: count // n], source[:count], group=group)
    if op == "all_to_all":
        return lambda: dist.all_to_all_single(sink[:count], source[:count], group=group)
    if op == "broadcast":
        return lambda: dist.broadcast(source[:count], src=ranks[0], group=group)
    at = ranks.index(me.rank)
    after, before = ranks[(at + 1) % n], ranks[at - 1]

    def exchange() -> None:
        moves = [
            dist.P2POp(dist.isend, source[:count], after, group=group),
            dist.P2POp(dist.irecv, sink[:count], before, group=group),
        ]
        for move in dist.batch_isend_irecv(moves):
            move.wait()

    return exchange


def capture(me: Rank, call: Callable[[], None]) -> Any:
    """Return a CUDA graph of `PER_GRAPH` calls. Raises RuntimeError where capture is refused. Nothing runs yet."""
    cuda = me.torch.cuda
    graph = cuda.CUDAGraph()
    cuda.synchronize()
    # Thread-local: NCCL's watchdog thread queries events at any time, which a global capture would forbid.
    with cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(PER_GRAPH):
            call()
    return graph


def replay(graph: Any) -> list[float]:
    """Return seconds of one call inside the replayed graph."""
    for _ in range(2):
        graph.replay()
    return [seconds / PER_GRAPH for seconds in timed_calls(graph.replay, ITERATIONS, cuda=True)]


def measure(me: Rank, indices: Sequence[int], recorder: Recorder, deadline: Deadline, largest: int) -> None:
    """Time every set of groups, op and size that fits into the budget. All ranks make the same call."""
    for number, pass_sizes in enumerate(sizes(largest)):
        for group_set in group_sets(me.world):
            for op in OPS:
                reached = _time_sizes(me, op, group_set, pass_sizes, indices, recorder, deadline)
                if reached < len(pass_sizes):
                    what = f"{op} on {len(group_set)} x {len(group_set[0])} GPUs from {pass_sizes[reached]} bytes on"
                    recorder.missing(
                        f"{what}: out of time" + (" (sizes between powers of 4)" if number else ""), late=True
                    )


def _time_sizes(
    me: Rank,
    op: str,
    group_set: tuple[tuple[int, ...], ...],
    pass_sizes: Sequence[int],
    indices: Sequence[int],
    recorder: Recorder,
    deadline: Deadline,
) -> int:
    """Time one op over sizes; return how many were done. Stops before a size that would not fit."""
    last_s, last_bytes = 0.0, pass_sizes[0]
    for at, size in enumerate(pass_sizes):
        # Every rank must take the same branch: rank 0's clock and the slowest rank's time decide.
        expected = last_s * max(1.0, size / last_bytes) * (WARMUP + 2 * ITERATIONS)
        (stop,) = me.reduce_over_ranks([0.0 if me.rank else float(not deadline.allows(expected + 0.05))])
        if stop:
            return at
        for launch in ("eager", "graph") if size <= EAGER_LIMIT and me.cuda else ("queued",):
            if launch == "graph" and op in me.no_graph:
                continue
            took = _time_size(me, op, group_set, size, launch, indices, recorder)
            if launch == "graph":
                continue
            if took is None:  # the failure is recorded; larger messages would fail as well
                return len(pass_sizes)
            last_s, last_bytes = took, size
    return len(pass_sizes)


def _time_size(
    me: Rank,
    op: str,
    group_set: tuple[tuple[int, ...], ...],
    size: int,
    launch: str,
    indices: Sequence[int],
    recorder: Recorder,
) -> float | None:
    """Time one size one way, on all groups of the set at once; rank 0 records.

    Returns the slowest group's seconds, None where some rank failed. All ranks vote before anything is replayed: a
    rank that could not capture would not enter the collective, and the others would wait there forever.
    """
    mine = next((ranks for ranks in group_set if me.rank in ranks), None)
    nbytes = rounded_bytes(op, size, len(group_set[0]), me.source.element_size())
    call = collective_call(me, op, mine, nbytes) if mine is not None else None
    seconds: list[float] = []
    graph: Any = None
    problem = ""
    try:
        if call is not None and launch == "graph":
            graph = capture(me, call)
        elif call is not None:
            timed_calls(call, WARMUP, cuda=me.cuda)
            seconds = timed_calls(call, ITERATIONS, cuda=me.cuda)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        problem = first_line(error)
    (failed,) = me.reduce_over_ranks([float(bool(problem))])
    if graph is not None:
        try:
            if not failed:
                seconds = replay(graph)
        finally:
            me.torch.cuda.synchronize()
            graph.reset()  # a communicator cannot be destroyed while a graph uses it
    if failed:
        if launch == "graph":
            me.no_graph.add(op)
        if (op, launch) not in me.reported:
            me.reported.add((op, launch))
            recorder.missing(f"{op} ({launch}) from {nbytes} bytes on: {problem or 'another rank failed'}")
        return None
    each, spread = median_and_spread(seconds) if seconds else (0.0, 0.0)
    table = [value for ranks in group_set for value in ((each, spread) if ranks == mine else (0.0, 0.0))]
    table = me.reduce_over_ranks(table)
    for position, ranks in enumerate(group_set):
        recorder.write(
            "group",
            sample=CollectiveSample(
                op=op, ranks=len(ranks), nodes=1, nbytes=nbytes, time_s=table[2 * position], launch=launch
            ),
            gpus=[indices[rank] for rank in ranks],
            iterations=ITERATIONS,
            spread=table[2 * position + 1],
            alongside=len(group_set) - 1,
        )
    return max(table[::2])


def record_sizes(
    device: Any, items: Sequence[tuple[str, Sequence[int]]], indices: Sequence[int], recorder: Recorder
) -> None:
    """Record collectives, each for its sizes in bytes, on all ranks of the current process group.

    Raises RuntimeError where an all-reduce of ones does not count the ranks.
    """
    torch = load_torch()
    dist = torch.distributed
    cuda, world = device.type == "cuda", dist.get_world_size()
    everyone = tuple(range(world))
    dtype = torch.bfloat16 if cuda else torch.float32
    count = max((size for _, sizes in items for size in sizes), default=SMALLEST) // dtype.itemsize
    source, sink = (torch.zeros(max(count, 256), dtype=dtype, device=device) for _ in range(2))
    me = Rank(torch, dist, dist.get_rank(), world, cuda, source, sink, groups={everyone: dist.group.WORLD})
    if not check_sum(me, everyone):
        raise RuntimeError("an all-reduce of ones does not count the ranks")
    for op, sizes in items:
        for size in sizes:
            for launch in ("eager", "graph") if size <= EAGER_LIMIT and cuda else ("queued",):
                if launch != "graph" or op not in me.no_graph:
                    _time_size(me, op, (everyone,), size, launch, indices, recorder)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; if that is empty, the error's class."""
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__


def check_sum(me: Rank, ranks: tuple[int, ...]) -> bool:
    """Return whether an all-reduce of ones gives the number of ranks: results are checked before they are timed."""
    ones = me.source[:256]
    ones.fill_(1)
    me.dist.all_reduce(ones, group=me.groups[ranks])
    good = bool((ones == len(ranks)).all())
    me.source.zero_()  # repeated sums of zeros stay finite
    return good


def start_rank(options: argparse.Namespace) -> Rank:
    """Join the process group and allocate buffers as large as fits on every GPU."""
    torch = load_torch()
    dist = torch.distributed
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.set_device(local)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=max(INIT_TIMEOUT_S, options.seconds))
    )
    device = f"cuda:{local}" if cuda else "cpu"
    dtype = torch.bfloat16 if cuda else torch.float32
    empty = torch.zeros(1, dtype=dtype, device=device)
    me = Rank(torch, dist, rank, world, cuda, empty, empty)
    largest = options.largest
    if cuda:
        (free,) = me.reduce_over_ranks([float(torch.cuda.mem_get_info(local)[0])], minimum=True)
        while largest > SMALLEST and 3 * largest > free:
            largest //= 2
    options.largest = largest
    me.source, me.sink = (torch.zeros(largest // empty.element_size(), dtype=dtype, device=device) for _ in range(2))
    for group_set in group_sets(world):
        for ranks in group_set:
            if ranks not in me.groups:
                me.groups[ranks] = dist.group.WORLD if len(ranks) == world else dist.new_group(list(ranks))
    return me


def versions(me: Rank) -> dict[str, str]:
    """Return the versions of the libraries on which the times depend."""
    found = {"torch": str(me.torch.__version__)}
    if me.cuda:
        found["nccl"] = ".".join(map(str, me.torch.cuda.nccl.version()))
        found["cuda"] = str(me.torch.version.cuda)
    return found


def run(options: argparse.Namespace) -> int:
    deadline = Deadline.since_launch(options.seconds)
    me = start_rank(options)
    recorder = Recorder(options.out if me.rank == 0 else None)
    indices = [int(index) for index in options.indices.split(",")]
    recorder.write("header", versions=versions(me))
    everyone = tuple(range(me.world))
    good = check_sum(me, everyone) if me.world > 1 else True
    (correct,) = me.reduce_over_ranks([float(good)], minimum=True)
    if correct:
        measure(me, indices, recorder, deadline, options.largest)
    else:
        recorder.missing("collectives: an all-reduce of ones does not count the ranks, so none was timed")
    recorder.close()
    me.dist.destroy_process_group()
    return 0 if correct else 1


def main(argv: Sequence[str] | None = None) -> int:
    from executor.measure.rank_group import run_as_rank  # noqa: PLC0415 - imports torch; tests drive this module without

    parser = piece_parser("executor.measure.probe_collectives")
    parser.add_argument("--indices", required=True)
    parser.add_argument("--largest", type=int, default=LARGEST)
    return run_as_rank(run, parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
