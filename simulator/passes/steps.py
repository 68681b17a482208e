"""The steps of a pass, in the order in which the host issues them. Amounts are arrays of shape (plans,).

Plans differ in what they run, so every step has `rows`, a mask of the plans that have it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simulator.columns.plan_table import Floats
from simulator.kernels.operators import Work, WorkKind

Rows = NDArray[np.bool_]
# The groups in which ranks with experts exchange tokens by all-to-all.
EXCHANGED_OVER = ("ep", "etp_ep")
# The suffix of a weight gradient's name.
WEIGHT_GRADIENT = ".wgrad"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel on the compute stream: its seconds alone, their source (`simulator.kernels.roofline`), and the host's
    seconds to launch it. A product names the tensor that it `reads` and the one that it `gives`, as in the runtime's
    description.
    """

    rows: Rows
    work: Work
    alone_s: Floats
    source: Floats
    launch_s: Floats | float
    reads: str = ""
    gives: str = ""

    @property
    def seconds(self) -> Floats:
        """Seconds in plans that run it, 0 elsewhere."""
        return np.where(self.rows, self.alone_s, 0.0)

    @property
    def issue_s(self) -> Floats:
        """The host's seconds in plans that run it, 0 elsewhere."""
        return np.where(self.rows, self.launch_s, 0.0)

    @property
    def product(self) -> bool:
        return self.work.kind is WorkKind.MATMUL

    @property
    def weight(self) -> bool:
        """Whether it computes a weight gradient, which a split backward pass runs later."""
        return self.work.name.endswith(WEIGHT_GRADIENT)

    def only(self, rows: Rows) -> Kernel:
        """Return the kernel restricted to the plans `rows`."""
        return replace(self, rows=self.rows & rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One collective, or message to a neighbour, that the next kernel waits for.

    `nbytes` is nccl-tests' size, `alone_s` its seconds, `call_s` the host's. `modes` has each plan's overlap mode; None
    if no plan has one. `tensor` as in `Kernel.reads`.
    """

    rows: Rows
    op: str
    over: str
    nbytes: Floats
    alone_s: Floats
    call_s: float
    ranks: Floats
    tensor: str = ""
    backward: bool = False
    modes: NDArray[np.str_] | None = None

    @property
    def seconds(self) -> Floats:
        return np.where(self.rows, self.alone_s, 0.0)

    def only(self, rows: Rows) -> Transfer:
        return replace(self, rows=self.rows & rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """An attention kernel in as many pieces as ranks; while one computes, the shard that the next one needs arrives.

    During that time the outgoing and incoming messages hold a share `held` of the SMs.
    """

    rows: Rows
    over: str
    shard_bytes: Floats
    hop_s: Floats
    held: Floats
    call_s: float
    ranks: Floats
    hidden_by: str  # the kernel's name
    backward: bool  # whether the kernel follows the ring (backward) instead of preceding it
    kernel: Kernel | None = None

    @property
    def piece_s(self) -> Floats:
        """Seconds of a piece alone."""
        alone = np.zeros(len(self.rows)) if self.kernel is None else self.kernel.seconds
        return np.where(self.rows, alone / self.ranks, 0.0)

    @property
    def beside_s(self) -> Floats:
        """Seconds of a piece during which a hop takes place."""
        piece = self.piece_s
        return np.minimum(piece / (1.0 - self.held), piece + self.held * self.hop_s)

    @property
    def lost_s(self) -> Floats:
        """Seconds by which concurrent hops lengthen the pieces."""
        return np.where(self.rows, (self.ranks - 1) * (self.beside_s - self.piece_s), 0.0)

    @property
    def exposed_s(self) -> Floats:
        """Seconds of hops that the pieces do not hide."""
        return np.where(self.rows, (self.ranks - 1) * np.maximum(self.hop_s - self.beside_s, 0.0), 0.0)

    @property
    def issue_s(self) -> Floats:
        """The host's seconds for hops, and for all pieces but the first, which a kernel without a ring has as well."""
        launch_s = 0.0 if self.kernel is None else self.kernel.issue_s
        return np.where(self.rows, (self.ranks - 1) * (2 * self.call_s + launch_s), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A tensor-parallel collective and the kernels that run at the same time: together they take `together_s`, and
    `issue_s` of the host.

    `copy_s` is the time of a shard by copy engine; `piece_s` that of one piece where torch's graph pass divides
    products by rank.
    """

    rows: Rows
    transfer: Transfer
    kernels: tuple[Kernel, ...]
    together_s: Floats
    issue_s: Floats
    copy_s: Floats
    piece_s: Floats

    @property
    def exposed_s(self) -> Floats:
        """Seconds that the collective adds to its kernels."""
        return np.where(self.rows, np.maximum(self.together_s - self.computed_s, 0.0), 0.0)

    @property
    def computed_s(self) -> Floats:
        """The kernels alone."""
        return sum((kernel.seconds for kernel in self.kernels), np.zeros(len(self.rows)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The host reads a value from the device: `call_s` of its own time, then it waits for everything that it has
    launched.
    """

    rows: Rows
    call_s: float


Step = Kernel | Transfer | Ring | Pair | Wait
