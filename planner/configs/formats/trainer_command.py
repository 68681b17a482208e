"""Commands of programs that take TrainingArguments as options: `torchrun train.py --per_device_train_batch_size 4`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from planner.configs.formats.adapters import TRAINER
from planner.configs.formats.command_line import CommandLine
from planner.configs.formats.documents import Settings
from planner.configs.formats.transformers_fields import LENGTHS, MICRO, MODEL_NAMES, PROGRAM, STEPS
from topology.errors import BadInput

# Options that name the file in which the sharding and the types are.
SWITCHES = ("use_fsdp", "use_deepspeed", "use_megatron_lm", "use_parallelism_config")
FILES = {"config_file": "accelerate", "deepspeed": "DeepSpeed", "deepspeed_config": "DeepSpeed"}


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
