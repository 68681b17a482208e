"""One mapping between a plan and the keys of a framework's configuration, read in both directions.

A table is a tuple of entries. An entry converts some facts (fields of `Plan`, `Workload` and `Runtime`) to the
framework's own keys and back. The exports write with a table and `planner check` reads with it, so the two cannot
disagree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from simulator.config.plan import Plan
from simulator.config.runtime import TF32, Runtime
from simulator.config.workload import Workload
from topology import codec
from topology.errors import BadInput

# Facts are fields of a Plan, Workload and Runtime by name, with the reader's inputs `gpus` and `layers`.
Facts = dict[str, Any]
Settings = dict[str, Any]  # values by the keys of a tool

PLAN_FACTS = frozenset(field.name for field in fields(Plan))
WORKLOAD_FACTS = frozenset({"seq_len", "global_batch_size", "document_len", "routing"})
RUNTIME_FACTS = frozenset(
    {
        "compile",
        "param_dtype",
        "compute_dtype",
        "low_precision_recipe",
        "wide_layers",
        "reduce_dtype",
        "optimizer",
        "adapter",
        "moe_dispatcher",
        "cuda_graph",
        "graph_scopes",
        "savers",
        "reentrant",
        "logs_each_step",
    }
)


class NotStated(BadInput):
    """A setting is left open: a question to the user, not an error of the file."""


class NotModelled(NotStated):
    """A setting asks for something that its tool has and that is not modelled here: a limit of ours, not an error of
    the file.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Facts and the keys that hold them.

    `write` takes all facts of a plan and returns settings for some of `keys`, by default none. `read` takes the
    settings of a file, with the framework's defaults for absent ones, and the facts read by earlier entries; it returns
    facts. `exclusive` keys are different ways to state the same, of which the framework accepts one, so a file only has
    those that were written.
    """

    keys: tuple[str, ...] = ()
    exclusive: tuple[str, ...] = ()
    write: Callable[[Facts], Settings] = lambda _: {}
    read: Callable[[Settings, Facts], Facts]


Table = tuple[Entry, ...]


# Placeholders for a value from elsewhere: a shell's variable, a template's field, OmegaConf's missing value.
_ELSEWHERE = re.compile(r"\$[\w{(]|\{\{|^\?\?\?$|^<.*>$|`")


def require_said(key: str, value: Any) -> Any:
    """Return a value. Raises NotStated for a placeholder."""
    if not isinstance(value, str) or not _ELSEWHERE.search(value):
        return value
    name = re.search(r"\$\{?(?:oc\.env:|env:)?((?<=\$)\w+|[\w.]+)", value)
    raise NotStated(
        f"{key} is {value[:60]!r}, which the file does not resolve",
        remedy=f"--set {name[1]}=VALUE" if name else "write the value into the file",
    )


def layers_of(facts: Facts, key: str) -> int:
    """Return the model's number of layers. Raises NotStated, naming `key`, which depends on it, if it is unknown."""
    layers = facts.get("layers")
    if layers is None:
        raise NotStated(f"{key} depends on the model's number of layers", remedy="--model")
    return int(layers)


def whole(settings: Mapping[str, Any], key: str, default: int = 1, *, least: int = 1) -> int:
    """Return an integer setting. Raises BadInput when it is no integer, or below `least`, NotStated when it is left
    open.
    """
    value = require_said(key, settings.get(key))
    if value is None:
        return default
    if isinstance(value, str) and value.strip().lstrip("-").isdecimal() and len(value) < 12:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 31:
        raise BadInput(f"{key} is {str(value)[:60]!r}", why=f"it must be a whole number of at least {least}")
    return value


