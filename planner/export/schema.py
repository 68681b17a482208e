"""Schemas of tools: keys, types, choices and known models, generated from the real packages.

`schema/NAME_VERSION.json` is made by tests/tools/export_schemas.py with the package installed; each version has its
own.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from simulator.config.model import Model
from topology import codec
from topology.codec import JsonObject
from topology.errors import Infeasible

FOLDER = Path(__file__).parent / "schema"


@lru_cache
def schema(name: str, version: str) -> JsonObject:
    """Return a tool's schema: `package`, `version`, `keys` (key -> type, choices), and `models` if it has some."""
    return dict(codec.read_json(FOLDER / f"{name}_{version}.json"))


def shipped_model(name: str, version: str, model: Model) -> JsonObject:
    """Return the target's own configuration of `model`, with the same shapes and number of parameters.

    Raises Infeasible if it has none: a target that builds models by name would otherwise train a different one.
    """
    weights = {model.parameters}
    if model.moe and model.moe.router_bias:  # a buffer in its DeepSeek, not a parameter
        weights.add(model.parameters - model.moe_layers * model.moe.experts)
    for entry in schema(name, version)["models"]:
        same = (
            entry["layers"] == model.layers
            and entry["hidden"] == model.hidden
            and entry["heads"] == model.heads
            and entry["kv_heads"] in {None, model.kv_heads}
            and entry["parameters"] in weights
        )
        if same:
            return dict(entry)
    known = ", ".join(sorted({f"{entry['module']} {entry['flavor']}" for entry in schema(name, version)["models"]}))
    raise Infeasible(
        f"torchtitan {version} ships no model with the {model.layers} layers, width {model.hidden} and "
        f"{model.parameters:,} parameters of {model.name[:60]!r}",
        why=f"it builds models by name, and knows {known}",
        remedy="another --to, or another version of it",
    )
