"""Collective times for whole columns of plans: one call per distinct group on the machine, not per plan."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from simulator.collectives.cost import CollectiveModel
from simulator.collectives.traffic import bottleneck_of, bottleneck_rates
from simulator.columns.plan_columns import distinct
from simulator.columns.plan_table import Floats, PlanTable
from topology.cluster import Cluster
from topology.rates.groups import GroupShape, group_shape
from topology.rates.node_rates import node_rates
from topology.rates.orders import Order, Pattern, groups_on, irregular, node_orders, order_of

REMEMBERED = 256  # most sizes of one group in a call whose times are cached
FEW = 32  # plans for which to look up each size takes less time than to find those that are equal


@dataclass(slots=True)
class GroupTimes:
    """Placement of each plan's groups on `cluster`, and the times of their collectives.

    Axes: `tp`, `cp`, `etp`, `ep` and `etp_ep` (both), `pp` (neighbouring stages; `pp_across` where they are on
    different nodes), `pipeline` (all of them), `fsdp` (dp_shard x cp), `replicate` (dp_replicate), `dp` (both, and cp),
    `expert_fsdp` and `expert_dp` (what expert parallelism leaves of them).

    `models_by_plan` has a model for each plan where plans run on clusters with different link rates. `factor` is the
    time of a collective in a runtime's step over its time alone, an array of shape (plans,) where plans differ in it.
    """

    cluster: Cluster
    table: PlanTable
    collectives: CollectiveModel
    models_by_plan: tuple[CollectiveModel, ...] = ()
    factor: Floats | float = 1.0
    _shapes: dict[str, tuple[tuple[GroupShape, ...], NDArray[np.int64]]] = field(default_factory=dict)
    _of_row: tuple[tuple[Order, ...], NDArray[np.int64]] | None = None
    _same_groups: dict[str, list[tuple[CollectiveModel, GroupShape, NDArray[np.intp]]]] = field(default_factory=dict)

    def time_s(self, op: str, axis: str, nbytes: Floats | float, *, algorithm: str | None = None) -> Floats:
        """Return the seconds of `op` with `nbytes` (nccl-tests' size column) along `axis`, one value per plan."""
        size = np.broadcast_to(np.asarray(nbytes, dtype=np.float64), (len(self.table),))
        out = np.zeros(len(self.table))
        for model, shape, rows in self.shapes(axis):
            sizes, which = size[rows], None
            if len(sizes) > FEW:
                sizes, which = np.unique(sizes, return_inverse=True)
            times_s = model.time_s if len(sizes) > REMEMBERED else model.times_s
            seconds = times_s(op, sizes, shape, algorithm=algorithm)
            factor = self.factor[rows] if isinstance(self.factor, np.ndarray) else self.factor
            out[rows] = factor * (seconds if which is None else seconds[which])
        return out

    def take(self, rows: NDArray[np.intp], table: PlanTable) -> GroupTimes:
        """Return the times for the plans `rows`, whose table is `table`."""
        models_by_plan = tuple(self.models_by_plan[row] for row in rows) if self.models_by_plan else ()
        shapes = {axis: (shapes, which[rows]) for axis, (shapes, which) in self._shapes.items()}
        return replace(
            self,
            table=table,
            models_by_plan=models_by_plan,
            factor=self.factor[rows] if isinstance(self.factor, np.ndarray) else self.factor,
            _shapes=shapes,
            _of_row=None,
            _same_groups={},
        )

    def load(self, op: str, axis: str, nbytes: Floats) -> tuple[Floats, Floats]:
        """Return (SMs that `op` holds, bytes that it sends through the port of a rank), one value per plan; of `nbytes`
        with several rows, for each row.
        """
        found = np.zeros((2, *nbytes.shape))
        for model, shape, every in self.shapes(axis):
            of_shape = nbytes[..., every]
            there = of_shape > 0
            loads = np.zeros((2, *of_shape.shape))
            loads[:, there] = model.loads(op, of_shape[there], shape)
            found[..., every] = loads
        return found[0], found[1]

    def bottlenecks(self, axis: str) -> tuple[NDArray[np.bool_], Floats, Floats]:
        """Return (whether groups along an axis span nodes, the share of a rank's rate that passes the bottleneck, its
        bytes/s), one value per plan; see `simulator.collectives.traffic.bottleneck_of`.
        """
        rates = bottleneck_rates(self.cluster)
        across, share = np.zeros(len(self.table), dtype=np.bool_), np.ones(len(self.table))
        rate = np.full(len(self.table), rates["port"])
        for _, shape, rows in self.shapes(axis):
            bottleneck, part = bottleneck_of(nodes=shape.nodes, ranks_per_node=shape.ranks_per_node)
            across[rows], share[rows], rate[rows] = bottleneck == "nic", part, rates[bottleneck]
        return across, share, rate

    def shapes(self, axis: str) -> list[tuple[CollectiveModel, GroupShape, NDArray[np.intp]]]:
        """Return (model, shape, rows) for each group along an axis that is not of one rank; `rows` are plan indices."""
        if axis not in self._same_groups:
            shapes, which = self._axis(axis)
            numbers = {id(model): number for number, model in enumerate(self.models_by_plan)}
            machine = np.array([numbers[id(model)] for model in self.models_by_plan] or [0] * len(self.table))
            order = np.lexsort((machine, which))
            starts = np.nonzero(np.diff(which[order], prepend=-1) | np.diff(machine[order], prepend=-1))[0]
            self._same_groups[axis] = [
                (self.models_by_plan[machine[rows[0]]] if self.models_by_plan else self.collectives, shape, rows)
                for rows in np.split(order, starts[1:])
                if len(rows) and (shape := shapes[which[rows[0]]]).ranks > 1
            ]
        return self._same_groups[axis]

    def _axis(self, axis: str) -> tuple[tuple[GroupShape, ...], NDArray[np.int64]]:
        if axis not in self._shapes:
            size, stride = self.extent(axis)
            world = self.table["gpus"]
            orders, of_row = self._orders()
            rows, which = distinct(size, stride, world, of_row)
            per_node = self.cluster.gpus_per_node
            shapes = (
                group_shape(size=int(n), stride=int(d), gpus_per_node=per_node, world=int(w))
                for n, d, w in zip(size[rows], stride[rows], world[rows], strict=True)
            )
            placed = [
                self._placed(shape, orders[number], axis) for shape, number in zip(shapes, of_row[rows], strict=True)
            ]
            self._shapes[axis] = (tuple(placed), which)
        return self._shapes[axis]

    def _orders(self) -> tuple[tuple[Order, ...], NDArray[np.int64]]:
        """Return (the orders of a node's GPUs that plans have, the index of each plan's); () is the best order for each
        group.
        """
        if self._of_row is None:
            every: dict[Order, int] = {(): 0}
            of_row = np.zeros(len(self.table), dtype=np.int64)
            placed = [(row, plan.placement) for row, plan in enumerate(self.table.plans) if plan.placement]
            if placed and irregular(self.cluster):
                for row, placement in placed:
                    order = order_of(placement, self.cluster.gpus_per_node)
                    of_row[row] = every.setdefault(order, len(every))
            numbers, gpus = self.table["placing"], self.table["gpus"]
            chosen = distinct(numbers, gpus)[0] if (numbers >= 0).any() else np.zeros(0, dtype=np.intp)
            for number, count in zip(numbers[chosen], gpus[chosen], strict=True):
                if number >= 0:
                    order = node_orders(self.cluster, int(count))[int(number)]
                    of_row[(numbers == number) & (gpus == count)] = every.setdefault(order, len(every))
            self._of_row = tuple(every), of_row
        return self._of_row

    def _placed(self, shape: GroupShape, order: Order, axis: str) -> GroupShape:
        """Return `shape` with the GPU positions that an order of a node's GPUs gives it."""
        if not order or shape.ranks_per_node < 2:
            return shape
        pattern = (shape.ranks_per_node, shape.stride, axis == "pp")
        return replace(shape, placed=groups_on(order, pattern, node_rates(self.cluster)))

    def patterns(self, row: int) -> frozenset[Pattern]:
        """Return the pattern of a plan's groups on a node, which decides what orders of its GPUs are worth trying."""
        found = set()
        for axis in AXES:
            shape = self.shape(axis, row)
            if shape.ranks > 1 and shape.ranks_per_node > 1:
                found.add((shape.ranks_per_node, shape.stride, axis == "pp"))
        return frozenset(found)

    def shape(self, axis: str, row: int = 0) -> GroupShape:
        """Return the shape of one plan's groups along `axis` on the machine."""
        shapes, which = self._axis(axis)
        return shapes[int(which[row])]

    def extent(self, axis: str) -> tuple[Floats, Floats]:
        """Return the number of ranks and their distance in rank along an axis, per plan; see plan.MESH_AXES."""
        t = self.table
        one = np.ones(len(t))
        inner = t["cp"] * t["tp"]
        # Expert groups are laid over dp_shard x cp x tp, innermost first: neighbours split an expert.
        expert_stride = t["etp"]
        everything = t["dp"] * t["cp"] * t["tp"]
        match axis:
            case "tp":
                return t["tp"], one
            case "cp":
                return t["cp"], t["tp"]
            case "etp":
                return t["etp"], one
            case "ep":
                return t["ep"], expert_stride
            case "etp_ep":
                return t["ep"] * t["etp"], one
            case "tp_pair" | "cp_pair":  # of the pairs of neighbours, those furthest apart decide
                size, stride = self.extent(axis.removesuffix("_pair"))
                node = float(self.cluster.gpus_per_node)
                return np.minimum(size, 2.0), np.where(size * stride > node, np.maximum(stride, node), stride)
            case "pipeline":
                return t["pp"], everything
            case "pp":
                return np.where(t["pp"] > 1, 2.0, 1.0), everything
            case "pp_across":  # neighbouring stages on different nodes
                return np.where(t["pp"] > 1, 2.0, 1.0), np.maximum(everything, float(self.cluster.gpus_per_node))
            case "fsdp":
                return t["sharded_over"], t["tp"]
            case "replicate":
                return t["dp_replicate"], t["dp_shard"] * inner
            case "dp":
                return t["dp"] * t["cp"], t["tp"]
            case "expert_fsdp":
                return t.expert_shard["optimizer"], expert_stride * t["ep"]
            case "expert_dp":
                return np.maximum(everything / (t["ep"] * expert_stride), 1.0), expert_stride * t["ep"]
        raise ValueError(axis)


# Axes along which a plan's ranks communicate; see `GroupTimes.extent`.
AXES = (
    *("tp", "cp", "etp", "ep", "etp_ep", "pp", "pipeline", "fsdp", "replicate", "dp", "expert_fsdp", "expert_dp"),
    *("tp_pair", "cp_pair"),
)
