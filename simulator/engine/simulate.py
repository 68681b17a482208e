"""The machine that runs a Program, on SimPy.

Each rank's host thread is a process that issues instructions in order and pays for each; each of its streams is a
process that carries them out in order. Launch-bound steps follow from this: streams run empty when the host is slow.
Events order streams; a collective starts when the last of its ranks has arrived; concurrent work slows down
(`simulator.engine.contention`). Symmetric ranks are simulated once (`simulator.program.fold`).

Deterministic: SimPy breaks ties in time by order of scheduling, and nothing here depends on hashes or addresses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import simpy
from simpy.core import EmptySchedule

from simulator.engine.contention import Activity, Contention
from simulator.program import trace as tr
from simulator.program.cost_model import Cost, CostModel, Ranks
from simulator.program.deadlock import find_deadlock
from simulator.program.fold import Folding, Meeting, RankClass, endpoint, fold, meeting_keys
from simulator.program.program import (
    HOST,
    Collective,
    Copy,
    HostWork,
    Instruction,
    Kernel,
    Launch,
    Program,
    RecordEvent,
    Recv,
    Send,
    WaitEvent,
    label,
)
from topology.errors import PlannerError
from topology.time_limit import check_time

Steps = Generator[simpy.Event, None, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The result. Traces and event times are of one rank per class, `folding.classes[i].representative`."""

    step_s: float
    trace: tr.Trace
    events_s: dict[int, dict[str, float]]
    folding: Folding


def simulate(
    program: Program,
    costs: CostModel,
    *,
    folded: bool = True,
    spans: bool = True,
    links: bool = True,
    watch: Callable[[float], None] | None = None,
) -> Run:
    """Run `program` once on the machine that `costs` describes.

    `folded=False` simulates every rank separately, with the same times. `spans=False` leaves the trace empty, where
    only times and peaks matter, and `links=False` without what links carry over time. `watch` is called with the
    simulated time some dozens of times a second; an exception that it raises ends the run. Raises PlannerError when the
    program does not end.
    """
    return _Machine(program, costs, folded=folded, spans=spans, links=spans and links).run(watch)


ROUNDING = 1e-12  # relative; sums of the same times in another order differ by this much, which is no waiting time
WATCHED = 1024  # steps of the clock between two calls of `watch` or of the time limit
_FREE = Cost(seconds=0.0)
_CATEGORIES: dict[type, str] = {Launch: tr.COMPUTE, Copy: tr.COPY, HostWork: tr.HOST}
_ALONE = Meeting((), (), ())


@dataclass(slots=True)
class _Op:
    """An instruction with what is known before the run: kernels have a cost, transfers also a meeting."""

    instruction: Instruction
    host_s: float
    cost: Cost = _FREE
    meeting: Meeting = _ALONE
    key: Hashable = None  # index of the meeting on that channel
    stream: str = ""
    launches: float = 0.0  # places that it takes in its stream's queue

    def __post_init__(self) -> None:
        self.stream = self.instruction.stream
        if isinstance(self.instruction, Launch):
            self.launches = self.cost.launches

    @property
    def name(self) -> str:
        return label(self.instruction)


@dataclass(slots=True)
class _Rendezvous:
    done: simpy.Event
    arrived: list[tuple[_Rank, _Op, float]] = field(default_factory=list)


