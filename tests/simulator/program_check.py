"""Check a program without running it; these checks are the specification of a Program.

They have four parts: events are recorded once and before they are waited for; every use of a buffer is defined, and
ordered after the writes it needs by streams and events; the ranks of a group agree on every collective and every
message has two ends; and the program ends. Symmetric ranks are checked once.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field

from simulator.program.deadlock import find_deadlock
from simulator.program.fold import Folding, RankClass, fold, meeting_keys
from simulator.program.program import (
    HOST,
    Collective,
    Copy,
    Instruction,
    Launch,
    Program,
    RankCode,
    RecordEvent,
    Recv,
    Send,
    WaitEvent,
    label,
)
from simulator.sharded.program import RunnableProgram

# Kinds of problems.
STRUCTURE = "structure"
EVENT = "event"
UNDEFINED = "use-before-definition"
UNORDERED = "unordered-use"
COLLECTIVE = "collective-mismatch"
MESSAGE = "message-mismatch"
DEADLOCK = "deadlock"


@dataclass(frozen=True, slots=True)
class ProgramFault:
    """`kind` is one of this module's constants, `where` names code and instruction, `what` says it in a sentence."""

    kind: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.where}: {self.what}"


def check_runnable(program: RunnableProgram) -> list[ProgramFault]:
    """Return all problems of a sharded program, which is given its inputs and the gradients of its outputs."""
    return check(program.program(), {*program.inputs.values(), *program.seeds})


def check(program: Program, given: Collection[str] = ()) -> list[ProgramFault]:
    """Return all problems of `program`; if there are none, `simulator.engine.simulate.simulate` ends.

    The buffers `given` have a value from the start.
    """
    try:
        folding = fold(program)
    except ValueError as error:
        return [ProgramFault(STRUCTURE, "program", str(error))]
    problems = [problem for code in program.codes for problem in _Reader(code, given).problems()]
    problems += _mismatched_collectives(folding)
    problems += _mismatched_messages(folding)
    stuck = find_deadlock(folding)
    if stuck:
        problems.append(ProgramFault(DEADLOCK, "program", stuck))
    return problems


# --- one rank: events and buffers -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Buffer:
    written: tuple[str, int] | None = None  # stream and its tick
    read: dict[str, int] = field(default_factory=dict)  # last tick of each stream that read it since


class _Reader:
    """Reads one code in issue order with a vector clock per stream (Mattern 1989)."""

    def __init__(self, code: RankCode, given: Collection[str]) -> None:
        self.code, self.given = code, given
        self.clocks: dict[str, dict[str, int]] = {HOST: {HOST: 0}}
        self.events: dict[str, dict[str, int]] = {}
        self.buffers: dict[str, _Buffer] = {}
        self.reported: set[tuple[str, str]] = set()

    def problems(self) -> Iterator[ProgramFault]:
        for index, instruction in enumerate(self.code.instructions):
            where = f"{self.code.name}[{index}] {label(instruction)}"
            for kind, name, what in self._read(instruction):
                if (kind, name) not in self.reported:  # only the first of a kind is reported; the others follow from it
                    self.reported.add((kind, name))
                    yield ProgramFault(kind, where, what)

    def _read(self, instruction: Instruction) -> Iterator[tuple[str, str, str]]:
        stream = instruction.stream
        clock = self.clocks.setdefault(stream, {stream: 0})
        if stream != HOST:
            _join(clock, self.clocks[HOST])  # nothing runs before it is issued
        clock[stream] += 1
        match instruction:
            case RecordEvent(event=name):
                if name in self.events:
                    yield EVENT, name, f"event {name} is recorded a second time"
                self.events[name] = dict(clock)
            case WaitEvent(event=name):
                if name not in self.events:
                    yield EVENT, name, f"{stream} waits for event {name}, which has not been recorded before"
                _join(clock, self.events.get(name, {}))
            case Launch() | Collective() | Send() | Recv() | Copy():
                for name in instruction.reads:
                    yield from self._use(name, stream, clock, writes=False)
                for name in instruction.writes:
                    yield from self._use(name, stream, clock, writes=True)

    def _use(self, name: str, stream: str, clock: dict[str, int], *, writes: bool) -> Iterator[tuple[str, str, str]]:
        buffer = self.buffers.setdefault(name, _Buffer())
        if not writes and buffer.written is None and name not in self.given:
            yield UNDEFINED, name, f"{name} is read, but nothing has written it"
        if buffer.written and clock.get(buffer.written[0], 0) < buffer.written[1]:
            yield UNORDERED, name, f"{stream} does not wait for {buffer.written[0]}, which writes {name}"
        if writes:
            for reader, tick in buffer.read.items():
                if clock.get(reader, 0) < tick:
                    yield UNORDERED, name, f"{stream} overwrites {name} while {reader} may still read it"
            buffer.written, buffer.read = (stream, clock[stream]), {}
        else:
            buffer.read[stream] = clock[stream]


