"""Recomputation: buffers that the backward pass needs are dropped and computed again instead of kept, if memory is
limited.

A gathered parameter is gathered again (as FSDP reshards after the forward pass), an intermediate is computed again
(activation recomputation, Chen et al., arXiv 1604.06174): in both cases the instruction that made it is written again
before the first backward kernel that needs it. Buffers with the least time per byte freed at the peak are dropped
first. An exchange is written just before the kernel that needs it or one kernel earlier (prefetched), which overlaps it
with that kernel for the memory of one more buffer; the simulation of both programs shows which is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.sharding.backends.lifetimes import Lifetimes, is_backward, lifetimes, memory_of, saved
from planner.sharding.backends.works import Work
from simulator.sharded.graph import renamed
from simulator.sharded.program import Buffer, Exchange, Kernel

PRODUCTS = frozenset(("aten.linear.default", "aten.matmul.default", "aten.mm.default", "aten.bmm.default", "attention"))
AGAIN = ".again"  # suffix of the name of a recomputed buffer
_MANY = 1500  # number of instructions beyond which buffers of one kind are dropped together


@dataclass(slots=True)
class Recomputation:
    """The works of a program; `given` are its inputs and the gradients of its outputs, `kept` are results of a run."""

    works: Sequence[Work]
    buffers: dict[str, Buffer]
    given: frozenset[str]
    kept: frozenset[str]
    backward_start: int  # the number of the first work after the forward pass
    _makers: dict[str, Work] = field(init=False)  # for buffers of the forward pass
    _owner: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self._owner = memory_of(self.works)
        self._makers = {name: work for work in self.works[: self.backward_start] for name in work.writes}

    def lifetimes(self, works: Sequence[Work]) -> Lifetimes:
        return lifetimes(works, self.buffers, given=self.given, kept=self.kept)

    def lifetimes_of(self, works: Sequence[Work]) -> Lifetimes:
        """Return the lifetimes of the buffers of some works: those of one pipeline stage."""
        used = {name for work in works for name in (*work.reads, *work.writes)}
        return lifetimes(works, self.buffers, given=self.given & used, kept=self.kept & used)

    def drop_until(
        self, limit_bytes: float, seconds: Callable[[Work], float], *, prefetch: bool
    ) -> tuple[list[Work], frozenset[str]]:
        """Return the works with enough buffers dropped to bring the peak to `limit_bytes`, and these buffers; all that
        help if the limit cannot be reached.

        `seconds` returns the time of a work alone.
        """
        dropped: frozenset[str] = frozenset()
        works = list(self.works)
        found = self.lifetimes(works)
        for group in self._candidates(found, seconds):
            peak, at = found.peak()
            if peak <= limit_bytes:
                break
            if not any(found.first[name] <= at <= found.last[name] for name in group):
                continue
            tried = self.remade(dropped | set(group), prefetch=prefetch)
            after = self.lifetimes(tried)
            if after.peak()[0] < peak:
                dropped, works, found = dropped | set(group), tried, after
        return works, dropped

    def _candidates(self, found: Lifetimes, seconds: Callable[[Work], float]) -> list[list[str]]:
        """Return what may be dropped, cheapest per byte first: buffers, or groups of them in long programs."""
        groups: dict[object, list[str]] = {}
        start = self.backward_start
        for name, work in self._makers.items():
            if name in self.kept or self._owner[name] != name or found.last[name] < start or not found.nbytes[name]:
                continue
            kind = work.do.op if isinstance(work.do, Kernel) else work.do.kind
            key = (kind, self.buffers[name].local) if len(self.works) > _MANY else name
            groups.setdefault(key, []).append(name)

        def price(group: list[str]) -> float:
            return sum(seconds(self._makers[name]) for name in group) / sum(found.nbytes[name] for name in group)

        return sorted(groups.values(), key=price)

    def remade(self, dropped: Collection[str], *, prefetch: bool) -> list[Work]:
        """Return the works with `dropped` buffers computed again in the backward pass."""
        out = list(self.works[: self.backward_start])
        forward = {work.writes[0]: work for work in out}
        again: dict[str, str] = {}
        place: int | None = None  # index in `out` of the latest product of the backward pass
        for work in self.works[self.backward_start :]:
            if is_backward(work) and isinstance(work.do, Kernel):
                needed = saved(forward[work.do.args[0]])
                before = len(out)
                for name in needed:
                    self._make(name, dropped, again, out)
                if len(out) > before:
                    _place_exchanges(out, before, place if prefetch else None)
                names = {name: again[name] for name in needed if name in again}
                if names:
                    do = replace_kwargs(work.do, {"again": names})
                    work = replace(work, do=do, reads=(*work.reads, *names.values()))  # noqa: PLW2901
                if forward[work.do.args[0]].do.op in PRODUCTS:  # type: ignore[union-attr]
                    place = len(out)
            out.append(work)
        return out

    def _make(self, name: str, dropped: Collection[str], again: dict[str, str], out: list[Work]) -> None:
        """Write the instructions that compute buffer `name` again, if its memory was dropped."""
        if name in again or self._owner.get(name, name) not in dropped:
            return
        work = self._makers[name]
        for read in work.reads:
            self._make(read, dropped, again, out)
        again[name] = f"{name}{AGAIN}"
        self.buffers[again[name]] = self.buffers[name]
        do = work.do
        if isinstance(do, Kernel):
            do = Kernel(op=do.op, args=renamed(do.args, again), kwargs=renamed(do.kwargs, again), index=do.index)
        reads = tuple(again.get(read, read) for read in work.reads)
        out.append(replace(work, do=do, reads=reads, writes=(again[name],)))


def _place_exchanges(out: list[Work], start: int, to: int | None) -> None:
    """Let exchanges among the works from `start` on begin after the kernel before them, and before work `to` if
    it is given.

    Otherwise they would begin, and take their memory, as early as possible.
    """
    at = start if to is None else to
    made = {name for work in out[at:] for name in work.writes}
    early = [w for w in out[start:] if isinstance(w.do, Exchange) and not made & set(w.reads)]
    rest = [w for w in out[start:] if not any(w is one for one in early)]
    before = next((w.writes for w in reversed(out[:at]) if isinstance(w.do, Kernel)), ())
    out[start:] = rest
    out[at:at] = [replace(w, after=before) for w in early]


def replace_kwargs(kernel: Kernel, more: Mapping[str, object]) -> Kernel:
    return Kernel(op=kernel.op, args=kernel.args, kwargs={**kernel.kwargs, **more}, index=kernel.index)