class _Machine:
    def __init__(self, program: Program, costs: CostModel, *, folded: bool, spans: bool, links: bool) -> None:
        self.program = program
        self.costs = costs
        self.keep_spans = spans
        self.folding = fold(program, costs, enabled=folded)
        self.env = simpy.Environment()
        self.contention = Contention(self.env)
        for number, link in enumerate(self.folding.link_names):
            watch = partial(self._watch_link, number) if links else None
            self.contention.add_resource(("link", number), costs.link_bytes_per_s(link), watch)
        self.meetings: dict[Hashable, _Rendezvous] = {}
        self.spans: list[tr.Span] = []
        self.flows: list[tr.Flow] = []
        self.link_use: dict[int, list[tuple[float, float]]] = {}
        self.end_s = 0.0  # when the last process ended; the clock may continue to timers that nothing waits for
        self.ranks = [_Rank(self, rank_class) for rank_class in self.folding.classes]

    def run(self, watch: Callable[[float], None] | None) -> Run:
        processes = [process for rank in self.ranks for process in rank.start()]
        with suppress(EmptySchedule):
            while True:
                check_time()
                if watch is not None:
                    watch(self.env.now)
                for _ in range(WATCHED):
                    self.env.step()
        if any(process.is_alive for process in processes):
            raise self._no_end()
        self.spans.sort(key=lambda span: (span.start_s, span.rank, span.stream, -span.end_s))
        trace = tr.Trace(spans=tuple(self.spans), flows=tuple(self.flows), counters=tuple(self._counters()))
        events_s = {rank.number: rank.events.happened_s for rank in self.ranks}
        return Run(step_s=self.end_s, trace=trace, events_s=events_s, folding=self.folding)

    def _no_end(self) -> PlannerError:
        starved = [self.ranks[gpu].number for gpu in self.contention.starved()]
        if starved:
            return PlannerError(
                "the program does not come to an end on this machine",
                why=f"transfers that wait for each other hold every SM of rank {starved[0]},"
                " its kernels have none left",
                remedy="let transfers use fewer SMs, or post fewer of them ahead",
            )
        return PlannerError(
            "the program does not come to an end",
            why=find_deadlock(self.folding) or "a stream waits for something that never happens",
            remedy="report it with its question: programs are written here, and are to end",
        )

    def meet(self, rank: _Rank, op: _Op) -> simpy.Event:
        """Arrive at a transfer; return the event of its end. The last rank to arrive starts it."""
        rendezvous = self.meetings.get(op.key)
        if rendezvous is None:
            rendezvous = self.meetings[op.key] = _Rendezvous(self.env.event())
        rendezvous.arrived.append((rank, op, self.env.now))
        if op.cost.sms:
            self.contention.hold(rank.index, op.cost.sms)
        expected = len(op.meeting.classes) if isinstance(op.instruction, Collective) else 2
        if len(rendezvous.arrived) == expected:
            del self.meetings[op.key]
            self._transfer(rendezvous)
        return rendezvous.done

    def _transfer(self, rendezvous: _Rendezvous) -> None:
        """Start a transfer at which all have arrived. Only the sender's end of a message knows its links; all members
        of a group do.
        """
        main = next(op for _, op, _ in rendezvous.arrived if not isinstance(op.instruction, Recv))
        cost = main.cost
        uses: list[tuple[Hashable, float]] = []
        if cost.hbm_bytes_per_s:
            demand: dict[Hashable, float] = {}
            for rank, _, _ in rendezvous.arrived:
                demand[rank.hbm] = demand.get(rank.hbm, 0.0) + cost.hbm_bytes_per_s
            uses += demand.items()
        if cost.link_bytes_per_s:
            uses += [(("link", link), cost.link_bytes_per_s * share) for link, share in main.meeting.links]
        if uses:
            rate = cost.link_bytes_per_s * main.meeting.share or cost.hbm_bytes_per_s
            end = self.contention.start(Activity(cost.seconds, tuple(uses), rate))
        else:
            end = self.env.timeout(cost.seconds)
        end.callbacks.append(partial(self._arrive, rendezvous, main, self.env.now))

    def _arrive(self, rendezvous: _Rendezvous, main: _Op, begin: float, _: simpy.Event) -> None:
        for rank, op, arrived_s in rendezvous.arrived:
            if op.cost.sms:
                self.contention.hold(rank.index, -op.cost.sms)
            if not self.keep_spans:
                continue
            if begin - arrived_s > ROUNDING * begin:
                rank.span(op, arrived_s, begin, tr.WAIT)
            rank.span(op, begin, self.env.now, tr.COMMUNICATION)
        if self.keep_spans and not isinstance(main.instruction, Collective):
            self._draw(rendezvous, begin)
        rendezvous.done.succeed()

    def _draw(self, rendezvous: _Rendezvous, begin: float) -> None:
        (a, first, _), (b, second, _) = rendezvous.arrived
        if isinstance(first.instruction, Recv):
            a, first, b, second = b, second, a, first
        self.flows.append(
            tr.Flow(
                first.name, a.number, first.instruction.stream, begin, b.number, second.instruction.stream, self.env.now
            )
        )

    def _watch_link(self, number: int, used: float) -> None:
        self.link_use.setdefault(number, []).append((self.env.now, used))

    def _counters(self) -> Generator[tr.Counter, None, None]:
        for number, samples in sorted(self.link_use.items()):
            name = f"link {self.folding.link_names[number]}"
            last_at_each_time = tuple(dict(samples).items())
            yield tr.Counter(-1, name, "bytes/s", last_at_each_time)


