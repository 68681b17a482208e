"""A pipeline rank that counts seconds: when its streams end, and what they spent time on.

It is the analytical model's `simulator.step.rank.Rank`, for all plans of a table at once. Streams and the host are
clocks that only move forward; waiting moves a clock to another's time. Concurrent work is slowed as a whole: for as
long as collectives last, kernels give up SMs and memory bandwidth to them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from simulator.analytical.block_times import TINY, Background, BlockTimes, Copied, PassTimes, Stretch, TrafficTimes
from simulator.columns.plan_table import Floats
from simulator.kernels.roofline import Packing
from simulator.program.program import COMPUTE
from simulator.step.host import QUEUED_LAUNCHES
from simulator.step.rank import Pass, Rank, Value
from simulator.step.traffic import COPIES, REPLICAS, STREAM, SUMS, WIRES
from simulator.step.units import Unit

# Parts of a step, in seconds of the compute stream. `dp` is waiting for data-parallel traffic; `packing` is what copies
# next to compute take from it; `orthogonal` is matrix products of an update, `optimizer` the rest of it.
PARTS = (
    *("compute", "recompute", "copies", "contention", "tp", "cp", "ep", "pp", "dp", "host", "bubble", "optimizer"),
    *("packing", "orthogonal"),
)
LOST = ("contention", "packing")
somewhere = np.logical_or.reduce  # an array's `any` is this behind two more functions


# Streams whose collectives may run at once: sharding, and sums over replicas of the shards.
CONCURRENT = {STREAM: REPLICAS, REPLICAS: STREAM}


class StreamClocks(dict[str, Floats]):
    """When streams are done; one on which nothing has run yet is done at zero."""

    def __init__(self, clocks: Mapping[str, Floats], zero: Floats) -> None:
        super().__init__(clocks)
        self.zero = zero

    def __missing__(self, stream: str) -> Floats:
        return self.zero


Ran = dict[int, tuple[PassTimes, Value]]
Mark = tuple[Floats, Floats, dict[str, Floats], dict[str, Floats], Ran, dict[str, Floats], Value]


class RankTimeline(Rank):
    """Counts the seconds of one pipeline rank for all plans of a table, or of `several` ranks that begin their passes
    at different times.

    Clocks and parts have shape (plans,), or (ranks, plans) of `several` ranks.
    """

    def __init__(self, blocks: BlockTimes, traffic: TrafficTimes, *, several: int = 0) -> None:
        self.blocks, self.traffic = blocks, traffic
        self.rows = blocks.rows
        self._zero = np.zeros((several, self.rows) if several else self.rows)
        self.host: Floats = self._zero
        self.clocks = StreamClocks({COMPUTE: self._zero}, self._zero)
        self.parts: dict[str, Floats] = dict.fromkeys(PARTS, self._zero)
        self._ran: Ran = {}  # by id: a pass and how often it ran
        self._beside: dict[str, Background] = {}
        # By stream: the start and end of its current collectives, back to back.
        self._busy: dict[str, tuple[Floats, Floats]] = {}
        self._over: set[str] = set()  # streams whose current collectives compute has passed
        # By stream: start, end and cost of its collectives before the last pause, where compute has not passed them
        # yet.
        self._earlier: dict[str, tuple[Floats, Floats, Background]] = {}
        self._events: dict[str, tuple[str, Floats]] = {}
        self.sent_s = self._nothing_sent()  # seconds of collectives issued on these streams in this pass
        self._recorded = 0
        self._ahead_s: Floats = self._zero
        self.launched: Value = 0.0  # kernels so far
        self._started: Floats = self._zero  # when the device could first run one of them
        self._held_up: Floats = self._zero  # for how long the host has waited for room in the queue
        self._last: tuple[Floats, PassTimes] | None = None  # the start of the last pass, and its times
        self._begun, self._sends = self.mark(), False  # where a repeated unit began, and whether it sends anything
        self._stretches: dict[tuple[int, int], tuple[Stretch, Background, PassTimes | Copied]] = {}
        self.paired = False  # passes run alongside those of another micro batch
        self.runs_ahead = False  # the host never waits for the device, whatever the runtime says
        self.at_pass: dict[str, Floats] = self.parts
        self.meeting: Floats | None = None  # when all other ranks of the pipeline are ready to meet
        self.met: Floats = self._zero  # when this rank is

    def start(self) -> None:
        """Start the device at the host's time."""
        self._wait(COMPUTE, self.host, "host")
        self._started = self.compute

    @property
    def done(self) -> Floats:
        """When all streams and the host are done."""
        return np.asarray(np.max([*self.clocks.values(), self.host], axis=0))

    def _nothing_sent(self) -> dict[str, Floats]:
        return dict.fromkeys((STREAM, REPLICAS), self._zero)

    def begin_pass(self, *, compute_s: Value, wire_s: Value, host_s: Value) -> None:
        """Set all clocks for the start of a pass; its times are counted from there."""
        for stream in (*self.clocks, *WIRES):
            self.clocks[stream] = self._zero + (compute_s if stream == COMPUTE else wire_s)
        self.host = self._zero + host_s
        self._events = {name: (stream, self._zero + wire_s) for name, (stream, _) in self._events.items()}
        self._busy, self._earlier, self._last, self.sent_s = {}, {}, None, self._nothing_sent()
        self._over.clear()
        self.launched = 0.0
        self.at_pass = self.spent_s()

    @property
    def compute(self) -> Floats:
        """When the compute stream is done."""
        return self.clocks[COMPUTE]

    def mark(self) -> Mark:
        """Return the present clocks and counts, from which `repeat` continues."""
        at = dict(self.clocks), dict(self.parts), dict(self._ran), dict(self.sent_s), self.launched
        return self.host, self._held_up, *at

    def repeat(self, since: Mark, times: Value) -> None:
        """Add `times` repetitions of everything that happened since a mark."""
        host, held_up, clocks, parts, ran, sent_s, launched = since
        self._over.clear()
        self.launched = self.launched + times * (self.launched - launched)
        self.sent_s = {name: sent + times * (sent - sent_s[name]) for name, sent in self.sent_s.items()}
        ahead = {name: times * (clock - clocks.get(name, self._zero)) for name, clock in self.clocks.items()}
        # A host that waits for room in the queue moves on at the device's speed, however far ahead it was before.
        waited, on = self._held_up - held_up, self.host - host
        on = np.where(waited > 0, np.maximum(on - waited, self.compute - clocks.get(COMPUTE, self._zero)), on)
        self.host = self.host + times * on
        self._held_up = self._held_up + times * waited
        self.clocks = StreamClocks({name: clock + ahead[name] for name, clock in self.clocks.items()}, self._zero)
        # A stream on which nothing has run yet has no clock.
        self._events = {name: (stream, at + ahead.get(stream, 0.0)) for name, (stream, at) in self._events.items()}
        self._busy = {name: (since + ahead[name], to + ahead[name]) for name, (since, to) in self._busy.items()}
        self._earlier = {
            name: (since + ahead[name], to + ahead[name], cost) for name, (since, to, cost) in self._earlier.items()
        }
        for name, part in self.parts.items():
            if part is not parts[name]:
                self.parts[name] = part + times * (part - parts[name])
        for key, (what, count) in self._ran.items():
            before = ran[key][1] if key in ran else 0.0
            if count is not before:
                self._ran[key] = what, count + times * (count - before)

    def spent_s(self) -> dict[str, Floats]:
        """Return the seconds of each part so far."""
        parts = dict(self.parts)
        for times, count in self._ran.values():
            for part, seconds in times.parts.items():
                parts[part] = parts[part] + count * seconds
        return parts

    # --- what a rank is asked to run ----------------------------------------------------------------------------------

    def begin(self, unit: Unit) -> None:
        if unit.repeats > 1:
            self._begun, self._sends = self.mark(), False

    def ended(self, unit: Unit) -> None:
        if unit.repeats > 1:
            if self._sends:
                self.repeat(self._begun, unit.repeats - 1.0)
            else:
                self._repeat_beside(self._begun, unit.repeats - 1.0)
            self._fill_queue()

    def _repeat_beside(self, since: Mark, times: float) -> None:
        """Repeat a unit that sends nothing itself. Traffic that runs alongside it ends at some point, and delays only
        the repetitions until then.
        """
        lost = {name: self.parts[name] - since[3][name] for name in LOST}
        left = np.max([self.clocks[stream] for stream in WIRES], axis=0) - self.compute
        lasting = np.clip(left / np.maximum(self.compute - since[2][COMPUTE], TINY), 0.0, times)
        wires = {name: self.clocks[name] for name in WIRES if name in self.clocks}
        self.repeat(since, times)
        for name, clock in wires.items():
            self.clocks[name] = clock + lasting * (clock - since[2].get(name, self._zero))
        for name, seconds in lost.items():
            self.clocks[COMPUTE] = self.compute - (times - lasting) * seconds
            self.parts[name] = self.parts[name] - (times - lasting) * seconds

    def begin_pair(self) -> None:
        self.paired = True

    def end_pair(self) -> None:
        self.paired = False

    def _fill_queue(self) -> None:
        """Let the host wait while the compute stream's queue is full. The queue holds kernels like those of the last
        pass or, where the stream itself has waited, kernels at their mean rate so far.
        """
        if not self.runs_ahead:
            pace_s = (self.compute - self._started) / np.maximum(self.launched, 1.0)
            ahead_s = np.maximum(self._ahead_s, QUEUED_LAUNCHES * pace_s)
            late_s = np.maximum(self.compute - ahead_s - self.host, 0.0)
            self.host, self._held_up = self.host + late_s, self._held_up + late_s

    def host_work(self, name: str, seconds: Value) -> None:  # noqa: ARG002 - a Rank is given names
        self.host = self.host + seconds

    def run(self, unit: Unit, which: Pass) -> None:
        times = self.blocks.of(unit, which, paired=self.paired)
        device_s, advance, begun = times.device_s, times.advance, self.compute
        start = np.maximum(begun, self.host)
        idle_s = np.maximum(begun + advance.device_s, self.host + advance.late_s) - start - device_s
        stretched = self._beside_traffic(start, times, idle_s, part="contention")
        self._ran[id(times)] = times, self._ran.get(id(times), (times, 0.0))[1] + 1.0
        longer: Value = 0.0
        done, late_s = begun + advance.device_s, advance.late_s
        if stretched is not None:
            longer = stretched
            done, late_s = done + stretched, np.maximum(late_s, advance.device_s + stretched)
        end = np.maximum(done, self.host + late_s)
        self.parts["host"] = self.parts["host"] + (end - begun - device_s - longer)
        self.clocks[COMPUTE] = end
        self.host = self.host + advance.host_s
        if times.waits:
            self.host = np.maximum(self.host, begun + advance.waits_s + longer)
        self._last = start, times
        self._ahead_s, self.launched = times.ahead_s, self.launched + times.launches
        self._fill_queue()

    def copy(
        self,
        name: str,  # noqa: ARG002 - a Rank is given names
        moved_bytes: Value,
        *,
        packing: Packing | None = None,
        stream: str = COMPUTE,
    ) -> None:
        copied = self.traffic.copied(moved_bytes, packing)
        if stream != COMPUTE:
            self._send(self.traffic.next_to(copied), stream, part="packing")
            return
        self._wait(COMPUTE, self.host, "host")
        seconds, stretched = copied.device_s, self._beside_traffic(self.compute, copied, None, part="copies")
        self.parts["copies"] = self.parts["copies"] + seconds
        self.clocks[COMPUTE] = self.compute + (seconds if stretched is None else seconds + stretched)

    def update(self, moved_bytes: Value, elements: Value) -> None:  # noqa: ARG002 - time is that of the bytes
        self._computes(np.asarray(moved_bytes / self.traffic.update_bytes_per_s), "optimizer")

    def orthogonalise(self, seconds: Value, elements: Value) -> None:  # noqa: ARG002 - a Rank is given elements
        self._computes(seconds, "orthogonal")

    def _computes(self, seconds: Value, part: str) -> None:
        self._wait(COMPUTE, self.host, "host")
        self.parts[part] = self.parts[part] + seconds
        self.clocks[COMPUTE] = self.compute + seconds

    def host_copy(self, name: str, nbytes: Value, *, stream: str) -> None:  # noqa: ARG002 - a Rank is given names
        self._sends = True
        start = np.maximum(self.clocks[stream], self.host)
        self.clocks[stream] = np.asarray(start + nbytes / self.traffic.host_copy_bytes_per_s)

    def on_host(self, name: str, moved_bytes: Value, *, after: str) -> None:
        seconds = moved_bytes / self.traffic.host_update_bytes_per_s
        self.host = np.asarray(np.maximum(self.host, self.clocks[after]) + seconds)
        if name == "optimizer":
            self._wait(COMPUTE, self.host, "optimizer")

    def collective(self, op: str, family: str, nbytes: Value, *, stream: str, times: Value = 1.0) -> None:
        self._send(self.traffic.cost(op, family, nbytes), stream, times)

    def _send(self, cost: Background, stream: str, times: Value = 1.0, *, part: str = "contention") -> None:
        if not cost.runs:
            return
        self._sends = True
        once = isinstance(times, float) and times == 1.0
        self.host = self.host + (cost.host_s if once else times * cost.host_s)
        now = self.clocks[stream]
        start, seconds = np.maximum(now, self.host), cost.seconds if once else times * cost.seconds
        end = start + seconds
        self._hold_up(start, end, cost, part)
        if stream in self.sent_s:
            self.sent_s[stream] = self.sent_s[stream] + seconds
        if stream in CONCURRENT and (other := self._beside.get(CONCURRENT[stream])) is not None:
            end = end + self._crowded(start, seconds, cost, CONCURRENT[stream], other)
        self.clocks[stream] = end if cost.everywhere else np.where(cost.seconds > 0, end, now)
        since, until = self._busy.get(stream, (start, start))
        before, pauses = self._beside.get(stream), start > until
        self._busy[stream] = np.where(pauses, start, since), self.clocks[stream]
        self._over.discard(stream)
        if before is not None and somewhere(ahead := pauses & (until > self.compute), axis=None):
            self._earlier[stream] = since, np.where(ahead, until, self.compute), before
        if before is not cost:
            self._beside[stream] = cost if before is None or cost.everywhere else cost.over(before)

    def blocking(self, op: str, family: str, nbytes: float, *, stream: str) -> None:
        seconds, host_s = self.traffic.seconds(op, family, nbytes)
        self.host = self.host + host_s
        if family == "pp":
            self.met = np.maximum(self.compute, self.host)
            if self.meeting is not None:
                self._wait(COMPUTE, self.meeting, "bubble")
        end = np.maximum(np.maximum(self.compute, self.clocks[stream]), self.host) + seconds
        self._wait(COMPUTE, np.where(seconds > 0, end, self.compute), "dp")

    def after(self, stream: str, other: str) -> None:
        self._wait(stream, self.clocks[other])

    def record(self, stream: str) -> str:
        self._recorded += 1
        name = f"event{self._recorded}"
        self._events[name] = stream, self.clocks[stream]
        return name

    def wait(self, stream: str, event: str) -> None:
        self._wait(stream, self._events.pop(event)[1])

    def synchronize(self) -> None:
        if not self.runs_ahead:
            self.host = np.maximum(self.host, self.compute)

    # --- clocks -------------------------------------------------------------------------------------------------

    def _wait(self, stream: str, until: Floats, part: str = "dp") -> None:
        now = self.clocks[stream]
        later = np.maximum(now, until)
        if stream == COMPUTE:
            self.parts[part] = self.parts[part] + (later - now)
        self.clocks[stream] = later

    def _hold_up(self, start: Floats, end: Floats, cost: Background, part: str) -> None:
        """Lengthen the last pass, already counted, by a collective that begins before the pass ends."""
        if self._last is None or not somewhere(start < self.compute, axis=None):
            return
        begun, times = self._last
        together = np.maximum(np.minimum(end, self.compute) - np.maximum(start, begun), 0.0)
        lost = together * self._stretch(cost, times).lost
        self.parts[part] = self.parts[part] + lost
        self.clocks[COMPUTE] = self.compute + lost

    def _crowded(self, start: Floats, seconds: Value, cost: Background, stream: str, other: Background) -> Floats:
        """Return by how much the collective under way on `stream` delays a new one; the one under way is delayed as
        well.
        """
        left = np.maximum(self.clocks[stream] - start, 0.0)
        mine, theirs = cost.speeds_beside(other)
        together = np.minimum(seconds / mine, left / theirs)
        self._delay(stream, start, together * (1.0 - theirs))
        return together * (1.0 - mine)

    def _delay(self, stream: str, since: Floats, late: Floats) -> None:
        """Delay what is under way on a stream, and events of it after `since`."""
        self.clocks[stream] = self.clocks[stream] + late
        if stream in self._busy:
            self._busy[stream] = self._busy[stream][0], self._busy[stream][1] + late
            self._over.discard(stream)
        self._events = {
            name: (of, at + np.where(at > since, late, 0.0) if of == stream else at)
            for name, (of, at) in self._events.items()
        }

    def _stretch(self, cost: Background, timed: PassTimes | Copied) -> Stretch:
        """Return how much a collective and a pass or a copy slow each other down; computed once for each pair."""
        key = id(cost), id(timed)
        if key not in self._stretches:  # keep both alive, so that their ids stay unique
            self._stretches[key] = cost.stretch(timed, self.traffic), cost, timed
        return self._stretches[key][0]

    def _beside_traffic(
        self, start: Floats, timed: PassTimes | Copied, idle_s: Floats | None, *, part: str
    ) -> Floats | None:
        """Return by how much traffic under way at `start` lengthens a pass or a copy, count that to a `part`, and delay
        that traffic as well; None where there is no traffic. Meanwhile the device is idle for `idle_s`, in which
        traffic has the GPU to itself.
        """
        longer = None
        for stream, alongside, since, until, latest in self._under_way(start):
            stretch = self._stretch(alongside, timed)
            left, rest = until - start, timed.device_s
            if since is not None:  # the stream may itself wait for another one first
                alone = np.maximum(since - start, 0.0)
                left, rest = left - alone, np.maximum(rest - alone, 0.0)
            left, busy = np.maximum(left, 0.0), stretch.times * rest
            if idle_s is None:
                together = np.minimum(busy, left / (1.0 - stretch.behind))
            else:
                working = busy + idle_s
                share = busy / np.maximum(working, TINY)
                together = share * np.minimum(working, left / (1.0 - share * stretch.behind))
            lost = together * stretch.lost
            here = "packing" if stream in {COPIES, SUMS} else part
            self.parts[here] = self.parts[here] + lost
            longer = lost if longer is None else longer + lost
            if latest:
                self._delay(stream, start, together * stretch.behind)
        return longer

    def _under_way(self, start: Floats) -> list[tuple[str, Background, Floats | None, Floats, bool]]:
        """Return the collectives that are not over at `start`: (stream, cost, start or None, end, whether they are the
        latest of their stream). Compute only moves forward, so a stream that is over is asked again once more is sent.
        """
        found: list[tuple[str, Background, Floats | None, Floats, bool]] = []
        for stream, (since, until, cost) in [*self._earlier.items()]:
            if somewhere(until > start, axis=None):
                found.append((stream, cost, since, until, False))
            else:
                del self._earlier[stream]
        for stream, cost in self._beside.items():
            if stream in self._over:
                continue
            # A clock may be later than the end of what is under way, if its stream waits for another one then.
            busy = self._busy.get(stream)
            began, until = (None, self.clocks[stream]) if busy is None else busy
            if somewhere(until > start, axis=None):
                found.append((stream, cost, began, until, True))
            elif busy is not None:
                self._over.add(stream)
        return found
