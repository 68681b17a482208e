"""Names of runtimes and of recompute modes as people write them."""

from __future__ import annotations

import re

# How people call software whose description has another name.
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
    """Return a runtime's own name and the version after `@` of a name as people write it: `NeMo AutoModel@0.3`."""
    bare, _, version = name.partition("@")
    bare = re.sub(r"[\s_]+", "-", bare.strip().lower())
    return CALLED.get(bare, bare), version.strip()


# Other words for the recompute modes, as frameworks and papers spell them. Any other word is a runtime's own.
RECOMPUTE_SYNONYMS = {
    **dict.fromkeys(("per-op selective", "per-op", "op", "selective_op"), "selective-op"),
    "core_attn": "selective",
    **dict.fromkeys(("uniform", "block", "full-recompute", "yes"), "full"),
    **dict.fromkeys(("off", "no"), "none"),
}
