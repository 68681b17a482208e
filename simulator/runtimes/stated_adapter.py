"""Adapters and frozen weights as a source states them; what it leaves open has the usual recipe's values and is
listed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from simulator.config.adapter import (
    ALL_LINEAR,
    DORA,
    FROZEN,
    IA3,
    LORA,
    MODULES,
    MOST_RANK,
    Adapter,
    adapter_kind,
    base_type,
)
from topology.codec import JsonObject
from topology.errors import BadPlan

ADAPTER_KEYS = ("kind", "rank", "target_modules", "base_weights", "dropout")
# Defaults: the rank of peft's LoraConfig and of torchtune's recipes; queries and values, which the paper of LoRA adapts
# (section 4.2), are peft's default for Llama-like models.
USUAL_RANK = 8
USUAL_TARGETS = ("q_proj", "v_proj")


def resolve_adapter(
    stated: JsonObject, *, usual: tuple[str, ...] = (), whose: str = ""
) -> tuple[Adapter | None, list[str]]:
    """Return the adapter that `stated` describes (None without one) and a list of assumptions. `usual` are the modules
    in the recipes of `whose` software, or peft's if it has none.

    Raises BadPlan, naming the key.
    """
    if not any(value not in (None, "", "unknown") for value in stated.values()):
        return None, []
    assumed: list[str] = []
    kind, implied = adapter_kind(str(stated.get("kind") or LORA))
    said = stated.get("base_weights")
    base = base_type(str(said)) if said else implied
    if not usual:
        usual, whose = USUAL_TARGETS, "peft"
    targets = _targets(stated.get("target_modules"), kind, usual)
    if targets is usual:
        assumed.append(f"runtime.adapter.target_modules = {', '.join(usual)} ({whose}'s default)")
    rank = stated.get("rank") if kind in {LORA, DORA} else 1
    if rank is None:
        rank = USUAL_RANK
        assumed.append(f"runtime.adapter.rank = {rank} (peft's and torchtune's default)")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 < rank <= MOST_RANK:
        raise BadPlan(f"runtime.adapter.rank is {str(rank)[:40]!r}", why=f"it is a whole number from 1 to {MOST_RANK}")
    dropout = stated.get("dropout") or 0.0
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise BadPlan(f"runtime.adapter.dropout is {str(dropout)[:40]!r}", why="it is a share: from 0 up to 1")
    adapter = Adapter(
        kind=kind,
        rank=rank if kind in {LORA, DORA} else 0,
        target_modules=targets,
        base_weights=base,
        dropout=float(dropout),
    )
    return adapter, assumed


def _targets(stated: Any, kind: str, usual: tuple[str, ...]) -> tuple[str, ...]:
    words = [stated] if isinstance(stated, str) else list(stated) if isinstance(stated, Iterable) else []
    if not all(isinstance(word, str) and word.isprintable() and 0 < len(word) <= 128 for word in words):
        raise BadPlan(
            "runtime.adapter.target_modules is no list of names", remedy='["q_proj", "v_proj"], or "all-linear"'
        )
    if kind == FROZEN:
        if not words:
            raise BadPlan("runtime.adapter freezes nothing", remedy='name modules in target_modules: ["embed_tokens"]')
        return tuple(words)
    if not words and kind == IA3:
        return ("k_proj", "v_proj", "down_proj")  # the paper's, section 3.3
    if not words:
        return usual
    names = tuple(dict.fromkeys(_known(word) for word in words))
    return (ALL_LINEAR,) if ALL_LINEAR in names else names


def _known(word: str) -> str:
    """Return the name of a module; `all linear` becomes our name for it. Raises BadPlan for one that no model has."""
    plain = word.lower().replace("_", "-").replace(" ", "-")
    if plain in {ALL_LINEAR, "all"}:
        return ALL_LINEAR
    name = word.rpartition(".")[2]
    if name.lower() not in MODULES:
        raise BadPlan(
            f"adapter.target_modules {word[:40]!r} is no matrix of a layer",
            why=f"known: {', '.join(MODULES)}, {ALL_LINEAR}",
        )
    return name