def _join(clock: dict[str, int], other: dict[str, int]) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


# --- between ranks: the two ends of everything ------------------------------------------------------------------------


def _mismatched_collectives(folding: Folding) -> list[ProgramFault]:
    """Compare what the members of each group call, call by call."""
    calls: dict[Hashable, dict[int, list[Collective]]] = {}
    for c in folding.classes:
        for key, meeting in c.meetings.items():
            if key[0] == "collective":
                for member in meeting.classes:  # a member that never calls is compared too
                    calls.setdefault(meeting.channel, {}).setdefault(member, [])
        for instruction in c.code.instructions:
            if isinstance(instruction, Collective):
                channel = c.meetings["collective", instruction.group, 0, False].channel
                calls[channel][c.index].append(instruction)
    problems = []
    for members in calls.values():
        (first, mine), *others = members.items()
        for other, theirs in others:
            turn = next((k for k, (a, b) in enumerate(zip(mine, theirs, strict=False)) if not _same(a, b)), None)
            if turn is None and len(mine) != len(theirs):
                turn = min(len(mine), len(theirs))
            if turn is not None:
                pair = [_call(folding.classes[i], calls_, turn) for i, calls_ in ((first, mine), (other, theirs))]
                group = (mine or theirs)[0].group
                problems.append(ProgramFault(COLLECTIVE, f"call {turn} on {group}", f"{pair[0]}, but {pair[1]}"))
                break
    return problems


def _same(a: Collective, b: Collective) -> bool:
    return (a.op, a.nbytes) == (b.op, b.nbytes)


def _call(rank_class: RankClass, calls: list[Collective], turn: int) -> str:
    if turn >= len(calls):
        return f"rank {rank_class.representative} makes no such call"
    return f"rank {rank_class.representative} calls {calls[turn].op} of {calls[turn].nbytes} bytes"


def _mismatched_messages(folding: Folding) -> list[ProgramFault]:
    """Compare sends and receives, channel by channel and tag by tag."""
    ends: dict[Hashable, tuple[list[Send], list[Recv]]] = {}
    pairs: dict[Hashable, tuple[int, ...]] = {}
    for c in folding.classes:
        for instruction, key in zip(c.code.instructions, meeting_keys(c), strict=True):
            if isinstance(instruction, Send | Recv):
                line = key[0]  # type: ignore[index]  # transfers always have a (line, turn) key
                side = ends.setdefault(line, ([], []))
                side[isinstance(instruction, Recv)].append(instruction)  # type: ignore[arg-type]  # index picks the list
                kind = "recv" if isinstance(instruction, Recv) else "send"
                pairs[line] = c.meetings[kind, instruction.group, instruction.peer, instruction.relative].ranks
    problems = []
    for line, (sends, recvs) in ends.items():
        a, b = pairs[line]
        where = f"{(sends or recvs)[0].group} from rank {a} to rank {b}, tag {(sends or recvs)[0].tag!r}"
        if len(sends) != len(recvs):
            lacking = "receive" if len(sends) > len(recvs) else "send"
            what = f"{len(sends)} sends and {len(recvs)} receives: a {lacking} is missing"
            problems.append(ProgramFault(MESSAGE, where, what))
        for turn, (send, recv) in enumerate(zip(sends, recvs, strict=False)):
            if send.nbytes != recv.nbytes:
                what = f"message {turn} is sent with {send.nbytes} bytes and received with {recv.nbytes}"
                problems.append(ProgramFault(MESSAGE, where, what))
                break
    return problems