class _Rank:
    """One simulated rank: its host, its streams, its events."""

    def __init__(self, machine: _Machine, rank_class: RankClass) -> None:
        self.machine = machine
        self.env = machine.env
        self.rank_class = rank_class
        self.index = rank_class.index
        self.number = rank_class.representative
        self.events = _Events(machine.env)
        self.hbm: Hashable = ("hbm", self.index)
        limits = machine.costs.limits(self.number)
        machine.contention.add_gpu(self.index, limits.sms)
        self.most_queued = limits.queue
        machine.contention.add_resource(self.hbm, limits.hbm_bytes_per_s)
        self.ops = self._look_up()
        self.streams = {op.stream: _Queue(self.env) for op in self.ops if op.stream != HOST}

    def _look_up(self) -> list[_Op]:
        """Ask the cost model once for each distinct kernel and transfer of this rank."""
        costs = self.machine.costs
        known: dict[Hashable, tuple[float, Cost]] = {}
        ops = []
        for instruction, meeting_key in zip(
            self.rank_class.code.instructions, meeting_keys(self.rank_class), strict=True
        ):
            if not isinstance(instruction, Kernel):
                ops.append(_Op(instruction, costs.host_s(instruction)))
                continue
            ranks: Ranks = (self.number,)
            meeting = _ALONE
            match instruction:
                case Launch():
                    key: Hashable = (instruction.name, instruction.shape, instruction.dtype)
                case Copy():
                    key = (instruction.kind, instruction.nbytes)
                case Collective() | Send() | Recv():
                    meeting = self.rank_class.meetings[endpoint(instruction)]
                    ranks = meeting.ranks
                    detail = instruction.op if isinstance(instruction, Collective) else instruction.tag
                    key = (endpoint(instruction), detail, instruction.nbytes)
            if key not in known:
                known[key] = costs.host_s(instruction), costs.cost(instruction, ranks)
            ops.append(_Op(instruction, *known[key], meeting, meeting_key))
        return ops

    def start(self) -> list[simpy.Process]:
        streams = [self.env.process(self._stream(queue)) for queue in self.streams.values()]
        return [self.env.process(self._host()), *streams]

    # --- processes ----------------------------------------------------------------------------------------------

    def _host(self) -> Steps:
        env, draws = self.env, self.machine.keep_spans
        for op in self.ops:
            if op.host_s > 0.0:
                begin = env.now
                yield env.timeout(op.host_s)
                if draws:
                    self.span(op, begin, env.now, tr.HOST, HOST)
            if op.stream == HOST:
                begin, end = env.now, self._begin(op)
                if end is not None:
                    yield end
                    if draws:
                        self._drawn(op, begin)
            else:
                queue = self.streams[op.stream]
                while queue.launches and queue.launches + op.cost.launches > self.most_queued:
                    yield queue.begun()
                queue.put(op)
        self.machine.end_s = env.now
        for queue in self.streams.values():
            queue.close()

    def _stream(self, queue: _Queue) -> Steps:
        env, draws = self.env, self.machine.keep_spans
        while True:
            while queue.items:
                op = queue.take()
                begin, end = env.now, self._begin(op)
                if end is not None:
                    yield end
                    if draws:
                        self._drawn(op, begin)
            if queue.closed:
                self.machine.end_s = env.now
                return
            yield queue.wait()

    def _begin(self, op: _Op) -> simpy.Event | None:
        """Begin an instruction; return the event of its end, None if it has already ended."""
        match op.instruction:
            case Launch() | Copy():
                return self._kernel(op)
            case RecordEvent(event=name):
                self.events.record(name)
            case WaitEvent(event=name):
                return self.events.wait(name)
            case Collective() | Send() | Recv():
                return self.machine.meet(self, op)
            case HostWork(duration_s=seconds):
                return self.env.timeout(seconds)
        return None

    def _drawn(self, op: _Op, begin_s: float) -> None:
        """Record the span of an instruction that has ended; spans of transfers are recorded together."""
        category = _CATEGORIES.get(type(op.instruction))
        if category is not None:
            self.span(op, begin_s, self.env.now, category)

    def _kernel(self, op: _Op) -> simpy.Event:
        cost = op.cost
        shares_sms = bool(cost.sms) and isinstance(op.instruction, Launch)
        crosses_links = bool(cost.link_bytes_per_s) and isinstance(op.instruction, Copy)
        if cost.taken and isinstance(op.instruction, Copy):
            return self._taking(cost)
        if not (shares_sms or crosses_links or cost.hbm_bytes_per_s):
            return self.env.timeout(cost.seconds)
        uses = [(self.hbm, cost.hbm_bytes_per_s)] if cost.hbm_bytes_per_s else []
        rate = cost.hbm_bytes_per_s
        if crosses_links:
            uses += [(("link", link), cost.link_bytes_per_s * share) for link, share in self.rank_class.copy_links]
            rate = cost.link_bytes_per_s * self.rank_class.copy_share or rate
        gpu = self.index if shares_sms else None
        return self.machine.contention.start(Activity(cost.seconds, tuple(uses), rate, gpu, cost.sms))

    def _taking(self, cost: Cost) -> simpy.Event:
        """Begin a copy within the GPU that takes from kernels while it lasts."""
        end = self.env.timeout(cost.seconds)
        end.callbacks.append(self.machine.contention.take(self.index, cost.taken))
        return end

    def span(self, op: _Op, start_s: float, end_s: float, category: str, stream: str = "") -> None:
        self.machine.spans.append(tr.Span(self.number, stream or op.stream, op.name, start_s, end_s, category))


