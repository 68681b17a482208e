"""Worker: rates of copies between GPUs and to the host, alone and concurrent, and whether the data arrive correctly.

One process uses all GPUs. Each flow has its own stream at both ends; all flows of a set wait for one event, so that
they start together although they are launched one by one. Copies run on the copy engines (`cudaMemcpyPeerAsync` under
`Tensor.copy_`), as pipeline stages and offloading use them; NCCL's kernels are measured by `probe_collectives`.

`--device cpu` runs the same sets between buffers in host memory: it tests this file, not a machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from typing import Any

from executor.launch.records import Deadline, Recorder, median_and_spread
from executor.measure.measurement import load_torch, piece_parser
from topology.profile.measurement import Flow
from topology.units import MIB

FLOW_BYTES = 128 * MIB  # copies reach their rate from about 64 MiB on
ROUNDS = 5
ROUND_S = 3e-3  # about the seconds of a round, in which copies are repeated
MAX_COPIES = 32
GATE_CYCLES = 2_000_000  # about a millisecond: longer than launching a round takes
MAX_TWO_DISJOINT = 64

End = int | str
Ends = tuple[End, End]


def flow_sets(count: int) -> Iterator[tuple[str, tuple[Ends, ...]]]:
    """Yield (pattern, flows) for `count` GPUs, the most informative first. Ends are ordinals or `host`."""
    gpus = range(count)
    for pair in permutations(gpus, 2):
        yield "pair", (pair,)
    for gpu in gpus:
        yield "host_to_device", (("host", gpu),)
        yield "device_to_host", ((gpu, "host"),)
    if count > 1:
        yield "all_host_to_device", tuple(("host", gpu) for gpu in gpus)
        yield "all_device_to_host", tuple((gpu, "host") for gpu in gpus)
    for a, b in combinations(gpus, 2):
        yield "two_host_to_device", (("host", a), ("host", b))
        yield "two_device_to_host", ((a, "host"), (b, "host"))
    if count > 2:
        yield "ring", tuple((gpu, (gpu + 1) % count) for gpu in gpus)
        yield "reverse_ring", tuple((gpu, (gpu - 1) % count) for gpu in gpus)
    for flows in two_disjoint(count):
        yield "two_disjoint", flows
    for a, b in combinations(gpus, 2):
        yield "duplex", ((a, b), (b, a))
    if count > 2:
        yield "all_pairs", tuple(permutations(gpus, 2))
        for gpu in gpus:
            others = [other for other in gpus if other != gpu]
            yield "all_to_one", tuple((other, gpu) for other in others)
            yield "one_to_all", tuple((gpu, other) for other in others)
    if count >= 8:
        half = count // 2
        yield "four_disjoint", tuple((gpu, gpu + half) for gpu in range(4))
        yield "four_disjoint", tuple((2 * gpu, 2 * gpu + 1) for gpu in range(4))


def two_disjoint(count: int) -> list[tuple[Ends, Ends]]:
    """Return pairs of flows without a common GPU: all of them for up to four GPUs.

    Of more, each pair of sources gets two pairs of sinks: their neighbours above, and the far half of the machine.
    """
    if count <= 4:
        return [(f, g) for f, g in combinations(permutations(range(count), 2), 2) if not {*f} & {*g}]
    found: list[tuple[Ends, Ends]] = []
    for a, c in combinations(range(count), 2):
        for step in (1, count // 2):
            b = next(x % count for x in range(a + step, a + step + count) if x % count not in {a, c})
            d = next(x % count for x in range(c + step, c + step + count) if x % count not in {a, b, c})
            found.append(((a, b), (c, d)))
    return found[:MAX_TWO_DISJOINT]


def measure(device: Any, names: Sequence[str], recorder: Recorder, deadline: Deadline) -> None:
    """Run the sets of flows that fit into the time and record each; `names` maps ordinals to vertices."""
    skipped: dict[str, int] = {}
    longest_s = 0.0
    for pattern, flows in flow_sets(len(names)):
        if not deadline.allows(2 * longest_s):
            skipped[pattern] = skipped.get(pattern, 0) + 1
            continue
        started = time.monotonic()
        try:
            _measure_set(device, pattern, flows, names, recorder)
        except RuntimeError as error:  # other sets are still measured if one is impossible (memory, a failing link)
            recorder.missing(f"{pattern} {flows}: {str(error).splitlines()[0][:300]}")
        longest_s = max(longest_s, time.monotonic() - started)
    for pattern, count in skipped.items():
        recorder.missing(f"{count} sets of flows {pattern}: out of time", late=True)


def _measure_set(device: Any, pattern: str, flows: Sequence[Ends], names: Sequence[str], recorder: Recorder) -> None:
    device.prepare(flows)
    first = max(device.timed(flows, 1))  # also the warm-up: the first use of a pair maps its memory
    copies = max(1, min(MAX_COPIES, int(ROUND_S / first)))
    rounds = [device.timed(flows, copies) for _ in range(ROUNDS)]
    recorder.write(
        "flows",
        pattern=pattern,
        nbytes=device.nbytes,
        flows=[
            _flow(device, ends, [seconds[at] / copies for seconds in rounds], names) for at, ends in enumerate(flows)
        ],
    )


def _flow(device: Any, ends: Ends, seconds: list[float], names: Sequence[str]) -> Flow:
    each, _ = median_and_spread(seconds)
    between = "host" not in ends
    return Flow(
        src=_name(ends[0], names),
        dst=_name(ends[1], names),
        bytes_per_s=device.nbytes / each,
        spread=(max(seconds) - min(seconds)) / each,
        correct=device.correct(ends) if between else None,
        peer=device.peer(ends) if between else None,
    )


def _name(end: End, names: Sequence[str]) -> str:
    return end if isinstance(end, str) else names[end]


class CudaCopies:
    """Buffers, streams and timing on CUDA devices."""

    def __init__(self, nbytes: int) -> None:
        self.torch, self.nbytes = load_torch(), nbytes
        self._sources: dict[End, Any] = {}
        self._sinks: dict[Ends, Any] = {}
        self._streams: dict[Ends, tuple[Any, Any]] = {}

    def prepare(self, flows: Sequence[Ends]) -> None:
        """Allocate missing buffers and streams, and clear the destination buffers."""
        torch, elements = self.torch, self.nbytes // 4
        for ends in flows:
            src, dst = ends
            key = src if src != "host" else f"host{dst}"
            if key not in self._sources:
                where = {"pin_memory": True} if src == "host" else {"device": f"cuda:{src}"}
                self._sources[key] = torch.empty(elements, dtype=torch.int32, **where)
                if src != "host":
                    self._sources[key].copy_(self._pattern(src, src))
            if ends not in self._sinks:
                where = {"pin_memory": True} if dst == "host" else {"device": f"cuda:{dst}"}
                self._sinks[ends] = torch.empty(elements, dtype=torch.int32, **where)
                self._streams[ends] = tuple(torch.cuda.Stream(device=end) for end in ends if end != "host")
            if dst != "host":
                self._sinks[ends].zero_()
        self._wait()

    def timed(self, flows: Sequence[Ends], copies: int) -> list[float]:
        """Return the seconds of each flow for `copies` copies, all flows at once."""
        torch = self.torch
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in flows]
        first = self._streams[flows[0]][0]
        gate = torch.cuda.Event()
        with torch.cuda.stream(first):
            torch.cuda._sleep(GATE_CYCLES)  # noqa: SLF001 - torch's own tests hold streams back with it
            gate.record(first)
        for ends, (start, _) in zip(flows, events, strict=True):
            for stream in self._streams[ends]:
                stream.wait_event(gate)
            start.record(self._streams[ends][0])
        for _ in range(copies):
            for ends in flows:
                self._copy(ends)
        for ends, (_, end) in zip(flows, events, strict=True):
            end.record(self._streams[ends][0])
        self._wait()
        return [start.elapsed_time(end) / 1e3 for start, end in events]

    def _copy(self, ends: Ends) -> None:
        """`copy_` between devices runs on the source's current stream and joins the sink's; both must be ours."""
        torch, streams = self.torch, self._streams[ends]
        key = ends[0] if ends[0] != "host" else f"host{ends[1]}"
        with torch.cuda.stream(streams[-1]), torch.cuda.stream(streams[0]):
            self._sinks[ends].copy_(self._sources[key], non_blocking=True)

    def correct(self, ends: Ends) -> bool:
        """Compare the received data with the pattern, made anew on the sink, since a second copy would hide a broken
        path.
        """
        src, dst = ends
        return bool(self.torch.equal(self._sinks[ends], self._pattern(src, dst)))

    def peer(self, ends: Ends) -> bool:
        return bool(self.torch.cuda.can_device_access_peer(ends[1], ends[0]))

    def _pattern(self, seed: End, device: End) -> Any:
        torch = self.torch
        values = torch.arange(self.nbytes // 4, dtype=torch.int32, device=f"cuda:{device}")
        return values.mul_(1_103_515_245).add_(12_345 + 7_919 * int(seed))  # wraps around, differs for every source

    def _wait(self) -> None:
        for ordinal in range(self.torch.cuda.device_count()):
            self.torch.cuda.synchronize(ordinal)


class HostCopies:
    """The same interface with copies between bytearrays: runs this module's code without a GPU."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._sinks: dict[Ends, bytearray] = {}

    def _pattern(self, seed: End) -> bytes:
        return bytes([hash(seed) % 251 + 1]) * self.nbytes

    def prepare(self, flows: Sequence[Ends]) -> None:
        for ends in flows:
            self._sinks[ends] = bytearray(self.nbytes)

    def timed(self, flows: Sequence[Ends], copies: int) -> list[float]:
        seconds = []
        for ends in flows:
            source = self._pattern(ends[0])
            started = time.perf_counter()
            for _ in range(copies):
                self._sinks[ends][:] = source
            seconds.append(max(time.perf_counter() - started, 1e-9))
        return seconds

    def correct(self, ends: Ends) -> bool:
        return bytes(self._sinks[ends]) == self._pattern(ends[0])

    def peer(self, ends: Ends) -> bool:
        return ends[0] != ends[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; return 0 even if time ran out, since the records made so far are valid."""
    parser = piece_parser("executor.measure.probe_flows")
    parser.add_argument("--indices", required=True, help="nvidia-smi's index of each device, comma separated")
    parser.add_argument("--nbytes", type=int, default=FLOW_BYTES)
    options = parser.parse_args(argv)
    names = [f"gpu{index}" for index in options.indices.split(",")]
    deadline, recorder = Deadline.since_launch(options.seconds), Recorder(options.out)
    device = CudaCopies(options.nbytes) if options.device == "cuda" else HostCopies(options.nbytes)
    measure(device, names, recorder, deadline)
    recorder.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
