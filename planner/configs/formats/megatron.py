"""Megatron-LM's flags in the forms of several tools: its command lines, the YAML of its functional tests, and the dumps
of Megatron-Bridge.

Sources: megatron-core 0.19.2; `tests/functional_tests/test_cases/*/model_config.yaml` of Megatron-LM at d98e8a6, whose
MODEL_ARGS are the flags that `run_ci_test.sh` passes on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import gcd
from pathlib import Path
from typing import Any

from planner.configs.formats import bridge
from planner.configs.formats.command_line import CommandLine, option_kinds
from planner.configs.formats.configuration import Configuration, not_understood
from planner.configs.formats.documents import Document, YamlDocument
from planner.configs.formats.launch import launch_of
from planner.export.frameworks.megatron_fields import TABLE
from planner.export.frameworks.megatron_model import MODEL_KEYS, model_flags, model_of_flags
from planner.export.mapping import Facts, NotStated, Settings, keys_of
from planner.export.schema import schema
from simulator.config.model import Model
from topology.codec import JsonObject
from topology.errors import BadInput

VERSION = "0.19.2"
UNDERSTOOD = keys_of(TABLE) | MODEL_KEYS
TEST_ARGS, TEST_ENVIRONMENT = "MODEL_ARGS.", "ENV_VARS."
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
# Flags without a cost, or that only state the model's shape.
HARMLESS = (
    r"--(lr.*|min-lr|train-(iters|samples)|weight-decay.*|adam-.*|clip-grad|init-method-std|seed|split|data-.*|mock-data"
    r"|tokenizer.*|vocab-file|merge-file|save.*|load|log-.*|eval-.*|tensorboard.*|wandb.*|timing-.*|distributed-.*"
    r"|norm-epsilon|layernorm-epsilon|rotary-.*|mscale(-all-dim)?|use-rot.*|use-rope.*|rope-.*|no-(load|save|position|masked|bias|rope|async).*"
    r"|use-mcore-models|transformer-impl|use-flash-attn|attention-(softmax|backend).*|num-workers|nproc.per.node|nnodes"
    r"|node.rank|master.*|rdzv.*|standalone|max-restarts|num_gpus|num_nodes|hostfile|moe-(aux|z-loss|router|permute"
    r"|token-drop).*|initial-loss-scale|override-opt.*|exit-.*|manual-gc.*|make-vocab.*|encoder-seq-length"
    r"|dist-ckpt.*|ckpt-.*|async-save|use-dist-ckpt|auto-detect.*|local.ranks.filter|tee|role|log.dir|redirects"
    r"|untie.*|attention-dropout|hidden-dropout|apply-.*|no-create.*|no-check.*|use-checkpoint-args|loss-scale.*"
    r"|kv-channels|no-mmap.*|disable-.*|bf16|fp16|sequence-parallel|recompute-activations|accumulate-allreduce.*"
    r"|container.*|nodes|gpus.*|ntasks.*|time|job.*|export|mpi|output|error|help|enable-one-logger|vocab-size"
    r"|use-persistent-ckpt-worker|check-weight-hash.*|enable-experimental|deterministic-mode|decoupled-.*|logging-level)"
)


def configured(
    document: Document,
    flags: Settings,
    where: str,
    edit: Callable[[Settings], str],
    *,
    framework: str = "megatron-lm",
    assumed: tuple[str, ...] = (),
    given: Facts | None = None,
    model: Model | None = None,
    **more: Any,
) -> Configuration:
    """Return the configuration of some flags, for `model` or the model that they describe; `more` are fields of the
    result.
    """
    unknown_model = ""
    of_model: tuple[str, ...] = ()
    if model is None:
        model, unknown_model, of_model = _flag_model(flags, where)
    found: JsonObject = {"version": None, "unknown_model": unknown_model, **more}
    return Configuration(
        framework=framework,
        rules="megatron-lm",
        document=document,
        settings=flags,
        table=TABLE,
        edit=edit,
        model=model,
        given={**_given(model, flags), **(given or {})},
        batch_step=_batch_step(flags),
        assumed=(*of_model, *assumed, *_taken_for_granted(flags)),
        **found,
    )


def _batch_step(flags: Settings) -> int | None:
    """Return what all batches of a ramp are multiples of, in sequences; None without a ramp."""
    first, increment = [*str(flags.get("--rampup-batch-size", "")).split(), "", ""][:2]
    known = all(word.isdecimal() and len(word) < 16 for word in (first, increment))
    return gcd(int(first), int(increment)) or None if known else None


LENGTH = frozenset({"--seq-length", "--max-position-embeddings"})


def over_model(
    defaults: Settings, own: Settings, paths: dict[str, str], model: Model | None
) -> tuple[Settings, Model | None]:
    """Return the flags of a tool that builds a named model, and the model if no shape is changed.

    `own` are the flags that the file sets; `paths` has each flag that it states, on or off.
    """
    base = {**defaults, **({} if model is None else model_flags(model))}
    flags = {**{flag: value for flag, value in base.items() if flag not in paths}, **own}
    return flags, None if paths.keys() & (MODEL_KEYS - LENGTH) else model


def command_line(text: str, where: str, variables: dict[str, str]) -> CommandLine:
    """Return a text as a command line, with values after the flags that take them in Megatron-LM."""
    return CommandLine(text, where, option_kinds(schema("megatron", VERSION)["keys"]), variables)


def read_script(document: CommandLine, where: str) -> Configuration:
    """Return the configuration of a command line or script."""
    settings = document.settings
    return _as_flags(
        document,
        settings,
        where,
        document.edited,
        own={flag: value for flag, value in settings.items() if flag not in document.launcher},
        gpus=launch_of(document).get("gpus"),
        one_connection=document.expanded(f"${CONNECTIONS}") == "1",
    )


def read_test(document: YamlDocument, where: str) -> Configuration:
    """Return the configuration of a functional test's `model_config.yaml`."""
    said = {key: value for key, value in document.settings.items() if value not in (None, False)}
    flags = {key.removeprefix(TEST_ARGS): value for key, value in said.items() if key.startswith(f"{TEST_ARGS}--")}

    def edit(changes: Settings) -> str:
        return document.edited({f"{TEST_ARGS}{flag}": value for flag, value in changes.items()})

    one = str(said.get(f"{TEST_ENVIRONMENT}{CONNECTIONS}")) == "1"
    return _as_flags(document, flags, where, edit, own=flags, gpus=None, one_connection=one)


