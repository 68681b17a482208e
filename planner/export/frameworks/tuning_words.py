"""Names that fine-tuning tools use for optimizers, models and matrices with adapters."""

from __future__ import annotations

import re

from simulator.config.adapter import ALL_LINEAR, MODULES, Adapter
from topology.codec import JsonObject
from topology.errors import Infeasible

PLAIN_LOSS = "torch.nn.CrossEntropyLoss"
# Names of classes in torchtune's and AutoModel's recipes.
TORCH = {
    "adamw": "torch.optim.AdamW",
    "adamw8bit": "bitsandbytes.optim.AdamW8bit",
    "pagedadamw": "bitsandbytes.optim.PagedAdamW",
    "pagedadamw8bit": "bitsandbytes.optim.PagedAdamW8bit",
    "adafactor": "torch.optim.Adafactor",
    "lion": "bitsandbytes.optim.Lion",
    "sgd": "torch.optim.SGD",
}
# transformers, training_args.py: OptimizerNames.
HUGGING_FACE = {
    "adamw": "adamw_torch_fused",
    "adamw8bit": "adamw_bnb_8bit",
    "pagedadamw": "paged_adamw_32bit",
    "pagedadamw8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
    "lion": "lion_32bit",
    "sgd": "sgd",
}
_MATRICES = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
# Families whose builders torchtune names `<family>_<size>`, with an `lora_` and a `qlora_` of each
# (torchtune/models/*/_model_builders.py of 0.6).
_BUILDERS = re.compile(r"(llama2|llama3|llama3_1|llama3_2|llama3_3|mistral|gemma|qwen2)_\d+(_\d+)?b")


def trained_modules(adapter: Adapter, title: str) -> set[str]:
    """Return the names in transformers of the matrices with adapters. Raises Infeasible."""
    if ALL_LINEAR in adapter.target_modules:
        return set(_MATRICES.values())
    parts = {part for word in adapter.target_modules for part in MODULES[word.lower()]}
    if unknown := sorted(parts - _MATRICES.keys()):
        raise Infeasible(f"{title} has no adapters on {', '.join(unknown)}", why=f"known: {', '.join(_MATRICES)}")
    return {_MATRICES[part] for part in parts}


def torchtune_model(name: str) -> str:
    """Return the builder of a model. Raises Infeasible if torchtune has none."""
    word = re.sub(r"[^a-z0-9]+", "_", name.rpartition("/")[2].casefold()).strip("_")
    if not (found := _BUILDERS.fullmatch(word)):
        raise Infeasible(
            f"torchtune has no builder of {name[:60]} by its name",
            why="known: Llama 2 to 3.3, Mistral 7B, Gemma and Qwen2",
            remedy="--to axolotl, or --to llama-factory",
        )
    return f"torchtune.models.{found[1]}.{word}"


def nested(settings: JsonObject) -> JsonObject:
    """Return dotted keys as sections of a document."""
    document: JsonObject = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        inside = document
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[name] = value
    return document
