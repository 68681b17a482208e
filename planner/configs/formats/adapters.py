"""Read how tools write adapters and frozen weights into the form of a case (`runtime.adapter`).

Names and defaults: LLaMA-Factory `hparams/finetuning_args.py` and `model_args.py`; TRL `trainer/model_config.py`;
axolotl `utils/schemas/peft.py` and `model.py`; torchtune `models/*/_model_builders.py` and recipes/configs/*/*lora*;
LitGPT `finetune/lora.py`; verl `workers/config/model.py`; NeMo AutoModel `components/_peft/lora.py`; Megatron-Bridge
`peft/lora.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planner.export.mapping import Entry, NotModelled, Settings, truth, whole
from simulator.runtimes.stated import resolve_adapter
from topology.codec import JsonObject
from topology.errors import BadInput, BadPlan

ALL = "all-linear"
Stated = JsonObject | None  # None: all weights are trained


def adapters(read: Callable[[Settings], Stated], *keys: str) -> Entry:
    """Return the entry of a tool's adapters; a request that is not modelled becomes a question."""

    def facts(settings: Settings, _: object) -> JsonObject:
        stated = read(settings)
        if stated is not None:
            try:
                resolve_adapter(stated)
            except BadPlan as error:
                raise NotModelled(error.what, why=error.why, remedy=error.remedy) from error
        return {"adapter": stated}

    return Entry(keys=keys, read=facts)


def _names(value: Any) -> list[str] | str | None:
    """Return the names in a list, in a text with commas, or meant by a word for all."""
    if isinstance(value, str):
        if value.replace("_", "-").lower() in {"all", ALL, "all-linear-layers"}:
            return ALL
        return [word.strip() for word in value.split(",") if word.strip()] or None
    return [str(word) for word in value] if isinstance(value, list) and value else None


def _share(settings: Settings, key: str, default: float = 0.0) -> float:
    value = settings.get(key)
    if value is None or value == "":
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadInput(f"{key} is {str(value)[:40]!r}", why="it must be a number")
    return float(value)


def _on(settings: Settings, key: str) -> bool:
    return settings.get(key) not in (None, "") and truth(settings, key)


def _refuse(settings: Settings, *keys: str) -> None:
    """Raise NotModelled if a file asks for one of these."""
    asked = next((key for key in keys if settings.get(key) not in (None, False, "", [], 0)), None)
    if asked is not None:
        raise NotModelled(f"{asked} {str(settings[asked])[:40]} is not modelled", remedy=f"without {asked}")


# --- Hugging Face's trainers ------------------------------------------------------------------------------------------

FACTORY = (
    "finetuning_type", "lora_rank", "lora_target", "lora_dropout", "quantization_bit", "quantization_method",
    "quantization_type", "pure_bf16",
)  # fmt: skip
LOADED = ("torch_dtype", "dtype")  # the type in which TRL's scripts load the model
TRL = ("use_peft", "lora_r", "lora_target_modules", "load_in_4bit", "bnb_4bit_quant_type", "use_dora")
TRAINER_KEYS = (*FACTORY, *TRL, "load_in_8bit", "lora_modules_to_save", "additional_target")


def _read_trainer(settings: Settings) -> Stated:
    """LLaMA-Factory's `finetuning_type`, or TRL's `use_peft`; plain TrainingArguments have neither."""
    kind = str(settings.get("finetuning_type") or ("lora" if _on(settings, "use_peft") else "full"))
    _refuse(settings, "load_in_8bit", "lora_modules_to_save", "additional_target")
    if kind not in {"full", "lora"}:
        raise NotModelled(f"finetuning_type {kind[:40]} is not modelled", remedy="lora or full")
    bits = settings.get("quantization_bit")
    packed = _on(settings, "load_in_4bit") or bits == 4
    if bits not in (None, "", 4) or (packed and _word(settings, "bnb_4bit_quant_type", "quantization_type") != "nf4"):
        raise NotModelled(
            "frozen weights in other types than NF4 are not modelled here", remedy="quantization_bit 4, nf4"
        )
    if kind == "full":
        if packed:
            raise NotModelled(
                "load_in_4bit without adapters trains nothing", remedy="use_peft or finetuning_type: lora"
            )
        return None
    factory = "finetuning_type" in settings
    targets = _names(settings.get("lora_target" if factory else "lora_target_modules"))
    half = any(settings.get(key) is True for key in ("bf16", "fp16"))
    # LLaMA-Factory loads the model in 16 bits and keeps trained parameters in float32 (model/loader.py, adapter.py); so
    # does PEFT with what TRL has loaded (autocast_adapter_dtype).
    base = "nf4" if packed else "bfloat16" if (factory and half) or loaded_in(settings) == "bfloat16" else None
    return {
        "kind": "dora" if _on(settings, "use_dora") else "lora",
        "rank": whole(settings, "lora_rank" if factory else "lora_r", 8 if factory else 16),
        "target_modules": targets or (ALL if factory else None),
        "dropout": _share(settings, "lora_dropout", 0.0 if factory else 0.05),
        "base_weights": base,
    }


