"""Costs of one block of the model on one rank: seconds of its forward and backward pass, bytes saved, host time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from simulator.analytical.clock_advance import NEVER, ClockAdvance, Waits, launching
from simulator.columns.plan_table import Floats
from simulator.kernels.efficiency import efficiency
from simulator.kernels.operators import OperatorSpec, Work, WorkKind
from simulator.kernels.roofline import FITTED, MEASURED
from simulator.passes.block import block_passes
from simulator.passes.steps import EXCHANGED_OVER, Kernel, Pair, Ring, Rows, Step, Transfer, Wait
from simulator.runtimes.model_operators import ModelOperators
from simulator.runtimes.parts import RecomputeSpec
from simulator.step.context import CostContext
from simulator.step.held import saved_bytes, tensors_bytes
from simulator.step.units import ENDS

# Share of the time of grouped products whose kernel is not described that scales with clocks as other products do:
# on a rested GPU grouped products take 0.86 of their sustained time (0.73 to 0.97, five networks on one H100, least
# where experts have few rows; examples/validation/experts.md), other products 0.69 (`rested` in efficiency.toml).
GROUPED_PRODUCTS = 0.45
# The axis to which a collective's time is added, where it is not that of its group.
ACCOUNTED = {"etp": "tp", "etp_ep": "ep"}


@dataclass(slots=True)
class PassCost:
    """One pass over a block: kernel seconds, exposed communication by axis, host seconds. Columns.

    `lost_s` is by how much concurrent communication delays kernels, which goes with the clocks as they do,
    `moved_bytes` what kernels read and write, `launches` their number. `behind_s` is when the device ends, counted from
    the host's start, if the device waits for nothing but the host; minus infinity where it does nothing. `waits` has
    the rows in which the host waits for the device within the pass.

    Layers with experts on several ranks exchange tokens twice. Between the two exchanges lie `experts_s` of kernels
    (`experts_weight_s` of them for weight gradients), which the host issues in `experts_host_s` (and
    `experts_weight_host_s`), and `experts_exposed_s` of other communication; `first_exchange_s` is the first exchange.
    `exchange_sms` is set for plans that hide exchanges behind another micro batch.
    """

    compute_s: Floats
    weight_s: Floats  # weight gradients, which schedules with a split backward pass delay
    host_s: Floats
    lost_s: Floats
    behind_s: Floats
    weight_host_s: Floats  # part of host_s: to issue weight gradients
    weight_behind_s: Floats  # as `behind_s`, of a pass of weight gradients alone
    moved_bytes: Floats
    launches: Floats
    measured_s: Floats | float = 0.0  # part of compute_s whose very operator was measured
    fitted_s: Floats | float = 0.0  # part of compute_s from a curve through measurements of other shapes
    products_s: Floats | float = 0.0  # part of compute_s that draws the power of matrix products
    clocked_s: Floats | float = 0.0  # part of compute_s whose time goes with the clocks as that of matrix products
    attention_s: Floats | float = 0.0  # and attention
    communication_s: dict[str, Floats] = field(default_factory=dict)
    waits: Waits | None = None
    experts_s: Floats | float = 0.0
    experts_exposed_s: Floats | float = 0.0
    experts_weight_s: Floats | float = 0.0
    experts_host_s: Floats | float = 0.0
    experts_weight_host_s: Floats | float = 0.0
    first_exchange_s: Floats | float = 0.0
    exchange_sms: Floats | float = 0.0

    @property
    def exposed_s(self) -> Floats:
        return sum(self.communication_s.values(), np.zeros_like(self.compute_s))

    @property
    def device_s(self) -> Floats:
        return self.compute_s + self.exposed_s

    def advance(self, *, host_s: Floats | float = 0.0) -> ClockAdvance:
        """Return how the pass moves the clocks of device and host, after `host_s` of Python."""
        plain = launching(self.device_s, self.behind_s + host_s, self.host_s + host_s)
        return plain if self.waits is None else self.waits.advance(plain, host_s=host_s)

    def expose(self, axis: str, seconds: Floats) -> None:
        self.communication_s[axis] = self.communication_s.get(axis, np.zeros_like(self.compute_s)) + seconds

    def without_exchanges(self, rows: Rows) -> PassCost:
        """Return the pass with its exchanges of tokens hidden in `rows`."""
        hidden = {axis: np.where(rows & (axis == "ep"), 0.0, s) for axis, s in self.communication_s.items()}
        return replace(self, communication_s=hidden)

    def with_transfers_of(self, other: PassCost, rows: NDArray[np.intp], clocks: Floats) -> PassCost:
        """Return the pass with what `other`, the plans `rows` at their `clocks`, leaves exposed and loses to
        transfers.
        """

        def changed(mine: Floats, theirs: Floats | float) -> Floats:
            found = mine.copy()
            found[rows] = theirs
            return found

        exposed = {
            axis: changed(seconds, other.communication_s.get(axis, 0.0))
            for axis, seconds in self.communication_s.items()
        }
        return replace(self, communication_s=exposed, lost_s=changed(self.lost_s, other.lost_s / clocks))

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


# The fields of a `PassCost` that have one number per plan.
AMOUNTS = tuple(f.name for f in fields(PassCost) if f.name not in {"communication_s", "waits"})


@dataclass(slots=True, kw_only=True)
class BlockMemory:
    """Bytes that the forward pass of a block keeps of one micro batch: `saved_bytes` under each recompute mode (the
    mean over layers where a mode wraps a share of them), `everything_bytes` without recomputation. `bounds`: the bytes
    belong to no mode but are no more than under any (`simulator.bounds.screening.SharedBlocks.keeping_least`).
    """

    saved_bytes: dict[str, Floats]
    everything_bytes: Floats
    bounds: bool = False

    def kept(self, which: NDArray[np.intp]) -> BlockMemory:
        """Return the memory of the rows `which`."""
        return BlockMemory(
            saved_bytes={mode: nbytes[which] for mode, nbytes in self.saved_bytes.items()},
            everything_bytes=self.everything_bytes[which],
            bounds=self.bounds,
        )


@dataclass(slots=True, kw_only=True)
class BlockCost(BlockMemory):
    """Costs of a block: its forward pass, its backward pass without recomputation, what each recompute mode runs again
    in a block that it wraps, and its memory. `inward` returns the backward pass without weight gradients, for schedules
    that split it. `hides`: in some plan transfers run next to kernels of the block.
    """

    forward: PassCost
    backward: PassCost
    inward: Callable[[], PassCost]
    recompute: dict[str, PassCost]
    hides: bool

    def with_transfers_of(self, other: BlockCost, rows: NDArray[np.intp], clocks: Floats) -> BlockCost:
        """Return these costs with what `other`, the plans `rows` at their `clocks`, leaves exposed and loses to
        transfers.
        """
        return replace(
            self,
            forward=self.forward.with_transfers_of(other.forward, rows, clocks),
            backward=self.backward.with_transfers_of(other.backward, rows, clocks),
            inward=cache(lambda: self.inward().with_transfers_of(other.inward(), rows, clocks)),
            recompute={
                mode: cost.with_transfers_of(other.recompute[mode], rows, clocks)
                for mode, cost in self.recompute.items()
            },
        )

    def take(self, which: NDArray[np.intp]) -> BlockCost:
        """Return the rows that `which` selects."""
        kept = self.kept(which)
        return BlockCost(
            forward=self.forward.take(which),
            backward=self.backward.take(which),
            inward=cache(lambda: self.inward().take(which)),
            recompute={mode: cost.take(which) for mode, cost in self.recompute.items()},
            hides=self.hides,
            saved_bytes=kept.saved_bytes,
            everything_bytes=kept.everything_bytes,
            bounds=self.bounds,
        )


def network_blocks(
    operators: ModelOperators,
    context: CostContext,
    recompute: Sequence[str],
    only: Collection[str] | None = None,
) -> dict[str, BlockCost]:
    """Return the costs of the model's blocks (`dense`, `moe`, layers in 16 bits, `embedding`, `head`), or `only` of
    some of them, with every recompute mode given for layers.
    """
    return {
        code: block_cost(some, context)
        if code in ENDS
        else block_cost(some, context.in_layers, {word: operators.modes(code)[word] for word in recompute})
        for code, some in operators.blocks.items()
        if only is None or code in only
    }


def block_cost(
    operators: Sequence[OperatorSpec], context: CostContext, modes: Mapping[str, RecomputeSpec] | None = None
) -> BlockCost:
    """Return the cost of a block, and what running it again costs under each of the recompute `modes` (layers only)."""
    modes = modes or {}
    passes = block_passes(operators, context, modes)
    everything = tensors_bytes(operators, context)
    return BlockCost(
        forward=pass_cost(passes.forward, context),
        backward=pass_cost(passes.backward, context),
        inward=cache(lambda: pass_cost([step for step in passes.backward if not of_weight(step)], context)),
        recompute={name: pass_cost(steps, context) for name, steps in passes.again.items()},
        hides=any(isinstance(step, (Ring, Pair)) for step in (*passes.forward, *passes.backward)),
        saved_bytes={
            name: mode.layers * saved_bytes(operators, mode, context) + (1 - mode.layers) * everything
            for name, mode in modes.items()
        }
        | ({} if modes else {"none": everything}),
        everything_bytes=everything,
    )


def of_weight(step: Step) -> bool:
    """Whether a step is a kernel that computes the gradient of a weight and nothing else."""
    return isinstance(step, Kernel) and step.weight


def pass_cost(steps: Iterable[Step], context: CostContext) -> PassCost:
    """Return the sum of the steps of a pass, for every plan."""
    fold = _Fold(context)
    for step in steps:
        match step:
            case Kernel():
                fold.kernel(step)
            case Transfer():
                fold.transfer(step)
            case Ring():
                fold.ring(step)
            case Pair():
                fold.pair(step)
            case Wait():
                fold.wait(step)
    return fold.done()


class _Fold:
    """Adds up the steps of one pass for all plans."""

    def __init__(self, context: CostContext) -> None:
        rows = len(context.table)
        self.context = context
        self.cost = PassCost(
            compute_s=np.zeros(rows),
            weight_s=np.zeros(rows),
            host_s=np.zeros(rows),
            lost_s=np.zeros(rows),
            behind_s=np.full(rows, -np.inf),
            weight_host_s=np.zeros(rows),
            weight_behind_s=np.full(rows, -np.inf),
            moved_bytes=np.zeros(rows),
            launches=np.zeros(rows),
        )
        self._waited = np.zeros((2, rows))  # seconds of device and host when the host last waited
        self._exchanged: tuple[Floats, Floats, Floats] | None = None  # amounts before the first exchange of tokens
        self._issued = np.zeros((2, rows))  # seconds of the host by then, all and for weight gradients

    def done(self) -> PassCost:
        if (waits := self.cost.waits) is not None:
            rest = launching(*self._since())
            self.cost.waits = replace(waits, after=waits.after.then(rest))
        return self.cost

    def _since(self) -> tuple[Floats, Floats, Floats]:
        """Return seconds since the host last waited: of the device, of the device behind the host, and of the host."""
        device_s, host_s = self._waited
        return self.cost.device_s - device_s, self.cost.behind_s, self.cost.host_s - host_s

    def wait(self, step: Wait) -> None:
        """Let the host wait for everything that it has launched."""
        cost, runs = self.cost, step.rows
        cost.host_s = cost.host_s + np.where(runs, step.call_s, 0.0)
        since, waits = self._since(), cost.waits
        nothing = np.zeros(len(runs))
        still = ClockAdvance(device_s=nothing, late_s=nothing + NEVER, host_s=nothing, waits_s=nothing + NEVER)
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

    def _as_products(self, work: Work) -> tuple[Floats | float, Floats | float]:
        """Return the power that a product draws and how far its time goes with the clocks, over those of others."""
        if not np.any(work.grouped_rows):
            return 1.0, 1.0
        roofline = self.context.roofline
        one = efficiency(roofline.gpu.architecture).grouped
        if one is None or not roofline.in_one_kernel(work):
            return GROUPED_PRODUCTS, GROUPED_PRODUCTS
        return one.power, one.clocks

    def kernel(self, step: Kernel, *, issued: bool = True) -> None:
        """Add a kernel; if it is `issued` by itself, also the host's time to launch it."""
        cost, work, seconds = self.cost, step.work, step.seconds
        cost.compute_s = cost.compute_s + seconds
        cost.measured_s = cost.measured_s + np.where(step.source == MEASURED, seconds, 0.0)
        cost.fitted_s = cost.fitted_s + np.where(step.source == FITTED, seconds, 0.0)
        if work.kind is WorkKind.MATMUL:
            power, clocks = self._as_products(work)
            cost.products_s = cost.products_s + seconds * power
            cost.clocked_s = cost.clocked_s + seconds * clocks
        elif work.kind is WorkKind.ATTENTION:
            cost.attention_s = cost.attention_s + seconds
        cost.moved_bytes = cost.moved_bytes + np.where(step.rows, work.bytes, 0.0)
        cost.launches = cost.launches + np.where(step.rows, work.launches, 0.0)
        if issued:
            cost.host_s = cost.host_s + step.issue_s
        ready_s = np.maximum(cost.behind_s, cost.host_s - self._waited[1])
        cost.behind_s = np.where(step.rows, ready_s + seconds, cost.behind_s)
        if step.weight:
            cost.weight_s = cost.weight_s + seconds
            cost.weight_host_s = cost.weight_host_s + step.issue_s
            ready_s = np.maximum(cost.weight_behind_s, cost.weight_host_s)
            cost.weight_behind_s = np.where(step.rows, ready_s + seconds, cost.weight_behind_s)

    def transfer(self, step: Transfer) -> None:
        cost = self.cost
        if step.over in EXCHANGED_OVER and step.op == "all_to_all":
            self._exchange(step)
        cost.host_s = cost.host_s + np.where(step.rows, step.call_s, 0.0)
        self._expose(step.over, step.seconds)

    def ring(self, step: Ring) -> None:
        if step.kernel is not None:
            self.kernel(step.kernel)
        self._expose(step.over, step.exposed_s)
        self.cost.lost_s = self.cost.lost_s + step.lost_s
        self.cost.host_s = self.cost.host_s + step.issue_s

    def pair(self, step: Pair) -> None:
        for kernel in step.kernels:
            self.kernel(kernel, issued=False)
        self.cost.host_s = self.cost.host_s + np.where(step.rows, step.issue_s, 0.0)
        self._expose(step.transfer.over, step.exposed_s)

    def _exchange(self, step: Transfer) -> None:
        """Note the kernels and communication between the two exchanges of tokens; transfers in a row are one."""
        cost = self.cost
        if self.context.table.paired.any():
            held = self.context.groups.load(step.op, step.over, step.nbytes)[0]
            cost.exchange_sms = np.maximum(cost.exchange_sms, held)
        others_s = cost.exposed_s - cost.communication_s.get("ep", 0.0)
        there = (cost.compute_s, others_s, cost.weight_s)
        if self._exchanged is None or all(map(np.array_equal, self._exchanged, there)):
            self._exchanged, cost.first_exchange_s = there, cost.first_exchange_s + step.seconds
            self._issued = np.stack([cost.host_s, cost.weight_host_s])
        else:
            cost.experts_s, cost.experts_exposed_s, cost.experts_weight_s = (
                now - before for now, before in zip(there, self._exchanged, strict=True)
            )
            issued = np.stack([cost.host_s, cost.weight_host_s]) - self._issued
            cost.experts_host_s, cost.experts_weight_host_s = issued

    def _expose(self, axis: str, seconds: Floats) -> None:
        """Add communication along `axis` that nothing hides."""
        cost = self.cost
        cost.expose(ACCOUNTED.get(axis, axis), seconds)
        after = seconds > 0
        ready_s = np.maximum(cost.behind_s, cost.host_s - self._waited[1])
        cost.behind_s = np.where(after, ready_s + seconds, cost.behind_s)
