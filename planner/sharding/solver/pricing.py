"""The cost of a choice: ring bytes, or time on a machine.

Ring bytes are the cost in papers and tools on sharding; they do not include computing and memory. Time includes the
collectives on the machine's links (by mesh axis: a group inside a node or across nodes), every operator on its local
shards (so that replicated work costs time), and local copies. Times are integer picoseconds, so that sums are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from planner.sharding.layouts.collectives import (
    ALL_GATHER,
    ALL_TO_ALL_V,
    PERMUTE,
    REDUCE,
    REDUCE_SCATTER,
    Collective,
    Cost,
    cost_of,
)
from planner.sharding.layouts.layout import Mesh, local_size
from planner.sharding.operators.operator import Operator, Tensor
from planner.sharding.operators.options import ShardingOption
from planner.sharding.operators.work import backward_s, operator_work
from planner.sharding.problem.problem import Machine
from simulator.calibration.calibration import collectives_on
from simulator.collectives.cost import CollectiveModel
from simulator.config.runtime import Runtime
from simulator.kernels.roofline import Roofline
from simulator.runtimes.library import attention_kernel
from topology.errors import Infeasible
from topology.rates.groups import GroupShape

PICOSECONDS = 1e12
_WIDE_ATTENTION = "flash2"  # of float32, over the rate of TF32. Source: assumed
ROOFLINE_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "tfloat32"}
Integers = NDArray[np.int64]


class Pricing(Protocol):
    """Costs of collectives, slices and operators."""

    def collectives(
        self, found: Sequence[Collective], *, slices: int = 0, sliced_bytes: int = 0, duals: bool = False
    ) -> Cost:
        """Return the cost of collectives, and of local slices whose results have `sliced_bytes`; with `duals` including
        the backward pass.
        """

    def operators(
        self, operator: Operator, options: Sequence[ShardingOption], tensors: dict[str, Tensor], *, gradients: int = 0
    ) -> list[int]:
        """Return the cost of an operator's own work under each option, in the unit of `Cost[0]`.

        `gradients` is the number of operands whose gradients its backward pass computes.
        """


@dataclass(frozen=True, slots=True)
class BytesPricing:
    """Cost as ring bytes of a rank, multiplied by the ranks of the mesh."""

    ranks: int

    def collectives(
        self, found: Sequence[Collective], *, slices: int = 0, sliced_bytes: int = 0, duals: bool = False
    ) -> Cost:
        del sliced_bytes, duals
        return cost_of(found, self.ranks, slices=slices)

    def operators(
        self, operator: Operator, options: Sequence[ShardingOption], tensors: dict[str, Tensor], *, gradients: int = 0
    ) -> list[int]:
        del operator, tensors, gradients
        return [0] * len(options)


@dataclass(slots=True)
class TimePricing:
    """Cost as picoseconds on a machine. Raises Infeasible if the mesh has more ranks than the machine has connected
    GPUs.
    """

    machine: Machine
    mesh: Mesh
    _model: CollectiveModel = field(init=False)
    _rooflines: dict[str, Roofline] = field(default_factory=dict)
    _shapes: dict[tuple[str, ...], GroupShape] = field(default_factory=dict)
    _known: dict[tuple[str, tuple[str, ...], int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.machine.require_ranks(self.mesh.ranks)
        self._model = collectives_on(self.machine.cluster, self.machine.calibration)

    def collectives(
        self, found: Sequence[Collective], *, slices: int = 0, sliced_bytes: int = 0, duals: bool = False
    ) -> Cost:
        plain = cost_of(found, self.mesh.ranks, slices=slices)
        total = sum(self._collective(each) + (self._collective(_dual(each)) if duals else 0) for each in found)
        if slices:
            total += self.copy(np.array([float(sliced_bytes)]))[0] * (2 if duals else 1)
        return (int(total), *plain[1:])

    def copy(self, nbytes: NDArray[np.float64]) -> Integers:
        """Return the time of copies with `nbytes` of results each."""
        rate = self.roofline("bf16").memory_bytes_per_s
        return np.asarray(np.rint(2 * nbytes / rate * PICOSECONDS), dtype=np.int64)

    def _collective(self, collective: Collective) -> int:
        nbytes = collective.bytes_out if collective.kind == ALL_GATHER else collective.bytes_in
        key = (collective.kind, collective.axes, nbytes)
        if key not in self._known:
            self._known[key] = int(self.times(collective.kind, collective.axes, np.array([float(nbytes)]))[0])
        return self._known[key]

    def times(self, kind: str, axes: tuple[str, ...], nbytes: NDArray[np.float64]) -> Integers:
        """Return the times of a collective over `axes`; bytes are those of the input, for an all-gather of the output.

        Raises Infeasible if its ranks are not connected.
        """
        seconds = self.seconds(kind, axes, nbytes)
        if not np.all(np.isfinite(seconds)):
            raise Infeasible(f"{kind} over {'+'.join(axes)} cannot run", why="nothing joins the nodes of the cluster")
        return np.asarray(np.rint(seconds * PICOSECONDS), dtype=np.int64)

    def seconds(
        self, kind: str, axes: tuple[str, ...], nbytes: NDArray[np.float64], *, algorithm: str | None = None
    ) -> NDArray[np.float64]:
        """Return the seconds of a collective, by an algorithm if one is named; infinite if it cannot run."""
        ops = {PERMUTE: "send_recv", ALL_TO_ALL_V: "all_to_all", REDUCE: "broadcast"}
        op = ops.get(kind, kind)
        shape = self.group_shape(axes)
        if op == "send_recv":
            shape = GroupShape(
                ranks=2,
                ranks_per_node=2 if shape.nodes == 1 else 1,
                siblings=max(1, shape.siblings * shape.ranks_per_node),
            )
        return np.asarray(self._model.time_s(op, nbytes, shape, algorithm=algorithm))

    def group_shape(self, axes: tuple[str, ...]) -> GroupShape:
        """Return the shape of the groups over `axes` on the machine."""
        key = self.mesh.ordered(axes)
        if key not in self._shapes:
            mesh, per_node = self.mesh, self.machine.cluster.gpus_per_node
            strides = {n: prod(mesh.shape[at + 1 :]) for at, n in enumerate(mesh.names)}
            members = [
                sum(c * strides[n] for c, n in zip(at, key, strict=True))
                for at in product(*(range(mesh.size(n)) for n in key))
            ]
            here = sum(1 for rank in members if rank // per_node == members[0] // per_node)
            gaps = [b - a for a, b in pairwise(members)]
            on_node = min(per_node, mesh.ranks)
            self._shapes[key] = GroupShape(
                ranks=len(members),
                ranks_per_node=here,
                siblings=max(1, on_node // here),
                stride=min(gaps, default=1) if here > 1 else 1,
            )
        return self._shapes[key]

    def roofline(self, dtype: str) -> Roofline:
        name = ROOFLINE_DTYPES.get(dtype, dtype)
        if name not in self._rooflines:
            self._rooflines[name] = roofline_on(self.machine, name)
        return self._rooflines[name]

    def operators(
        self, operator: Operator, options: Sequence[ShardingOption], tensors: dict[str, Tensor], *, gradients: int = 0
    ) -> list[int]:
        if operator.is_view or not options:
            return [0] * len(options)
        work = operator_work(operator, tensors, _sizes(operator, options, self.mesh))
        roofline = self.roofline(operator.result.dtype)
        seconds = np.broadcast_to(roofline.seconds(work) + backward_s(work, gradients, roofline), len(options))
        return [int(value) for value in np.rint(seconds * PICOSECONDS)]


def roofline_on(machine: Machine, dtype: str) -> Roofline:
    """Return the times of kernels on a machine: measured ones of products if there are any, else by its datasheet."""
    gpu = machine.cluster.slowest_kind
    wide = dtype not in {"bfloat16", "float16"}
    kernel = _WIDE_ATTENTION if wide else attention_kernel(Runtime(name="pytorch"), gpu.architecture)
    return Roofline(gpu=gpu, dtype=dtype, attention_kernel=kernel, measured=machine.calibration)


# The backward exchange of the exchanges for which it differs from the forward one.
DUALS = {ALL_GATHER: REDUCE_SCATTER, REDUCE_SCATTER: ALL_GATHER}


def _dual(collective: Collective) -> Collective:
    """Return the exchange of the gradient: the same ranks, with input and output buffers swapped."""
    kind = DUALS.get(collective.kind, collective.kind)
    return replace(collective, kind=kind, local_in=collective.local_out, local_out=collective.local_in)


def _sizes(operator: Operator, options: Sequence[ShardingOption], mesh: Mesh) -> dict[str, NDArray[np.float64]]:
    """Return the local size of every axis for every option."""
    sizes = {axis: np.full(len(options), float(size)) for axis, size in operator.sizes.items()}
    for number, option in enumerate(options):
        for axis, spec in option.axis_specs:
            sizes[axis][number] = local_size(operator.sizes[axis], spec, mesh)
    return sizes


def pricing_of(mesh: Mesh, machine: Machine | None) -> Pricing:
    """Return costs as time if the machine is known, else as ring bytes."""
    return BytesPricing(mesh.ranks) if machine is None else TimePricing(machine, mesh)
