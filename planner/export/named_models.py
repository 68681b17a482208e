"""Models by the names that configurations have for them: on the Hub, a folder of theirs, a flavor of torchtitan's.

No path that a file names is opened.
"""

from __future__ import annotations

import re
from functools import cache

from planner.export.schema import schema
from simulator.config.hf_config import hub_name, named_model, shipped_models
from simulator.config.hub_models import hub_table
from simulator.config.model import Model
from topology.errors import BadModel


def model_said(name: object) -> tuple[Model | None, str]:
    """Return the model for a name on the Hub, or for a folder with such a name; else None and why it is unknown."""
    said = str(name or "").strip()
    if not said:
        return None, ""
    folder = said.rstrip("/").rpartition("/")[2]
    try:
        for one in (said, folder) if said.count("/") != 1 or said[0] in "./~" else (said,):
            if one and (found := named_model(one)) is not None:
                return found, ""
    except BadModel as error:
        return None, f"{error.what}: {error.why}"
    return None, f"the file names {said[:80]!r}, which the table of names does not have"


def model_spelt(word: str) -> Model | None:
    """Return the model whose name, here or on the Hub, has the same letters and digits as a word, such as
    `llama3_1_8b`; None if no name has them, or several.
    """
    return _by_letters().get(_letters(word))


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


@cache
def _by_letters() -> dict[str, Model]:
    found: dict[str, list[Model]] = {}
    for models in _by_shape().values():
        for model in models:
            for name in {model.name, hub_name(model.name)}:
                found.setdefault(_letters(name.rpartition("/")[2].removesuffix("-hf")), []).append(model)
    return {letters: models[0] for letters, models in found.items() if len({one.parameters for one in models}) == 1}


@cache
def model_of_flavor(version: str, module: str, flavor: str) -> Model | None:
    """Return the model with the shapes of torchtitan's flavor; None if there is none."""
    module = "llama3" if module == "llama3_ft" else module
    entries = [
        entry
        for entry in schema("torchtitan", version)["models"]
        if (entry["module"], entry["flavor"]) == (module, flavor)
    ]
    for entry in entries:
        for model in models_of_shape(entry["layers"], entry["hidden"], entry["heads"]):
            bias = model.moe_layers * model.moe.experts if model.moe and model.moe.router_bias else 0
            if entry["kv_heads"] in {None, model.kv_heads} and model.parameters - entry["parameters"] in {0, bias}:
                return model
    return None


def models_of_shape(layers: int, hidden: int, heads: int) -> tuple[Model, ...]:
    """Return the models with these sizes, shipped ones first."""
    return tuple(_by_shape().get((layers, hidden, heads), ()))


@cache
def _by_shape() -> dict[tuple[int, int, int], list[Model]]:
    """Return all models with known shapes, by layers, width and heads; shipped ones first."""
    found: dict[tuple[int, int, int], list[Model]] = {}
    for name in (*shipped_models(), *(row.ids[0] for row in hub_table().rows)):
        if (model := named_model(name)) is not None:
            found.setdefault((model.layers, model.hidden, model.heads), []).append(model)
    return found
