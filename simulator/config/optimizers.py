"""Optimizers as data: what each keeps of a parameter, and what its update moves.

Sources: torch.optim (AdamW, Adafactor, SGD: its momentum is off by default); Lion, Chen et al., arXiv 2302.06675: one
moment; Adafactor, Shazeer and Stern, arXiv 1804.04235: a matrix has a row and a column of second moments, so next to
nothing a parameter, and torch's makes the whole matrix of them for a moment; 8-bit states, Dettmers et al., arXiv
2110.02861: a byte and a float32 scale for each block of 256 (bitsandbytes since 0.44), whose states are float32 where
they are not 8 bits, whatever the parameter is. Paged states: `simulator.step.paged`. Moments in bfloat16 are
Megatron-LM's --use-precision-aware-optimizer with --exp-avg-dtype and --exp-avg-sq-dtype. Muon, Jordan et al.,
https://kellerjordan.github.io/posts/muon/, as torch.optim has it (torch/optim/_muon.py of 2.13): one momentum of each
hidden matrix, orthogonalised by five Newton-Schulz iterations (`simulator.step.muon`); embeddings, head, norms and
biases are updated by AdamW.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

EIGHT_BIT = 1.0 + 4.0 / 256
# kOptimizerStatic8bit2StateBlockwise of bitsandbytes 0.50.2 searches a table of 256 values for both states of each
# number, which takes longer than memory: 36.4e9 numbers a second on the 132 SMs of an H200, the same for single tensors
# of 4 to 525 million (bfloat16, torch 2.11, 2026-11-28); whole models are compared in examples/validation/savers.md.
SEARCHED_PER_SM = 36.4e9 / 132
# Optimizer8bit.step waits for the GPU after every tensor, so that what the host does for one is not hidden: 22 us of
# Python (bitsandbytes 0.49 without its kernel, on one Xeon core, 2026-11-29), 15 us to launch and to wait assumed.
TENSOR_S = 37e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """`states` are the tensors that it keeps of every parameter: bytes of a number, None as wide as what is updated.

    `passes` are how often an update reads or writes a tensor of the parameters' size besides those, and besides the
    parameter, its gradient and the parameter again. `paged` are the bytes of a number's states that are paged.
    `per_sm_s` are the numbers that an SM updates a second where its arithmetic takes longer than memory. `tensor_s` are
    the seconds of the host that the device waits for at each tensor, plain ones only. `matrices` is what hidden
    matrices have in the place of all this, where they are updated otherwise than the rest, by a momentum that is
    orthogonalised.
    """

    states: tuple[float | None, ...] = ()
    passes: float = 0.0
    paged: float = 0.0
    per_sm_s: float | None = None
    tensor_s: float = 0.0
    matrices: Optimizer | None = None

    def state_bytes(self, wide: float) -> float:
        """Return bytes of a parameter's states, `wide` those of a number of what is updated."""
        return sum(wide if nbytes is None else nbytes for nbytes in self.states)

    def moved(self, wide: float) -> float:
        """Return how many tensors as wide as what is updated an update reads and writes besides the plain three."""
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
# What people name that is known and not modelled, and why.
NOT_MODELLED = {
    "shampoo": "its preconditioners are inverted by blocks on some ranks (distributed Shampoo), which has no cost here",
}


def canonical_optimizer(word: str) -> str:
    """Return an optimizer's name without how it is implemented: `FusedAdam`, `distributed_adam` and `adam` are one."""
    plain = re.sub(r"fused|foreach|distributed|apex|torch|optimizer|[^a-z0-9]", "", word.lower()) or word
    return _SYNONYMS.get(plain, plain)


def why_no_optimizer(name: str) -> str:
    """Return why an optimizer cannot be predicted, or nothing."""
    if name in OPTIMIZERS:
        return ""
    why = next((text for word, text in NOT_MODELLED.items() if word in name), "its states and its update are not known")
    return f"optimizer {name!r} is not modelled: {why}; known: {', '.join(OPTIMIZERS)}"
