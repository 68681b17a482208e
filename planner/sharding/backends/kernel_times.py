"""Times of the kernels of a written program: products and attention by their work, all others by the bytes they move.

A kernel of the backward pass moves the incoming gradient, the tensors that autograd saved for it, and the gradients
that it computes. A kernel that passes the incoming gradient on unchanged takes no time; one that embeds it in zeros
writes the zeros first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any

import numpy as np

from planner.sharding.backends.lifetimes import saved_by, short_name
from planner.sharding.backends.ring_attention import ring_seconds
from planner.sharding.backends.works import Work
from planner.sharding.layouts.collectives import ALL_TO_ALL
from planner.sharding.layouts.layout import Mesh
from planner.sharding.operators.work import backward_s
from planner.sharding.ops.op import Saves
from planner.sharding.ops.table import saves
from planner.sharding.plans.lowering import work_of
from planner.sharding.problem.problem import Machine, ShardingProblem
from planner.sharding.solver.pricing import ROOFLINE_DTYPES, TimePricing, roofline_on
from simulator.calibration.calibration import overlap_of
from simulator.config.runtime import ELEMENT_BYTES
from simulator.kernels.operators import Work as KernelWork
from simulator.kernels.operators import WorkKind
from simulator.kernels.roofline import Roofline
from simulator.overlap.modes import GATHER, SLICES, Parts, rounds_of
from simulator.overlap.site_costs import LARGE_COPY_BYTES, pair_s, product_of
from simulator.sharded.program import (
    OVERLAPPED,
    RING_ATTENTION,
    ROUTE,
    Buffer,
    Exchange,
    Kernel,
    RunnableProgram,
    is_of_patches,
)
from topology.errors import Infeasible


@dataclass(frozen=True, slots=True)
class OverlapTimes:
    """Times of overlapped kernels on a machine whose GPUs the mesh takes in order.

    For every kernel, `nbytes` is the total gathered or summed, and `product` the work of all rows on one rank.
    """

    machine: Machine
    mesh: Mesh

    def forward_s(
        self, kind: str, mode: str, axes: tuple[str, ...], nbytes: float, product: KernelWork, roofline: Roofline
    ) -> float:
        """Return the seconds of a kernel. Raises Infeasible if copy engines do not reach all ranks."""
        op = "all_gather" if kind == GATHER else "reduce_scatter"
        return self._pair_s(op, mode, axes, nbytes, product, roofline)

    def backward_s(
        self,
        kind: str,
        mode: str,
        axes: tuple[str, ...],
        nbytes: float,
        product: KernelWork,
        roofline: Roofline,
        *,
        gradients: int,
    ) -> float:
        """Return the seconds of a kernel's backward pass, which computes this number of gradients."""
        once = float(np.asarray(roofline.seconds(product)).item())
        regathers = kind == GATHER and gradients > 1
        op = "reduce_scatter" if kind == GATHER else "all_gather"
        return self._pair_s(op, mode, axes, nbytes, product, roofline, regathers=regathers) + (gradients - 1) * once

    def _pair_s(
        self,
        op: str,
        mode: str,
        axes: tuple[str, ...],
        nbytes: float,
        product: KernelWork,
        roofline: Roofline,
        *,
        regathers: bool = False,
    ) -> float:
        parts = self._parts(op, axes, nbytes, product, roofline)
        products = product_of(product, parts.product_s, 0.0, parts.ranks, roofline)
        site = overlap_of(self.machine.calibration)
        seconds = float(np.asarray(pair_s(mode, op, parts, products, regathers=regathers, site=site)).item())
        if not isfinite(seconds):
            raise Infeasible(
                f"{mode} over {'+'.join(axes)} cannot run",
                why="copy engines do not reach all of its ranks",
                remedy="ranks of one node that are joined by NVLink",
            )
        return seconds

    def _parts(self, op: str, axes: tuple[str, ...], nbytes: float, product: KernelWork, roofline: Roofline) -> Parts:
        ranks, pricing = self.mesh.size(axes), TimePricing(self.machine, self.mesh)
        shard, once = nbytes / ranks, float(np.asarray(roofline.seconds(product)).item())
        cut = product_of(product, once, 0.0, ranks, roofline)

        def seconds(kind: str, size: float, algorithm: str | None = None) -> float:
            return float(pricing.seconds(kind, axes, np.array([size]), algorithm=algorithm)[0])

        copied = (
            seconds("send_recv", LARGE_COPY_BYTES, "copy_engine") if pricing.group_shape(axes).nodes == 1 else np.inf
        )
        return Parts(
            ranks=ranks,
            shard_bytes=shard,
            shard_rows=product.m / ranks,
            product_s=once,
            shard_product_s=cut.shard_s,
            streamed_product_s=cut.streamed_s,
            slice_product_s=cut.slice_s,
            collective_s=seconds(op, nbytes),
            slice_collective_s=seconds(op, nbytes / SLICES),
            copy_s=shard * copied / LARGE_COPY_BYTES,
            stream_s=shard / roofline.memory_bytes_per_s,
            rounds=rounds_of(product.m, product.n, roofline.gpu.sm_count),
        )


