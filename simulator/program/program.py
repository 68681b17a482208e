"""The intermediate form of a step: the instructions of every rank on named streams, without costs.

A rank's code is one ordered list: the order in which its host thread issues the instructions. `stream` names what
carries an instruction out. Each stream runs in issue order, different streams run at the same time, and events order
them. `host` is the host thread itself. Ranks that run the same code share one `RankCode`: a program for 16,384 GPUs is
as long as one for its 16 pipeline stages.

Communication names a *family* of groups ("tp", "pp") and each rank takes part in the one group of the family that
holds it, so code never mentions a rank and can be shared. Partners are positions in that group.

Costs are in `simulator.program.cost_model`; `tests/simulator/program_check.py` says what makes a program sound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

HOST = "host"
COMPUTE = "compute"
COMM = "comm"
COPY = "copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class _OnDevice:
    """What a stream carries out. `reads` and `writes` name buffers."""

    stream: str = COMM
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch(_OnDevice):
    """One kernel. (`name`, `shape`, `dtype`) is the key under which its cost is looked up or measured."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    stream: str = COMPUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective(_OnDevice):
    """One collective over this rank's group of the family `group`. `nbytes` as in nccl-tests' size column."""

    op: str
    group: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Send(_OnDevice):
    """A message to position `peer` of this rank's group, or `peer` places further round the ring if `relative`.

    A rendezvous, as in NCCL: it moves when both sides have arrived, and holds its stream until it is over.
    """

    group: str
    peer: int
    nbytes: int
    tag: str = ""
    relative: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recv(_OnDevice):
    """The other half of a `Send`: same `tag` and `nbytes`, `peer` the position the message comes from."""

    group: str
    peer: int
    nbytes: int
    tag: str = ""
    relative: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(_OnDevice):
    """A copy by a copy engine. `kind` is h2d, d2h, d2d, ..."""

    nbytes: int
    kind: str
    stream: str = COPY


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWork:
    """The host thread is busy with work of its own: data loading, Python, an optimizer on the CPU."""

    name: str
    duration_s: float
    stream: str = HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordEvent:
    """Marks a point of `stream`. Each event is recorded once in a program."""

    event: str
    stream: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitEvent:
    """`stream` does not continue before `event` has happened; on `host` this is a device synchronisation."""

    event: str
    stream: str


Kernel = Launch | Collective | Send | Recv | Copy
Transfer = Collective | Send | Recv
Instruction = Launch | Collective | Send | Recv | Copy | HostWork | RecordEvent | WaitEvent


def label(instruction: Instruction) -> str:
    """Return a short name for display: `matmul`, `all_gather dp_shard`, `send pp+1`, ..."""
    match instruction:
        case Launch() | HostWork():
            return instruction.name
        case Collective():
            return f"{instruction.op} {instruction.group}"
        case Send() | Recv():
            sign = "+" if instruction.relative and instruction.peer >= 0 else ""
            tag = f" {instruction.tag}" if instruction.tag else ""
            return f"{type(instruction).__name__.lower()} {instruction.group}{sign or ' '}{instruction.peer}{tag}"
        case Copy():
            return f"copy {instruction.kind}"
        case RecordEvent() | WaitEvent():
            return f"{'record' if isinstance(instruction, RecordEvent) else 'wait'} {instruction.event}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCode:
    """The instructions that all of `ranks` run, in the order in which their hosts issue them."""

    name: str
    ranks: tuple[int, ...]
    instructions: tuple[Instruction, ...]


Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Code for ranks 0..n-1 and the families of groups in which they communicate.

    A family is a tuple of groups; a group lists its ranks by position; no rank is in two groups of a family.
    """

    codes: tuple[RankCode, ...]
    groups: Mapping[str, Groups] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return sum(len(code.ranks) for code in self.codes)

    @property
    def instructions(self) -> int:
        """The number of instructions; code that several ranks run counts once."""
        return sum(len(code.instructions) for code in self.codes)


class On(TypedDict, total=False):
    """Where an instruction runs, and the buffers that it uses."""

    stream: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


class CodeWriter:
    """Writes one rank's code line by line; reads like the training loop that it stands for."""

    def __init__(self) -> None:
        self._instructions: list[Instruction] = []
        self._events = 0

    @property
    def length(self) -> int:
        """Return the number of instructions written."""
        return len(self._instructions)

    def add(self, instruction: Instruction) -> None:
        self._instructions.append(instruction)

    def extend(self, instructions: Iterable[Instruction]) -> None:
        """Write instructions that `cut` returned."""
        self._instructions.extend(instructions)

    def cut(self, start: int) -> list[Instruction]:
        """Remove the instructions from index `start` on, and return them."""
        taken = self._instructions[start:]
        del self._instructions[start:]
        return taken

    def launch(self, name: str, shape: Sequence[int] = (), dtype: str = "", **on: Unpack[On]) -> None:
        self.add(Launch(name=name, shape=tuple(shape), dtype=dtype, **on))

    def collective(self, op: str, group: str, nbytes: int, **on: Unpack[On]) -> None:
        self.add(Collective(op=op, group=group, nbytes=nbytes, **on))

    def send(
        self, group: str, peer: int, nbytes: int, *, tag: str = "", relative: bool = False, **on: Unpack[On]
    ) -> None:
        self.add(Send(group=group, peer=peer, nbytes=nbytes, tag=tag, relative=relative, **on))

    def recv(
        self, group: str, peer: int, nbytes: int, *, tag: str = "", relative: bool = False, **on: Unpack[On]
    ) -> None:
        self.add(Recv(group=group, peer=peer, nbytes=nbytes, tag=tag, relative=relative, **on))

    def exchange(self, group: str, step: int, nbytes: int, *, tag: str = "", **on: Unpack[On]) -> None:
        """Send `step` places further round the group's ring and receive from as far back, both at once, as NCCL does in
        one group call.

        One after the other on one stream, every rank of the ring would wait for the next one's receive for ever. The
        receive runs on another stream, which `stream` waits for.
        """
        stream = on.get("stream", COMM)
        receiving = f"{stream} in"
        self.after(receiving, stream)
        self.send(group, step, nbytes, tag=tag, relative=True, stream=stream, reads=on.get("reads", ()))
        self.recv(group, -step, nbytes, tag=tag, relative=True, stream=receiving, writes=on.get("writes", ()))
        self.after(stream, receiving)

    def copy(self, nbytes: int, kind: str, **on: Unpack[On]) -> None:
        self.add(Copy(nbytes=nbytes, kind=kind, **on))

    def host_work(self, name: str, duration_s: float) -> None:
        self.add(HostWork(name=name, duration_s=duration_s))

    def record(self, stream: str, event: str = "") -> str:
        """Mark a point of `stream`; return the event's name, which is generated if none is given."""
        if not event:
            self._events += 1
            event = f"event{self._events}"
        self.add(RecordEvent(event=event, stream=stream))
        return event

    def wait(self, stream: str, event: str) -> None:
        self.add(WaitEvent(event=event, stream=stream))

    def after(self, stream: str, other: str) -> None:
        """Let `stream` wait for all that has been issued to `other` so far (`stream.wait_stream(other)` in torch)."""
        self.wait(stream, self.record(other))

    def synchronize(self, stream: str) -> None:
        """Let the host wait for all that has been issued to `stream` so far, as reading a scalar does."""
        self.after(HOST, stream)

    def code(self, name: str, ranks: Iterable[int]) -> RankCode:
        return RankCode(name=name, ranks=tuple(ranks), instructions=tuple(self._instructions))
