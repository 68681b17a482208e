"""How long a written program's buffers live, in the order of its instructions, and the memory that a rank has at its
peak.

A buffer lives until its last reader; tensors that autograd saves for a kernel of the forward pass live until the
kernel's backward pass. A view has no memory of its own and keeps that of its base. Overheads of an allocator and memory
that kernels allocate inside are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from planner.sharding.backends.works import Work
from planner.sharding.ops.op import Saves
from planner.sharding.ops.table import saves
from simulator.config.runtime import ELEMENT_BYTES
from simulator.sharded.program import Buffer, Kernel

# Kernels without an operator, whose derivatives need nothing.
_PARTS = frozenset(("join_chunks", "join_ring", "take_chunk", "take_ring", "shard", "unshard"))


def is_view(work: Work) -> bool:
    return isinstance(work.do, Kernel) and saves(work.do.op) is Saves.VIEW


def is_backward(work: Work) -> bool:
    return isinstance(work.do, Kernel) and work.do.op == "backward"


def saved(work: Work) -> tuple[str, ...]:
    """Return the buffers that the backward pass of a kernel needs."""
    return saved_by(work.do, work.reads, work.writes) if isinstance(work.do, Kernel) else ()


def saved_by(do: Kernel, reads: tuple[str, ...], writes: tuple[str, ...]) -> tuple[str, ...]:
    """Return those buffers, of the ones that a kernel reads and writes, that its backward pass needs."""
    if do.op in _PARTS:
        return ()
    match saves(do.op):
        case Saves.NOTHING | Saves.VIEW:
            return ()
        case Saves.OTHERS:
            return reads[1:]
        case Saves.RESULT:
            return writes
        case Saves.BOTH:
            return (*reads, *writes)
    return reads


def short_name(op: str) -> str:
    """Return an operator's name: `add` of `aten.add.Tensor`."""
    return op.removeprefix("aten.").split(".")[0] if op.startswith("aten.") else op


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """For each buffer with memory of its own: the numbers of the first and the last instruction that need it, and its
    bytes.
    """

    first: Mapping[str, int]
    last: Mapping[str, int]
    nbytes: Mapping[str, int]

    def peak(self) -> tuple[int, int]:
        """Return the bytes at the peak, and the number of the instruction there."""
        changes: dict[int, int] = {}
        for name, start in self.first.items():
            changes[start] = changes.get(start, 0) + self.nbytes[name]
            changes[self.last[name] + 1] = changes.get(self.last[name] + 1, 0) - self.nbytes[name]
        total, best = 0, (0, -1)
        for number in sorted(changes):
            total += changes[number]
            if total > best[0]:
                best = (total, number)
        return best


def memory_of(works: Sequence[Work]) -> dict[str, str]:
    """Return for each buffer the one that has its memory: itself, unless it is a view."""
    owner: dict[str, str] = {}
    for work in works:
        for name in work.writes:
            owner[name] = owner.get(work.reads[0], work.reads[0]) if is_view(work) else name
    return owner


def lifetimes(
    works: Sequence[Work], buffers: Mapping[str, Buffer], *, given: Iterable[str], kept: Iterable[str]
) -> Lifetimes:
    """Return the lifetimes of the buffers of `works`: `given` buffers exist from the start, `kept` ones until
    the end.
    """
    owner = memory_of(works)
    given = tuple(given)
    first = dict.fromkeys(given, -1)
    last = dict.fromkeys(given, len(works))
    forward = {work.writes[0]: work for work in works if not is_backward(work)}
    for number, work in enumerate(works):
        needed = [*work.reads, *work.writes]
        if is_backward(work) and isinstance(work.do, Kernel):
            again = work.do.kwargs.get("again", {})
            needed += [again.get(name, name) for name in saved(forward[work.do.args[0]])]
        for name in needed:
            own = owner.get(name, name)
            first.setdefault(own, number)
            last[own] = max(last.get(own, -1), number)
    for name in kept:
        last[owner.get(name, name)] = len(works)
    nbytes = {name: prod(buffers[name].local) * ELEMENT_BYTES[buffers[name].dtype] for name in first}
    return Lifetimes(first, last, nbytes)
