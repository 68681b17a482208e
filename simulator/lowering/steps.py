"""The steps of a block's code under one plan: kernels, collectives, and pairs of the two that run at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from simulator.passes.steps import Wait
from simulator.program.cost_model import Cost

KernelKey = tuple[str, tuple[int, ...], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelStep:
    """One launch on the compute stream, which may stand for several: the host issues the first in `host_s` and the
    others in `more_host_s`. `weight`: a weight gradient, which a split backward pass runs later.
    """

    key: KernelKey
    cost: Cost
    host_s: float
    weight: bool = False
    more_host_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStep:
    """One collective that the next kernel waits for."""

    op: str
    group: str
    nbytes: int
    host_s: float
    seconds: float
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecesStep:
    """A kernel in as many pieces as ranks; while one computes, the shard of `nbytes` that the next one needs arrives:
    over the ring or, as torch's graph pass combines products and collectives, by copy engine. A copy takes `hop_s`, and
    `copies_host_s` of the host for each piece.
    """

    piece: KernelStep
    group: str
    nbytes: int
    ranks: int
    hop_s: float | None = None  # None: over the ring
    copies_host_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteStep:
    """Products and their collective in one of the executor's modes: `kernel` as long as the products alone, then what
    they leave `exposed` of the collective, which needs no SMs.

    The host takes `kernel.host_s` for the first call and `more_host_s` for the others; copies of `hop_s` each represent
    the shards.
    """

    mode: str
    kernel: KernelStep
    exposed: KernelStep
    transfer: TransferStep
    hop_s: float
    more_host_s: float


Step = KernelStep | TransferStep | PiecesStep | SiteStep | Wait


def summed(run: Sequence[KernelStep], name: str) -> KernelStep:
    """Return consecutive launches as one."""
    if len(run) == 1:
        return run[0]
    seconds = sum(step.cost.seconds for step in run)
    moved = sum(step.cost.seconds * step.cost.hbm_bytes_per_s for step in run)
    return KernelStep(
        key=(name, (), run[0].key[2]),
        cost=Cost(
            seconds=seconds,
            sms=max(step.cost.sms for step in run),
            hbm_bytes_per_s=moved / seconds if seconds else 0.0,
            launches=sum(step.cost.launches for step in run),
        ),
        host_s=run[0].host_s,
        more_host_s=sum(step.host_s for step in run[1:]),
        weight=run[0].weight,
    )


def piece_of(kernel: KernelStep, ranks: int, seconds: float) -> KernelStep:
    """Return one of the pieces, of `seconds` each, into which a kernel is divided: as many as `ranks`."""
    name, shape, dtype = kernel.key
    return replace(kernel, key=(f"{name}/{ranks}", shape, dtype), cost=replace(kernel.cost, seconds=seconds))
