"""Read the keys that other tools accept off their real packages, into planner/export/schema/, or tests/data/.

Run inside an environment that has one of the packages:

    python -m venv /tmp/v && /tmp/v/bin/pip install torchtitan==0.2.2
    /tmp/v/bin/python tests/tools/export_schemas.py torchtitan

It needs nothing of meshwright. A schema holds the package, its version, and for every key its type, its choices and
whatever else decides whether a value is accepted; for torchtitan also the models that it builds by name.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parents[2]
READ = ("accelerate", "deepspeed", "megatron", "torchtitan")  # by `planner check` and exports, not by tests alone


def typed(annotation: Any) -> dict[str, Any]:
    """Return a type as data: its text, and the values of a Literal."""
    text = re.sub(r"\b(?:typing|builtins|typing_extensions)\.", "", str(annotation))
    if isinstance(annotation, type) and get_origin(annotation) is None:
        text = annotation.__name__
    entry: dict[str, Any] = {"type": text[:200]}
    if "Literal" in str(get_origin(annotation)):
        entry["choices"] = list(get_args(annotation))
    return entry


def fields_of(kind: Any, path: str = "") -> dict[str, Any]:
    """Return the fields of nested dataclasses by dotted path."""
    hints = get_type_hints(kind)
    keys: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        inner = hints[field.name]
        where = f"{path}{field.name}"
        if dataclasses.is_dataclass(inner):
            keys |= fields_of(inner, f"{where}.")
        else:
            keys[where] = typed(inner)
    return keys


def actions_of(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the options of an argparse parser by their flags."""
    keys: dict[str, Any] = {}
    for action in parser._actions:
        entry: dict[str, Any] = {"type": getattr(action.type, "__name__", "str")}
        if action.nargs == 0:
            entry["type"] = "flag"
        if action.choices is not None:
            entry["choices"] = [getattr(choice, "name", choice) for choice in action.choices]
        for flag in action.option_strings:
            keys[flag] = entry
    return keys


def torchtitan() -> dict[str, Any]:
    """0.2.2 has one configuration class; 0.3.0 has functions that return a trainer's configuration."""
    if version("torchtitan").startswith("0.2"):
        from torchtitan.config import JobConfig

        return {"keys": fields_of(JobConfig), "models": list(_models_of_specs())}
    from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
    from torchtitan.trainer import Trainer

    modes = []
    for member in get_args(ActivationCheckpointingConfig):
        modes += [mark.name for mark in getattr(member, "__metadata__", ()) if hasattr(mark, "name")]
    keys = fields_of(Trainer.Config) | {
        "--module": {"type": "str"},
        "--config": {"type": "str"},
        "activation_checkpoint": {"type": "subcommand", "choices": modes},
    }
    return {"keys": keys, "models": list(_models_of_registries()), "configs": dict(_configurations())}


def _models_of_specs() -> Any:
    import torch
    from torchtitan.models import _supported_models
    from torchtitan.protocols.train_spec import get_train_spec

    for module in sorted(_supported_models):
        try:
            spec = get_train_spec(module)
        except ImportError:  # a model with a dependency of its own
            continue
        for flavor, arguments in spec.model_args.items():
            if "flex" in flavor or "varlen" in flavor or not hasattr(arguments, "n_layers"):
                continue
            # What its trainer fills in from the rest of the configuration.
            arguments.moe_impl = getattr(arguments, "moe_impl", "standard")
            with torch.device("meta"):
                model = spec.model_cls(arguments)
            yield {
                "module": module,
                "flavor": flavor,
                "layers": arguments.n_layers,
                "hidden": arguments.dim,
                "heads": arguments.n_heads,
                "kv_heads": getattr(arguments, "n_kv_heads", None),
                "parameters": sum(weight.numel() for weight in model.parameters()),
            }


