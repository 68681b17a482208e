"""A tool's YAML format as data: the keys that identify it, how keys are read and written, and where its model is
stated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from planner.configs.formats.configuration import Configuration, Limits, not_understood
from planner.configs.formats.documents import Document
from planner.export.mapping import Entry, Facts, Settings, Table, keys_of, truth, whole
from planner.export.named_models import model_said
from simulator.config.model import Model

# What tools without pipelines and experts can express.
DATA_PARALLEL: Limits = {"pp": ((1, 1),), "ep": ((1, 1),)}
FLAT: Facts = {"pp": 1, "ep": 1, "virtual_stages": 1, "schedule": None, "zero_stage": None, "sequence_parallel": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A file's model: the model or why it is unknown, the assumptions, and why it has no cost."""

    model: Model | None = None
    unknown: str = ""
    assumed: tuple[str, ...] = ()
    no_cost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlFormat:
    """A tool. A file with all keys of one of `marks` belongs to it; `runtime` runs its plans, and `rules` is the
    framework whose rules apply, if different.

    `ready` converts a file's settings to those that the table reads, and `gpus` returns the number of GPUs they are
    for. `behaves_as` is the version of the runtime whose step a file describes, if not the newest.
    """

    framework: str
    runtime: str
    marks: tuple[frozenset[str], ...]
    table: Table
    describe: Callable[[Settings], Described]
    harmless: str
    limits: Limits = field(default_factory=dict)
    rules: str = ""
    gpus: Callable[[Settings], int | None] = lambda _: None
    nodes: str = ""  # the key for the number of nodes, where a file may state it without that of GPUs
    ready: Callable[[Settings], Settings] = dict
    behaves_as: Callable[[Settings], str] = lambda _: ""

    def knows(self, settings: Settings) -> bool:
        """Return whether a file is one of this tool's."""
        return any(mark <= settings.keys() for mark in self.marks)

    def configuration(self, document: Document, said: Settings | None = None, at: str = "") -> Configuration:
        """Return the configuration of a file, or of `said`, its settings below the path `at`.

        Raises BadInput for impossible values.
        """
        said = document.settings if said is None else said
        settings = self.ready(said)
        described = self.describe(settings)
        spelt = {key: path for path in said for key in (self.key_of(path),)}

        def edit(changes: Settings) -> str:
            return document.edited({f"{at}{spelt.get(key, key)}": value for key, value in changes.items()})

        return Configuration(
            framework=self.framework,
            version=None,
            rules=self.rules or self.runtime,
            runtime=self.runtime,
            document=document,
            settings=settings,
            table=self.table,
            edit=edit,
            model=described.model,
            unknown_model=described.unknown,
            no_cost=described.no_cost,
            gpus=self.gpus(settings),
            machines=nodes if type(nodes := settings.get(self.nodes)) is int and nodes > 0 else None,
            unknown=not_understood(_said(settings), keys_of(self.table), self.harmless),
            assumed=described.assumed,
            behaves_as=self.behaves_as(settings),
            limits=self.limits,
        )

    def key_of(self, path: str) -> str:
        """Return the table's key for a key of a file."""
        return next(iter(self.ready({path: None})), path)


def _said(settings: Settings) -> Settings:
    """Return the settings without those that are empty or off."""
    return {key: value for key, value in settings.items() if value not in (None, False, "", [], {})}


def named(settings: Settings, *keys: str) -> Described:
    """Return the model named under the first of some keys that has one."""
    model, unknown = model_said(next((settings[key] for key in keys if settings.get(key)), None))
    return Described(model=model, unknown=unknown)


def accumulated(micro: str, steps: str, *, least: int = 1) -> Entry:
    """Micro batch, and number of accumulated micro batches."""

    def write(facts: Facts) -> Settings:
        together = facts["dp_replicate"] * facts["dp_shard"] * facts["micro_batch_size"]
        return {micro: facts["micro_batch_size"], steps: facts["global_batch_size"] // together}

    def read(settings: Settings, facts: Facts) -> Facts:
        at_once, times = whole(settings, micro, least), whole(settings, steps, 1)
        together = facts["dp_replicate"] * facts["dp_shard"]
        return {"micro_batch_size": at_once, "global_batch_size": at_once * times * together}

    return Entry(keys=(micro, steps), write=write, read=read)


def in_all(micro: str, total: str) -> Entry:
    """Micro batch, and global batch."""

    def read(settings: Settings, facts: Facts) -> Facts:
        at_once = whole(settings, micro, 1)
        together = at_once * facts["dp_replicate"] * facts["dp_shard"]
        return {"micro_batch_size": at_once, "global_batch_size": whole(settings, total, together)}

    def write(facts: Facts) -> Settings:
        return {micro: facts["micro_batch_size"], total: facts["global_batch_size"]}

    return Entry(keys=(micro, total), write=write, read=read)


def length(*keys: str) -> Entry:
    """Tokens of a sequence, from the first key that states them; otherwise the program's data decides."""

    def read(settings: Settings, facts: Facts) -> Facts:
        stated = next((key for key in keys if settings.get(key)), None)
        return {"seq_len": whole(settings, stated) if stated else facts.get("seq_len")}

    return Entry(keys=keys, read=read)


def whole_blocks(key: str) -> Entry:
    """Recomputation of whole blocks, or none."""
    return Entry(
        keys=(key,),
        write=lambda facts: {key: facts["recompute"] != "none"},
        read=lambda settings, _: {"recompute": "full" if settings.get(key) not in {None, False, "none"} else "none"},
    )


def compiled(key: str) -> Entry:
    return Entry(
        keys=(key,),
        write=lambda facts: {key: bool(facts["compile"])},
        read=lambda settings, _: {"compile": settings.get(key) is True},
    )


def constant(facts: Facts, *keys: str) -> Entry:
    """A fixed setting of a tool."""
    return Entry(keys=keys, read=lambda *_: dict(facts))


def degree(key: str, fact: str) -> Entry:
    """A degree, for which empty and 0 mean 1."""
    return Entry(
        keys=(key,),
        write=lambda facts: {key: facts[fact]} if facts[fact] > 1 else {},
        read=lambda settings, _: {fact: whole(settings, key, 1, least=0) or 1},
    )


def types(param: str, compute: str, reduce: str) -> Facts:
    return {"param_dtype": param, "compute_dtype": compute, "reduce_dtype": reduce}


def on(settings: Settings, key: str) -> bool:
    value: Any = settings.get(key)
    return False if value in {None, "auto"} else truth(settings, key)
