"""What one block of the network costs on one rank: seconds forward and backward, bytes kept, host time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from simulator.group_times import GroupTimes
from simulator.operators import (
    FIXED_DTYPE_BYTES,
    OperatorSpec,
    Work,
    WorkKind,
    active_rows,
    backward_work,
    forward_work,
    tensor_bytes,
)
from simulator.overlap_sites import SITES
from simulator.plan_table import Floats, PlanTable
from simulator.recomputation import run_again
from simulator.roofline import FITTED, MEASURED, Roofline
from simulator.runtime import DTYPE_BYTES, Runtime
from simulator.runtime_library import RecomputeSpec, RuntimeSpec
from simulator.tp_overlap import (
    COPY_ENGINE_MODES,
    MATCHED_MODES,
    PEER_MODES,
    extra_calls,
    launches,
    partials_bytes,
    together_s,
)

Rows = NDArray[np.bool_]


@dataclass(slots=True)
class PassCost:
    """One pass over a block: kernel seconds, exposed communication by axis, host seconds. Columns.

    `hidden_s` is communication that kernels hide while it takes SMs from them.
    """

    compute_s: Floats
    weight_s: Floats  # weight gradients, which split backwards put off
    host_s: Floats
    hidden_s: Floats
    measured_s: Floats | float = 0.0  # of compute_s, what rests on the very operator measured
    fitted_s: Floats | float = 0.0  # and what on a curve through others
    communication_s: dict[str, Floats] = field(default_factory=dict)

    @property
    def exposed_s(self) -> Floats:
        return sum(self.communication_s.values(), np.zeros_like(self.compute_s))

    @property
    def device_s(self) -> Floats:
        return self.compute_s + self.exposed_s

    def expose(self, axis: str, seconds: Floats) -> None:
        self.communication_s[axis] = self.communication_s.get(axis, np.zeros_like(self.compute_s)) + seconds

    def take(self, which: NDArray[np.intp]) -> PassCost:
        """Return the rows that `which` selects."""
        return PassCost(
            compute_s=self.compute_s[which],
            weight_s=self.weight_s[which],
            host_s=self.host_s[which],
            hidden_s=self.hidden_s[which],
            communication_s={axis: seconds[which] for axis, seconds in self.communication_s.items()},
        )


@dataclass(slots=True)
class BlockCost:
    """Forward, backward without recomputation, and for each recompute mode what runs again and what is kept.

    Bytes are of one micro batch. A mode that wraps a share of the layers is averaged over layers.
    """

    forward: PassCost
    backward: PassCost
    recompute: dict[str, PassCost]
    saved_bytes: dict[str, Floats]
    everything_bytes: Floats  # what it would save without recomputation

    def take(self, which: NDArray[np.intp]) -> BlockCost:
        """Return the rows that `which` selects."""
        return BlockCost(
            forward=self.forward.take(which),
            backward=self.backward.take(which),
            recompute={mode: cost.take(which) for mode, cost in self.recompute.items()},
            saved_bytes={mode: nbytes[which] for mode, nbytes in self.saved_bytes.items()},
            everything_bytes=self.everything_bytes[which],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostContext:
    """Everything a block's cost depends on besides its operators."""

    table: PlanTable
    sizes: Mapping[str, Floats]
    roofline: Roofline
    groups: GroupTimes
    runtime: Runtime
    spec: RuntimeSpec

    def dtype_bytes(self, name: str) -> float:
        named = {
            "compute": self.runtime.compute_dtype,
            "param": self.runtime.param_dtype,
            "reduce": self.runtime.reduce_dtype,
        }
        if name in named:
            return float(DTYPE_BYTES[named[name]])
        return FIXED_DTYPE_BYTES[name]


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
                writer.add(works, twice[name][i] * modes[name].layers, operator)
    for operator in reversed(operators):
        works = backward_work(operator, context.sizes, context.dtype_bytes)
        backward.add(works, active_rows(operator, context.table), operator)
    everything = tensors_bytes(operators, context)
    return BlockCost(
        forward=forward.done(),
        backward=backward.done(),
        recompute={name: writer.done() for name, writer in again.items()},
        saved_bytes={
            name: mode.layers * saved_bytes(operators, mode, context) + (1 - mode.layers) * everything
            for name, mode in modes.items()
        }
        | ({} if modes else {"none": everything}),
        everything_bytes=everything,
    )