def _models_of_registries() -> Any:
    """Yield every flavor that a module's own registry builds, with a configuration function of that module to start
    from.
    """
    import inspect

    import torch
    from torchtitan.models import _supported_models
    from torchtitan.trainer import Trainer

    for module in sorted(_supported_models):
        try:
            models = importlib.import_module(f"torchtitan.models.{module}")
            registry = importlib.import_module(f"torchtitan.models.{module}.config_registry")
        except ImportError:
            continue
        flavors = next(
            (table for name, table in vars(models).items() if name.endswith("_configs") and isinstance(table, dict)),
            None,
        )
        takes = inspect.signature(models.model_registry).parameters if hasattr(models, "model_registry") else {}
        if flavors is None or "attn_backend" not in takes:
            continue
        named: set[str] = set()
        for name, function in inspect.getmembers(registry, inspect.isfunction):
            # Configurations that are a model of their own: no other numerics, data or loss than pre-training's.
            if function.__module__ != registry.__name__ or not re.fullmatch(
                rf"{module}_[0-9a-z.]+b(?:_a[0-9]+b)?", name
            ):
                continue
            try:
                config = function()
            except (ValueError, ImportError):  # numerics or kernels that this machine does not have
                continue
            if type(config) is Trainer.Config:
                named.add(config.model_spec.flavor)
        for flavor in flavors:
            if "debug" in flavor or not named:
                continue
            try:
                model = models.model_registry(flavor).model
            except (ValueError, ImportError, TypeError):
                continue
            with torch.device("meta"):
                built = model.build()
            attention = model.layers[0].attention
            yield {
                "module": module,
                "flavor": flavor,
                "layers": len(model.layers),
                "hidden": model.dim,
                "heads": attention.n_heads,
                "kv_heads": getattr(attention, "n_kv_heads", None),
                "parameters": sum({id(w): w.numel() for w in built.parameters()}.values()),
            }


def _configurations() -> Any:
    """Yield (module.function, its model's flavor and what it sets that a plan is about) of every configuration
    function.
    """
    import inspect

    from torchtitan.models import _supported_models
    from torchtitan.trainer import Trainer

    modes = {"SelectiveAC.Config": "selective", "FullAC.Config": "full", "NoneType": "none"}
    for module in sorted(_supported_models):
        try:
            registry = importlib.import_module(f"torchtitan.models.{module}.config_registry")
        except ImportError:
            continue
        for name, function in inspect.getmembers(registry, inspect.isfunction):
            if function.__module__ != registry.__name__:
                continue
            try:
                config = function()
            except (ValueError, ImportError, TypeError):
                continue
            if not isinstance(config, Trainer.Config) or config.model_spec is None:
                continue
            settings: dict[str, Any] = {}
            for section in ("training", "parallelism", "compile"):
                for field in dataclasses.fields(getattr(config, section)):
                    value = getattr(getattr(config, section), field.name)
                    if field.default is not dataclasses.MISSING and value != field.default:
                        settings[f"{section}.{field.name}"] = value
            mode = modes.get(type(config.activation_checkpoint).__qualname__)
            settings |= {"activation_checkpoint": mode} if mode else {}
            yield f"{module}.{name}", {"flavor": config.model_spec.flavor, "settings": settings}


def megatron() -> dict[str, Any]:
    from megatron.training.arguments import add_megatron_arguments

    return {"keys": actions_of(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))}


def deepspeed() -> dict[str, Any]:
    """Top-level keys are constants there; sections are pydantic models."""
    import deepspeed as package
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig
    from deepspeed.runtime import config, constants
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    words = {
        value
        for module in (constants, config)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str) and re.fullmatch(r"[a-z][a-z0-9_]+", value)
    }
    # Read from the dictionary by name, where no constant stands for them.
    for source in (config.__file__, package.__file__):
        words |= set(re.findall(r'config\["([a-z_]+)"\]', Path(source).read_text()))
    keys: dict[str, Any] = {word: {"type": "any"} for word in sorted(words)}
    sections = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "tensor_parallel": TPTrainingConfig,
    }
    for section, model in sections.items():
        keys |= {
            f"{section}.{field.alias or name}": typed(field.annotation) for name, field in model.model_fields.items()
        }
    return {"keys": keys | fields_of(AutoEPConfig, "expert_parallel.")}


