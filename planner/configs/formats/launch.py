"""Read a launch line: the number of GPUs, and arguments of the program that it starts, which may be TrainingArguments:
`torchrun train.py --per_device_train_batch_size 4`.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.configs.formats.adapters import TRAINER
from planner.configs.formats.command_line import CommandLine, typed
from planner.configs.formats.configuration import CheckFlags, Configuration
from planner.configs.formats.documents import Settings, YamlDocument
from planner.configs.formats.savers import TRAINER as SAVERS
from planner.configs.formats.transformers_fields import LENGTHS, MICRO, MODEL_NAMES, PROGRAM, STEPS, named_optimizer
from planner.export.named_models import model_said
from topology import codec
from topology.codec import JsonObject
from topology.errors import BadInput, UserError

# Options of launchers and programs that change a step or its memory and are not read here.
COSTLY = re.compile(
    r"--(.*parallel.*|.*(sharding|zero_|offload|liger|recompute.*|cudnn|autotp).*|(use_)?fsdp.*|fsdp_.*|mixed_precision|fp8.*"
    r"|torch_compile|dynamo_.*|optim|packing|lora.*|use_peft|load_in_.*|finetuning_type|auto_find_batch_size|pipeline.*)"
)
# Settings that a DeepSpeed file and arguments can both state: Transformers refuses two different values.
TWICE = {"micro_batch": ("train_micro_batch_size_per_gpu", MICRO), "steps": ("gradient_accumulation_steps", STEPS)}
# Options that name the file in which the sharding and the types are.
SWITCHES = ("use_fsdp", "use_deepspeed", "use_megatron_lm", "use_parallelism_config")
ARGUMENTS = "--config"  # the file from which TRL's scripts read their arguments
PARTS = {"adapter": TRAINER, "savers": SAVERS}  # of the program, read from its line for files of a launcher
FILES = {"config_file": "accelerate", "deepspeed": "DeepSpeed", "deepspeed_config": "DeepSpeed"}


def launch_facts(line: str) -> JsonObject:
    """Return what a launch line states: GPUs, and the program's arguments by Transformers' names."""
    return launch_of(_launched(line)) if line else {}


def _launched(line: str) -> CommandLine:
    """Return a launch line, completed from the file of arguments that TRL's scripts read (`--config`)."""
    said = CommandLine(line, "--launch", lambda _: None)
    name = said.settings.get(ARGUMENTS)
    if isinstance(name, str) and name.endswith((".yaml", ".yml")) and codec.is_file(name):
        stated = YamlDocument(codec.read_text(name), name).settings
        said.settings = {f"--{key}": value for key, value in stated.items()} | said.settings
    return said


def started_by(found: Configuration, flags: CheckFlags, where: str) -> Configuration:
    """Return a configuration completed from the line that starts it: its GPUs, and its unknown options.

    Raises UserError where the line and a flag differ, BadInput where the line and the file do, or where the line names
    another file that decides on the sharding.
    """
    if codec.is_file(flags.launch):
        raise UserError(
            f"--launch {flags.launch[:80]} names a file, and takes the line itself",
            remedy=f'--launch "$(cat {flags.launch[:80]})"',
        )
    said = _launched(flags.launch)
    launch = launch_of(said)
    gpus = launch.get("gpus")
    if found.framework == "transformers":
        line = flags.launch if ARGUMENTS in said.settings else f"{flags.launch} {ARGUMENTS} {where}"
        stated = {name.removeprefix("--"): value for name, value in said.settings.items()}
        if error := named_file(stated, ".", shlex.quote(line)):
            raise error
    if flags.gpus and gpus and flags.gpus != gpus:
        raise UserError(f"--gpus {flags.gpus}, but the launch line starts {gpus}", remedy="leave --gpus out")
    inner = [name for name in said.settings if "." in name and found.framework == "torchtitan"]
    if inner:
        raise BadInput(
            f"the launch line sets {', '.join(inner)[:200]}",
            why="it counts before the file, which changes are written into",
            remedy="write the values into the file",
        )
    for fact, keys in TWICE.items():
        for key in keys:
            value = found.settings.get(key)
            if type(value) is int and launch.get(fact, value) != value:
                raise BadInput(
                    f"the launch line says {launch[fact]} for {key}, and the file {value}",
                    remedy="write the same into both, or auto into the file",
                )
    unknown = _not_read(said.settings, found)
    known: JsonObject = {"gpus": gpus, "in_a_comment": False} if gpus else {}
    if gpus and "nodes" in launch:
        known["machines"] = launch["nodes"]
    if found.model is None and "model" in launch:
        known["model"], known["unknown_model"] = model_said(launch["model"])
    return replace(found, unknown=(*found.unknown, *unknown), **known)


def _not_read(said: Settings, found: Configuration) -> tuple[str, ...]:
    """Return the options of a launch line that change a step and are not read, and a file of arguments that is not
    here.
    """
    read = {f"--{key}" for part, entry in PARTS.items() if part in found.given for key in entry.keys}
    if named_optimizer(str(said.get("--optim"))) == "adamw":  # the default of these tools, too
        read.add("--optim")
    costly = [name for name, on in said.items() if COSTLY.fullmatch(name) and name not in read and on is not False]
    program = found.framework in {"accelerate", "deepspeed"} and ARGUMENTS in said
    return (*costly, *([ARGUMENTS] if program and f"--{MICRO}" not in said else []))


