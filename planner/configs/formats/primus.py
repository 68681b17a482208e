"""Primus's experiments: overrides of one of several trainers, on top of Primus's defaults.

Sources: `primus/configs/modules/` and `primus/configs/models/` of Primus at fd1eeab. A value may come from the
environment, with a default: `${PRIMUS_TP:1}`. The file does not state the machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.configs.formats import bridge, maxtext, megatron, torchtitan
from planner.configs.formats.command_line import typed
from planner.configs.formats.configuration import CheckFlags, Configuration, not_understood, unknown_kind
from planner.configs.formats.documents import YamlDocument
from planner.export.mapping import Settings
from planner.export.named_models import model_said, model_spelt
from planner.export.schema import schema
from simulator.config.model import Model

TRAINER = re.compile(r"(modules\.\w+\.)framework")
ELSEWHERE = re.compile(r"\$\{(\w+)(?::([^}]{0,1000}))?\}")
# Defaults of its trainers: `trainer_base.yaml`, `pre_trainer.yaml`, `language_model.yaml`.
MEGATRON: Settings = {"--bf16": True, "--use-distributed-optimizer": True, "--sequence-parallel": True}
TORCHTITAN: Settings = {
    "training.local_batch_size": 8,
    "training.seq_len": 2048,
    "compile.enable": True,
    "activation_checkpoint.mode": "none",
}
HARMLESS = (
    r"(\w*sink_level|disable_(wandb|tensorboard|last_saving)|mock_data|(train|valid|test)_data_path|eod_mask_loss|finetune"
    r"|auto_continue_train|no_(load|save)_\w+|enable_primus_turbo|cross_entropy_\w+|profile\w*|primus_\w+|use_pytorch_profiler"
    r"|(local_)?trace\w*|pp_warmup|gradient_accumulation_fusion|moe_router_force_load_balancing\w*|multiprocessing\w*"
    r"|dump_pp_data|turbo_sync\w*|disable_primus_topk_router|check_for_nan_in_loss_and_grad|mmap_bin_files|mscale\w*|trainable)"
)


def is_primus(settings: Settings) -> bool:
    """Return whether a file is an experiment."""
    return any(TRAINER.fullmatch(key) for key in settings)


def read(document: YamlDocument, where: str, flags: CheckFlags) -> Configuration:
    """Return the configuration of an experiment, read as that of its trainer."""
    outside = dict(flags.variables)
    settings = {key: _resolved(value, outside) for key, value in document.settings.items()}
    root = next(match[1] for key in settings if (match := TRAINER.fullmatch(key)))
    at = f"{root}overrides."
    said = {key.removeprefix(at): value for key, value in settings.items() if key.startswith(at)}
    name = str(settings.get(f"{root}model") or "").removesuffix(".yaml")
    model = model_spelt(name) or model_said(name)[0]
    unknown = "" if model else f"Primus's {name[:60]} is none whose shapes are known"
    trainer = str(settings[f"{root}framework"])
    if trainer in {"megatron", "megatron_bridge"}:
        found = _megatron(document, said, at, where, model, unknown)
    elif trainer == "torchtitan":
        found = torchtitan.of_keys(document, {**TORCHTITAN, **said}, at)
        found = replace(found, unknown=tuple(key for key in found.unknown if not re.fullmatch(HARMLESS, key)))
        named = "model.flavor" in said
        found = found if named else replace(found, model=model, unknown_model=unknown)
    elif trainer == "maxtext":
        found = maxtext.FORMAT.configuration(document, {"model_name": name.replace("_", "-"), **said}, at)
    else:
        raise unknown_kind(where, f"Primus's trainer {trainer[:40]!r} is none that is read")
    return replace(found, framework=f"primus-{trainer}")


def _resolved(value: Any, outside: Mapping[str, str]) -> Any:
    """Return a value with variables from outside replaced, and the defaults of others."""
    if not isinstance(value, str) or not ELSEWHERE.search(value):
        return value

    def known(found: re.Match[str]) -> str:
        default = found[0] if found[2] is None else found[2].strip("\"'")
        return outside.get(found[1], default)

    word = ELSEWHERE.sub(known, value)
    return None if word in {"", "null"} else typed(word)


def _megatron(
    document: YamlDocument, said: Settings, at: str, where: str, model: Model | None, unknown_model: str
) -> Configuration:
    """Return the settings of Megatron-LM's arguments under their Python names, on top of those of the named model."""
    own, paths = bridge.flags_of(said)
    precision = str(said.get("precision_config") or "")
    own |= bridge.precision_flags(precision) if precision else {}
    flags, whole = megatron.over_model(MEGATRON, own, paths, model)
    known = schema("megatron", megatron.VERSION)["keys"]

    def edit(changes: Settings) -> str:
        fields = bridge.fields_of(changes, paths, flat=True)
        return document.edited({f"{at}{field}": value for field, value in fields.items()})

    at_flag = {path: flag for flag, path in paths.items()}
    unread = {
        at_flag[path]: value for path, value in said.items() if path in at_flag and not re.fullmatch(HARMLESS, path)
    }
    unknown = not_understood(unread, megatron.UNDERSTOOD, megatron.HARMLESS)
    adapter = said.get("peft") if said.get("peft") not in {None, False, "none"} else None
    found = megatron.configured(
        document,
        flags,
        where,
        edit,
        model=whole,
        unknown=tuple(paths[flag] for flag in unknown if unread[flag] is not False),
        elsewhere=("Primus's own defaults and changes of Megatron-LM",),
        known=frozenset(flag.removeprefix("--").replace("-", "_") for flag in known),
        no_cost=f"peft: {str(adapter)[:40]} trains adapters, whose cost is not modelled" if adapter else "",
    )
    named = found.model is None and model is None and unknown_model
    return replace(found, unknown_model=unknown_model) if named else found
