"""Hand exported files to the real parser of their tool, and say what the tool understood.

    python tests/tools/export_readers.py TARGET FILES.json   # [{"text": ..., "keys": [...]}, ...]

prints a list of {"read": {key: value as read}} or {"error": what the parser said}. Runs inside an environment that has
the tool; needs nothing of meshwright. Nothing is started: parsers only.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Read = dict[str, Any]


def words_after(text: str, mark: str) -> list[str]:
    """Return the words of a shell script that follow `mark`, as a shell would split them."""
    words = shlex.split(text.replace("\\\n", " "), comments=True)  # shlex knows no continued lines
    return [word for word in words[words.index(mark) + 1 :] if word != "$@"]


def at(value: Any, path: str) -> Any:
    """Follow a dotted path through attributes and dictionaries."""
    for name in path.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


def torchtitan(text: str, keys: Iterable[str]) -> Read:
    from export_builders import heredocs  # next to this script
    from torchtitan.config import ConfigManager

    if "torchtitan.train" not in text.partition("\nset -eu")[2]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "config.toml")
            path.write_text(text)
            config = ConfigManager().parse_args(["--job.config_file", str(path)])
        return {key: at(config, key) for key in keys}
    words = words_after(text, "torchtitan.train")
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        for name, content in heredocs(text).items():
            Path(folder, name).write_text(content)
            sys.modules.pop(name.removesuffix(".py"), None)
        importlib.invalidate_caches()
        config = ConfigManager().parse_args(words)
        sys.path.remove(folder)
    modes = {"SelectiveAC.Config": "selective", "FullAC.Config": "full", "NoneType": "none"}
    read: Read = {"activation_checkpoint": modes[type(config.activation_checkpoint).__qualname__]}
    # The manager has loaded them: it refuses what it cannot find.
    read |= {
        name: value for name, _, value in (word.partition("=") for word in words) if name in {"--module", "--config"}
    }
    return read | {key: at(config, key) for key in keys if "." in key}


def megatron(text: str, keys: Iterable[str]) -> Read:
    """Read and validate: Megatron-LM's own `validate_args` has to agree, on as many ranks as the script starts."""
    import typing

    import typing_extensions

    typing.override = typing_extensions.override  # type: ignore[attr-defined]
    words = words_after(text, "pretrain_gpt.py")
    starter = words_after(text, "torchrun")
    nodes = next((int(w.partition("=")[2]) for w in starter if w.startswith("--nnodes=")), 1)
    each = next(int(w.partition("=")[2]) for w in starter if w.startswith("--nproc-per-node="))
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(nodes * each)}
    os.environ |= dict(re.findall(r"^export (CUDA_DEVICE_MAX_CONNECTIONS)=(\S+)$", text, re.MULTILINE))
    from megatron.training import arguments

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    arguments_of = {flag: action for action in parser._actions for flag in action.option_strings}
    # What no plan decides has to be there for the check.
    own = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--lr", "1e-4", "--train-iters", "1"]
    parsed = parser.parse_args(words)
    read: Read = {}
    for key in keys:
        action = arguments_of[key]
        value = getattr(parsed, action.dest)
        read[key] = (value == action.const) if action.nargs == 0 else value
    # There may be no GPU here; Hopper is what most plans are for.
    import torch

    torch.cuda.get_device_capability = lambda *_: (9, 0)
    arguments.get_device_arch_version = lambda: 9
    checked = parser.parse_args([*words, *own])
    checked._is_global_batch_size_explicitly_specified = True
    checked.rank, checked.world_size = 0, nodes * each
    arguments.validate_args(checked)
    return read


def deepspeed(text: str, keys: Iterable[str]) -> Read:
    from deepspeed.runtime.config import DeepSpeedConfig

    document = json.loads(text)
    each = document["train_micro_batch_size_per_gpu"] * document["gradient_accumulation_steps"]
    ranks = document.get("train_batch_size", each) // each

    class Grid:
        """As many data-parallel ranks as the batch sizes say."""

        def get_data_parallel_world_size(self) -> int:
            return ranks

    import deepspeed.comm as dist

    dist.get_rank = lambda *_: 0
    dist.get_world_size = lambda *_: ranks
    config = DeepSpeedConfig(document, mpu=Grid())
    sections = {
        "zero_optimization": "zero_config",
        "bf16": "bfloat16_config",
        "fp16": "float16_config",
        "tensor_parallel": "tensor_parallel_config",
        "expert_parallel": "expert_parallel_config",
    }
    by_initialize = {"sequence_parallel_size", "data_parallel_size"}
    read: Read = {}
    for key in keys:
        section, _, name = key.rpartition(".")
        path = f"{sections[section]}.{name}" if section else name
        # A key that only deepspeed.initialize looks at stays in the dictionary.
        read[key] = config._param_dict[key] if key in by_initialize else at(config, path)
    short = {"torch.float32": "fp32", "torch.bfloat16": "bf16"}
    read |= {key: short[str(value)] for key, value in read.items() if key.endswith("communication_data_type")}
    return read