def tensors_bytes(operators: Sequence[OperatorSpec], context: CostContext, *, without: Sequence[str] = ()) -> Floats:
    """Return the bytes that operators save, those named in `without` left out."""
    total = np.zeros(len(context.table))
    for operator in operators:
        if operator.saves and operator.name not in without:
            active = active_rows(operator, context.table)
            for tensor in operator.saves:
                total = total + active * tensor_bytes(tensor, context.sizes, context.dtype_bytes)
    return total


def saved_bytes(operators: Sequence[OperatorSpec], mode: RecomputeSpec, context: CostContext) -> Floats:
    """Return the bytes a block wrapped in `mode` keeps per micro batch."""
    if mode.keeps:
        zero = np.zeros(len(context.table))
        return sum((tensor_bytes(x, context.sizes, context.dtype_bytes) for x in mode.keeps), zero)
    return tensors_bytes(operators, context, without=mode.drops)


class PassWriter:
    """Adds up one pass, operator by operator, and pairs tensor-parallel collectives with the products beside them.

    A gather runs beside the products that follow it, a reduce-scatter beside those just before it, in the mode that the
    plan's `tp_overlap` has for the site; a product serves one collective. All columns, since plans differ in which
    operators run.
    """

    def __init__(self, context: CostContext) -> None:
        rows = len(context.table)
        self.context = context
        self.cost = PassCost(
            compute_s=np.zeros(rows),
            weight_s=np.zeros(rows),
            host_s=np.zeros(rows),
            hidden_s=np.zeros(rows),
        )
        self._ranks = context.table["tp"]
        self._modes = context.table.overlap_modes
        self._mode_at = {site: context.table.overlap_at(site) for site in (*SITES, "")} if self._modes else {}
        self._open = np.zeros(rows, dtype=bool)  # a gather waits for the end of its products
        self._seen = np.zeros(rows, dtype=bool)  # and has met one
        self._gathered = ""  # the tensor of the last gather
        self._mode = np.full(rows, "none")  # and its overlap mode
        self._whole = np.zeros(rows)
        self._bytes = np.zeros(rows)
        self._beside = np.zeros((3, rows))  # its products: seconds at once and in pieces, and the host's for one launch
        self._tail = np.zeros((3, rows))  # products at the end of what has been added, claimed by no gather
        self._tail_inputs = np.zeros((3, rows))  # the same without weight gradients
        self._results: list[tuple[str, Rows]] = []  # what products since the last collective gave, and in which rows

    def add(self, works: Sequence[Work], active: Floats, operator: OperatorSpec) -> None:
        for work in works:
            if work.kind is WorkKind.COLLECTIVE:
                self._collective(work, active, operator)
            else:
                self._kernel(work, active, operator)
                self._results.append((ends_of(work, operator)[1], active > 0))

    def done(self) -> PassCost:
        self._close(self._open)
        return self.cost

    def _kernel(self, work: Work, active: Floats, operator: OperatorSpec) -> None:
        cost, host = self.cost, self.context.spec.host
        alone, source = self.context.roofline.sourced(work)
        seconds = active * alone
        cost.compute_s = cost.compute_s + seconds
        cost.measured_s = cost.measured_s + np.where(source == MEASURED, seconds, 0.0)
        cost.fitted_s = cost.fitted_s + np.where(source == FITTED, seconds, 0.0)
        if work.name.endswith(WEIGHT_GRADIENT):
            cost.weight_s = cost.weight_s + seconds
        launch = host.backward_launch_s if work.backward else host.launch_s
        eager = not self.context.runtime.compile
        launch_s = np.where((self._ranks > 1) & eager, host.dtensor_launch_s, launch)
        issued_s = active * work.launches * launch_s
        cost.host_s = cost.host_s + issued_s
        if not self._modes:
            return
        runs = active > 0
        if work.kind is WorkKind.MATMUL:
            product = np.stack([seconds, active * pieces_s(work, self.context), issued_s])
            weights, matched = work.name.endswith(WEIGHT_GRADIENT), _matched(self._mode)
            if not weights and ends_of(work, operator)[0] != self._gathered:
                self._close(self._open & self._seen & runs & matched)
            joins = self._open & ~(matched & weights)
            self._seen = self._seen | (joins & runs)
            self._beside = self._beside + np.where(joins, product, 0.0)
            left = np.where(self._open, 0.0, product)
            self._tail = self._tail + left
            self._tail_inputs = self._tail_inputs + (0.0 if weights else left)
            return
        self._close(self._open & self._seen & runs)
        self._beside = self._beside + np.where(self._open & runs, np.stack([seconds, seconds, issued_s]), 0.0)
        self._end_tail(runs)

    def _collective(self, work: Work, active: Floats, operator: OperatorSpec) -> None:
        cost, context = self.cost, self.context
        runs = (active > 0) & (context.groups.extent(work.over)[0] > 1)
        if work.collective == "ring":
            exposed, hidden = self._ring(work, operator)
            cost.expose(work.over, active * exposed)
            cost.hidden_s = cost.hidden_s + active * hidden
            hops = np.where(runs, context.table["cp"] - 1, 0.0)
            launch = context.spec.host.launch_s
            cost.host_s = cost.host_s + active * hops * (2 * context.spec.host.collective_s + launch)
            return
        seconds = active * context.groups.time_s(work.collective, work.over, work.bytes)
        cost.host_s = cost.host_s + active * context.spec.host.collective_s * runs
        if work.over == "tp" and work.collective != "reduce_scatter":
            self._results = [(tensor, r & ~runs) for tensor, r in self._results]
        if work.over != "tp" or not self._modes:
            cost.expose(work.over, seconds)
            self._close(self._open & runs)
            self._end_tail(runs)
            return
        self._close(self._open & runs)
        mode = self._mode_at[operator.site]
        size = np.broadcast_to(np.asarray(work.bytes, dtype=np.float64), runs.shape)
        if work.collective == "all_gather":
            cost.expose("tp", np.where(mode == "none", seconds, 0.0))
            runs = runs & (mode != "none")
            self._open = self._open | runs
            self._gathered, self._mode = operator.tensor, np.where(runs, mode, self._mode)
            self._seen = self._seen & ~runs
            self._whole, self._bytes = np.where(runs, seconds, self._whole), np.where(runs, size, self._bytes)
            self._beside = np.where(runs, 0.0, self._beside)
        elif work.collective == "reduce_scatter":
            terms = sum(
                (r.astype(int) for tensor, r in self._results if tensor == operator.tensor), np.zeros(len(runs))
            )
            matched = _matched(mode)
            hides = ~matched | (terms == 1)
            beside = np.where(hides, np.where(matched, self._tail_inputs, self._tail), 0.0)
            self._pair(work.collective, mode, seconds, size, beside, active)
            self._results = [(tensor, r & ~runs) for tensor, r in self._results]
        else:
            cost.expose("tp", seconds)
        self._end_tail(runs)

    def _end_tail(self, rows: Rows) -> None:
        self._tail = np.where(rows, 0.0, self._tail)
        self._tail_inputs = np.where(rows, 0.0, self._tail_inputs)

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
            self._pair("all_gather", self._mode, self._whole * active, self._bytes, self._beside * active, active)
            self._open = self._open & ~rows

    def _pair(
        self, op: str, modes: NDArray[np.str_], whole_s: Floats, nbytes: Floats, products: Floats, active: Floats
    ) -> None:
        product_s, in_pieces_s, issue_s = products
        exposed = whole_s
        for mode in self._modes:
            chunk_s, hop_s = overlap_parts_s(mode, op, nbytes, self.context)
            together = together_s(
                mode,
                whole_s=whole_s,
                chunk_s=chunk_s,
                hop_s=hop_s,
                product_s=product_s,
                pieces_s=in_pieces_s,
                ranks=self._ranks,
            )
            paired = (modes == mode) & (product_s > 0)
            exposed = np.where(paired, np.maximum(together - product_s, 0.0), exposed)
            if mode in MATCHED_MODES and op == "reduce_scatter":
                moved = partials_bytes(mode, op, nbytes, self._ranks)
                adding_s = np.where(paired, moved / self.context.roofline.memory_bytes_per_s, 0.0) * (active > 0)
                self.cost.compute_s = self.cost.compute_s + adding_s
            if mode not in COPY_ENGINE_MODES:
                self.cost.hidden_s = self.cost.hidden_s + np.where(paired, np.maximum(whole_s - exposed, 0.0), 0.0)
            calls = np.array([extra_calls(mode, ranks) for ranks in self._ranks])
            again = np.array([launches(mode, ranks) - 1 for ranks in self._ranks])
            issued_s = calls * self.context.spec.host.collective_s + again * issue_s
            self.cost.host_s = self.cost.host_s + np.where(paired & (active > 0), issued_s, 0.0)
        self.cost.expose("tp", exposed * (active > 0))


