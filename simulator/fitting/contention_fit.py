"""By how much a collective and a concurrent kernel slow each other down, from pairs measured alone and together.

A kernel loses SMs and memory bandwidth. The factor differs between large products, small ones and copies, and little
between collectives. A collective loses bandwidth and waits: NCCL's kernel gets SMs only when blocks of the running
product end, which takes a share of that product's time for every message size. So

    kernel alongside     = slowdown(kernel) * kernel alone
    collective alongside = share * collective alone + wait * kernel alone

with `share` for products and for copies and one `wait` for products; copies end too soon to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy  # submodules are imported when first used

from simulator.calibration.calibration import Contention
from topology.profile.samples import ContentionSample


def fit_contention(samples: Sequence[ContentionSample]) -> dict[str, Contention]:
    """Return by how much compute and each collective slow each other down in a step.

    Pairs are weighted by the time of their compute, since large products take most of a step.
    """
    found = {}
    pairs = valid(samples)
    for op in dict.fromkeys(s.op for s in pairs):
        mine = [s for s in pairs if s.op == op]
        weight = np.array([s.compute_alone_s for s in mine])
        compute = np.array([max(s.compute_beside_s / s.compute_alone_s, 1.0) for s in mine])
        collective = np.array([max(s.collective_beside_s / s.collective_alone_s, 1.0) for s in mine])
        found[op] = Contention(
            compute=float(np.exp(np.average(np.log(compute), weights=weight))),
            collective=float(np.exp(np.average(np.log(collective), weights=weight))),
            samples=len(mine),
        )
    return found


def valid(samples: Sequence[ContentionSample]) -> list[ContentionSample]:
    return [s for s in samples if not s.invalid and s.compute_alone_s > 0 and s.collective_alone_s > 0]


def left_out_errors(samples: Sequence[ContentionSample]) -> tuple[float, float] | None:
    """Return the mean errors of concurrent (kernel, collective) times, each pair predicted from all others.

    None with too few pairs to leave one out.
    """
    pairs = valid(samples)
    kernels, collectives = [], []
    for index, pair in enumerate(pairs):
        others = pairs[:index] + pairs[index + 1 :]
        alike = [s for s in others if s.compute == pair.compute and s.shape == pair.shape]
        model = fit_collective(others, pair.compute)
        if not alike or model is None:
            continue
        slowdown = float(np.exp(np.mean([np.log(s.compute_beside_s / s.compute_alone_s) for s in alike])))
        kernels.append(abs(slowdown * pair.compute_alone_s / pair.compute_beside_s - 1))
        share, wait = model
        predicted_s = share * pair.collective_alone_s + wait * pair.compute_alone_s
        collectives.append(abs(predicted_s / pair.collective_beside_s - 1))
    return (float(np.mean(kernels)), float(np.mean(collectives))) if kernels else None


def fit_collective(samples: Sequence[ContentionSample], compute: str) -> tuple[float, float] | None:
    """Return (share, wait) of collectives next to one kind of compute, by least squares of relative errors."""
    mine = [s for s in samples if s.compute == compute]
    if not mine:
        return None
    together = np.array([s.collective_beside_s for s in mine])
    alone = np.array([s.collective_alone_s for s in mine]) / together
    if compute != "matmul" or len(mine) < 3:
        return float(np.sum(alone) / np.sum(alone**2)), 0.0
    kernel = np.array([s.compute_alone_s for s in mine]) / together
    (share, wait), _ = scipy.optimize.nnls(np.stack([alone, kernel], axis=1), np.ones(len(mine)))
    return float(share), float(wait)