def accelerate() -> dict[str, Any]:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    keys = {field.name: typed(field.type) for field in dataclasses.fields(ClusterConfig)}
    for flag, entry in actions_of(launch_command_parser()).items():
        for section, prefix in (
            ("fsdp_config", "fsdp_"),
            ("parallelism_config", "parallelism_config_"),
            ("dynamo_config", "dynamo_"),
        ):
            if flag.startswith(f"--{prefix}"):
                keys[f"{section}.{flag[2:]}"] = entry
    return {"keys": keys}


def trainjob() -> dict[str, Any]:
    from kubeflow_trainer_api import models

    def walk(model: Any, path: str, depth: int) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        for name, field in model.model_fields.items():
            where = f"{path}{field.alias or name}"
            nested = [a for a in (field.annotation, *get_args(field.annotation)) if hasattr(a, "model_fields")]
            keys[where] = typed(field.annotation)
            if nested and depth:
                keys |= walk(nested[0], f"{where}.", depth - 1)
        return keys

    return {"keys": walk(models.TrainerV1alpha1TrainJob, "", 3)}


def skypilot() -> dict[str, Any]:
    from sky.utils import schemas

    keys = dict(schemas.get_task_schema()["properties"])
    keys |= {f"resources.{name}": entry for name, entry in schemas.get_resources_schema()["properties"].items()}
    return {"keys": {name: {"type": str(entry.get("type", "any"))} for name, entry in keys.items()}}


def torchrun() -> dict[str, Any]:
    from torch.distributed.run import get_args_parser

    return {"keys": actions_of(get_args_parser())}


def sbatch(*words: str) -> str:
    """Return what sbatch prints; it wants a configuration even to say its version, so it gets one of nobody."""
    with tempfile.TemporaryDirectory() as folder:
        conf = Path(folder, "slurm.conf")
        conf.write_text("ClusterName=none\nSlurmctldHost=localhost(127.0.0.1)\nPlugStackConfig=/dev/null\n")
        environment = {**os.environ, "SLURM_CONF": str(conf)}
        run = subprocess.run(["sbatch", *words], capture_output=True, text=True, check=False, env=environment)
    return run.stdout + run.stderr


def slurm() -> dict[str, Any]:
    """Sbatch says in its own usage text which long options it has."""
    usage = sbatch("--help")
    return {"keys": {name: {"type": "str"} for name in sorted(set(re.findall(r"--([a-z][a-z0-9-]+)", usage)))}}


PACKAGES = {
    "torchtitan": "torchtitan",
    "megatron": "megatron-core",
    "deepspeed": "deepspeed",
    "accelerate": "accelerate",
    "trainjob": "kubeflow-trainer-api",
    "skypilot": "skypilot",
    "torchrun": "torch",
}


def package_version(target: str) -> str:
    """Return the version that names the schema; torch's and SLURM's without what distributors add."""
    if target == "slurm":
        said = sbatch("--version")
        return ".".join(said.split()[-1].split(".")[:2])
    full = version(PACKAGES[target])
    return ".".join(full.split("+")[0].split(".")[:2]) if target == "torchrun" else full


def main() -> None:
    target = sys.argv[1]
    if target == "megatron":
        import typing

        import typing_extensions

        # megatron-core asks for Python 3.12; its arguments need no more of it than this decorator.
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    found = package_version(target)
    made = globals()[target]()
    document = {"package": PACKAGES.get(target, "slurm-client"), "version": found, **made}
    folder = ROOT / ("planner/export/schema" if target in READ else "tests/data/export_schemas")
    folder.mkdir(exist_ok=True)
    path = folder / f"{target}_{found}.json"
    path.write_text(json.dumps(document, indent=1, sort_keys=True, default=str) + "\n")
    print(f"{path.name}: {len(document['keys'])} keys, {len(document.get('models', ()))} models")


if __name__ == "__main__":
    main()
