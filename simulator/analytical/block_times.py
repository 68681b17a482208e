"""Times of passes of units and of concurrent transfers, for all plans of a table, as `RankTimeline` asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from simulator.analytical.clock_advance import ClockAdvance, launching
from simulator.analytical.layer_cost import BlockCost, PassCost
from simulator.collectives.group_times import GroupTimes
from simulator.columns.plan_columns import words
from simulator.columns.plan_table import Floats
from simulator.kernels.efficiency import efficiency
from simulator.kernels.roofline import Packing
from simulator.overlap.combined import DELAY_WGRAD, LayerParts, hidden_lost_and_stalled_s
from simulator.step.context import CostContext
from simulator.step.fsdp_copies import TAKEN
from simulator.step.host import QUEUED_LAUNCHES, again_host_s, unit_host_s
from simulator.step.offload import copy_bytes_per_s, update_bytes_per_s
from simulator.step.rank import Pass, Value
from simulator.step.units import Unit
from simulator.step.update import update_rate

TINY = 1e-12  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """One pass of a unit. `device_s` is `kernels_s` plus `exposed_s` communication; `advance` also has the host's
    times. `waits`: in some row the host waits for the device within the pass. `ahead_s` is how far the host can be
    ahead of the device when the stream's queue is full of such passes.
    """

    kernels_s: Floats
    exposed_s: Floats
    advance: ClockAdvance
    bytes_per_s: Floats
    launches: Floats
    parts: dict[str, Floats]
    device_s: Floats = field(init=False)
    ahead_s: Floats = field(init=False)
    waits: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device_s", self.kernels_s + self.exposed_s)
        object.__setattr__(self, "ahead_s", QUEUED_LAUNCHES * self.device_s / np.maximum(self.launches, 1.0))
        object.__setattr__(self, "waits", bool(np.isfinite(self.advance.waits_s).any()))

    def hiding(self, axis: str, seconds: Floats, lost: Floats, stalled: Floats) -> PassTimes:
        """Return the pass with `seconds` of its communication along `axis` hidden behind kernels, which then take
        `lost` longer, and the device waiting for the host for `stalled`.
        """
        advance = self.advance
        parts = {axis: self.parts[axis] - seconds, "contention": self.parts["contention"] + lost}
        device_s = np.maximum(advance.device_s, self.device_s + stalled) - seconds + lost
        return PassTimes(
            kernels_s=self.kernels_s + lost,
            exposed_s=self.exposed_s - seconds,
            advance=ClockAdvance(
                device_s=device_s,
                late_s=np.maximum(advance.late_s - seconds + lost, device_s),
                host_s=advance.host_s,
                waits_s=advance.waits_s - seconds + lost,
            ),
            bytes_per_s=self.bytes_per_s,
            launches=self.launches,
            parts=self.parts | parts,
        )


class BlockTimes:
    """Passes of units, from the costs of their blocks. Kernel times are multiplied by `clocks`."""

    def __init__(self, context: CostContext, blocks: Mapping[str, BlockCost], clocks: Floats) -> None:
        self.context, self.blocks, self.clocks = context, blocks, clocks
        self.rows = len(context.table)
        self._known: dict[tuple[object, ...], PassTimes] = {}

    def of(self, unit: Unit, which: Pass, *, paired: bool = False) -> PassTimes:
        """Return the times of a pass of a unit; `paired`: while a layer of the same kind runs for another micro
        batch.
        """
        paired = paired and unit.sparse and which in {Pass.FORWARD, Pass.BACKWARD}
        key = (unit.code, which, unit.wrapped, id(unit.words) if unit.wrapped else 0, paired)
        if key not in self._known:
            self._known[key] = self._paired(unit, which) if paired else self._times(unit, which)
        return self._known[key]

    def _paired(self, unit: Unit, which: Pass) -> PassTimes:
        """Return a pass of a layer with experts whose token exchanges run while a layer of another micro batch
        computes.
        """
        block = self.blocks[unit.code]
        forward, backward = self.of(unit, Pass.FORWARD), self.of(unit, Pass.BACKWARD)
        waits = np.zeros(self.rows, dtype=bool) if block.forward.waits is None else block.forward.waits.rows
        parts = self._parts(forward, block.forward, waits), self._parts(backward, block.backward, waits)
        later = str(self.context.table.ep_overlap[0]) == DELAY_WGRAD
        held = block.forward.exchange_sms / self.context.roofline.gpu.sm_count
        hidden, lost, stalled = hidden_lost_and_stalled_s(*parts, held, weights_later=later)
        times, own = (forward, parts[0]) if which is Pass.FORWARD else (backward, parts[1])
        share = own.moved_s / np.maximum(parts[0].moved_s + parts[1].moved_s, TINY)
        return times.hiding("ep", share * hidden, share * lost, share * stalled)

    def _parts(self, times: PassTimes, cost: PassCost, waits: NDArray[np.bool_]) -> LayerParts:
        """Return the parts of a pass; the host's in the rows where it `waits` in forward passes."""
        experts = self.clocks * cost.experts_s + cost.experts_exposed_s
        moved = cost.communication_s.get("ep", np.zeros(self.rows))
        weight = self.clocks * cost.experts_weight_s
        around = times.device_s - moved - experts
        issues = waits.astype(np.float64)
        before_s, before_host_s = np.zeros(self.rows), np.zeros(self.rows)
        if cost.waits is not None:
            before_s = issues * np.minimum(self.clocks * cost.waits.before_s[0], around)
            before_host_s = issues * (cost.waits.before_s[2] + times.advance.host_s - cost.host_s)
        return LayerParts(
            around_s=around,
            experts_s=experts,
            around_weight_s=self.clocks * cost.weight_s - weight,
            experts_weight_s=weight,
            first_s=np.asarray(cost.first_exchange_s + np.zeros(self.rows)),
            second_s=moved - cost.first_exchange_s,
            around_host_s=issues * (times.advance.host_s - cost.experts_host_s),
            experts_host_s=issues * cost.experts_host_s,
            around_weight_host_s=issues * (cost.weight_host_s - cost.experts_weight_host_s),
            experts_weight_host_s=issues * cost.experts_weight_host_s,
            before_wait_s=before_s,
            before_wait_host_s=before_host_s,
        )

    def _times(self, unit: Unit, which: Pass) -> PassTimes:
        block, (forward_s, backward_s) = self.blocks[unit.code], unit_host_s(self.context, unit)
        if which is Pass.FORWARD:
            return self._timed(block.forward, forward_s)
        if which is Pass.WEIGHT:
            weight = self.clocks * block.backward.weight_s
            behind = block.backward.weight_behind_s + np.minimum(weight - block.backward.weight_s, 0.0)
            return PassTimes(
                kernels_s=weight,
                exposed_s=np.zeros(self.rows),
                advance=launching(weight, behind, block.backward.weight_host_s),
                bytes_per_s=_rate(block.backward.moved_bytes, block.backward.compute_s),
                launches=block.backward.launches * weight / np.maximum(self.clocks * block.backward.device_s, TINY),
                parts={"compute": weight},
            )
        return self._backward(unit, block, block.backward if which is Pass.BACKWARD else block.inward(), backward_s)

    def _backward(self, unit: Unit, block: BlockCost, cost: PassCost, host_s: Floats) -> PassTimes:
        """Return a backward pass of a `cost`, preceded by what each plan's recompute mode runs again."""
        plain = self._timed(cost, host_s)
        if not unit.wrapped:
            return plain
        again_s = again_host_s(self.context.spec, self.context.table, sparse=unit.sparse)
        backward = self._timed(cost, host_s + again_s)
        result = plain
        for word in words(unit.words):
            if word in block.recompute:
                again = self._timed(block.recompute[word], np.zeros(self.rows))
                result = _chosen(unit.words == word, _one_after_other(again, backward), result)
        return result

    def _timed(self, cost: PassCost, host_s: Floats) -> PassTimes:
        """Return a pass with `host_s` of Python before it."""
        lost = self.clocks * cost.lost_s
        kernels = self.clocks * cost.compute_s
        saved = kernels - cost.compute_s  # seconds added to the kernels by their clocks
        advance = cost.advance(host_s=host_s)
        device_s = advance.device_s + saved + lost
        return PassTimes(
            kernels_s=kernels + lost,
            exposed_s=cost.exposed_s,
            advance=ClockAdvance(
                device_s=device_s,
                late_s=np.maximum(advance.late_s + np.minimum(saved, 0.0), device_s),
                host_s=advance.host_s,
                waits_s=advance.waits_s + saved + lost,
            ),
            bytes_per_s=_rate(cost.moved_bytes, cost.compute_s),
            launches=cost.launches,
            parts={"compute": kernels, "contention": lost, **cost.communication_s},
        )