# Views whose gradient is a part of a larger one: torch writes zeros and copies the part into them.
_PARTS = frozenset(("piece", "range", "select"))
# The operands' gradient is the incoming gradient unchanged, or a view of it.
_REPEATS = frozenset(("add", "bias"))
_HANDED_ON = _REPEATS | {"clone", "cat", "stack", "reduce.sum", "join_chunks", "join_ring"}
# Tensor cores take channels last: cuDNN transposes both operands, and the result back (NVIDIA, Convolutional Layers
# User's Guide, "Tensor Layouts in Memory").
CONVOLUTIONS = frozenset(("conv1d", "conv2d", "conv3d"))
# Gradients of a norm's weights: a kernel that reads its operand and the incoming gradient once more, and one that adds
# up blocks of rows. For group norms, a kernel before the norm computes the moments, and the backward pass reads both
# twice (ATen/native/cuda/ layer_norm_kernel.cu and group_norm_kernel.cu).
_NORMS = frozenset(("layernorm", "rmsnorm", "groupnorm"))
_PRODUCTS = frozenset(("mul", "div"))  # elementwise: one kernel per gradient


@dataclass(frozen=True, slots=True)
class Draft:
    """Buffers and works of a program while it is written."""

    buffers: Mapping[str, Buffer]
    work: Mapping[str, Kernel | Exchange]


def kernel_seconds(work: Work, program: RunnableProgram | Draft, problem: ShardingProblem, machine: Machine) -> float:
    """Return the time of one kernel on the GPUs of a machine, by its operator's work or else by the bytes it moves."""
    assert isinstance(work.do, Kernel)  # noqa: S101 - by the caller
    roofline = roofline_on(machine, ROOFLINE_DTYPES.get(program.buffers[work.writes[0]].dtype, "tfloat32"))
    backward = work.do.op == "backward"
    forward = program.work[work.do.args[0]] if backward else work.do
    assert isinstance(forward, Kernel)  # noqa: S101 - exchanges have duals of their own
    described = None
    if work.step is not None:
        operator = problem.operators[work.step.operator]
        axis, parts = work.chunk
        described = work_of(operator, work.step.option, problem, {axis: parts})
        if forward.op.startswith(OVERLAPPED):
            return _overlapped_s(work, forward, program, described, roofline, OverlapTimes(machine, problem.mesh))
        if forward.op == RING_ATTENTION:
            pricing = TimePricing(machine, problem.mesh)
            return ring_seconds(forward, program.buffers, described, roofline, pricing, backward=backward)
    if described is None or described.kind is WorkKind.MOVE:
        moving = _backward_moves(work, forward, program) if backward else _moves(work, program)
        sent = _route_s(work, forward, program, problem, machine) if forward.op.startswith(ROUTE) else 0.0
        return sent if moving is None else sent + float(roofline.seconds(moving).item())
    passed = backward_s(described, len(work.writes), roofline) if backward else roofline.seconds(described)
    if short_name(forward.op) in CONVOLUTIONS and ELEMENT_BYTES[program.buffers[work.writes[0]].dtype] == 2:
        passed = passed + _layouts_s(work, forward, program, described, roofline)
    return work.share * float(np.asarray(passed).item())


def _route_s(
    work: Work, forward: Kernel, program: RunnableProgram | Draft, problem: ShardingProblem, machine: Machine
) -> float:
    """Return the time of the exchange inside a kernel that sends rows to the ranks of their experts, or back."""
    axes, sent = tuple(forward.kwargs["axes"]), _written_by(work, forward)
    if not axes:
        return 0.0
    pricing = TimePricing(machine, problem.mesh)
    return float(pricing.seconds(ALL_TO_ALL, axes, np.array([float(buffer_bytes(program, sent))]))[0])


def _layouts_s(
    work: Work, forward: Kernel, program: RunnableProgram | Draft, product: KernelWork, roofline: Roofline
) -> float:
    """Return the time in which a convolution transposes its operands and result; for a convolution of patches, only its
    images.
    """
    images, weight = list(_tensors(forward.args))[:2]
    wanted = work.do.args[1] if work.do is not forward and isinstance(work.do, Kernel) else ()
    results = len(wanted) or 1
    moved, launches = 2.0 * product.bytes, 3.0
    if not forward.kwargs and is_of_patches(forward, program.buffers[images].local, program.buffers[weight].local):
        moved, launches = 2.0 * buffer_bytes(program, images), 1.0
        results = int(work.do is forward or images in wanted)
    moves = KernelWork(kind=WorkKind.MOVE, name="layouts", bytes=moved, launches=launches)
    return results * float(np.asarray(roofline.seconds(moves)).item())