class _Events:
    """The events of one rank and the times when they happened. An event that nothing waits for costs nothing."""

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self.happened_s: dict[str, float] = {}
        self._awaited: dict[str, simpy.Event] = {}

    def record(self, name: str) -> None:
        self.happened_s[name] = self.env.now
        if name in self._awaited:
            self._awaited.pop(name).succeed()

    def wait(self, name: str) -> simpy.Event | None:
        """Return an event that has not happened yet."""
        return None if name in self.happened_s else self._awaited.setdefault(name, self.env.event())


class _Queue:
    """The instructions that a host has issued to a stream and the stream has not begun; `launches` of them are
    kernels.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self.items: deque[_Op] = deque()
        self.launches = 0.0
        self.closed = False
        self._idle: simpy.Event | None = None
        self._full: simpy.Event | None = None

    def put(self, op: _Op) -> None:
        self.items.append(op)
        self.launches += op.launches
        self._wake()

    def take(self) -> _Op:
        op = self.items.popleft()
        if op.launches:
            # An empty queue holds exactly none, whatever rounding has left of the sum.
            self.launches = self.launches - op.launches if self.items else 0.0
            if self._full is not None:
                self._full.succeed()
                self._full = None
        return op

    def begun(self) -> simpy.Event:
        """Return the event of the next kernel's start."""
        self._full = self.env.event()
        return self._full

    def close(self) -> None:
        self.closed = True
        self._wake()

    def wait(self) -> simpy.Event:
        self._idle = self.env.event()
        return self._idle

    def _wake(self) -> None:
        if self._idle is not None:
            self._idle.succeed()
            self._idle = None
