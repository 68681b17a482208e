"""torchtitan's configurations: the TOML of 0.2.2 and before, and the command line of 0.3.0."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from planner.configs.formats.command_line import CommandLine
from planner.configs.formats.configuration import CheckFlags, Configuration, not_understood, preset, unknown_kind
from planner.configs.formats.documents import Document, TomlDocument
from planner.configs.formats.launch import launch_of
from planner.export.frameworks import torchtitan_fields
from planner.export.mapping import Settings, keys_of
from planner.export.named_models import model_of_flavor
from planner.export.schema import schema
from simulator.config.model import Model
from topology.codec import JsonObject
from topology.errors import BadInput

# Names before 0.1, and today's.
OLD_KEYS = {
    "training.batch_size": "training.local_batch_size",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.context_parallel_degree": "parallelism.context_parallel_degree",
    "training.compile": "compile.enable",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "model.tokenizer_path": "model.hf_assets_path",
}
INNER = ("tensor_parallel", "context_parallel", "pipeline_parallel")
CHOICE = (("--module", "MODULE"), ("--config", "CONFIG"))
WHOLE_LOSS = "0.2.2"  # the version with a loss in one piece, which a configuration function can choose in 0.3.0
IN_PIECES = "ChunkedLossWrapper"


def read_toml(text: str, where: str, variables: Mapping[str, str]) -> Configuration:
    document = TomlDocument(text, where)
    document.fill(variables)
    if not any(key.startswith(("parallelism.", "training.", "model.")) for key in document.settings):
        raise unknown_kind(where, "its tables are not torchtitan's (training, parallelism, model)")
    gpus, machine = preset(text)
    found = of_keys(document, document.settings)
    comment = found.gpus is None
    return replace(found, gpus=gpus if comment else found.gpus, cluster=machine, in_a_comment=comment)


def of_keys(document: Document, settings: Settings, at: str = "") -> Configuration:
    """Return the configuration of torchtitan 0.2.2's keys below the path `at` of a document."""
    harmless = (
        r"(job|profiling|metrics|optimizer|lr_scheduler|checkpoint|validation|comm|fault_tolerance|debug|memory_estimation"
        r"|experimental)\..*|training\.(dataset.*|mock_data|steps|max_norm|gc_.*|dataloader\..*|mixed_precision_reduce|seed"
        r"|deterministic|warmup_steps|data_parallel_type)|model\.(name|flavor|hf_assets_path|tokenizer_path"
        r"|print_after_conversion|norm_type)|compile\.backend|activation_checkpoint\.(early_stop|debug|preserve_rng_state"
        r"|determinism_check|visualize.*|memory_budget|per_op_sac_force_recompute_mm_shapes_by_fqns|selective_ac_option)"
        r"|parallelism\.(disable_loss_parallel|context_parallel_load_balancer|expert_parallel_comm_backend"
        r"|pipeline_parallel_expert_parallel_overlap)"
    )
    known = keys_of(torchtitan_fields.TOML)
    assumed = []
    stated_as: dict[str, str] = {}
    for old, new in OLD_KEYS.items():
        if old in settings and new not in settings:
            settings[new], stated_as[new] = settings.pop(old), old
            assumed.append(f"{old} is read as {new}, its later name")

    def edit(changes: Settings) -> str:
        return document.edited({f"{at}{stated_as.get(key, key)}": value for key, value in changes.items()})

    model, unknown_model = _flavor("0.2.2", settings.get("model.name"), settings.get("model.flavor"))
    # One means no expert tensor parallelism; a plan cannot express more.
    alone = settings.get("parallelism.expert_tensor_parallel_degree", 1) == 1
    known |= {"parallelism.expert_tensor_parallel_degree"} if alone else set()
    return Configuration(
        framework="torchtitan",
        version="0.2.2",
        rules="torchtitan",
        document=document,
        settings=settings,
        table=torchtitan_fields.TOML,
        edit=edit,
        model=model,
        unknown_model=unknown_model,
        gpus=_product(settings, None),
        given={"optimizer_said": settings.get("optimizer.name", "AdamW")},
        unknown=not_understood(settings, known, harmless),
        assumed=(*assumed, *torchtitan_fields.float8_assumed(settings)),
    )


