"""The default global batch: about as many tokens per step as in a published recipe for a model of that size."""

from __future__ import annotations

from dataclasses import dataclass
from math import log, log2

from simulator.config.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The published pretraining of a model with `parameters`: `tokens` per step, the last value if the batch grew."""

    name: str
    parameters: float
    tokens: int
    source: str


GPT3 = "arXiv 2005.14165, table 2.1"
LLAMA2 = "arXiv 2307.09288, section 2.2"
RECIPES = (
    Recipe(name="GPT-3 Small", parameters=125e6, tokens=1 << 19, source=GPT3),
    Recipe(name="GPT-3 Large", parameters=760e6, tokens=1 << 19, source=GPT3),
    Recipe(name="GPT-3 XL", parameters=1.3e9, tokens=1 << 20, source=GPT3),
    Recipe(name="GPT-3 2.7B", parameters=2.7e9, tokens=1 << 20, source=GPT3),
    Recipe(name="Llama 2 7B", parameters=6.7e9, tokens=1 << 22, source=LLAMA2),
    Recipe(name="Llama 2 13B", parameters=13e9, tokens=1 << 22, source=LLAMA2),
    Recipe(name="Llama 2 70B", parameters=69e9, tokens=1 << 22, source=LLAMA2),
    Recipe(name="GPT-3 175B", parameters=175e9, tokens=3_200_000, source=GPT3),
    Recipe(name="Llama 3 405B", parameters=405e9, tokens=1 << 24, source="arXiv 2407.21783, section 3.4.1"),
    Recipe(name="DeepSeek-V3", parameters=671e9, tokens=15360 * 4096, source="arXiv 2412.19437, section 4.2"),
)


# Sequences of a step per GPU in recipes of LoRA for Llama 3 8B, which tools start with on any number of GPUs.
TUNED_PER_GPU = 8
TUNED = (
    "LLaMA-Factory's examples/train_lora/llama3_lora_sft.yaml, 1 x 8 accumulated; axolotl's"
    " examples/llama-3/lora-8b.yml, 2 x 4"
)


SEQ_LEN = 8192  # tokens of a sequence, unless the model's own limit is less


def default_length(model: Model) -> int:
    """Return the tokens of a sequence where no length is stated."""
    return min(SEQ_LEN, model.max_positions or SEQ_LEN)


def default_batch(model: Model, seq_len: int, gpus: int, *, tuned: bool = False) -> tuple[int, str]:
    """Return the sequences of a step, and the name of the recipe; `tuned` is for adapters or frozen weights.

    The number is a multiple of `gpus` and of powers of two, or a power of two if a step has fewer sequences than GPUs,
    so it can be divided by many numbers of data-parallel ranks and micro batch sizes.
    """
    if tuned:
        batch = TUNED_PER_GPU * gpus
        return batch, f"global batch {batch:,} sequences ({TUNED_PER_GPU} a GPU, as in fine-tuning: {TUNED})"
    recipe = min(RECIPES, key=lambda one: abs(log(one.parameters / model.parameters)))
    sequences = recipe.tokens / seq_len
    if sequences >= gpus:
        several = 1 << max(0, int(log2(sequences / gpus)) - 3)
        batch = max(1, round(sequences / gpus / several)) * several * gpus
    else:
        batch = 1 << max(0, round(log2(max(sequences, 1))))
    tokens, theirs = (f"{count / 1e6:.2g}M" for count in (batch * seq_len, recipe.tokens))
    like = f"as {recipe.name}" if tokens == theirs else f"near the {theirs} of {recipe.name}"
    return batch, f"global batch {batch:,} sequences ({tokens} tokens a step, {like}: {recipe.source})"
