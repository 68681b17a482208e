"""Join kernels and collectives of a pass that run at the same time into pairs, with their time together.

Rings pass keys and values on while attention works on earlier ones. In a mode of the executor a gather runs with the
products that read what it gathers, a scatter with those whose results add up to what it scatters (except weight
gradients), as in executor/overlap/autograd.py; they are moved next to each other. torch's graph pass only takes
products that are next to a collective (`simulator.overlap.torch_async`). A kernel is paired with one collective at
most, and no pair extends past another collective between tensor-parallel ranks.

Plans differ in what they run and pair: for some plans (`rows`) a step is part of a pair, for the others it keeps its
own place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from simulator.columns.plan_table import Floats
from simulator.config.overlap_sites import ASYNC
from simulator.kernels.operators import Work, WorkKind
from simulator.kernels.roofline import DATASHEET
from simulator.overlap.site_costs import SITE_MODES, Products, pair_issue_s, pair_s, parts_of, product_of
from simulator.overlap.torch_async import extra_calls, launch_s, partials_bytes, together_s
from simulator.passes.steps import Kernel, Pair, Ring, Rows, Step, Transfer
from simulator.step.context import CostContext


def paired(steps: Sequence[Step], context: CostContext) -> list[Step]:
    """Return a pass in which kernels and collectives that run at the same time are joined."""
    steps = _rings(steps)
    if not any(isinstance(step, Transfer) and step.modes is not None for step in steps):
        return steps
    return _Pairing(steps, context).joined()


def _rings(steps: Sequence[Step]) -> list[Step]:
    """Join every ring of keys and values with its attention kernel, which precedes it (forward) or follows it
    (backward).
    """
    found = list(steps)
    for at, ring in enumerate(found):
        if not isinstance(ring, Ring):
            continue
        places = range(at + 1, len(found)) if ring.backward else reversed(range(at))
        for place in places:
            kernel = found[place]
            if isinstance(kernel, Kernel) and kernel.work.name == ring.hidden_by:
                found[at] = replace(ring, kernel=kernel.only(ring.rows))
                found[place] = kernel.only(~ring.rows)
                break
    return [step for step in found if step.rows.any()]


Taken = tuple[int, Rows]  # index of a kernel, and the plans in which it is taken


@dataclass(slots=True)
class _Partners:
    """The kernels paired with a collective, and the plans that have enough of them for a pair."""

    taken: list[Taken]
    rows: Rows


class _Pairing:
    """Pairs of one pass. `steps` are the steps that remain in their own places."""

    def __init__(self, steps: Sequence[Step], context: CostContext) -> None:
        self.context = context
        self.steps = list(steps)
        self.runs = [step.rows for step in steps]  # rows of each step before any pair took it
        self.ranks = context.table["tp"]

    def joined(self) -> list[Step]:
        found: list[list[Step]] = [[] for _ in self.steps]
        for at, transfer in enumerate(self.steps):
            if not isinstance(transfer, Transfer) or transfer.modes is None:
                continue
            of_sites = transfer.rows & np.isin(transfer.modes, SITE_MODES)
            matched = transfer.rows & (transfer.modes == ASYNC)
            if transfer.op == "all_gather":
                found[at] += self._pair(at, transfer, of_sites, self._readers, self._site)
                found[at] += self._pair(at, transfer, matched, self._next, self._cut)
            elif transfer.op == "reduce_scatter":
                found[at] += self._pair(at, transfer, of_sites, self._givers, self._site)
                found[at] += self._pair(at, transfer, matched, self._before, self._cut)
        steps = [step for own, pairs in zip(self.steps, found, strict=True) for step in (own, *pairs)]
        return [step for step in steps if step.rows.any()]

    def _pair(
        self,
        at: int,
        transfer: Transfer,
        rows: Rows,
        partners: Callable[[int, Transfer, Rows], _Partners],
        priced: Callable[[int, Transfer, tuple[Kernel, ...], Rows], list[Step]],
    ) -> list[Step]:
        """Remove a collective and its kernels from their places in `rows`; return the pair, and further steps that it
        needs.
        """
        if not rows.any():
            return []
        found = partners(at, transfer, rows)
        if not found.rows.any():
            return []
        kernels = []
        for place, taken in found.taken:
            kernel = self.steps[place]
            assert isinstance(kernel, Kernel)  # noqa: S101 - partners are
            kernels.append(kernel.only(taken & found.rows))
            self.steps[place] = kernel.only(~(taken & found.rows))
        own = self.steps[at]
        assert isinstance(own, Transfer)  # noqa: S101 - it was a moment ago
        self.steps[at] = own.only(~found.rows)
        return priced(at, transfer.only(found.rows), tuple(kernels), found.rows)

    def _since(self, at: int, rows: Rows) -> Iterator[tuple[int, Kernel, Rows]]:
        """Yield (index, kernel, plans) backwards from a collective to the previous one between tensor-parallel
        ranks.
        """
        for place in reversed(range(at)):
            step = self.steps[place]
            if isinstance(step, Transfer) and step.over == "tp":
                rows = rows & ~self.runs[place]
            elif isinstance(step, Kernel):
                yield place, step, rows & step.rows
            if not rows.any():
                return

    # --- modes of the executor ----------------------------------------------------------------------------------------

    def _readers(self, at: int, gather: Transfer, rows: Rows) -> _Partners:
        """Return the products that read what a gather gives, up to the next collective of the same ranks."""
        found, any_rows = [], np.zeros_like(rows)
        for place in range(at + 1, len(self.steps)):
            step = self.steps[place]
            if isinstance(step, Transfer) and step.over == gather.over:
                rows = rows & ~self.runs[place]
            elif isinstance(step, Kernel) and step.reads and step.reads == gather.tensor:
                found.append((place, rows & step.rows))
                any_rows = any_rows | found[-1][1]
        return _Partners(found, any_rows)

    def _givers(self, at: int, scatter: Transfer, rows: Rows) -> _Partners:
        """Return the products whose results add up to what is scattered, since the last collective of the same
        ranks.
        """
        found: list[Taken] = []
        any_rows = np.zeros_like(rows)
        for place, kernel, here in self._since(at, rows):
            if kernel.gives and kernel.gives == scatter.tensor:
                found.insert(0, (place, here))
                any_rows = any_rows | here
        return _Partners(found, any_rows)

    def _site(self, at: int, transfer: Transfer, kernels: tuple[Kernel, ...], rows: Rows) -> list[Step]:
        """Return a pair in the mode that its site has under each plan."""
        context, op, size = self.context, transfer.op, transfer.nbytes
        scatters = op == "reduce_scatter"
        # Weight gradients are not part of a scatter's pair, except in `userbuffers`.
        weight_s = np.zeros(len(rows))
        for _, kernel, here in self._since(at, rows) if scatters else ():
            if kernel.weight:
                weight_s = weight_s + np.where(here, kernel.alone_s, 0.0)
        products = replace(Products().only(rows), weight_s=weight_s)
        for kernel in kernels:
            made = product_of(kernel.work, kernel.alone_s, kernel.launch_s, self.ranks, context.roofline)
            products = products.merged(made.only(kernel.rows))
        parts = parts_of(op, products, transfer.seconds, size, context.groups, context.roofline, self.ranks)
        together, issue = np.zeros(len(rows)), np.zeros(len(rows))
        regathers = scatters and transfer.backward
        for mode in context.table.overlap_modes:
            here = rows & (transfer.modes == mode)
            if mode in SITE_MODES and here.any():
                both = pair_s(mode, op, parts, products, regathers=regathers, site=context.site)
                together = np.where(here, both, together)
                issue = np.where(here, pair_issue_s(mode, op, parts, regathers=regathers, site=context.site), issue)
        return [self._both(transfer, kernels, rows, together, issue, np.zeros(len(rows)))]

    # --- torch's graph pass -------------------------------------------------------------------------------------------

    def _next(self, at: int, gather: Transfer, rows: Rows) -> _Partners:
        """Return the kernels after a gather, up to the first kernel that does not read it after one that did."""
        found: list[Taken] = []
        # Plans with any product so far, and with one that is not a weight gradient.
        met, products = np.zeros_like(rows), np.zeros_like(rows)
        for place in range(at + 1, len(self.steps)):
            step = self.steps[place]
            if not isinstance(step, Kernel):
                rows = rows & ~self.runs[place]
            elif step.product and step.weight:
                met = met | (rows & step.rows)
            else:
                reads = step.product and step.reads == gather.tensor
                rows = rows & ~(step.rows & (products if step.product else met)) if not reads else rows
                here = rows & step.rows
                found.append((place, here))
                if step.product:
                    met, products = met | here, products | here
            if not rows.any():
                break
        return _Partners(found, products)

    def _before(self, at: int, scatter: Transfer, rows: Rows) -> _Partners:
        """Return the consecutive products before a scatter, for plans in which exactly one since the last collective
        gives its tensor.
        """
        terms = np.zeros(len(rows))
        for _, kernel, here in self._since(at, rows):
            if kernel.gives == scatter.tensor:
                terms = terms + here
        found: list[Taken] = []
        some, rows = np.zeros_like(rows), rows & (terms == 1)
        for place in reversed(range(at)):
            step = self.steps[place]
            if not isinstance(step, Kernel):
                rows = rows & ~self.runs[place]
            elif not step.product:
                rows = rows & ~step.rows
            elif not step.weight:
                found.insert(0, (place, rows & step.rows))
                some = some | found[0][1]
            if not rows.any():
                break
        return _Partners(found, some)

    def _cut(self, at: int, transfer: Transfer, kernels: tuple[Kernel, ...], rows: Rows) -> list[Step]:
        """Return a pair of products divided into one piece per rank, and the step that adds up partial results."""
        del at
        size, ranks = transfer.nbytes, self.ranks
        copy_s = self._copy_s(size / ranks)
        in_pieces, issued = np.zeros(len(rows)), np.zeros(len(rows))
        for kernel in kernels:
            in_pieces = in_pieces + np.where(kernel.rows, self._pieces_s(kernel), 0.0)
            issued = issued + kernel.issue_s
        calls = (1 + extra_calls(ranks)) * transfer.call_s
        together = together_s(hop_s=copy_s, pieces_s=in_pieces, ranks=ranks)
        piece = launch_s(hop_s=copy_s, pieces_s=in_pieces, ranks=ranks)
        pair = self._both(transfer, kernels, rows, together, calls + ranks * issued, piece, copy_s)
        moved = partials_bytes(transfer.op, size, ranks)
        if not (rows & (moved > 0)).any():
            return [pair]
        rate = self.context.roofline.memory_bytes_per_s
        adding = Work(kind=WorkKind.MOVE, name="add_partials", bytes=moved, backward=transfer.backward)
        source = np.full(len(rows), DATASHEET)
        return [pair, Kernel(rows=rows & (moved > 0), work=adding, alone_s=moved / rate, source=source, launch_s=0.0)]

    def _copy_s(self, shard_bytes: Floats) -> Floats:
        """Return the seconds of a copy to a peer; by NCCL where no copy engine reaches it."""
        groups = self.context.groups
        pushed_s = groups.time_s("send_recv", "tp_pair", shard_bytes, algorithm="copy_engine")
        return np.where(np.isfinite(pushed_s), pushed_s, groups.time_s("send_recv", "tp_pair", shard_bytes))

    def _pieces_s(self, kernel: Kernel) -> Floats:
        """Return the seconds of a kernel; of a product, when divided by tokens into one piece per rank."""
        work, ranks = kernel.work, self.ranks
        if not kernel.product:
            return kernel.alone_s
        piece = replace(work, flops=work.flops / ranks, bytes=work.bytes / ranks, m=work.m / ranks)
        return np.asarray(ranks * self.context.roofline.seconds(piece))

    def _both(
        self,
        transfer: Transfer,
        kernels: tuple[Kernel, ...],
        rows: Rows,
        together_s: Floats,
        issue_s: Floats,
        piece_s: Floats,
        copy_s: Floats | None = None,
    ) -> Pair:
        if copy_s is None:
            copy_s = self._copy_s(transfer.nbytes / self.ranks)
        return Pair(
            rows=rows,
            transfer=transfer,
            kernels=kernels,
            together_s=np.broadcast_to(together_s, rows.shape),
            issue_s=np.broadcast_to(issue_s, rows.shape),
            copy_s=copy_s,
            piece_s=piece_s,
        )