def _flavor(version: str, module: object, flavor: object) -> tuple[Model | None, str]:
    """Return the model of a flavor, or None and why it is unknown."""
    if module is None or flavor is None:
        return None, ""
    model = model_of_flavor(version, str(module), str(flavor))
    return model, "" if model else f"torchtitan's {str(module)[:40]} {str(flavor)[:40]} is none whose shapes are known"


def _product(settings: Settings, stated: int | None) -> int | None:
    """Return the number of GPUs that torchtitan's degrees give, if none is open."""
    degrees = [settings.get(f"parallelism.{name}_degree", 1) for name in ("data_parallel_replicate", *INNER)]
    shard = settings.get("parallelism.data_parallel_shard_degree", -1)
    if not isinstance(shard, int) or shard < 1 or not all(isinstance(degree, int) for degree in degrees):
        return stated
    product = shard
    for degree in degrees:
        product *= degree
    return product


def read_command(text: str, where: str, flags: CheckFlags) -> Configuration:
    document = CommandLine(text, where, lambda _: None, dict(flags.variables))
    said = document.settings
    module, function = (str(said.get(flag, document.expanded(f"${name}"))) for flag, name in CHOICE)
    configs = schema("torchtitan", "0.3.0")["configs"]
    base = configs.get(f"{module}.{function}") or _own_module(text)
    settings: Settings = dict(base["settings"]) if base else {}
    plain = {flag.removeprefix("--"): value for flag, value in said.items() if "." in flag}
    for key, value in plain.items():
        section, _, name = key.rpartition(".")
        no = name.startswith("no_")
        settings[f"{section}.{name.removeprefix('no_')}" if no else key] = (value is not True) if no else value
    mode = next((word.text for word in document.words if word.text.startswith("activation_checkpoint:")), "")
    if mode:
        settings[torchtitan_fields.SUBCOMMAND] = mode.partition(":")[2].replace("-", "_")
    module = base.get("module", module) if base else module
    assumed = (
        ()
        if base
        else (f"configuration {module[:40]}.{function[:40]} is not torchtitan's own: class defaults, loss in 8 pieces",)
    )
    whole = base is not None and "module" in base and IN_PIECES not in text
    harmless = (
        r"(training\.(steps|dataset.*|max_norm|gc_.*|disable_cuda_graphs)|(checkpoint|metrics|profil\w+|optimizer|comm|debug"
        r"|lr_scheduler|validator|dataloader|hf_assets_path)\..*|compile\.(components|backend)|parallelism\.(spmd_backend"
        r"|context_parallel_.*|disable_.*)|activation_checkpoint\..*)"
    )
    model, unknown_model = _flavor("0.3.0", module, base["flavor"] if base else None)
    if base is None:
        unknown_model = f"{module[:40]}.{function[:40]} is none of torchtitan's own configurations"
    launch = launch_of(document)

    def edit(changes: Settings) -> str:
        edited = document.edited({f"--{key}": v for key, v in changes.items() if key != torchtitan_fields.SUBCOMMAND})
        wanted = changes.get(torchtitan_fields.SUBCOMMAND)
        if not wanted:
            return edited
        word = f"{torchtitan_fields.SUBCOMMAND}:{wanted}"
        if mode:
            return edited.replace(mode, word)
        options = CommandLine(edited, where, lambda _: None).flags.values()
        if not options:
            raise BadInput(f"{where} has no option that {word} could follow")
        last = max(flag.end for flag in options)  # the subcommand ends the options
        return f"{edited[:last]} {word}{edited[last:]}"

    return Configuration(
        framework="torchtitan",
        version="0.3.0",
        behaves_as=WHOLE_LOSS if whole else None,
        rules="torchtitan",
        document=document,
        settings=settings,
        table=torchtitan_fields.COMMAND_LINE,
        edit=edit,
        model=model,
        unknown_model=unknown_model,
        gpus=_product(settings, launch.get("gpus") or document.variable("NGPU")),
        unknown=not_understood(
            {key.replace(".no_", "."): 0 for key in plain}, keys_of(torchtitan_fields.COMMAND_LINE), harmless
        ),
        assumed=assumed,
    )


def _own_module(text: str) -> JsonObject | None:
    """Return what the configuration module in an exported script states about its model, if there is one."""
    module = re.search(r"^from torchtitan\.models import (\w+) as models$", text, re.MULTILINE)
    flavor = re.search(r"models\.model_registry\(\"([^\"]+)\"\)", text)
    if module is None or flavor is None:
        return None
    return {"flavor": flavor[1], "settings": {}, "module": module[1]}
