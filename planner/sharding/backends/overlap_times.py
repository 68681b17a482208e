"""What the executor's overlapped kernels take in a program, by the formulas that price them in training steps.

The backward pass of a kernel runs the mirrored exchange in the same mode, and then the weight's gradient
(`executor.overlap.autograd`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import numpy as np

from planner.sharding.layouts.mesh import Mesh
from planner.sharding.problem.problem import Machine
from planner.sharding.solver.pricing import TimePricing
from simulator.calibration.calibration import overlap_of
from simulator.kernels.operators import Work
from simulator.kernels.roofline import Roofline
from simulator.overlap.modes import GATHER, SLICES, Parts, rounds_of
from simulator.overlap.site_costs import LARGE_COPY_BYTES, pair_s, product_of
from topology.errors import Infeasible


@dataclass(frozen=True, slots=True)
class OverlapTimes:
    """Times of overlapped kernels on a machine whose GPUs the mesh takes in order.

    Of every kernel, `nbytes` are what is gathered or summed in all, and `product` is the work of all rows on one rank.
    """

    machine: Machine
    mesh: Mesh

    def forward_s(
        self, kind: str, mode: str, axes: tuple[str, ...], nbytes: float, product: Work, roofline: Roofline
    ) -> float:
        """Return the seconds of a kernel. Raises Infeasible where copy engines do not reach all ranks."""
        op = "all_gather" if kind == GATHER else "reduce_scatter"
        return self._pair_s(op, mode, axes, nbytes, product, roofline)

    def backward_s(
        self,
        kind: str,
        mode: str,
        axes: tuple[str, ...],
        nbytes: float,
        product: Work,
        roofline: Roofline,
        *,
        gradients: int,
    ) -> float:
        """Return the seconds of a kernel's backward pass, which makes so many gradients."""
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
        product: Work,
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

    def _parts(self, op: str, axes: tuple[str, ...], nbytes: float, product: Work, roofline: Roofline) -> Parts:
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
            hop_s=seconds("send_recv", shard),
            stream_s=shard / roofline.memory_bytes_per_s,
            rounds=rounds_of(product.m, product.n, roofline.gpu.sm_count),
        )
