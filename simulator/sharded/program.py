"""A program that can be run and simulated: the Program's instructions, with what each computes or exchanges.

`RunnableProgram.program` is an ordinary `simulator.program.program.Program`. Every buffer that an instruction writes
has its work under `work`: a `Kernel` (an operator on the rank's own pieces) or an `Exchange` (a collective). All ranks
run the same code; with pipeline stages, those of each stage. The file is JSON data: operators are looked up by name in
the executor's table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import msgspec

from simulator.program.program import (
    Collective,
    Groups,
    Instruction,
    Launch,
    Program,
    RankCode,
    RecordEvent,
    Recv,
    Send,
    WaitEvent,
)
from topology.codec import JsonObject
from topology.errors import BadInput

FORMAT = "meshwright runnable program"
MAX_INSTRUCTIONS = 200_000
MAX_RANKS = 1 << 20
OVERLAPPED = "overlap."  # prefix of kernels that exchange pieces while they multiply (`executor.overlap`)
RING_ATTENTION = "ring.attention"  # a kernel that passes keys and values on while it attends to those that it has
ROUTE = "route."  # prefix of kernels that send rows to the ranks of their experts, or back
_INSTRUCTIONS: JsonObject = {
    "launch": Launch,
    "collective": Collective,
    "send": Send,
    "recv": Recv,
    "record": RecordEvent,
    "wait": WaitEvent,
}


class Buffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in one layout. `dims` has for each dim its mesh axes and block counts, major first; `local` is a rank's
    shape.

    `pending` has the reduction that is still to be performed, by mesh axis. `gradient` buffers belong to `tensor`'s
    gradient. `order` lists the dims as they are in memory, outermost first, if that differs from their own order.
    """

    tensor: str
    shape: tuple[int, ...]
    dtype: str
    dims: tuple[tuple[str | int, ...], ...]
    local: tuple[int, ...]
    pending: dict[str, str] = {}
    gradient: bool = False
    order: tuple[int, ...] = ()


class Kernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="kernel"):
    """An operator: `args` as plain data, tensors as `{"tensor": BUFFER}`; `index` picks one of several results."""

    op: str
    args: tuple[Any, ...] = ()
    kwargs: JsonObject = {}
    index: int | None = None


class Exchange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="exchange"):
    """A collective over `axes` (major first) of the mesh, on a piece seen as [blocks, pieces, rest] along a dim.

    `dim` is gathered or, in a reduce-scatter, scattered; an all-to-all gathers `dim` and scatters `to_dim`. In a
    permute, `source` has for each rank the rank whose piece it takes. `root` is the index, along `axes`, of the rank
    that broadcasts or is reduced to; a reduction reads its own piece and what the other ranks return. `stages` are the
    sender's and receiver's coordinates on the stage axis of a message.
    """

    kind: str
    axes: tuple[str, ...]
    dim: int = 0
    blocks: int = 1
    to_dim: int = 0
    to_blocks: int = 1
    reducer: str = ""
    source: tuple[int, ...] = ()
    root: int = 0
    stages: tuple[int, ...] = ()


def is_of_patches(kernel: Kernel, x: Sequence[int], weight: Sequence[int]) -> bool:
    """Return whether the windows of a convolution of these shapes lie side by side, so that it is one product."""
    ones = [1] * (len(weight) - 2)
    said: list[Any] = [ones, [0], ones, 1]
    said[: len(kernel.args[3:7])] = kernel.args[3:7]
    stride, padding, dilation, groups = said[0], said[1], said[2], said[3]
    window = list(weight[2:])
    if not all(isinstance(one, list | tuple) for one in (stride, padding, dilation)):
        return False
    tiles = list(stride) == window != ones and not any(padding) and set(dilation) <= {1} and groups == 1
    return tiles and all(size % width == 0 for size, width in zip(x[2:], window, strict=True))


