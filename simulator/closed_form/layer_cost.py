"""What one block of the network costs on one rank: seconds forward and backward, bytes kept, host time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from simulator.closed_form.pace import NEVER, Pace, Waits, launching
from simulator.closed_form.pieces import WEIGHT_GRADIENT, copy_hop_s, ends_of, pieces_s
from simulator.columns.plan_table import Floats
from simulator.kernels.operators import (
    OperatorSpec,
    Work,
    WorkKind,
    active_rows,
    backward_work,
    forward_work,
)
from simulator.kernels.roofline import FITTED, MEASURED
from simulator.overlap.site_costs import SitePairs
from simulator.overlap.torch_async import ASYNC, extra_calls, partials_bytes, together_s
from simulator.runtimes.recomputation import run_again
from simulator.step.context import CostContext
from simulator.step.held import saved_bytes, tensors_bytes

Rows = NDArray[np.bool_]


@dataclass(slots=True)
class PassCost:
    """One pass over a block: kernel seconds, exposed communication by axis, host seconds. Columns.

    `hidden_s` is communication that kernels hide while it takes SMs from them, `moved_bytes` what kernels read and write.
    `behind_s` is when the device ends what comes after the first collective, counted from the host's start, where it waits
    for the host alone: minus infinity where nothing comes after it. `launches` is how many kernels. `waits`: where the host waits for the device on its way.

    Of a layer with experts on several ranks: seconds of kernels between its two exchanges of tokens, and of other communication
    there, of kernels the gradients of weights, and the first exchange; the SMs that exchanges hold, of plans that run others beside.
    """

    compute_s: Floats
    weight_s: Floats  # weight gradients, which split backwards put off
    host_s: Floats
    hidden_s: Floats
    behind_s: Floats
    weight_host_s: Floats  # of host_s, what issues weight gradients
    moved_bytes: Floats
    launches: Floats
    measured_s: Floats | float = 0.0  # of compute_s, what rests on the very operator measured
    fitted_s: Floats | float = 0.0  # and what on a curve through others
    products_s: Floats | float = 0.0  # of compute_s, matrix products
    attention_s: Floats | float = 0.0  # and attention
    communication_s: dict[str, Floats] = field(default_factory=dict)
    waits: Waits | None = None
    experts_s: Floats | float = 0.0
    experts_exposed_s: Floats | float = 0.0
    experts_weight_s: Floats | float = 0.0
    first_exchange_s: Floats | float = 0.0
    exchange_sms: Floats | float = 0.0

    @property
    def exposed_s(self) -> Floats:
        return sum(self.communication_s.values(), np.zeros_like(self.compute_s))

    @property
    def device_s(self) -> Floats:
        return self.compute_s + self.exposed_s

    def pace(self, *, host_s: Floats | float = 0.0) -> Pace:
        """Return how the pass moves the clocks of device and host, with `host_s` of Python before it."""
        plain = launching(self.device_s, self.behind_s + host_s, self.host_s + host_s)
        return plain if self.waits is None else self.waits.pace(plain, host_s=host_s)

    def expose(self, axis: str, seconds: Floats) -> None:
        self.communication_s[axis] = self.communication_s.get(axis, np.zeros_like(self.compute_s)) + seconds

    def without_exchanges(self, rows: Rows) -> PassCost:
        """Return the pass with its exchanges of tokens hidden in some rows."""
        hidden = {axis: np.where(rows & (axis == "ep"), 0.0, s) for axis, s in self.communication_s.items()}
        return replace(self, communication_s=hidden)

    def of_share(self, layers: float) -> PassCost:
        """Return the average over layers of which a share runs this pass."""
        if layers == 1.0:
            return self
        values = {name: getattr(self, name) for name in AMOUNTS}
        communication_s = {axis: layers * seconds for axis, seconds in self.communication_s.items()}
        waits = None if self.waits is None else self.waits.times(layers)
        return PassCost(
            **{name: layers * value for name, value in values.items()}, communication_s=communication_s, waits=waits
        )

    def take(self, which: NDArray[np.intp]) -> PassCost:
        """Return the rows that `which` selects."""
        shape = self.compute_s.shape
        values = {name: getattr(self, name) for name in AMOUNTS}
        return PassCost(
            **{
                name: (value if value.shape == shape else np.broadcast_to(value, shape))[which]
                if isinstance(value, np.ndarray)
                else value
                for name, value in values.items()
            },
            communication_s={axis: seconds[which] for axis, seconds in self.communication_s.items()},
            waits=None if self.waits is None else self.waits.take(which),
        )


# What a `PassCost` has one number of for every plan.
AMOUNTS = tuple(f.name for f in fields(PassCost) if f.name not in {"communication_s", "waits"})


@dataclass(slots=True)
class BlockCost:
    """Forward, backward without recomputation, and for each recompute mode what runs again and what is kept.

    Bytes are of one micro batch. A mode that wraps a share of the layers is averaged over layers. `bounds`: of no mode, but
    no more than under any (`simulator.bounds.screening.SharedBlocks.keeping_least`).
    """

    forward: PassCost
    backward: PassCost
    recompute: dict[str, PassCost]
    saved_bytes: dict[str, Floats]
    everything_bytes: Floats  # what it would save without recomputation
    bounds: bool = False

    def take(self, which: NDArray[np.intp]) -> BlockCost:
        """Return the rows that `which` selects."""
        return BlockCost(
            forward=self.forward.take(which),
            backward=self.backward.take(which),
            recompute={mode: cost.take(which) for mode, cost in self.recompute.items()},
            saved_bytes={mode: nbytes[which] for mode, nbytes in self.saved_bytes.items()},
            everything_bytes=self.everything_bytes[which],
            bounds=self.bounds,
        )


def block_cost(operators: Sequence[OperatorSpec], context: CostContext, recompute: Sequence[str] = ()) -> BlockCost:
    """Return the cost of a block, and of running it again under each of the modes `recompute` (layers only)."""
    forward, backward = PassWriter(context), PassWriter(context)
    modes = {name: context.spec.recompute[name] for name in recompute}
    again = {name: PassWriter(context) for name, mode in modes.items() if mode.recomputes}
    twice = {name: run_again(operators, modes[name], context.runtime, context.table) for name in again}
    for i, operator in enumerate(operators):
        works = forward_work(operator, context.sizes, context.dtype_bytes)
        forward.add(works, active_rows(operator, context.table), operator)
        for name, writer in again.items():
            if twice[name][i].any():
                writer.add(works, 1.0 * twice[name][i], operator)
    for operator in reversed(operators):
        works = backward_work(operator, context.sizes, context.dtype_bytes)
        backward.add(works, active_rows(operator, context.table), operator)
    everything = tensors_bytes(operators, context)
    return BlockCost(
        forward=forward.done(),
        backward=backward.done(),
        recompute={name: writer.done().of_share(modes[name].layers) for name, writer in again.items()},
        saved_bytes={
            name: mode.layers * saved_bytes(operators, mode, context) + (1 - mode.layers) * everything
            for name, mode in modes.items()
        }
        | ({} if modes else {"none": everything}),
        everything_bytes=everything,
    )


class PassWriter:
    """Adds up one pass, operator by operator, and pairs tensor-parallel collectives with the products beside them.

    Pairs in a mode of our executor are `SitePairs`'s. With torch's asynchronous tensor parallelism a gather runs beside
    the products that follow it, a reduce-scatter beside those just before it; a product serves one collective. All
    columns, since plans differ in which operators run.
    """

    def __init__(self, context: CostContext) -> None:
        rows = len(context.table)
        self.context = context
        self.cost = PassCost(
            compute_s=np.zeros(rows),
            weight_s=np.zeros(rows),
            host_s=np.zeros(rows),
            hidden_s=np.zeros(rows),
            behind_s=np.full(rows, -np.inf),
            weight_host_s=np.zeros(rows),
            moved_bytes=np.zeros(rows),
            launches=np.zeros(rows),
        )
        self._issued = np.full(rows, NEVER)  # when the host issued the kernels since the last collective
        self._waited = np.zeros((2, rows))  # seconds of device and host when the host last waited
        self._ranks = context.table["tp"]
        self._overlaps = bool(context.table.overlap_modes)
        self._matches = ASYNC in context.table.overlap_modes
        self._sites = SitePairs(context.groups, context.roofline, context.site, context.spec.host.collective_s)
        self._open = np.zeros(rows, dtype=bool)  # a gather waits for the end of its products
        self._seen = np.zeros(rows, dtype=bool)  # and has met one
        self._gathered = ""  # the tensor of the last gather
        self._whole = np.zeros(rows)
        self._bytes = np.zeros(rows)
        self._beside = np.zeros((3, rows))  # its products: seconds at once and in pieces, and the host's for one launch
        self._tail = np.zeros((3, rows))  # products at the end of what has been added, claimed by no gather
        self._results: list[tuple[str, Rows]] = []  # what products since the last collective gave, and in which rows
        self._exchanged: tuple[Floats, Floats, Floats] | None = None  # what there was at the first exchange of tokens

    def add(self, works: Sequence[Work], active: Floats, operator: OperatorSpec) -> None:
        for work in works:
            if work.kind is WorkKind.COLLECTIVE:
                self._collective(work, active, operator)
            elif work.kind is WorkKind.WAIT:
                self._wait(work, active)
            else:
                self._kernel(work, active, operator)
                self._results.append((ends_of(work, operator)[1], active > 0))

    def done(self) -> PassCost:
        self._close(self._open)
        self._account(self._sites.end_gather())
        if (waits := self.cost.waits) is not None:
            rest = launching(*self._since())
            self.cost.waits = replace(waits, after=waits.after.then(rest))
        return self.cost

    def _since(self) -> tuple[Floats, Floats, Floats]:
        """Return seconds of the device, of the device behind the host and of the host since it last waited."""
        device_s, host_s = self._waited
        return self.cost.device_s - device_s, self.cost.behind_s, self.cost.host_s - host_s

    def _wait(self, work: Work, active: Floats) -> None:
        """Have the host wait for all that it has launched."""
        cost, runs = self.cost, active > 0
        cost.host_s = cost.host_s + active * work.launches * self.context.spec.host.launch_s
        since, waits = self._since(), cost.waits
        nothing = np.zeros(len(runs))
        still = Pace(device_s=nothing, late_s=nothing + NEVER, host_s=nothing, waits_s=nothing + NEVER)
        if waits is None:
            cost.waits = Waits(rows=runs, before_s=since, after=still)
        else:
            device_s, behind_s, host_s = (
                np.where(waits.rows, before, now) for before, now in zip(waits.before_s, since, strict=True)
            )
            after = waits.after.then(launching(*since)).waited().where(runs & waits.rows, waits.after)
            cost.waits = Waits(rows=waits.rows | runs, before_s=(device_s, behind_s, host_s), after=after)
        self._waited = np.where(runs, np.stack([cost.device_s, cost.host_s]), self._waited)
        cost.behind_s = np.where(runs, NEVER, cost.behind_s)
        self._issued = np.where(runs, NEVER, self._issued)

    def _kernel(self, work: Work, active: Floats, operator: OperatorSpec) -> None:
        cost, host = self.cost, self.context.spec.host
        alone, source = self.context.roofline.seconds_and_source(work)
        seconds = active * alone
        cost.compute_s = cost.compute_s + seconds
        cost.measured_s = cost.measured_s + np.where(source == MEASURED, seconds, 0.0)
        cost.fitted_s = cost.fitted_s + np.where(source == FITTED, seconds, 0.0)
        if work.kind is WorkKind.MATMUL:
            cost.products_s = cost.products_s + seconds
        elif work.kind is WorkKind.ATTENTION:
            cost.attention_s = cost.attention_s + seconds
        cost.moved_bytes = cost.moved_bytes + active * work.bytes
        cost.launches = cost.launches + active * work.launches
        cost.behind_s = np.maximum(cost.behind_s, self._issued) + seconds
        launch = host.backward_launch_s if work.backward else host.launch_s
        eager = not self.context.runtime.compile
        launch_s = np.where((self._ranks > 1) & eager, host.dtensor_launch_s, launch)
        issued_s = active * work.launches * launch_s
        cost.host_s = cost.host_s + issued_s
        if work.name.endswith(WEIGHT_GRADIENT):
            cost.weight_s = cost.weight_s + seconds
            cost.weight_host_s = cost.weight_host_s + issued_s
        runs = active > 0
        ends = ends_of(work, operator)
        self._sites.product(work, ends, seconds, issued_s, active)
        if not self._matches:
            return
        if work.kind is WorkKind.MATMUL:
            if work.name.endswith(WEIGHT_GRADIENT):
                return
            product = np.stack([seconds, active * pieces_s(work, self.context), issued_s])
            if ends[0] != self._gathered:
                self._close(self._open & self._seen & runs)
            self._seen = self._seen | (self._open & runs)
            self._beside = self._beside + np.where(self._open, product, 0.0)
            self._tail = np.where(self._open, self._tail, self._tail + product)
            return
        self._close(self._open & self._seen & runs)
        self._beside = self._beside + np.where(self._open & runs, np.stack([seconds, seconds, issued_s]), 0.0)
        self._end_tail(runs)

    def _collective(self, work: Work, active: Floats, operator: OperatorSpec) -> None:
        cost, context = self.cost, self.context
        runs = (active > 0) & (context.groups.extent(work.over)[0] > 1)
        if work.collective == "ring":
            exposed, hidden = self._ring(work, operator)
            self._expose(work.over, active * exposed)
            cost.hidden_s = cost.hidden_s + active * hidden
            hops = np.where(runs, context.table["cp"] - 1, 0.0)
            launch = context.spec.host.launch_s
            cost.host_s = cost.host_s + active * hops * (2 * context.spec.host.collective_s + launch)
            return
        between = f"{work.over}_pair" if work.collective == "send_recv" else work.over
        seconds = active * context.groups.time_s(work.collective, between, work.bytes)
        if work.over == "ep":
            self._exchange(work, seconds)
        if work.over != "tp" or not self._overlaps:
            cost.host_s = cost.host_s + active * context.spec.host.collective_s * runs
            self._expose(work.over, seconds)
            self._close(self._open & runs)
            self._end_tail(runs)
            return
        paired, mode = self._sites.takes(operator.site, runs)
        self._pair_sites(work, operator, paired, mode, seconds, runs)
        seconds = np.where(paired, 0.0, seconds)
        cost.host_s = cost.host_s + active * context.spec.host.collective_s * (runs & ~paired)
        if work.collective != "reduce_scatter":
            self._results = [(tensor, r & ~runs) for tensor, r in self._results]
        self._close(self._open & runs)
        matched = runs & (mode == ASYNC)
        size = np.broadcast_to(np.asarray(work.bytes, dtype=np.float64), runs.shape)
        if work.collective == "all_gather":
            self._expose("tp", np.where(matched, 0.0, seconds))
            self._open = self._open | matched
            self._gathered = operator.tensor
            self._seen = self._seen & ~matched
            self._whole, self._bytes = np.where(matched, seconds, self._whole), np.where(matched, size, self._bytes)
            self._beside = np.where(matched, 0.0, self._beside)
        elif work.collective == "reduce_scatter":
            terms = sum(
                (r.astype(int) for tensor, r in self._results if tensor == operator.tensor), np.zeros(len(runs))
            )
            hides = matched & (terms == 1)
            self._pair(work.collective, seconds, size, np.where(hides, self._tail, 0.0), active)
            self._results = [(tensor, r & ~runs) for tensor, r in self._results]
        else:
            self._expose("tp", seconds)
        self._end_tail(runs)

    def _exchange(self, work: Work, seconds: Floats) -> None:
        """Note what lies between the two exchanges of tokens."""
        cost = self.cost
        if self.context.table.paired.any():
            size = np.broadcast_to(np.asarray(work.bytes, dtype=np.float64), seconds.shape)
            cost.exchange_sms = self.context.groups.load(work.collective, work.over, size)[0]
        others_s = cost.exposed_s - cost.communication_s.get("ep", 0.0)
        there = (cost.compute_s, others_s, cost.weight_s)
        if self._exchanged is None:
            self._exchanged, cost.first_exchange_s = there, seconds
        else:
            cost.experts_s, cost.experts_exposed_s, cost.experts_weight_s = (
                now - before for now, before in zip(there, self._exchanged, strict=True)
            )

    def _pair_sites(
        self, work: Work, operator: OperatorSpec, paired: Rows, mode: NDArray[np.str_], seconds: Floats, runs: Rows
    ) -> None:
        """Have a tensor-parallel collective end what came before it, and begin or end a pair where it is one."""
        self._account(self._sites.end_gather(None if work.collective == "all_gather" else runs))
        size = np.broadcast_to(np.asarray(work.bytes, dtype=np.float64), runs.shape)
        if work.collective == "all_gather":
            self._sites.gather(operator.tensor, mode, seconds, size, paired)
        elif work.collective == "reduce_scatter":
            backward = work.backward
            self._account(self._sites.scatter(operator.tensor, mode, seconds, size, paired, backward=backward))
        self._sites.forget(runs)

    def _account(self, found: tuple[Floats, Floats] | None) -> None:
        if found is not None:
            self.cost.host_s = self.cost.host_s + found[1]
            self._expose("tp", found[0])

    def _end_tail(self, rows: Rows) -> None:
        self._tail = np.where(rows, 0.0, self._tail)

    def _ring(self, work: Work, operator: OperatorSpec) -> tuple[Floats, Floats]:
        """Return (exposed, hidden) seconds of shards passed round while attention works on the one before.

        Forward the attention kernel has just been added, backward it comes next; either way its work is the same.
        """
        ranks = self.context.groups.extent(work.over)[0]
        hop = self.context.groups.time_s("send_recv", f"{work.over}_pair", work.bytes / ranks)
        attention = self.context.roofline.seconds(attention_work(operator.hidden_by, self.context, work.backward))
        exposed = (ranks - 1) * np.maximum(hop - attention / ranks, 0.0)
        return exposed, (ranks - 1) * hop - exposed

    def _close(self, rows: Rows) -> None:
        """End the products beside the gathers of `rows`."""
        if rows.any():
            active = rows.astype(np.float64)
            self._pair("all_gather", self._whole * active, self._bytes, self._beside * active, active)
            self._open = self._open & ~rows

    def _pair(self, op: str, whole_s: Floats, nbytes: Floats, products: Floats, active: Floats) -> None:
        """Add what is left of a collective that torch's graph pass hides behind products, where there are any."""
        product_s, in_pieces_s, issue_s = products
        hop_s = copy_hop_s(nbytes, self.context)
        together = together_s(hop_s=hop_s, pieces_s=in_pieces_s, ranks=self._ranks)
        paired = product_s > 0
        exposed = np.where(paired, np.maximum(together - product_s, 0.0), whole_s)
        moved = partials_bytes(op, nbytes, self._ranks)
        adding_s = np.where(paired, moved / self.context.roofline.memory_bytes_per_s, 0.0) * (active > 0)
        self.cost.compute_s = self.cost.compute_s + adding_s
        calls = extra_calls(self._ranks)
        issued_s = calls * self.context.spec.host.collective_s + (self._ranks - 1) * issue_s
        self.cost.host_s = self.cost.host_s + np.where(paired & (active > 0), issued_s, 0.0)
        self._expose("tp", exposed * (active > 0))

    def _expose(self, axis: str, seconds: Floats) -> None:
        """Add communication that nothing hides; kernels behind it are issued after it."""
        cost = self.cost
        cost.expose(axis, seconds)
        after = seconds > 0
        issued_s = cost.host_s - self._waited[1]
        cost.behind_s = np.where(after, np.maximum(cost.behind_s, issued_s) + seconds, cost.behind_s)
        self._issued = np.where(after, issued_s, self._issued)


def attention_work(name: str, context: CostContext, backward: bool) -> Work:
    """Return the fused attention kernel called `name`."""
    spec = OperatorSpec(name=name, attention="flash")
    works = (backward_work if backward else forward_work)(spec, context.sizes, context.dtype_bytes)
    return works[0]
