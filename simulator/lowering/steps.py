"""What a block's code is made of: kernels, collectives, and pairs of the two that run beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from simulator.overlap.site_costs import Products
from simulator.overlap.torch_async import extra_calls, launch_s, together_s
from simulator.program.cost_model import Cost

KernelKey = tuple[str, tuple[int, ...], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelStep:
    """One launch on the compute stream. `weight`: a weight gradient, which split backwards run later.

    `pieces_s` is what it takes cut into one piece for each tensor-parallel rank, under async; zero for what is no
    product. `product` is the same kernel as half of a pair of our own modes.
    """

    key: KernelKey
    cost: Cost
    host_s: float
    weight: bool = False
    pieces_s: float = 0.0
    merged: bool = False  # stands for many launches
    reads: str = ""  # the tensor a product reads, in the runtime's words
    result: str = ""  # and the one it gives
    product: Products | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStep:
    """One collective that the next kernel waits for. `mode` says how products next to it may hide it.

    `hop_s` is one shard by a copy engine; `whole_bytes` before rounding; `backward` as of its operator.
    """

    op: str
    group: str
    nbytes: int
    host_s: float
    seconds: float
    mode: str = "none"
    hop_s: float = 0.0
    tensor: str = ""
    adding: Cost | None = None  # of the pass that adds up partial results, where the mode has one
    ranks: int = 1
    whole_bytes: float = 0.0
    backward: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncStep:
    """A product and the collective it feeds on (`gathers`) or feeds, as torch's graph pass joins them."""

    product: KernelStep
    transfer: TransferStep
    gathers: bool

    @property
    def ranks(self) -> int:
        return self.transfer.ranks

    @property
    def piece(self) -> KernelStep:
        """What is launched: one piece of the product."""
        name, shape, dtype = self.product.key
        return KernelStep(
            key=(f"{name}/{self.ranks}", shape, dtype),
            cost=replace(self.product.cost, seconds=launch_s(**self._times)),
            host_s=self.product.host_s,
        )

    @property
    def seconds(self) -> float:
        """How long both take together on an idle machine."""
        return together_s(**self._times)

    @property
    def host_s(self) -> float:
        return self.product.host_s * self.ranks + (1 + extra_calls(float(self.ranks))) * self.transfer.host_s

    @property
    def _times(self) -> dict[str, float]:
        return {"hop_s": self.transfer.hop_s, "pieces_s": self.product.pieces_s, "ranks": float(self.ranks)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteStep:
    """Products and their collective in one of the executor's modes: one launch that takes as long as both together.

    The host is `kernel.host_s` in the first call and `more_host_s` in the others; shards are seen as copies beside.
    """

    kernel: KernelStep
    transfer: TransferStep
    more_host_s: float

    @property
    def seconds(self) -> float:
        return self.kernel.cost.seconds

    @property
    def host_s(self) -> float:
        return self.kernel.host_s + self.more_host_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RingStep:
    """A kernel in `ranks` pieces; while one computes, the shard that the next one needs comes round the ring."""

    kernel: KernelStep
    group: str
    nbytes: int  # of one shard
    hop_s: float
    host_s: float
    ranks: int

    @property
    def piece(self) -> KernelStep:
        name, shape, dtype = self.kernel.key
        cost = replace(self.kernel.cost, seconds=self.kernel.cost.seconds / self.ranks)
        return KernelStep(key=(f"{name}/{self.ranks}", shape, dtype), cost=cost, host_s=self.kernel.host_s)

    @property
    def seconds(self) -> float:
        piece = self.kernel.cost.seconds / self.ranks
        return piece + (self.ranks - 1) * max(piece, self.hop_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitStep:
    """The host reads something off the device: `host_s` of its own, then it waits for all that it has launched."""

    host_s: float


Step = KernelStep | TransferStep | AsyncStep | SiteStep | RingStep | WaitStep


def summed(run: Sequence[KernelStep], name: str) -> KernelStep:
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
        host_s=sum(step.host_s for step in run),
        weight=run[0].weight,
        pieces_s=sum(step.pieces_s or step.cost.seconds for step in run),
        merged=True,
    )