def truth(settings: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """Return a boolean setting. Raises BadInput when it is no boolean, NotStated when it is left open."""
    value = require_said(key, settings.get(key, default))
    if isinstance(value, str) and value.lower() in {"true", "false"}:
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise BadInput(f"{key} is {str(value)[:60]!r}", why="it must be true or false")
    return value


def one_of(settings: Mapping[str, Any], key: str, known: Mapping[Any, str], default: str) -> Any:
    """Return the key of `known` (our word: theirs) for a setting. Raises BadInput for an unknown word, NotStated when
    it is left open.
    """
    value = require_said(key, settings.get(key, default))
    for ours, theirs in known.items():
        if value == theirs:
            return ours
    listed = ", ".join(map(str, known.values()))
    raise BadInput(f"{key} is {str(value)[:60]!r}", why=f"known: {listed}")


def number(key: str, fact: str, default: int = 1) -> Entry:
    """A whole number with the same meaning on both sides."""
    return Entry(
        keys=(key,),
        write=lambda facts: {key: facts[fact]},
        read=lambda settings, _: {fact: whole(settings, key, default)},
    )


def switch(key: str, fact: str) -> Entry:
    """A boolean with the same meaning on both sides."""
    return Entry(
        keys=(key,), write=lambda facts: {key: bool(facts[fact])}, read=lambda settings, _: {fact: truth(settings, key)}
    )


def either(key: str, fact: str, on: str, off: str) -> Entry:
    """A boolean for one of two values."""
    return Entry(
        keys=(key,),
        write=lambda facts: {key: facts[fact] == on},
        read=lambda settings, _: {fact: on if truth(settings, key) else off},
    )


def words(key: str, fact: str, known: Mapping[Any, str], default: str) -> Entry:
    """A word for each value: `known` maps ours to theirs. A value without a word is not written."""
    return Entry(
        keys=(key,),
        write=lambda facts: {key: known[facts[fact]]} if facts[fact] in known else {},
        read=lambda settings, _: {fact: one_of(settings, key, known, default)},
    )


def facts_of(plan: Plan, workload: Workload, runtime: Runtime, layers: int) -> Facts:
    """Return the facts of a plan. `layers` is the model's number of layers."""
    facts: Facts = {name: getattr(plan, name) for name in PLAN_FACTS}
    facts |= {name: getattr(workload, name) for name in WORKLOAD_FACTS}
    facts |= {name: getattr(runtime, name) for name in RUNTIME_FACTS}
    facts["adapter"] = None if runtime.adapter is None else codec.to_builtins(runtime.adapter)
    if runtime.compute_dtype == TF32:  # a switch of torch's, not of a framework
        facts["compute_dtype"] = runtime.activation_dtype
    return facts | {"gpus": plan.gpus, "layers": layers}


def write(table: Table, facts: Facts) -> Settings:
    """Return the settings of all entries."""
    settings: Settings = {}
    for entry in table:
        settings |= entry.write(facts)
    return settings


def nested(settings: Settings) -> Settings:
    """Return dotted keys as sections of a document."""
    document: Settings = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        inside = document
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[name] = value
    return document


def read(table: Table, settings: Settings, given: Facts) -> Facts:
    """Return the facts in `settings`; `given` are facts that they do not contain. Raises BadInput."""
    facts = dict(given)
    for entry in table:
        facts |= entry.read(settings, facts)
    return facts


def keys_of(table: Iterable[Entry]) -> frozenset[str]:
    """Return all keys of a table."""
    return frozenset(key for entry in table for key in entry.keys)


def data_parallel_rest(settings: Settings, facts: Facts, key: str, product: int) -> int:
    """Return the degree under `key`; -1 or an absent key means the GPUs divided by `product`.

    Raises BadInput where the GPUs are not a multiple of it.
    """
    stated = whole(settings, key, -1, least=-1)
    if stated > 0:
        return stated
    if facts["gpus"] % product:
        raise BadInput(
            f"{key} fills {facts['gpus']} GPUs, which are not a multiple of the other degrees, {product}",
            remedy="say with --gpus how many the configuration is for",
        )
    return int(facts["gpus"] // product)
