"""One mapping between a plan and the keys of a framework's configuration, read in both directions.

A table is a tuple of entries. An entry says how some facts (fields of `Plan`, `Workload` and `Runtime`) are written
under the framework's own keys, and how they are read back. The exports write with a table and `planner check` reads
with it, so the two cannot disagree.
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

# Facts hold names of fields of a Plan, Workload and Runtime, and `gpus` and `layers`, which a reader is given.
Facts = dict[str, Any]
Settings = dict[str, Any]  # values by the keys of a tool

PLAN_FACTS = frozenset(field.name for field in fields(Plan))
WORKLOAD_FACTS = frozenset({"seq_len", "global_batch_size"})
RUNTIME_FACTS = frozenset(
    {
        "compile",
        "param_dtype",
        "compute_dtype",
        "reduce_dtype",
        "optimizer",
        "adapter",
        "moe_dispatcher",
        "cuda_graph",
        "graph_scopes",
        "savers",
        "reentrant",
    }
)


class NotStated(BadInput):
    """A setting is left open: a question to whoever has the file, and no fault of it."""


class NotModelled(NotStated):
    """A setting asks for something that its tool has and no cost here knows: a limit of ours, and no fault of the
    file.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Facts and the keys that hold them.

    `write` takes all facts of a plan and returns settings, among `keys`. `read` takes the settings of a file, absent
    ones at the framework's defaults, and the facts that entries before this one read; it returns facts. Of `exclusive`
    keys a file has those that were written: they say the same in other ways, and the framework refuses two.
    """

    keys: tuple[str, ...]
    exclusive: tuple[str, ...] = ()
    write: Callable[[Facts], Settings]
    read: Callable[[Settings, Facts], Facts]


Table = tuple[Entry, ...]


# What stands for a value that is elsewhere: a shell's variable, a template's field, a missing value of OmegaConf's.
_ELSEWHERE = re.compile(r"\$[\w{(]|\{\{|^\?\?\?$|^<.*>$|`")


def require_said(key: str, value: Any) -> Any:
    """Return a value. Raises NotStated where it stands for one that is elsewhere."""
    if not isinstance(value, str) or not _ELSEWHERE.search(value):
        return value
    name = re.search(r"\$\{?(\w+)", value)
    raise NotStated(
        f"{key} is {value[:60]!r}, which the file does not resolve",
        remedy=f"--set {name[1]}=VALUE" if name else "write the value into the file",
    )


def layers_of(facts: Facts, key: str) -> int:
    """Return the model's number of layers. Raises NotStated where it is not known, and `key` depends on it."""
    layers = facts.get("layers")
    if layers is None:
        raise NotStated(f"{key} depends on the model's number of layers", remedy="--model")
    return int(layers)


def whole(settings: Mapping[str, Any], key: str, default: int = 1, *, least: int = 1) -> int:
    """Return an integer setting. Raises BadInput when it is none, or below `least`, NotStated where it is left open."""
    value = require_said(key, settings.get(key))
    if value is None:
        return default
    if isinstance(value, str) and value.strip().lstrip("-").isdecimal() and len(value) < 12:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 31:
        raise BadInput(f"{key} is {str(value)[:60]!r}", why=f"it must be a whole number of at least {least}")
    return value


def truth(settings: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """Return a boolean setting. Raises BadInput when it is none, NotStated where it is left open."""
    value = require_said(key, settings.get(key, default))
    if isinstance(value, str) and value.lower() in {"true", "false"}:
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise BadInput(f"{key} is {str(value)[:60]!r}", why="it must be true or false")
    return value


def one_of(settings: Mapping[str, Any], key: str, known: Mapping[Any, str], default: str) -> Any:
    """Return what of `known` (ours: theirs) a setting says. Raises BadInput for a word that is not among them,
    NotStated where it is left open.
    """
    value = require_said(key, settings.get(key, default))
    for ours, theirs in known.items():
        if value == theirs:
            return ours
    listed = ", ".join(map(str, known.values()))
    raise BadInput(f"{key} is {str(value)[:60]!r}", why=f"known: {listed}")


def number(key: str, fact: str, default: int = 1) -> Entry:
    """A whole number of the same meaning on both sides."""
    return Entry(
        keys=(key,),
        write=lambda facts: {key: facts[fact]},
        read=lambda settings, _: {fact: whole(settings, key, default)},
    )


def switch(key: str, fact: str) -> Entry:
    """A boolean of the same meaning on both sides."""
    return Entry(
        keys=(key,),
        write=lambda facts: {key: bool(facts[fact])},
        read=lambda settings, _: {fact: truth(settings, key)},
    )


def words(key: str, fact: str, known: Mapping[Any, str], default: str) -> Entry:
    """A word for each value: `known` is ours to theirs. A value without a word is not written."""
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


def read(table: Table, settings: Settings, given: Facts) -> Facts:
    """Return the facts that `settings` say; `given` are those that they do not hold. Raises BadInput."""
    facts = dict(given)
    for entry in table:
        facts |= entry.read(settings, facts)
    return facts


def keys_of(table: Iterable[Entry]) -> frozenset[str]:
    """Return all keys of a table."""
    return frozenset(key for entry in table for key in entry.keys)


def data_parallel_rest(settings: Settings, facts: Facts, key: str, product: int) -> int:
    """Return the degree under `key`, where -1 and an absent key mean: what `product` leaves of the GPUs.

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
