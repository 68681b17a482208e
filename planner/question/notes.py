"""What a source says of a run in words besides its fields (`note`): read for general words, each listed as assumed."""

from __future__ import annotations

import re

_SCOPES = re.compile(r'"?cuda_graph_scopes"?\s*[:=]\s*\[([^\]]{1,200})\]')
_BF16_MOMENTS = re.compile(r"\b(bf16|bfloat16) (optimi[sz]er |adam )?moments?\b")
_FORCED = re.compile(r"\bforced?( load)?[ -]balanc|\bbalanc\w* forced|\brout\w+ forced")
_NATURAL = re.compile(r"\bnatural\b|\bnot balanced\b")
_WATTS = re.compile(r"\b(\d{3,4}) ?W\b")


def graph_scopes_noted(note: str) -> tuple[str, ...]:
    """Return the parts of a layer of which a note says that CUDA graphs replay them."""
    found = _SCOPES.search(note)
    parts = re.split(r"[^a-z_ ]", found.group(1).lower()) if found else []
    return tuple(part.strip("_ ") for part in parts if part.strip("_ "))


def bf16_moments_noted(note: str) -> bool:
    """Return whether a note says that Adam keeps its moments in bfloat16."""
    return _BF16_MOMENTS.search(note.lower()) is not None


def routing_noted(note: str) -> str:
    """Return what a note says of how tokens visit experts, in the words of a workload, or nothing."""
    if _NATURAL.search(note.lower()):
        return "natural"
    return "balanced" if _FORCED.search(note.lower()) else ""


def watts_noted(note: str) -> int | None:
    """Return the power of a GPU that a note speaks of, the first where it names several, or None."""
    found = _WATTS.search(note)
    return int(found.group(1)) if found else None