class RunnableProgram(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`inputs` and `gradients` map tensors of the graph to buffers; `outputs` and `seeds` are in the graph's order.

    `seeds` are the gradients of the outputs, given to a run; a program without a backward pass has none. The backward
    pass starts at instruction `backward_start`. With a `stage_axis`, every instruction is run by the ranks at one
    coordinate of that mesh axis, its `stage`. With several `micro_batches`, inputs with one value per micro batch are
    called `x[0]`, `x[1]`, ..., and `outputs` and `seeds` have those of the first micro batch first. An `interleaved`
    program alternates forward and backward passes (1F1B): it has no `backward_start`, and needs the seeds from the
    beginning.
    """

    mesh_names: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    buffers: dict[str, Buffer]
    instructions: tuple[JsonObject, ...]
    work: dict[str, Kernel | Exchange]
    inputs: dict[str, str]
    outputs: tuple[str, ...]
    seeds: tuple[str, ...] = ()
    backward_start: int = 0
    gradients: dict[str, str] = {}
    stage_axis: str = ""
    micro_batches: int = 1
    interleaved: bool = False
    format: str = FORMAT
    schema_version: int = 1

    @property
    def ranks(self) -> int:
        return prod(self.mesh_shape)

    @property
    def stages(self) -> int:
        return self.mesh_shape[self.mesh_names.index(self.stage_axis)] if self.stage_axis else 1

    def code(self, stage: int | None = None, *, first: int = 0) -> tuple[Instruction, ...]:
        """Return the instructions in issue order from number `first` on, of one stage if it is given."""
        chosen = self.instructions[first:]
        return tuple(_instruction(data) for data in chosen if stage is None or data.get("stage", 0) == stage)

    def stage_of(self, rank: int) -> int:
        return coordinates(self.mesh_names, self.mesh_shape, rank)[self.stage_axis] if self.stage_axis else 0

    def groups(self) -> dict[str, Groups]:
        """Return the families of groups that collectives name."""
        names = {data["group"] for data in self.instructions if data["do"] in {"collective", "send", "recv"}}
        return {name: rank_groups(self.mesh_names, self.mesh_shape, axes_of(name, self.mesh_names)) for name in names}

    def program(self) -> Program:
        """Return the Program that the simulator times."""
        codes = []
        for stage in range(self.stages):
            ranks = tuple(rank for rank in range(self.ranks) if self.stage_of(rank) == stage)
            name = f"stage {stage}" if self.stage_axis else "all"
            codes.append(RankCode(name=name, ranks=ranks, instructions=self.code(stage)))
        return Program(codes=tuple(codes), groups=self.groups())


def axes_of(group: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the mesh axes of a family of groups: `dp+tp`, or `world` for all."""
    return names if group == "world" else tuple(group.split("+"))


def axes_used(work: Kernel | Exchange) -> tuple[str, ...]:
    """Return the mesh axes over which an instruction exchanges; none for a kernel of one rank."""
    if isinstance(work, Exchange):
        return work.axes
    return tuple(work.kwargs["axes"]) if work.op.startswith((OVERLAPPED, ROUTE, RING_ATTENTION)) else ()


def rank_groups(names: tuple[str, ...], shape: tuple[int, ...], axes: tuple[str, ...]) -> Groups:
    """Return the groups of ranks that differ in `axes` only, each in the order of ranks."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, at in enumerate(product(*(range(size) for size in shape))):
        key = tuple(c for c, name in zip(at, names, strict=True) if name not in axes)
        groups.setdefault(key, []).append(rank)
    return tuple(tuple(group) for group in groups.values())


def coordinates(names: tuple[str, ...], shape: tuple[int, ...], rank: int) -> dict[str, int]:
    """Return the coordinates of `rank` by mesh axis; the first axis is major."""
    at = {}
    for name, size in zip(reversed(names), reversed(shape), strict=True):
        rank, at[name] = divmod(rank, size)
    return at


def rank_at(program: RunnableProgram, rank: int, axis: str, coordinate: int) -> int:
    """Return the rank whose coordinates differ from this one's in one mesh axis only."""
    at = {**coordinates(program.mesh_names, program.mesh_shape, rank), axis: coordinate}
    number = 0
    for name, size in zip(program.mesh_names, program.mesh_shape, strict=True):
        number = number * size + at[name]
    return number


def written(instruction: Instruction) -> JsonObject:
    """Return an instruction as JSON data."""
    kind = next(name for name, one in _INSTRUCTIONS.items() if isinstance(instruction, one))
    fields = msgspec.to_builtins(instruction)
    return {"do": kind, **{key: value for key, value in fields.items() if value not in ("", (), [])}}


def _instruction(data: Mapping[str, Any]) -> Instruction:
    rest = {key: value for key, value in data.items() if key not in {"do", "stage"}}
    found: Instruction = msgspec.convert(rest, _INSTRUCTIONS[data["do"]], strict=True)
    return found


def read_program(data: Any, *, where: str) -> RunnableProgram:
    """Return decoded JSON as a program whose buffers, work and groups are all defined. Raises BadInput."""
    try:
        program = msgspec.convert(data, RunnableProgram, strict=True)
        code = program.code()
    except (msgspec.ValidationError, RecursionError, KeyError, TypeError) as error:
        raise BadInput(
            f"{where} is no runnable program", why=str(error), remedy="write one with planner shard"
        ) from error
    if program.format != FORMAT or program.schema_version != 1:
        raise BadInput(f"{where} is {program.format[:40]!r}", remedy=f"{FORMAT}, version 1")
    if len(code) > MAX_INSTRUCTIONS or not 1 <= program.ranks <= MAX_RANKS:
        raise BadInput(f"{where} has {len(code):,} instructions for {program.ranks:,} ranks", why="more than are read")
    if len(program.mesh_names) != len(program.mesh_shape):
        raise BadInput(f"{where} names {len(program.mesh_names)} mesh axes and sizes {len(program.mesh_shape)}")
    if program.stage_axis and program.stage_axis not in program.mesh_names:
        raise BadInput(f"{where} has stages over {program.stage_axis[:40]!r}", remedy="an axis of its mesh")
    if not all(0 <= data.get("stage", 0) < program.stages for data in program.instructions):
        raise BadInput(f"{where} has an instruction of no stage", remedy="write it again")
    ready = {*program.inputs.values(), *program.seeds}
    for instruction in code:
        if isinstance(instruction, Recv):
            ready |= set(instruction.writes)
        if isinstance(instruction, Launch | Collective):
            missing = [name for name in instruction.reads if name not in ready]
            unknown = [name for name in instruction.writes if name not in program.buffers]
            if missing or unknown or not instruction.writes or instruction.writes[0] not in program.work:
                name = (missing or unknown or ["an instruction without work"])[0]
                raise BadInput(f"{where}: {name[:60]!r} is used and not there", remedy="write it again")
            ready |= set(instruction.writes)
    named = {axis for one in program.work.values() for axis in axes_used(one)}
    if not named <= set(program.mesh_names) or not {*program.outputs, *program.gradients.values()} <= ready:
        raise BadInput(f"{where} names mesh axes or results that it does not have", remedy="write it again")
    return program