def launch_of(said: CommandLine) -> JsonObject:
    """Return what a command line states about GPUs and, by Transformers' names, about the batch."""
    values = said.settings
    found: JsonObject = {}

    def count(*names: str) -> int | None:
        return next((values[name] for name in names if type(values.get(name)) is int), None)

    each = count("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--gpus-per-node")
    each = each or said.variable("GPUS_PER_NODE", "NPROC_PER_NODE", "GPUS", "NUM_GPUS")
    each = each or _directive(said, "gpus-per-node", "ntasks-per-node", "gres")
    nodes = count("--nnodes", "--num_nodes", "--nodes", "--num_machines") or said.variable("NNODES", "NUM_NODES")
    nodes = nodes or _directive(said, "nodes")
    visible = re.fullmatch(r"\d{1,3}(,\d{1,3})*", said.expanded("$CUDA_VISIBLE_DEVICES"))
    each = each or (len(visible[0].split(",")) if visible else None)
    total = count("--num_processes") or said.variable("WORLD_SIZE")
    if total or each:
        found["gpus"] = total or (each or 1) * (nodes or 1)
    if nodes:
        found["nodes"] = nodes
    if name := next((values[f"--{key}"] for key in MODEL_NAMES if isinstance(values.get(f"--{key}"), str)), None):
        found["model"] = name
    for name, key in (("micro_batch", MICRO), ("steps", STEPS)):
        if (value := count(f"--{key}")) is not None:
            found[name] = value
    for key in LENGTHS:
        if (value := count(f"--{key}")) is not None:
            found["seq_len"] = value
    if values.get("--gradient_checkpointing") is True:
        found["recompute"] = "full"
    for name in ("bf16", "fp16"):
        if values.get(f"--{name}") is True or values.get("--mixed_precision") == name:
            found[name] = True
    program = {name.removeprefix("--"): value for name, value in values.items() if name.startswith("--")}
    parts = {part: entry.read(program, {}).get(part) for part, entry in PARTS.items()}
    return found | {part: stated for part, stated in parts.items() if stated}


def _directive(said: CommandLine, *names: str) -> int | None:
    for name in names:
        value = typed(str(said.directives.get(name, "")).rpartition(":")[2])
        if type(value) is int:
            return value
    return None


class TrainerCommand(CommandLine):
    """A command whose options are named as the keys of a file with TrainingArguments, without dashes."""

    def __init__(self, command: CommandLine, where: str) -> None:
        super().__init__(command.text, where, lambda _: None, command._outside)  # noqa: SLF001 - the same text again
        said = {name.removeprefix("--"): value for name, value in self.settings.items()}
        if (precision := said.get("mixed_precision")) in {"bf16", "fp16"}:  # of accelerate launch
            said.setdefault(precision, True)
        self.settings = said

    def edited(self, changes: Settings) -> str:
        return super().edited({f"--{key}": self._switched(f"--{key}", value) for key, value in changes.items()})

    def _switched(self, name: str, value: Any) -> Any:
        """Return True as a word where the option has one, as in `--bf16 False`."""
        flag = self.flags.get(name)
        return "True" if value is True and flag is not None and flag.value_start != flag.start else value


def as_options(settings: Settings) -> str:
    """Return the arguments of a file, as far as a launch line can state them, as a shell writes them in one word."""
    stated = (MICRO, STEPS, *LENGTHS, *MODEL_NAMES, "bf16", "fp16", *TRAINER.keys)
    said = {name: settings[name] for name in stated if isinstance(settings.get(name), (str, int))}
    recomputed = next(entry for entry in PROGRAM if "gradient_checkpointing" in entry.keys).read(settings, {})
    said |= {"gradient_checkpointing": True} if recomputed["recompute"] == "full" else {}
    return shlex.quote(" ".join(f"--{name} {shlex.quote(str(value))}" for name, value in said.items()))


def is_trainer_command(settings: Settings) -> bool:
    return bool({f"--{name}" for name in (MICRO, *FILES)} & settings.keys())


def named_file(settings: Settings, where: str, command: str) -> BadInput | None:
    """Return the error of a command whose sharding is in a file that it names; None if it is in its options.

    `command` is how a shell writes the command's text.
    """
    if asked := [name for name in SWITCHES if settings.get(name)]:
        return BadInput(
            f"the arguments have --{asked[0]} of accelerate, whose further options are not read here",
            why="the sharding is in them",
            remedy="write them into a file (accelerate config), and check that with this command as --launch",
        )
    for option, tool in FILES.items():
        name = settings.get(option)
        if isinstance(name, str) and name:
            neighbour = Path(where).parent / name
            path = neighbour if neighbour.is_file() else Path(name)
            return BadInput(
                f"the arguments name a file of {tool}, {name[:80]!r}",
                why="the sharding and the types are in it",
                remedy=f"planner check {str(path)[:200]} --launch {command}",
            )
    return None
