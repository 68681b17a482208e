"""Run a program on one rank: its instructions in issue order, each on its stream, with its events.

On CUDA every stream of the program is a CUDA stream, and events order them as the program says. On the CPU instructions
run one after another. A kernel with a backward keeps its own autograd graph and the tensors that the graph saves.
Between kernels there is no graph: gradients are passed as the program says. A buffer that the program recomputes in the
backward pass is not kept; the graph reads the new one instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh

from executor.sharding.exchanges import Group, Pieces, exchange, group_of, is_overlapped, make_groups, run_overlapped
from executor.sharding.operations import run_kernel
from executor.sharding.places import DTYPES, Context, Place, in_order
from executor.sharding.routes import run_route
from executor.sharding.saved_tensors import Operand, SavedTensors
from simulator.program.program import COMPUTE, Collective, Launch, RecordEvent, Recv, Send, WaitEvent
from simulator.sharded.program import ROUTE, Buffer, Exchange, Kernel, RunnableProgram, rank_at
from topology.errors import BadInput, UserError


@dataclass(slots=True)
class _Tape:
    """The graph of one kernel of the forward pass: by operand where its gradients leave, and where that of the result
    enters.
    """

    operands: dict[str, GradientEdge]
    result: GradientEdge | None  # None if no differentiated operand enters it, as for one of several results
    dtype: torch.dtype
    saved: SavedTensors | None


@dataclass(slots=True)
class State:
    """A run between its forward and its backward pass: values by buffer, tapes by the buffer that a kernel wrote,
    events.
    """

    at: dict[str, torch.Tensor]
    tapes: dict[str, _Tape] = field(default_factory=dict)
    events: dict[str, torch.cuda.Event] = field(default_factory=dict)
    sent: list[tuple[dist.Work, torch.Tensor]] = field(default_factory=list)  # messages in flight, and their tensors
    without_loss: frozenset[str] = frozenset()  # gradients that depend on no gradient that was given


@dataclass(slots=True)
class RankProgram:
    """A program on `device`, at the place `rank` of its mesh: this process's rank in the default process group, or its
    place in `mesh`, which may have only some of the ranks. The constructor is collective.
    """

    program: RunnableProgram
    rank: int
    device: torch.device
    mesh: DeviceMesh | None = None
    like: RankProgram | None = None  # another program of the same mesh, whose groups are reused
    members: tuple[int, ...] = field(init=False)  # ranks of the default process group, by place in the mesh
    place: Place = field(init=False)
    groups: dict[tuple[str, ...], Group] = field(init=False)
    back: dist.ProcessGroup | None = field(init=False)  # for messages to earlier stages; later ones: the default group
    stage: int = field(init=False)
    used: frozenset[str] = field(init=False)  # buffers that this rank's stage reads or writes
    _code: tuple[Any, ...] = field(init=False)
    _backward_start: int = field(init=False)
    _own_streams: dict[str, torch.cuda.Stream] = field(init=False)  # besides the caller's
    _streams: dict[str, torch.cuda.Stream] = field(init=False)
    _last_use: dict[int, list[str]] = field(init=False)
    _differentiated: dict[str, dict[str, str]] = field(init=False)  # by result of a kernel: what is made again of it
    _wanted: dict[str, frozenset[str]] = field(init=False)  # by result of a kernel: operands that need gradients

    def __post_init__(self) -> None:
        ranks = range(self.program.ranks) if self.mesh is None else self.mesh.mesh.flatten().tolist()
        self.members = tuple(ranks)
        self.place = Place.of(self.program, self.rank)
        known = {} if self.like is None else self.like.groups
        self.groups = make_groups(self.program, self.rank, self.mesh, known)
        if self.like is not None:  # later programs use it, when this one may not exist any more
            self.like.groups.update(self.groups)
        # With one communicator, two ranks that send to each other at the same time would each wait for the other's
        # message.
        self.back = None if self.like is None else self.like.back
        if self.like is None and self.program.stage_axis and dist.is_initialized():
            self.back = dist.new_group()
        self.stage = self.program.stage_of(self.rank)
        self._code = self.program.code(self.stage)
        started = self.program.backward_start
        self._backward_start = len(self._code) - len(self.program.code(self.stage, first=started)) if started else 0
        moving = [one for one in self._code if isinstance(one, Launch | Collective | Send | Recv)]
        self.used = frozenset(name for one in moving for name in (*one.reads, *one.writes))
        if self.stage == 0:  # an input that is also a result, and its gradient
            program = self.program
            self.used |= set(program.inputs.values()) & set(program.outputs)
            self.used |= set(program.gradients.values()) & set(program.seeds)
        names = {one.stream for one in moving}
        on_gpu = self.device.type == "cuda"
        self._own_streams = {
            name: torch.cuda.Stream(self.device) for name in (names | {COMPUTE} if on_gpu else ()) if name != COMPUTE
        }
        self._streams = {}
        works = self.program.work.values()
        backward = [w for w in works if isinstance(w, Kernel) and w.op == "backward"]
        self._wanted = {w.args[0]: frozenset(w.args[1]) for w in backward}
        self._differentiated = {w.args[0]: w.kwargs.get("again", {}) for w in backward}
        self._last_use = _last_uses(self._code, self.program)
        self._meet_neighbours()

    def _meet_neighbours(self) -> None:
        """Send a first message between all stages that exchange messages, in the same order on all ranks.

        NCCL creates the communicator of two ranks at their first message, and both wait for each other. In a step, with
        other messages in flight, that could deadlock.
        """
        pairs = {(data["stage"], data["peer"]) for data in self.program.instructions if data["do"] == "send"}
        for source, target in sorted(pairs):
            group, greeting = self._group_to(source, target), torch.zeros(1, device=self.device)
            if self.stage == source:
                _started(dist.isend(greeting, self._rank_at_stage(target), group=group)).wait()
            elif self.stage == target:
                _started(dist.irecv(greeting, self._rank_at_stage(source), group=group)).wait()

    def _rank_at_stage(self, stage: int) -> int:
        return rank_at(self.program, self.rank, self.program.stage_axis, stage)

    def pieces(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's pieces of whole tensors of the graph, by buffer."""
        inputs, buffers = self.program.inputs, self.program.buffers
        return {
            inputs[n]: self.place.piece(t, buffers[inputs[n]]).to(self.device)
            for n, t in tensors.items()
            if n in inputs
        }

    def seeds(self, gradients: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's pieces of whole gradients of the outputs, by buffer."""
        buffers = self.program.buffers
        both = zip(self.program.seeds, gradients, strict=True)
        return {name: self.place.piece(whole.to(self.device), buffers[name]) for name, whole in both}

    def run(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run the program on pieces by buffer; return the pieces of outputs and gradients by buffer."""
        if self.program.interleaved:
            state = State(at=self._laid({name: value for name, value in values.items() if name in self.used}))
            self._run(0, len(self._code), state)
        else:
            state = self.forward(values)
            if self.program.seeds:
                self.backward(state, values)
        kept = {*self.program.outputs, *self.program.gradients.values()}
        return {name: value for name, value in state.at.items() if name in kept}

    def forward(self, values: Mapping[str, torch.Tensor]) -> State:
        """Run the forward pass on pieces of the inputs by buffer. The state has the outputs and the values that
        backward needs.

        Raises UserError if forward and backward passes alternate.
        """
        if self.program.interleaved:
            raise UserError(
                "forward and backward passes of this program take turns (1F1B)",
                why="none of them runs by itself",
                remedy="a step, which is given the gradients of the outputs: ShardedModule.step",
            )
        state = State(at=self._laid(values))
        self._run(0, self._backward_start or len(self._code), state)
        return state

    def _laid(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return pieces by buffer, inputs with the order of dims in memory that the program requires."""
        orders = {name: self.program.buffers[name].order for name in values}
        return {name: in_order(value, orders[name]) if orders[name] else value for name, value in values.items()}

    def backward(self, state: State, seeds: Mapping[str, torch.Tensor], given: Collection[str] | None = None) -> None:
        """Run the backward pass from pieces of the outputs' gradients; then the state has the inputs' gradients.

        `given` names the seeds that a loss depends on, all unless stated; `state.without_loss` has what no other
        reaches.
        """
        state.at.update({name: seeds[name] for name in self.program.seeds if name in self.used})
        state.without_loss = self._without_loss(self.program.seeds if given is None else given)
        self._run(self._backward_start, len(self._code), state)

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        """The group of all ranks of the mesh; None for the default one."""
        return None if self.mesh is None else group_of(self.mesh, self.mesh.mesh_dim_names or ())

    def _without_loss(self, given: Collection[str]) -> frozenset[str]:
        """Return the buffers of the backward pass, on all stages, that depend on no `given` gradient of an output."""
        found, left = set(given), set(self.program.seeds).difference(given)
        if not left:
            return frozenset()
        for data in self.program.instructions[self.program.backward_start :]:
            # the buffer that a message is received in has its tag
            written = (data["tag"],) if data["do"] == "send" else data.get("writes", ())
            if found.intersection(data.get("reads", ())):
                found.update(written)
            else:
                left.update(written)
        return frozenset(left - found)

    def zeros(self, name: str, output: str) -> torch.Tensor:
        """Return a gradient of zeros for an output, in its dtype."""
        dtype = DTYPES[self.program.buffers[output].dtype]
        return torch.zeros(self.place.shape(self.program.buffers[name]), dtype=dtype, device=self.device)

    def everywhere(self, name: str, state: State) -> torch.Tensor:
        """Return a result of the forward pass; with pipeline stages, the stage that has it sends it to the same place
        of all stages.
        """
        if not self.program.stage_axis:
            return state.at[name].contiguous()
        buffer, axis = self.program.buffers[name], self.program.stage_axis
        making = (data.get("stage", 0) for data in self.program.instructions if name in data.get("writes", ()))
        made = next(making, 0)
        value = state.at.get(name)
        if value is None:
            value = torch.empty(self.place.shape(buffer), dtype=DTYPES[buffer.dtype], device=self.device)
        value = value.contiguous()
        dist.broadcast(value, rank_at(self.program, self.rank, axis, made), group=self.groups[axis,].group)
        return value

    def _run(self, start: int, stop: int, state: State) -> None:
        with torch.autocast(self.device.type, enabled=False):  # casts are kernels
            self._issue(start, stop, state)

    def _issue(self, start: int, stop: int, state: State) -> None:
        events: dict[str, torch.cuda.Event] = state.events
        if self.device.type == "cuda":
            self._streams = {COMPUTE: torch.cuda.current_stream(self.device), **self._own_streams}
        for stream in self._own_streams.values():  # after the caller's earlier work
            stream.wait_stream(self._streams[COMPUTE])
        for number in range(start, stop):
            instruction = self._code[number]
            match instruction:
                case RecordEvent() if self._streams:
                    events[instruction.event] = self._streams[instruction.stream].record_event()
                case WaitEvent() if self._streams:
                    self._streams[instruction.stream].wait_event(events[instruction.event])
                case Launch() | Collective():
                    with torch.cuda.stream(self._streams.get(instruction.stream)):
                        self._do(instruction, state)
                case Send() | Recv():
                    with torch.cuda.stream(self._streams.get(instruction.stream)):
                        self._message(instruction, state)
            for name in self._last_use.get(number, ()):
                self._drop(name, state)
        for work, _ in state.sent:
            work.wait()
        state.sent.clear()
        for stream in self._own_streams.values():
            self._streams[COMPUTE].wait_stream(stream)

    def _message(self, instruction: Send | Recv, state: State) -> None:
        """Send a buffer to the rank at the same place in another stage, or receive one."""
        peer = self._rank_at_stage(instruction.peer)
        if isinstance(instruction, Send):
            value = state.at[instruction.reads[0]].contiguous()
            if not (self._streams and torch.cuda.is_current_stream_capturing()):
                state.sent = [one for one in state.sent if not one[0].is_completed()]
            work = _started(dist.isend(value, peer, group=self._group_to(self.stage, instruction.peer)))
            state.sent.append((work, value))
            return
        (name,) = instruction.writes
        buffer = self.program.buffers[name]
        state.at[name] = torch.empty(self.place.shape(buffer), dtype=DTYPES[buffer.dtype], device=self.device)
        _started(dist.irecv(state.at[name], peer, group=self._group_to(instruction.peer, self.stage))).wait()

    def _group_to(self, source: int, target: int) -> dist.ProcessGroup | None:
        """Return the group for messages from one stage to another."""
        return self.back if target < source else None

    def _drop(self, name: str, state: State) -> None:
        """Free a buffer. The allocator may reuse its memory when every stream of the program has passed this point."""
        value = state.at.pop(name, None)
        if value is not None:
            for stream in self._streams.values():
                value.record_stream(stream)

    def _do(self, instruction: Launch | Collective, state: State) -> None:
        work, at = self.program.work[instruction.writes[0]], state.at
        if isinstance(work, Exchange):
            x, *others = (at[name] for name in instruction.reads)
            pieces = Pieces(
                self.place, self.program.buffers[instruction.reads[0]], self.program.buffers[instruction.writes[0]]
            )
            at[instruction.writes[0]] = exchange(work, x, self.groups[work.axes], pieces, self.members, *others)
        elif work.op == "backward":
            self._backward(instruction, work, state)
        else:
            self._forward(instruction, work, at, state.tapes)

    def _forward(
        self, instruction: Launch | Collective, work: Kernel, at: dict[str, torch.Tensor], tapes: dict[str, _Tape]
    ) -> None:
        name = instruction.writes[0]
        buffers = self.program.buffers
        context = Context(buffers[name], {read: buffers[read] for read in instruction.reads}, self.place)
        operands = {read: at[read] for read in instruction.reads}
        if name not in self._differentiated:
            with torch.no_grad():
                at[name] = self._kernel(work, operands, context)
            return
        again = self._differentiated[name]
        saved = SavedTensors({read: operands.get(read) for read in again}) if again else None
        with torch.enable_grad():
            entered = {
                read: Operand.apply(torch.empty(0, requires_grad=True), value) if read in self._wanted[name] else value
                for read, value in operands.items()
            }
            with saved.hooks() if saved is not None else nullcontext():
                result = self._kernel(work, entered, context)
        edges = {read: get_gradient_edge(value) for read, value in entered.items() if value.requires_grad}
        at[name] = result.detach()
        if saved is not None:
            saved.release(name, at[name])
        edge = get_gradient_edge(result) if result.requires_grad else None
        tapes[name] = _Tape(edges, edge, result.dtype, saved)

    def _kernel(self, work: Kernel, operands: Mapping[str, torch.Tensor], context: Context) -> torch.Tensor:
        if is_overlapped(work):
            return run_overlapped(work, operands, self.groups)
        if work.op.startswith(ROUTE):
            return run_route(work, operands, self.groups)
        return run_kernel(work, operands, context)

    def _backward(self, instruction: Launch | Collective, work: Kernel, state: State) -> None:
        forward, wanted = work.args
        at, tape = state.at, state.tapes.pop(forward)
        if tape.saved is not None:
            tape.saved.restore({name: at[again] for name, again in self._differentiated[forward].items()})
        incoming = at[instruction.reads[0]].to(tape.dtype)
        edges = [tape.operands[name] for name in wanted]
        found: Sequence[torch.Tensor | None] = [None] * len(edges)
        # without a loss there is no gradient: zeros times infinity would make it NaN
        if tape.result is not None and instruction.reads[0] not in state.without_loss:
            found = torch.autograd.grad(tape.result, edges, incoming, allow_unused=True)
        for name, gradient in zip(instruction.writes, found, strict=True):
            buffer = self.program.buffers[name]
            at[name] = gradient if gradient is not None else self._zeros(buffer, incoming)

    def _zeros(self, buffer: Buffer, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self.place.shape(buffer), dtype=DTYPES[buffer.dtype])


def place_in(mesh: DeviceMesh | None, program: RunnableProgram) -> tuple[int, bool]:
    """Return this rank's place in the mesh, and whether the mesh has only some of the ranks, as a slice of a larger
    one.

    Raises BadInput if ranks and mesh do not match.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if mesh is None and program.ranks not in {1, ranks}:
        raise BadInput(
            f"a mesh of {program.ranks} ranks, in a job of {ranks}", remedy="a DeviceMesh that says which ranks it has"
        )
    members = list(range(ranks)) if mesh is None else mesh.mesh.flatten().tolist()
    if members == list(range(ranks)):
        return rank, False
    if rank not in members or program.stage_axis:
        raise BadInput(
            f"rank {rank} is not in the mesh" if rank not in members else "pipeline stages on a part of the ranks",
            remedy="a slice of a mesh of all ranks, and stages on all of it",
        )
    return members.index(rank), True


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this rank is not in the group of a message")
    return work


def _last_uses(code: tuple[Any, ...], program: RunnableProgram) -> dict[int, list[str]]:
    """Return by instruction the buffers that no later instruction reads and no caller gets."""
    last: dict[str, int] = {}
    for number, one in enumerate(code):
        if isinstance(one, Launch | Collective | Send | Recv):
            last |= dict.fromkeys((*one.reads, *one.writes), number)
    kept = {*program.outputs, *program.gradients.values(), *program.inputs.values()}
    found: dict[int, list[str]] = {}
    for name, number in last.items():
        if name not in kept:
            found.setdefault(number, []).append(name)
    return found