def loaded_in(settings: Settings) -> str | None:
    """Return the type in which TRL's scripts load the model; `auto` is the checkpoint's, taken to be of 16 bits."""
    said = str(next((settings[key] for key in LOADED if settings.get(key)), "")).removeprefix("torch.")
    if said == "auto":
        return "float16" if settings.get("fp16") is True else "bfloat16"
    return said if said in {"bfloat16", "float16", "float32"} else None


def _word(settings: Settings, *keys: str) -> str:
    return next((str(settings[key]) for key in keys if settings.get(key)), "nf4")


TRAINER = adapters(_read_trainer, *TRAINER_KEYS, "lora_dropout")

# --- axolotl ----------------------------------------------------------------------------------------------------------


def _read_axolotl(settings: Settings) -> Stated:
    kind = settings.get("adapter")
    packed = _on(settings, "load_in_4bit") or kind == "qlora"
    _refuse(settings, "load_in_8bit", "lora_modules_to_save", "peft_layers_to_transform")
    if not kind:
        return None
    if kind not in {"lora", "qlora"}:
        raise NotModelled(f"adapter {str(kind)[:40]} is not modelled", remedy="lora or qlora")
    every = _on(settings, "lora_target_linear")
    return {
        "kind": "dora" if _on(settings, "peft_use_dora") else "lora",
        "rank": whole(settings, "lora_r", 8),
        "target_modules": ALL if every else _names(settings.get("lora_target_modules")),
        "dropout": _share(settings, "lora_dropout"),
        "base_weights": "nf4" if packed else None,
    }


AXOLOTL = adapters(
    _read_axolotl,
    "adapter", "lora_r", "lora_dropout", "lora_target_modules", "lora_target_linear", "load_in_4bit", "load_in_8bit",
    "peft_use_dora", "lora_modules_to_save", "peft_layers_to_transform",
)  # fmt: skip

# --- torchtune --------------------------------------------------------------------------------------------------------

_TUNE = "model."


def _read_torchtune(settings: Settings) -> Stated:
    component = str(settings.get(f"{_TUNE}_component_", "")).rpartition(".")[2]
    kind = next((word for word in ("qlora", "qdora", "lora", "dora") if component.startswith(f"{word}_")), "")
    if not kind:
        return None
    _refuse(settings, f"{_TUNE}apply_lora_to_output")
    attention = _names(settings.get(f"{_TUNE}lora_attn_modules")) or ["q_proj", "v_proj"]
    mlp = ["gate_proj", "up_proj", "down_proj"] if _on(settings, f"{_TUNE}apply_lora_to_mlp") else []
    packed = kind.startswith("q") or _on(settings, f"{_TUNE}quantize_base")
    return {
        "kind": "dora" if "dora" in kind or _on(settings, f"{_TUNE}use_dora") else "lora",
        "rank": whole(settings, f"{_TUNE}lora_rank", 8),
        "target_modules": [*("o_proj" if word == "output_proj" else word for word in attention), *mlp],
        "dropout": _share(settings, f"{_TUNE}lora_dropout"),
        "base_weights": "nf4" if packed else None,
    }


