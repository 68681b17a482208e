"""Hand configurations to the parser and the validation of the tool that they are for, and say what it refuses.

    python tests/tools/config_parsers.py TOOL FILES.json   # [{"text" or "words", "world"}, ...]

prints a list of "" or what the tool said. Runs in an environment that has the tool, and needs nothing of meshwright.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import typing
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


@cache
def megatron_parser() -> argparse.ArgumentParser:
    """Made once for all files: it takes a tenth of a second, and reading with it leaves it as it was."""
    from megatron.training import arguments

    return arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def megatron(file: dict[str, Any]) -> None:
    """`parse_args`, `validate_args`, and the sizes of the batch."""
    import torch
    from megatron.core import num_microbatches_calculator as batches
    from megatron.training import arguments

    torch.cuda.get_device_capability = lambda *_: (9, 0)
    arguments.get_device_arch_version = lambda: 9
    # The variable is the environment's: one connection for tensor parallelism, and more for its FSDP.
    connections = "8" if "--use-megatron-fsdp" in file["words"] else "1"
    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": connections, "RANK": "0", "WORLD_SIZE": str(file["world"])}
    own = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--lr", "1e-4", "--train-iters", "1"]
    if "--rampup-batch-size" in file["words"]:
        own[-2:] = ["--train-samples", "5859375"]
    given = megatron_parser().parse_args([*file["words"], *own])
    given._is_global_batch_size_explicitly_specified = True
    given.rank, given.world_size = 0, file["world"]
    arguments.validate_args(given)
    sizes = (given.global_batch_size, given.micro_batch_size, given.data_parallel_size)
    batches._build_num_microbatches_calculator(0, *sizes, False)


def torchtitan(file: dict[str, Any]) -> None:
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims

    Path("config.toml").write_text(file["text"])
    asked = ConfigManager().parse_args(["--job.config_file", "config.toml"]).parallelism
    ParallelDims(
        dp_shard=asked.data_parallel_shard_degree,
        dp_replicate=asked.data_parallel_replicate_degree,
        cp=asked.context_parallel_degree,
        tp=asked.tensor_parallel_degree,
        pp=asked.pipeline_parallel_degree,
        ep=asked.expert_parallel_degree,
        etp=asked.expert_tensor_parallel_degree,
        world_size=file["world"],
    )


def deepspeed(file: dict[str, Any]) -> None:
    """What is auto is filled in as Transformers does before the file gets there."""
    import deepspeed.comm as dist
    from deepspeed.runtime.config import DeepSpeedConfig

    document = json.loads(file["text"])
    tensor = document.get("tensor_parallel", {}).get("autotp_size", 1)
    ranks = file["world"] // tensor

    class Grid:
        def get_data_parallel_world_size(self) -> int:
            return ranks

    dist.get_rank = lambda *_: 0
    dist.get_world_size = lambda *_: ranks
    DeepSpeedConfig(_without_auto(document), mpu=Grid())


def _without_auto(value: Any) -> Any:
    """Return a document with a number for every batch that is auto, and without what else is."""
    if not isinstance(value, dict):
        return value
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8}
    filled = {name: sizes.get(name) if inner == "auto" else _without_auto(inner) for name, inner in value.items()}
    return {name: inner for name, inner in filled.items() if inner is not None}


def accelerate(file: dict[str, Any]) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    Path("config.yaml").write_text(file["text"])
    _validate_launch_command(launch_command_parser().parse_args(["--config_file", "config.yaml", "program.py"]))


def transformers(file: dict[str, Any]) -> None:
    """`TrainingArguments` of the keys that it has; a trainer's own are in other classes."""
    import dataclasses

    import yaml
    from transformers import TrainingArguments

    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    said = yaml.safe_load(file["text"])
    TrainingArguments(**{name: value for name, value in said.items() if name in names} | {"use_cpu": True})


IMPORTED = {
    "megatron": "megatron.training.arguments",
    "torchtitan@0.2.2": "torchtitan.distributed",
    "deepspeed": "deepspeed.runtime.config",
    "accelerate": "accelerate.commands.launch",
    "transformers": "transformers",
}
PARSERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "megatron": megatron,
    "torchtitan@0.2.2": torchtitan,
    "deepspeed": deepspeed,
    "accelerate": accelerate,
    "transformers": transformers,
}


def refused(tool: str, file: dict[str, Any]) -> str:
    try:
        PARSERS[tool](file)
    except SystemExit:
        return "the parser gave up; see its usage text"
    except Exception as error:  # noqa: BLE001 - whatever a foreign parser raises is its answer
        return f"{type(error).__name__}: {error}"[:500] or "an error without a word"
    return ""


def forked(tool: str, file: dict[str, Any]) -> str:
    """Ask in a child of this process: parsers leave state behind, and take seconds to import."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, refused(tool, file).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


def main() -> None:
    tool, files = sys.argv[1:]
    if tool == "megatron":
        typing.override = import_module("typing_extensions").override  # type: ignore[attr-defined]
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    asked = json.loads(Path(files).read_text())
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        import_module(IMPORTED[tool])
        if tool == "megatron":
            megatron_parser()
        gc.freeze()  # children need not copy what they only read
        answers = [forked(tool, file) for file in asked]
    print(f"\n{json.dumps(answers)}")


if __name__ == "__main__":
    main()