def _moves(work: Work, program: RunnableProgram | Draft) -> KernelWork | None:
    """Return the bytes that a kernel of the forward pass moves; none for a view."""
    assert isinstance(work.do, Kernel)  # noqa: S101 - by the caller
    if saves(work.do.op) is Saves.VIEW:
        return None
    out = program.buffers[work.writes[0]]
    moved = sum(buffer_bytes(program, name) for name in (*work.reads, *work.writes))
    launches = 1.0
    if work.do.op == "groupnorm":
        moved, launches = moved + buffer_bytes(program, work.reads[0]), 3.0
    joins = work.do.op == "aten.cat.default" and work.do.args[1] in {-1, len(out.local) - 1}
    return KernelWork(
        kind=WorkKind.MOVE,
        name="elementwise",
        bytes=float(moved),
        launches=launches,
        units={"joined": float(prod(out.local))} if joins else {},
    )


def _backward_moves(work: Work, forward: Kernel, program: RunnableProgram | Draft) -> KernelWork | None:
    """Return the bytes that the backward pass of a kernel moves; none if it passes the incoming gradient on, or a view
    of it.
    """
    assert isinstance(work.do, Kernel)  # noqa: S101 - by the caller
    name = short_name(forward.op)
    incoming = buffer_bytes(program, work.reads[0])
    wanted: list[str] = list(work.do.args[1])
    made = {one: buffer_bytes(program, one) for one in work.writes}
    if name in _PARTS:
        return KernelWork(
            kind=WorkKind.MOVE, name="elementwise", bytes=float(sum(made.values()) + 2 * incoming), launches=2.0
        )
    if saves(forward.op) is Saves.VIEW and name != "expand":
        return None
    if name in _HANDED_ON:  # except for operands that had been broadcast
        sums = [incoming + size for size in made.values() if size < incoming and name in _REPEATS]
        moved, launches = sum(sums), len(sums)
    elif name in _PRODUCTS:
        operands = dict.fromkeys(_tensors(forward.args))
        others = [sum(buffer_bytes(program, one) for one in operands if one != each) for each in wanted]
        moved, launches = len(made) * incoming + sum(others) + sum(made.values()), len(made)
    else:
        kept = saved_by(forward, tuple(dict.fromkeys(_tensors(forward.args))), (work.do.args[0],))
        moved, launches = incoming + sum(buffer_bytes(program, one) for one in kept) + sum(made.values()), 1
        first, *weights = dict.fromkeys(_tensors(forward.args))
        if name in _NORMS and (name == "groupnorm" or not set(weights).isdisjoint(wanted)):
            moved += incoming + buffer_bytes(program, first)
            launches = 4 if name == "groupnorm" else 3
    if not launches:
        return None
    return KernelWork(kind=WorkKind.MOVE, name="elementwise", bytes=float(moved), launches=float(launches))


def _tensors(args: Any) -> Iterator[str]:
    """Yield the buffers among a kernel's arguments."""
    if isinstance(args, Mapping):
        if "tensor" in args:
            yield args["tensor"]
    elif isinstance(args, list | tuple):
        for one in args:
            yield from _tensors(one)


def _overlapped_s(
    work: Work,
    forward: Kernel,
    program: RunnableProgram | Draft,
    product: KernelWork,
    roofline: Roofline,
    times: OverlapTimes,
) -> float:
    """Return the time of a kernel of the executor that exchanges during its product, or of its backward pass."""
    backward = work.do is not forward
    kind, mode, axes = forward.op.removeprefix(OVERLAPPED), forward.kwargs["mode"], tuple(forward.kwargs["axes"])
    exchanged = forward.args[0]["tensor"] if kind == GATHER else _written_by(work, forward)
    nbytes = float(buffer_bytes(program, exchanged) * times.mesh.size(axes))
    if backward:
        return times.backward_s(kind, mode, axes, nbytes, product, roofline, gradients=len(work.writes))
    return times.forward_s(kind, mode, axes, nbytes, product, roofline)


def _written_by(work: Work, forward: Kernel) -> str:
    """Return the result of the kernel that `work` is, or whose backward pass it is."""
    return work.writes[0] if work.do is forward or not isinstance(work.do, Kernel) else str(work.do.args[0])


def buffer_bytes(program: RunnableProgram | Draft, name: str) -> int:
    """Return the bytes of a rank's piece in a buffer."""
    buffer = program.buffers[name]
    size = ELEMENT_BYTES[buffer.dtype]
    for n in buffer.local:
        size *= n
    return size
