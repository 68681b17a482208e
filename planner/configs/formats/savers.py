"""Read how tools write memory savers into the form of a case (`runtime.savers`), and write them back.

Names and defaults: torchtune recipes/full_finetune_single_device.py and recipes/configs; transformers
training_args.py (use_liger_kernel; gradient_checkpointing_kwargs with offload, pull request 48444); TRL
trainer/sft_config.py; axolotl integrations/liger/args.py and utils/schemas/config.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from planner.export.mapping import Entry, Facts, Settings, truth
from simulator.config.savers import ACTIVATION_OFFLOAD, CHUNKED_LOSS, LINEAR_LOSS, OPTIMIZER_IN_BACKWARD

_TUNE_LOSS = "loss._component_"
_TUNE = {ACTIVATION_OFFLOAD: "enable_activation_offloading", OPTIMIZER_IN_BACKWARD: "optimizer_in_bwd"}
_IN_PIECES = ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss")

_LIGER, _LOSS, _AWAY = "use_liger_kernel", "loss_type", "activation_offloading"
_FACTORY_LIGER = "enable_liger_kernel"  # LLaMA-Factory hparams/model_args.py
_OFFLOAD = "gradient_checkpointing_kwargs.offload"
TRL_KEYS = frozenset({_LOSS, _AWAY, "assistant_only_loss", "completion_only_loss"})  # only TRL's trainers have these


def _entry(
    read: Callable[[Settings], Iterable[str]], write: Callable[[Facts], Settings], *keys: str, said: bool = False
) -> Entry:
    """Return the entry of a tool's savers. With `said`, a file with none of its keys has the runtime's default."""

    def facts(settings: Settings, _: Facts) -> Facts:
        return {} if said and not {*keys} & settings.keys() else {"savers": tuple(read(settings))}

    return Entry(keys=keys, write=write, read=facts)


def _on(settings: Settings, key: str) -> bool:
    return settings.get(key) not in (None, "") and truth(settings, key)


def _read_tune(settings: Settings) -> Iterable[str]:
    loss = str(settings.get(_TUNE_LOSS, _IN_PIECES[0])).rpartition(".")[2]
    if loss in _IN_PIECES:
        yield CHUNKED_LOSS
    for saver, key in _TUNE.items():
        if _on(settings, key):
            yield saver


def _write_tune(facts: Facts) -> Settings:
    return {key: saver in facts["savers"] for saver, key in _TUNE.items()}


def _read_trainer(settings: Settings) -> Iterable[str]:
    """TrainingArguments, or TRL's, whose loss is chunked unless Liger's kernel or another loss is requested."""
    liger, trl = _on(settings, _LIGER) or _on(settings, _FACTORY_LIGER), bool(TRL_KEYS & settings.keys())
    loss = settings.get(_LOSS) or ("nll" if liger or not trl else "chunked_nll")
    if loss == "chunked_nll":
        yield CHUNKED_LOSS
    if liger:
        yield LINEAR_LOSS
    if _on(settings, _AWAY) or _on(settings, _OFFLOAD):
        yield ACTIVATION_OFFLOAD


def _write_trainer(facts: Facts) -> Settings:
    return {_LIGER: LINEAR_LOSS in facts["savers"], _OFFLOAD: ACTIVATION_OFFLOAD in facts["savers"]}


_AXOLOTL_LOSS, _AXOLOTL_AWAY = "liger_fused_linear_cross_entropy", "activation_offloading"


def _read_axolotl(settings: Settings) -> Iterable[str]:
    if _on(settings, _AXOLOTL_LOSS):
        yield LINEAR_LOSS
    away = settings.get(_AXOLOTL_AWAY)
    if settings.get("gradient_checkpointing") == "offload" or away is True:
        yield ACTIVATION_OFFLOAD


TORCHTUNE = _entry(_read_tune, _write_tune, _TUNE_LOSS, *_TUNE.values())
TRAINER = _entry(_read_trainer, _write_trainer, _LIGER, _FACTORY_LIGER, _LOSS, _AWAY, _OFFLOAD, said=True)
AXOLOTL = _entry(
    _read_axolotl, lambda facts: {_AXOLOTL_LOSS: LINEAR_LOSS in facts["savers"]}, _AXOLOTL_LOSS, _AXOLOTL_AWAY
)