def accelerate(text: str, keys: Iterable[str]) -> Read:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        path.write_text(text)
        given = launch_command_parser().parse_args(["--config_file", str(path), "program.py"])
        arguments, defaults, _ = _validate_launch_command(given)
    read: Read = {}
    for key in keys:
        name = key.rpartition(".")[2]
        value = getattr(arguments, name, None) if "." in key else getattr(defaults, name)
        read[key] = getattr(value, "value", value)
    return read


def trainjob(text: str, keys: Iterable[str]) -> Read:
    import yaml
    from kubeflow_trainer_api import models

    kept = models.TrainerV1alpha1TrainJob.from_dict(yaml.safe_load(text)).to_dict()
    return {key: at(kept, key) for key in keys if "/" not in key}


def skypilot(text: str, keys: Iterable[str]) -> Read:
    import sky
    import yaml

    kept = sky.Task.from_yaml_config(yaml.safe_load(text)).to_yaml_config()
    read = {}
    for key in keys:
        value = at(kept, key)
        read[key] = {name: int(count) for name, count in value.items()} if key.endswith("accelerators") else value
    return read


def torchrun(text: str, keys: Iterable[str]) -> Read:
    from torch.distributed.run import get_args_parser

    reported = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    words = [
        re.sub(r"^\$\{(\w+):.*\}$", lambda found: reported[found[1]], word) for word in words_after(text, "torchrun")
    ]
    parsed = get_args_parser().parse_args(words)
    return {key: getattr(parsed, key[2:].replace("-", "_")) for key in keys}


def slurm(text: str, keys: Iterable[str]) -> Read:
    """Sbatch prints the options it understood before it looks for a controller, and there is none.

    Of these, a path is absolute although a relative one was written, and a number whose unit nobody said has a question
    mark.
    """
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        conf, script = folder / "slurm.conf", folder / "job.sbatch"
        conf.write_text("ClusterName=none\nSlurmctldHost=localhost(127.0.0.1)\nPlugStackConfig=/dev/null\n")
        script.write_text(text)
        run = subprocess.run(
            ["sbatch", "-vv", "--test-only", str(script)],
            cwd=folder,
            env={**os.environ, "SLURM_CONF": str(conf)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    shown = re.findall(r"^sbatch: (\S+)\s+: (.*)$", run.stderr, re.MULTILINE)
    options = {key: re.sub(r"^(\d+)\?$", r"\1", value.removeprefix(f"{folder}/")) for key, value in shown}
    return {key: int(options[key]) if options[key].isdigit() else options[key] for key in keys}


READERS: dict[str, Callable[[str, Iterable[str]], Read]] = {
    "torchtitan": torchtitan,
    "megatron": megatron,
    "deepspeed": deepspeed,
    "accelerate": accelerate,
    "trainjob": trainjob,
    "skypilot": skypilot,
    "torchrun": torchrun,
    "slurm": slurm,
}


def plain(value: Any) -> Any:
    """Return a value as JSON would hold it, for comparison with what was written."""
    return json.loads(json.dumps(value, default=lambda other: getattr(other, "value", str(other))))


def same(written: Any, read: Any) -> bool:
    """Whether a parser read what was written; words of one's own type are compared as text.

    A flag that takes several values reads one as a list.
    """
    if isinstance(read, list) and len(read) == 1 and not isinstance(written, (str, list)):
        return same(written, read[0])
    if isinstance(written, str) and isinstance(read, list):
        return written in {str(read).replace(" ", ""), ",".join(map(str, read)), " ".join(map(str, read))}
    if isinstance(written, bool) or isinstance(read, bool):
        return str(written).lower() == str(read).lower()
    return written == read or str(written).lower() == str(read).lower()


def one(target: str, file: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"read": plain(READERS[target](file["text"], file["keys"]))}
    except SystemExit:
        return {"error": "the parser gave up; see its usage text"}
    except Exception as error:  # noqa: BLE001 - whatever a foreign parser raises is its answer
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def main() -> None:
    target, files = sys.argv[1:]
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    answers = [one(target, file) for file in json.loads(Path(files).read_text())]
    print(f"\n{json.dumps(answers)}")


if __name__ == "__main__":
    main()
