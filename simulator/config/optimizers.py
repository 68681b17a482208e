"""Optimizers as data: the state of each parameter, and the bytes that an update moves.

Sources: torch.optim (AdamW, Adafactor, SGD: its momentum is off by default); Lion, Chen et al., arXiv 2302.06675: one
moment; Adafactor, Shazeer and Stern, arXiv 1804.04235: a matrix has a row and a column of second moments, so almost
nothing per parameter, but torch's builds the whole matrix of second moments for a moment; 8-bit states, Dettmers et
al., arXiv 2110.02861: a byte and a float32 scale for each block of 256 (bitsandbytes since 0.44), whose states are
float32 where they are not 8 bits, whatever the parameter is. Paged states: `simulator.step.paged`. Moments in bfloat16
are Megatron-LM's --use-precision-aware-optimizer with --exp-avg-dtype and --exp-avg-sq-dtype. Muon, Jordan et al.,
https://kellerjordan.github.io/posts/muon/, as torch.optim has it (torch/optim/_muon.py of 2.13): one momentum of each
hidden matrix, orthogonalised by five Newton-Schulz iterations (`simulator.step.muon`); embeddings, head, norms and
biases are updated by AdamW.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

EIGHT_BIT = 1.0 + 4.0 / 256
# kOptimizerStatic8bit2StateBlockwise of bitsandbytes 0.50.2 searches a table of 256 values for both states of each
# number, which takes longer than its memory traffic: 36.4e9 numbers a second on the 132 SMs of an H200, the same for
# single tensors of 4 to 525 million (bfloat16, torch 2.11, 2026-11-28); whole models are compared in
# examples/validation/savers.md.
SEARCHED_PER_SM = 36.4e9 / 132
# Optimizer8bit.step waits for the GPU after every tensor, so the host's time for a tensor is not hidden: 22 us of
# Python (bitsandbytes 0.49 without its kernel, on one Xeon core, 2026-11-29), 15 us to launch and to wait assumed.
TENSOR_S = 37e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """`states` has one entry for each state tensor of a parameter: bytes per number, None for the width of what is
    updated.

    `passes` counts the tensors of the parameters' size that an update reads or writes, besides the states, the
    gradient, and reading and writing the parameter. `paged` is the bytes per number of paged states. `per_sm_s` is how
    many numbers an SM updates per second where arithmetic takes longer than memory. `tensor_s` is how long the device
    waits for the host at each tensor (plain tensors only). `matrices` replaces all this for hidden matrices, where
    these are updated by an orthogonalised momentum.
    """

    states: tuple[float | None, ...] = ()
    passes: float = 0.0
    paged: float = 0.0
    per_sm_s: float | None = None
    tensor_s: float = 0.0
    matrices: Optimizer | None = None

    def state_bytes(self, wide: float) -> float:
        """Return the bytes of a parameter's states; `wide` is the bytes per number of what is updated."""
        return sum(wide if nbytes is None else nbytes for nbytes in self.states)

    def moved(self, wide: float) -> float:
        """Return how many tensors of the updated type's width an update reads and writes, besides the plain three."""
        return 2.0 * self.state_bytes(wide) / wide + self.passes


_ADAM = Optimizer(states=(None, None))
_EIGHT = Optimizer(states=(EIGHT_BIT, EIGHT_BIT), per_sm_s=SEARCHED_PER_SM, tensor_s=TENSOR_S)
OPTIMIZERS = {
    "adamw": _ADAM,
    "adam": _ADAM,
    "adamwbf16moments": Optimizer(states=(2.0, 2.0)),
    "adamw8bit": _EIGHT,
    "pagedadamw": Optimizer(states=(4.0, 4.0), paged=8.0, tensor_s=TENSOR_S),
    "pagedadamw8bit": replace(_EIGHT, paged=2.0),
    "adafactor": Optimizer(passes=8.0),  # torch/optim/_adafactor.py: two norms, the matrix of moments, the update
    "lion": Optimizer(states=(None,)),
    "sgd": Optimizer(),
    "sgdmomentum": Optimizer(states=(None,)),
    # _single_tensor_muon: `lerp_` and `lerp` read a gradient more and write an update, which is read to be rounded and
    # written at half the width; decay reads and writes the parameter once more, and the last addition reads the update.
    "muon": Optimizer(states=(None, None), matrices=Optimizer(states=(None,), passes=7.0)),
}
_SYNONYMS = {
    **dict.fromkeys(("adam8bit", "adamwbnb8bit", "adambnb8bit", "bnbadamw8bit"), "adamw8bit"),
    **dict.fromkeys(("pagedadamw32bit", "pagedadam32bit", "pagedadam"), "pagedadamw"),
    "pagedadam8bit": "pagedadamw8bit",
    **dict.fromkeys(("distmuon", "muonadamw", "muonwithauxadam", "singledevicemuonwithauxadam"), "muon"),
}
# Names that are known and not modelled, with the reason.
NOT_MODELLED = {
    "shampoo": "its preconditioners are inverted by blocks on some ranks (distributed Shampoo), which has no cost here"
}


def canonical_optimizer(word: str) -> str:
    """Return an optimizer's name without its implementation: `FusedAdam`, `distributed_adam` and `adam` are the
    same.
    """
    plain = re.sub(r"fused|foreach|distributed|apex|torch|optimizer|[^a-z0-9]", "", word.lower()) or word
    return _SYNONYMS.get(plain, plain)


def why_no_optimizer(name: str) -> str:
    """Return why an optimizer cannot be predicted; empty if it can."""
    if name in OPTIMIZERS:
        return ""
    why = next((text for word, text in NOT_MODELLED.items() if word in name), "its states and its update are not known")
    return f"optimizer {name!r} is not modelled: {why}; known: {', '.join(OPTIMIZERS)}"