def _as_flags(
    document: Document,
    flags: Settings,
    where: str,
    edit: Callable[[Settings], str],
    *,
    own: Settings,
    gpus: int | None,
    one_connection: bool,
) -> Configuration:
    """Return the configuration of flags of `pretrain_gpt.py`; `own` are its flags without a launcher's."""
    known = schema("megatron", VERSION)["keys"]
    unknown = not_understood(own, UNDERSTOOD, HARMLESS)
    later = tuple(f"{flag} is not a flag of Megatron-LM 0.19" for flag in unknown if flag not in known)
    return configured(
        document,
        flags,
        where,
        edit,
        version=VERSION,
        gpus=gpus,
        given={"one_connection": one_connection, "arguments": True},  # which Megatron-LM's own `validate_args` checks
        unknown=unknown,
        assumed=later,
    )


def read_dump(document: YamlDocument, where: str) -> Configuration:
    """Return the configuration of a Megatron-Bridge recipe's dump.

    It has hundreds of fields, most with defaults that do not matter; those in `costly` change a step or its memory.
    """
    flags, paths = bridge.flags_of(document.settings)

    def edit(changes: Settings) -> str:
        return document.edited(bridge.fields_of(changes, paths))

    return configured(
        document,
        flags,
        where,
        edit,
        framework="megatron-bridge",
        gpus=_of_nemo(document.settings),
        unknown=costly(document.settings, paths),
    )


def _of_nemo(settings: Settings) -> int | None:
    """Return the number of GPUs that NeMo 1's trainer is for; no other file states it."""
    each, nodes = settings.get("trainer.devices"), settings.get("trainer.num_nodes")
    return each * nodes if type(each) is int and type(nodes) is int else None


COSTLY = re.compile(
    r"(fp8|fp4|.*cpu_offload.*|.*_offload_.*"
    r"|window_size|mtp_num_layers|moe_.*(capacity|deepep|overlap).*|heterogeneous.*|hierarchical_context.*|use_torch_fsdp2"
    r"|use_precision_aware.*|rampup_batch_size|moe_layer_recompute|symmetric_ar_type|nccl_ub)"
)


def costly(fields: Settings, paths: dict[str, str]) -> tuple[str, ...]:
    """Return the fields that are set, have a cost and are unknown; `paths` are those of flags."""
    at = {path: flag for flag, path in paths.items()}
    return tuple(
        path
        for path, value in fields.items()
        if value not in (None, False, 0, 0.0, "", "none")
        and COSTLY.fullmatch(path.rpartition(".")[2])
        and at.get(path) not in UNDERSTOOD
    )


def _taken_for_granted(flags: Settings) -> Iterator[str]:
    """Yield assumptions of Megatron-LM's predicted step that no flag states."""
    if not flags.get("--overlap-grad-reduce"):
        yield "gradients are reduced while backward runs, though --overlap-grad-reduce is not set: a step may be longer"
    sharded = flags.get("--use-distributed-optimizer") or flags.get("--use-megatron-fsdp")
    if sharded and not flags.get("--overlap-param-gather"):
        yield "parameters are gathered while forward runs, though --overlap-param-gather is not set"
    if sharded and flags.get("--fp8-format") and not flags.get("--fp8-param-gather"):
        yield "parameters are gathered in float8, though --fp8-param-gather is not set"


def _flag_model(flags: Settings, where: str) -> tuple[Model | None, str, tuple[str, ...]]:
    """Return the model that flags describe or None, why it is unknown, and the assumptions."""
    try:
        model, assumed = model_of_flags(flags, Path(where).stem[:60])
    except BadInput as error:
        by_hand = f" (or {error.remedy})" if isinstance(error, NotStated) else ""
        return None, f"{error.what}{by_hand}", ()
    return model, "", assumed


def _given(model: Model | None, flags: Settings) -> Facts:
    if model is not None:
        return {"moe": model.moe is not None, "max_positions": model.max_positions}
    layers = flags.get("--num-layers")
    return {"layers": layers} if type(layers) is int and layers > 0 else {}
