"""A configuration that was read: its framework, its settings by the names of that framework's table, and what it leaves
open.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from planner.configs.formats.documents import Document
from planner.export.mapping import Facts, Settings, Table, keys_of
from planner.export.schema import schema
from planner.search.plan_space.stated import Values
from simulator.config.model import Model
from topology.errors import PlannerError, UserError

# The values of a plan's fields that a kind of file can express; None: it has no key for the field, which keeps its
# value.
Limits = Mapping[str, Values | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFlags:
    """What the command line states besides the file."""

    model: str | None = None
    cluster: str | None = None
    gpu: str | None = None
    gpus: int | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    launch: str = ""
    variables: tuple[tuple[str, str], ...] = ()  # variables of a script that it does not set
    release: str = ""  # of a serving engine, if the command does not state it


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A file that was read. `settings` are read by the `table`; `rules` is the framework whose rules apply, and
    `runtime` the one that runs its plans, if different.

    `model` is the model that the file describes or names; None if it is not known, and then `unknown_model` is what the
    file says about it; `no_cost` is why the cost is not modelled for any model. `gpus` is the number that the file is
    for, on `machines` hosts; with `in_a_comment` this and `cluster` are from a comment. `behaves_as` is the version
    whose step is predicted, if it is not `version`. `given` are facts outside its keys. `edit` makes a new text from
    changed settings.
    """

    framework: str
    version: str | None
    rules: str
    runtime: str = ""
    behaves_as: str | None = None
    document: Document
    settings: Settings
    table: Table
    edit: Callable[[Settings], str]
    model: Model | None = None
    unknown_model: str = ""
    no_cost: str = ""
    gpus: int | None = None
    machines: int | None = None
    given: Facts = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    limits: Limits = field(default_factory=dict)
    batch_step: int | None = None  # of a batch that grows: sequences of which micro batch x data parallel is a divisor
    cluster: str | None = None
    in_a_comment: bool = False
    leaves_open: frozenset[str] = frozenset()  # which of seq_len and global_batch it does not say
    elsewhere: tuple[str, ...] = ()  # decisions about a plan that the text does not contain
    known: frozenset[str] = frozenset()  # keys besides the table's that a misspelt key may have meant


def not_understood(settings: Mapping[str, Any], understood: frozenset[str], harmless: str) -> tuple[str, ...]:
    """Return the unknown keys, without those that match the pattern `harmless`, which do not change the cost."""
    quiet = re.compile(harmless)
    return tuple(
        key for key, value in settings.items() if value != "" and key not in understood and not quiet.fullmatch(key)
    )


# Source of a framework's key names, which a misspelt key may have meant.
_SCHEMAS = {
    "deepspeed": ("deepspeed", "0.19.8"),
    "megatron-lm": ("megatron", "0.19.2"),
    "accelerate": ("accelerate", "1.15.0"),
}
_ALIKE = 0.8  # least ratio of difflib: one letter of five


def did_you_mean(configuration: Configuration) -> dict[str, str]:
    """Return, for each unknown key, the known key with the most similar spelling, if there is one."""
    name, version = _SCHEMAS.get(configuration.framework, (configuration.framework, configuration.version or ""))
    known = configuration.known | keys_of(configuration.table)
    with suppress(PlannerError):
        known |= schema(name, version)["keys"].keys()
    found = {}
    for key in configuration.unknown:
        if key in known:
            continue
        section = key.rpartition(".")[0]
        # Only names of the key's own section are compared.
        siblings = [one for one in known if one.rpartition(".")[0] == section]
        near = get_close_matches(key.rpartition(".")[2], [one.rpartition(".")[2] for one in siblings], 1, _ALIKE)
        if near:
            found[key] = f"{section}.{near[0]}" if section else near[0]
    return found


# Machines of the GPUs that files name.
MACHINES = {"A100": "dgx-a100", "H100": "dgx-h100", "H200": "dgx-h200", "B200": "dgx-b200", "GB200": "gb200-nvl72"}


def preset(text: str) -> tuple[int | None, str | None]:
    """Return the GPUs and their machine that a comment names, as torchtitan's own files do:
    `NOTE: this toml config is a preset for 64 A100 GPUs`.
    """
    found = re.search(r"preset for (\d{1,6})(?:x| x)? ?([A-Z]+\d\w*)? ?GPUs?", text)
    if found is None:
        return None, None
    return int(found[1]), MACHINES.get(found[2] or "")


class NotAConfiguration(UserError):
    """The file is of no known kind (exit 2)."""


def unknown_kind(where: str, why: str) -> NotAConfiguration:
    """Return the error for a file of no known kind."""
    return NotAConfiguration(
        f"{where} is no configuration of a kind that is known",
        why=why,
        remedy="a torchtitan TOML or command, a Megatron-LM command line, script or functional test, a recipe of"
        " Megatron-Bridge or its dump, a DeepSpeed JSON, an accelerate YAML, TrainingArguments, commands or YAML of"
        " verl or MaxText, or YAML of axolotl, torchtune, LitGPT, nanotron, GPT-NeoX, NeMo AutoModel, OLMo or Primus",
    )
