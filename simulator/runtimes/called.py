"""Names of runtimes and of recompute modes as people write them."""

from __future__ import annotations

import re

# Common names of software whose description has another name.
CALLED = {
    "titan": "torchtitan",
    "megatron": "megatron-lm",
    "automodel": "nemo-automodel",
    "fsdp": "pytorch",
    "fsdp2": "pytorch",
    "torch": "pytorch",
    "trainer": "transformers",
    "huggingface": "transformers",
    "hugging-face": "transformers",
    "hf-trainer": "transformers",
    "paddle": "paddlenlp",
}


def called(name: str) -> tuple[str, str]:
    """Return the runtime's name and the version after `@` in a common name: `NeMo AutoModel@0.3`."""
    bare, _, version = name.partition("@")
    bare = re.sub(r"[\s_]+", "-", bare.strip().lower())
    return CALLED.get(bare, bare), version.strip()


# Synonyms of recompute modes in frameworks and papers. Any other word is passed on as the runtime's own.
RECOMPUTE_SYNONYMS = {
    **dict.fromkeys(("per-op selective", "per-op", "op", "selective_op"), "selective-op"),
    "core_attn": "selective",
    **dict.fromkeys(("uniform", "block", "full-recompute", "yes"), "full"),
    **dict.fromkeys(("off", "no"), "none"),
}