def _matched(modes: NDArray[np.str_]) -> Rows:
    """Return where a mode is set up by pattern."""
    return np.isin(modes, list(MATCHED_MODES))


def attention_work(name: str, context: CostContext, backward: bool) -> Work:
    """Return the fused attention kernel called `name`."""
    spec = OperatorSpec(name=name, attention="flash")
    works = (backward_work if backward else forward_work)(spec, context.sizes, context.dtype_bytes)
    return works[0]


# The ending of a weight gradient's name.
WEIGHT_GRADIENT = ".wgrad"


def ends_of(work: Work, operator: OperatorSpec) -> tuple[str, str]:
    """Return (the tensor a product reads, the one it gives) in the words of the runtime's description, else ("", "")."""
    if work.kind is not WorkKind.MATMUL or work.name.endswith(WEIGHT_GRADIENT) or not operator.matmul:
        return "", ""
    operands, _, result = operator.matmul.partition("->")
    ends = operands.split(",")[0].strip(), result.strip()
    return (ends[1], ends[0]) if work.backward else ends


def pieces_s(work: Work, context: CostContext) -> Floats:
    """Return seconds of a product cut into one piece for each tensor-parallel rank, along tokens."""
    ranks = context.table["tp"]
    piece = replace(work, flops=work.flops / ranks, bytes=work.bytes / ranks)
    if work.name.endswith(WEIGHT_GRADIENT):
        piece = replace(piece, k=work.k / ranks)
    else:
        piece = replace(piece, m=work.m / ranks)
    return np.asarray(ranks * context.roofline.seconds(piece))


def overlap_parts_s(mode: str, op: str, nbytes: Floats, context: CostContext) -> tuple[Floats, Floats]:
    """Return seconds of (a chunk as a collective of its own, a shard to a peer) under an overlap mode."""
    ranks, groups = context.table["tp"], context.groups
    if mode not in PEER_MODES:
        chunk = groups.time_s(op, "tp", nbytes / ranks)
        return chunk, chunk
    algorithm = "copy_engine" if mode in COPY_ENGINE_MODES else None
    hop = groups.time_s("send_recv", "tp_pair", nbytes / ranks, algorithm=algorithm)
    return hop, hop
