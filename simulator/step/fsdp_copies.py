"""What FSDP moves within a GPU around its collectives, kernel by kernel.

FSDP2 (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_all_gather`, `foreach_all_gather_copy_out`,
`foreach_reduce`): shards are cast to the type of products and then copied into the gather's buffer, on a stream of
their own; gathered parameters are copied out of it, and gradients packed for the reduction, on the compute stream.
What is reduced is cast to the parameters' type and added to the gradients of earlier micro batches on the stream of
reductions. Over one rank nothing is gathered (`FSDPParamGroup.wait_for_unshard`): whole parameters are cast and copied
on the compute stream, and packed gradients are copied once more instead of reduced.

FSDP1 (torch/distributed/fsdp/_flat_param.py, _runtime_utils.py) gathers the cast shard of a flat tensor into the place
where its parameters are views of it. Their gradients are joined to a flat one on the compute stream, then cast and, for
several ranks, divided on the stream of reductions.

One rank may cast its parameters itself (`FsdpSpec.casts_own`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from simulator.columns.plan_table import Floats
from simulator.kernels.roofline import GATHER_PACK, GATHER_UNPACK, REDUCE_PACK, Packing
from simulator.step.context import CostContext

# Of the time that copies take next to compute, what they take from it: next to products they hardly move and slow
# nothing (products take -8 to +2 % longer), and kernels that move memory lose 70 % of it. Source: one H200, casts and
# copies of 109 million elements on a stream of high priority next to 10 to 21 products and next to 40 products of
# elements (torch 2.11; examples/validation/kernels.md).
TAKEN = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Bytes that a kernel moves for a module, whether they are any, and how it runs."""

    nbytes: Floats
    some: bool
    packing: Packing


class FsdpCopies:
    """What FSDP copies for the plans of a table. What is moved is of a module with `shared` and `experts` parameters on
    a rank before sharding.
    """

    def __init__(self, context: CostContext) -> None:
        spec, adapter, reduced = context.spec, context.runtime.adapter, context.dtype_bytes("reduce")
        self.none, self.flat = not spec.fsdp.copy_in_copy_out, spec.fsdp.flat_parameters  # none: copies nothing
        self.casts_own = context.table.casts_own
        # Ranks that share a module's parameters, and its routed experts.
        self.ranks, self.expert_ranks = (context.groups.extent(family)[0] for family in ("fsdp", "expert_fsdp"))
        # Bytes of a number where parameters are stored, gathered and reduced, and of gradients before they are packed.
        self.gathered, self.reduced = context.dtype_bytes("gathered"), reduced
        in_base = adapter is not None and adapter.base_weights
        self.stored = self.gathered if in_base else context.dtype_bytes("param")
        # Without a reduction after every micro batch, gradients are added up in the type of the reduction.
        width = context.dtype_bytes(spec.state.unsharded_gradient_dtype)
        self.computed = np.where(context.table["pp"] > 1, reduced, width)

    def before_gather(self, shared: Floats, experts: Floats) -> Move:
        """Return what runs before a gather, next to compute."""

        def each(ranks: Floats) -> Floats:
            width = self._cast + (0.0 if self.flat else 2.0 * self.gathered)
            return np.where(ranks > 1, width / ranks, 0.0)

        return self._move(GATHER_PACK, shared, experts, each)

    def after_gather(self, shared: Floats, experts: Floats) -> Move:
        """Return what runs between a gather and the module: the copy out of it, or what one rank does instead."""

        def each(ranks: Floats) -> Floats:
            alone = self._cast + np.where(self.casts_own, 0.0, 2.0 * self.gathered)
            return np.where(ranks > 1, 0.0 if self.flat else 2.0 * self.gathered, alone)

        return self._move(GATHER_UNPACK, shared, experts, each)

    def before_reduction(self, shared: Floats, experts: Floats, *, further: bool) -> Move:
        """Return the packing of gradients between the module and their reduction, or their sum with those of earlier
        micro batches where one rank keeps them itself (`further`).
        """
        width = self.computed + (self.computed if self.flat else self.reduced)
        added = self.casts_own & further
        width = width + np.where(added, self.reduced, 0.0)
        # One rank's first gradients are cast many at a time.
        widens = (self.reduced > self.computed) & (not self.flat) & (~self.casts_own | added)
        return self._move(REDUCE_PACK, shared, experts, lambda _: width, widened_bytes=np.where(widens, width, 0.0))

    def after_reduction(self, shared: Floats, experts: Floats, *, further: bool) -> Move:
        """Return what runs next to compute around a reduction; `further`: there are gradients of earlier micro
        batches.
        """

        def each(ranks: Floats) -> Floats:
            back = self.reduced + self.stored if self.reduced != self.stored else 0.0
            kept = back + (3.0 * self.stored if further else 0.0)
            if not self.flat:
                return np.where(ranks > 1, 0.0, 2.0 * self.reduced) + kept / ranks
            cast = np.where(self.computed != self.reduced, self.computed + self.reduced, 0.0)
            return np.asarray(cast + np.where(ranks > 1, 2.0 * self.reduced, 0.0) + kept / ranks)

        return self._move(GATHER_PACK, shared, experts, lambda ranks: np.where(self.casts_own, 0.0, each(ranks)))

    @property
    def _cast(self) -> float:
        return self.stored + self.gathered if self.stored != self.gathered else 0.0

    def _move(
        self,
        kernel: str,
        shared: Floats,
        experts: Floats,
        each: Callable[[Floats], Floats],
        *,
        widened_bytes: Floats | float = 0.0,
    ) -> Move:
        nbytes = np.zeros_like(shared) if self.none else shared * each(self.ranks) + experts * each(self.expert_ranks)
        module_bytes = (shared + experts) * self.gathered
        packing = Packing(kernel=kernel, module_bytes=module_bytes, widened_bytes=widened_bytes)
        return Move(nbytes=nbytes, some=bool(np.any(nbytes)), packing=packing)