TORCHTUNE = adapters(
    _read_torchtune,
    *(f"{_TUNE}{key}" for key in ("_component_", "lora_attn_modules", "apply_lora_to_mlp", "apply_lora_to_output")),
    *(f"{_TUNE}{key}" for key in ("lora_rank", "lora_dropout", "quantize_base", "use_dora")),
)

# --- LitGPT -----------------------------------------------------------------------------------------------------------

_PARTS = {
    "lora_query": (["q_proj"], True),
    "lora_key": (["k_proj"], False),
    "lora_value": (["v_proj"], True),
    "lora_projection": (["o_proj"], False),
    "lora_mlp": (["gate_proj", "up_proj", "down_proj"], False),
}


def _read_litgpt(settings: Settings) -> Stated:
    if not settings.get("lora_r"):
        return None
    _refuse(settings, "lora_head")
    quantize = settings.get("quantize")
    if quantize not in (None, "", "bnb.nf4", "bnb.nf4-dq"):
        raise NotModelled(f"quantize {str(quantize)[:40]} is not modelled", remedy="bnb.nf4-dq, or none")
    chosen = [names for key, (names, usual) in _PARTS.items() if (truth(settings, key) if key in settings else usual)]
    return {
        "kind": "lora",
        "rank": whole(settings, "lora_r"),
        "target_modules": [name for names in chosen for name in names],
        "dropout": _share(settings, "lora_dropout", 0.05),
        "base_weights": "nf4" if quantize else None,
    }


LITGPT = adapters(_read_litgpt, "lora_r", "lora_alpha", "lora_dropout", "lora_head", "quantize", *_PARTS)

# --- verl -------------------------------------------------------------------------------------------------------------


def verl_adapters(model: str) -> Entry:
    """Return the entry of the actor's adapters; `model` is the path of its section."""

    def read(settings: Settings) -> Stated:
        rank = next((key for key in (f"{model}lora_rank", f"{model}lora.rank") if settings.get(key)), None)
        if rank is None:
            return None
        names = _names(settings.get(f"{model}target_modules", settings.get(f"{model}lora.target_modules")))
        return {"kind": "lora", "rank": whole(settings, rank), "target_modules": names or ALL, "dropout": 0.0}

    return adapters(read, *(f"{model}{key}" for key in ("lora_rank", "lora.rank", "lora.target_modules")))


# --- NVIDIA -----------------------------------------------------------------------------------------------------------

_PEFT = "peft."


def _read_automodel(settings: Settings) -> Stated:
    if not any(key.startswith(_PEFT) for key in settings):
        return None
    _refuse(settings, f"{_PEFT}exclude_modules")
    names = _names(settings.get(f"{_PEFT}target_modules"))
    if _on(settings, f"{_PEFT}match_all_linear") or names in (["*_proj"], ["*.proj"], "*_proj"):
        names = ALL
    packed = _on(settings, "quantization.load_in_4bit")
    return {
        "kind": "dora" if _on(settings, f"{_PEFT}use_dora") else "lora",
        "rank": whole(settings, f"{_PEFT}dim", 8),
        "target_modules": names,
        "dropout": _share(settings, f"{_PEFT}dropout"),
        "base_weights": "nf4" if packed else None,
    }


AUTOMODEL = adapters(
    _read_automodel,
    *(f"{_PEFT}{key}" for key in ("target_modules", "match_all_linear", "dim", "dropout", "use_dora")),
    "quantization.load_in_4bit",
)

# Defaults of Megatron-Bridge's LoRA and DoRA (`target_modules`, `dim`, `dropout` of peft/lora.py and dora.py).
BRIDGE_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
BRIDGE_RANK = 32


def bridge_adapter(settings: Settings, *, recipe: bool) -> Stated:
    """Return the adapters of a recipe's `peft` section; `recipe`: its name states that it has them."""
    said = settings.get("peft")
    kind = said.lower() if isinstance(said, str) else "lora"
    if not recipe and said in (None, False, "", "none") and not any(key.startswith(_PEFT) for key in settings):
        return None
    return {
        "kind": kind,
        "rank": whole(settings, f"{_PEFT}dim", BRIDGE_RANK),
        "target_modules": _names(settings.get(f"{_PEFT}target_modules")) or list(BRIDGE_TARGETS),
        "dropout": _share(settings, f"{_PEFT}dropout"),
    }
