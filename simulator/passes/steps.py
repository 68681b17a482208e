"""What a pass is made of, in the order in which its host issues it. Amounts are columns, one value a plan.

Plans differ in what they run, so every step has `rows`: the plans that have it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simulator.columns.plan_table import Floats
from simulator.kernels.operators import Work, WorkKind

Rows = NDArray[np.bool_]
# The groups in which all-to-alls exchange tokens between ranks with experts.
EXCHANGED_OVER = ("ep", "etp_ep")
# The ending of a weight gradient's name.
WEIGHT_GRADIENT = ".wgrad"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel on the compute stream: its seconds alone, where they are from (`simulator.kernels.roofline`), and the
    host's seconds to launch it. A product names the tensor that it `reads` and the one that it `gives`, in the words of
    the runtime's description.
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
        """Its seconds in plans that run it, 0 elsewhere."""
        return np.where(self.rows, self.alone_s, 0.0)

    @property
    def issue_s(self) -> Floats:
        """The host's seconds likewise."""
        return np.where(self.rows, self.launch_s, 0.0)

    @property
    def product(self) -> bool:
        return self.work.kind is WorkKind.MATMUL

    @property
    def weight(self) -> bool:
        """Whether it computes the gradient of a weight, which split backwards run later."""
        return self.work.name.endswith(WEIGHT_GRADIENT)

    def only(self, rows: Rows) -> Kernel:
        """Return the kernel in plans of `rows`."""
        return replace(self, rows=self.rows & rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One collective, or message to a neighbour, that the next kernel waits for.

    `nbytes` as of nccl-tests, `alone_s` its seconds, `call_s` the host's. `modes` are the words by which plans have it
    run alongside products; None where no plan has one. `tensor` as in `Kernel.reads`.
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
    """An attention kernel in as many pieces as ranks; while one computes, the shard that the next one needs comes
    round.

    Meanwhile the message out and the one in hold a share `held` of the SMs.
    """

    rows: Rows
    over: str
    shard_bytes: Floats
    hop_s: Floats
    held: Floats
    call_s: float
    ranks: Floats
    hidden_by: str  # the kernel's name
    backward: bool  # and whether it comes behind the ring, not before it
    kernel: Kernel | None = None

    @property
    def piece_s(self) -> Floats:
        """Seconds of a piece alone."""
        alone = np.zeros(len(self.rows)) if self.kernel is None else self.kernel.seconds
        return np.where(self.rows, alone / self.ranks, 0.0)

    @property
    def beside_s(self) -> Floats:
        """Seconds of a piece that begins with a hop."""
        piece = self.piece_s
        return np.minimum(piece / (1.0 - self.held), piece + self.held * self.hop_s)

    @property
    def lost_s(self) -> Floats:
        """Seconds that pieces lose alongside hops."""
        return np.where(self.rows, (self.ranks - 1) * (self.beside_s - self.piece_s), 0.0)

    @property
    def exposed_s(self) -> Floats:
        """Seconds of hops that pieces do not hide."""
        return np.where(self.rows, (self.ranks - 1) * np.maximum(self.hop_s - self.beside_s, 0.0), 0.0)

    @property
    def issue_s(self) -> Floats:
        """The host's seconds for the hops and for the pieces, of which there is one without them."""
        launch_s = 0.0 if self.kernel is None else self.kernel.issue_s
        return np.where(self.rows, (self.ranks - 1) * (2 * self.call_s + launch_s), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A tensor-parallel collective and the kernels that run alongside it: both together take `together_s`, and the host
    `issue_s`.

    `copy_s` is a shard by a copy engine, `piece_s` one launch of as many as ranks where torch's graph pass cuts
    products up.
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
        """What the collective adds to its kernels."""
        return np.where(self.rows, np.maximum(self.together_s - self.computed_s, 0.0), 0.0)

    @property
    def computed_s(self) -> Floats:
        """The kernels alone."""
        return sum((kernel.seconds for kernel in self.kernels), np.zeros(len(self.rows)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The host reads something off the device: `call_s` of its own, then it waits for all that it has launched."""

    rows: Rows
    call_s: float


Step = Kernel | Transfer | Ring | Pair | Wait
