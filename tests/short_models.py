"""Models of which only some layers are run: shipped ones at their widths, and smaller ones of their families."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner.calibrate.measurements import shallow
from simulator.config.hf_config import load_model
from simulator.config.model import Model

# Smaller ones of a family that is shipped: what differs, from their config.json on huggingface.co.
RELATED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-1.5b": (
        "qwen2.5-7b",
        {"hidden": 1536, "heads": 12, "kv_heads": 2, "ffn": 8960, "vocab": 151936, "tied_embeddings": True},
    ),
    "qwen2.5-3b": (
        "qwen2.5-7b",
        {
            "layers": 36,
            "hidden": 2048,
            "heads": 16,
            "kv_heads": 2,
            "ffn": 11008,
            "vocab": 151936,
            "tied_embeddings": True,
        },
    ),
}


def shortened(name: str, layers: int | None) -> Model:
    """Return a model, at its widths, with fewer layers where that is asked for."""
    shipped, changes = RELATED.get(name, (name, {}))
    model = replace(load_model(shipped), name=name, **changes)
    return model if layers is None else replace(shallow(model, layers), name=f"{model.name}-{layers}-layers")