def _rate(moved: Floats, seconds: Floats) -> Floats:
    return np.asarray(moved / np.maximum(seconds, TINY))


def _one_after_other(again: PassTimes, then: PassTimes) -> PassTimes:
    """Return recomputation followed by the backward pass, as one pass."""
    kernels = again.kernels_s + then.kernels_s
    moved = again.bytes_per_s * again.kernels_s + then.bytes_per_s * then.kernels_s
    parts = {"recompute": again.parts["compute"]}
    for part in {*again.parts, *then.parts} - {"compute"}:
        parts[part] = again.parts.get(part, 0.0) + then.parts.get(part, np.zeros(1))
    return PassTimes(
        kernels_s=kernels,
        exposed_s=again.exposed_s + then.exposed_s,
        advance=again.advance.then(then.advance),
        bytes_per_s=_rate(moved, kernels),
        launches=again.launches + then.launches,
        parts=parts | {"compute": then.parts["compute"]},
    )


def _chosen(here: object, one: PassTimes, other: PassTimes) -> PassTimes:
    """Return `one` in the rows `here` and `other` in the rest."""

    def either(a: Value, b: Value) -> Floats:
        return np.where(np.asarray(here), a, b)

    names = {*one.parts, *other.parts}
    return PassTimes(
        kernels_s=either(one.kernels_s, other.kernels_s),
        exposed_s=either(one.exposed_s, other.exposed_s),
        advance=one.advance.where(np.asarray(here), other.advance),
        bytes_per_s=either(one.bytes_per_s, other.bytes_per_s),
        launches=either(one.launches, other.launches),
        parts={name: either(one.parts.get(name, 0.0), other.parts.get(name, 0.0)) for name in sorted(names)},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """A collective that runs while kernels do: its seconds alone, the SMs it holds, and the bytes of memory it moves
    per second.

    It uses a share `asks` of the bandwidth out of a GPU: of its port, or of its NIC where the collective goes `across`
    nodes.
    """

    seconds: Floats
    host_s: Floats
    sms: Floats
    bytes_per_s: Floats
    across: NDArray[np.bool_]
    asks: Floats
    runs: bool  # in any row
    everywhere: bool  # in every row
    slowed: float = 1.0  # factor of its time while kernels run

    def over(self, before: Background) -> Background:
        """Return this collective in the rows where it runs, and `before` in the others."""
        here = self.seconds > 0
        return Background(
            seconds=np.where(here, self.seconds, before.seconds),
            host_s=self.host_s,
            runs=True,
            everywhere=before.everywhere,
            sms=np.where(here, self.sms, before.sms),
            bytes_per_s=np.where(here, self.bytes_per_s, before.bytes_per_s),
            across=np.where(here, self.across, before.across),
            asks=np.where(here, self.asks, before.asks),
            slowed=self.slowed,
        )

    def speeds_beside(self, other: Background) -> tuple[Floats, Floats]:
        """Return the shares of their speeds that this collective and another keep while both run. Where they share a
        port or NIC that is too narrow for both, each gets half of it, and what the other leaves of its half.
        """
        crowded = (self.across == other.across) & (self.asks + other.asks > 1.0)
        mine, theirs = (
            np.maximum(1.0 - two.asks, 0.5) / np.maximum(one.asks, 0.5) for one, two in ((self, other), (other, self))
        )
        mine, theirs = np.minimum(mine, 1.0), np.minimum(theirs, 1.0)
        return np.where(crowded, mine, 1.0), np.where(crowded, theirs, 1.0)

    def stretch(self, timed: PassTimes | Copied, traffic: TrafficTimes) -> Stretch:
        """Return how much compute and this collective slow each other down while both run; copies use no SMs."""
        sms = 1.0 if isinstance(timed, Copied) else 1.0 - self.sms / traffic.sms
        memory = (traffic.memory_bytes_per_s - self.bytes_per_s) / np.maximum(timed.bytes_per_s, 1.0)
        speed = np.maximum(np.minimum(np.minimum(sms, memory), 1.0), 0.05)
        total, slow_kernels = timed.device_s, timed.kernels_s / speed
        stretched = slow_kernels + timed.exposed_s
        progress = (slow_kernels / self.slowed + timed.exposed_s) / np.maximum(stretched, TINY)
        times = np.where(total > TINY, stretched / np.maximum(total, TINY), 1.0)
        return Stretch(times, 1.0 - 1.0 / times, 1.0 - np.maximum(progress, 0.05))


@dataclass(frozen=True, slots=True)
class Stretch:
    """What compute and a concurrent collective do to each other: compute takes `times` as long, of which the share
    `lost` is due to the collective, and the collective loses the share `behind` of its speed.
    """

    times: Floats
    lost: Floats
    behind: Floats


@dataclass(slots=True)
class Copied:
    """A copy within the GPU: its seconds and bytes/s, and what it costs compute that it runs next to, once asked."""

    device_s: Floats
    bytes_per_s: Floats
    cost: Background | None = None
    exposed_s: float = 0.0

    @property
    def kernels_s(self) -> Floats:
        return self.device_s


@dataclass(slots=True)
class TrafficTimes:
    """Times of transfers around the blocks, and of copies; each distinct size is looked up once."""

    context: CostContext
    sms: float = field(init=False)
    memory_bytes_per_s: float = field(init=False)
    update_bytes_per_s: Value = field(init=False)
    host_copy_bytes_per_s: Value = field(init=False)
    host_update_bytes_per_s: Value = field(init=False)
    _hbm: Floats = field(init=False)
    _costs: dict[tuple[str, str, int], tuple[Background, Value]] = field(default_factory=dict)
    _known: dict[tuple[str, str, bytes | float], Background] = field(default_factory=dict)
    _seconds: dict[tuple[str, str, bytes | float], tuple[Floats, Floats]] = field(default_factory=dict)
    _rates: dict[tuple[str | bytes, ...], Floats] = field(default_factory=dict)
    _copied: dict[tuple[int, int], tuple[Copied, Value, Packing | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        roofline = self.context.roofline
        self.host_copy_bytes_per_s = copy_bytes_per_s(self.context)
        self.host_update_bytes_per_s = update_bytes_per_s(self.context)
        self._hbm = np.full(len(self.context.table), roofline.memory_bytes_per_s)
        self.sms = float(roofline.gpu.sm_count)
        self.memory_bytes_per_s = roofline.gpu.memory_bytes_per_s * efficiency(roofline.gpu.architecture).hbm
        self.update_bytes_per_s = update_rate(self.context.runtime, roofline)

    def copied(self, moved_bytes: Value, packing: Packing | None) -> Copied:
        """Return the rate and the seconds of a copy within the GPU, as one of FSDP's if `packing` says how; computed
        once for the same array of bytes.
        """
        key = id(moved_bytes), id(packing)
        if key not in self._copied:  # keep both alive, so that their ids stay unique
            rate = self._hbm if packing is None else self._copy_bytes_per_s(packing)
            self._copied[key] = Copied(np.asarray(moved_bytes / rate), rate), moved_bytes, packing
        return self._copied[key][0]

    def next_to(self, copied: Copied) -> Background:
        """Return what a copy on another stream costs compute."""
        if copied.cost is None:
            copied.cost = self._copying(copied.device_s)
        return copied.cost

    def _copy_bytes_per_s(self, packing: Packing) -> Floats:
        sizes = (np.asarray(size).tobytes() for size in (packing.widened_bytes, packing.module_bytes))
        key: tuple[str | bytes, ...] = (packing.kernel, *sizes)
        if key not in self._rates:
            rate = self.context.roofline.packing_bytes_per_s(packing)
            self._rates[key] = np.broadcast_to(rate, (len(self.context.table),))
        return self._rates[key]

    def _copying(self, seconds: Floats) -> Background:
        there, nothing = seconds > 0, np.zeros(len(self.context.table))
        return Background(
            seconds=seconds,
            host_s=nothing,
            sms=np.where(there, TAKEN * self.sms, 0.0),
            bytes_per_s=nothing,
            across=nothing > 0,
            asks=nothing,
            runs=bool(there.any()),
            everywhere=bool(there.all()),
        )

    def look_up(self, sends: Iterable[tuple[str, str, Floats]]) -> None:
        """Find what collectives (op, family, bytes of each plan) cost, all sizes of a kind at once: `cost` of each is
        then known.
        """
        of_kind: dict[tuple[str, str], list[Floats]] = {}
        for op, family, nbytes in sends:
            of_kind.setdefault((op, family), []).append(nbytes)
        for (op, family), several in of_kind.items():
            self.context.groups.load(op, family, np.stack(several))

    def seconds(self, op: str, family: str, nbytes: Value) -> tuple[Floats, Floats]:
        """Return (seconds of a collective in the groups of a family, of the host to issue it); zero in groups of one
        rank.
        """
        groups, axis = self.context.groups, "pipeline" if family == "pp" else family
        key = (op, axis, nbytes.tobytes() if isinstance(nbytes, np.ndarray) else nbytes)
        if key not in self._seconds:
            size = np.broadcast_to(np.asarray(nbytes, dtype=np.float64), (len(self.context.table),))
            ranks = groups.extent(axis)[0]
            there = (ranks > 1) & (size > 0)
            seconds = np.where(there, groups.time_s(op, axis, np.maximum(size, 1.0)), 0.0)
            self._seconds[key] = seconds, np.where(there, self.context.collective_host_s(op, ranks), 0.0)
        return self._seconds[key]

    def cost(self, op: str, family: str, nbytes: Value) -> Background:
        """Return the cost of a collective in the groups of a family; zero in groups of one rank."""
        same = op, family, id(nbytes)
        if same not in self._costs:  # keep bytes alive, so that their ids stay unique
            self._costs[same] = self._cost(op, family, nbytes), nbytes
        return self._costs[same][0]

    def _cost(self, op: str, family: str, nbytes: Value) -> Background:
        groups: GroupTimes = self.context.groups
        axis = "pipeline" if family == "pp" else family
        key = (op, axis, nbytes.tobytes() if isinstance(nbytes, np.ndarray) else nbytes)
        if key not in self._known:
            size = np.broadcast_to(np.asarray(nbytes, dtype=np.float64), (len(self.context.table),))
            there = (groups.extent(axis)[0] > 1) & (size > 0)
            sms, sent = groups.load(op, axis, size)
            seconds, host_s = self.seconds(op, family, nbytes)
            measured = self.context.held_sms(op)
            sms = sms if measured is None else np.where(there, measured, 0.0)
            across, share, rate = groups.bottlenecks(axis)
            self._known[key] = Background(
                seconds=seconds,
                host_s=host_s,
                runs=bool(there.any()),
                everywhere=bool(there.all()),
                sms=sms,
                bytes_per_s=2.0 * sent / np.maximum(seconds, TINY),
                across=across,
                asks=np.where(there, np.minimum(share * sent / np.maximum(seconds, TINY) / rate, 1.0), 0.0),
            )
        return self._known[key]
