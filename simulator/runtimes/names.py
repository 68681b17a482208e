"""How people call software whose description (`simulator.runtimes.library`) has another name."""

from __future__ import annotations

import re

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
