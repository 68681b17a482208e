"""Models by the names they have on the Hugging Face Hub: `models/HUB.json`, read as data; nothing is downloaded.

A name is found in upper or lower case, with or without its organisation. A quantised copy (`-AWQ`, `-FP8`) and a copy
by an organisation that republishes models are found as their original, which has the same shapes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from topology.codec import JsonObject, convert, read_json
from topology.errors import BadModel

SHIPPED = Path(__file__).parents[1] / "models"
_CACHED = re.compile(r"/models--([^/]+)/snapshots/[^/]+$")  # a folder of huggingface_hub's cache
ON_THE_HUB = re.compile(r"([\w.-]{1,60}/[\w.-]{1,96})(?:@([\w.-]{1,64}))?", re.ASCII)
_SITE = re.compile(r"^(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/", re.IGNORECASE)
_SUFFIX = re.compile(r"-(it|pt|instruct|base|chat|hf)$")
_MOST_WORDS = 3  # most endings of a name that say how a copy is quantised: "-unsloth-bnb-4bit" has three


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """One shape and the names that have it.

    `config` has the fields of a config.json, or those that differ from the shipped model `like`. `parameters` is the
    published count that `counted` describes, with the digits that were stated. `left_out` names parts that the shape
    lacks; `weights` is the format of its checkpoint where that is not 16 bits (default: that of `like`), `also` other
    spellings.
    """

    ids: tuple[str, ...]
    parameters: str
    source: str
    like: str = ""
    config: JsonObject = field(default_factory=dict)
    left_out: str = ""
    counted: str = ""
    weights: str = ""
    also: tuple[str, ...] = ()

    def shape(self) -> JsonObject:
        """Return the config.json that describes the shape."""
        return {**(read_json(SHIPPED / f"{self.like}.json") if self.like else {}), **self.config}


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedModel:
    """Names of models with a part that is not modelled, and that part."""

    ids: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HubTable:
    schema_version: int
    about: str
    quantised: str
    republishers: tuple[str, ...]
    rows: tuple[HubModel, ...]
    refused: tuple[RefusedModel, ...]


@cache
def hub_table() -> HubTable:
    return convert(read_json(SHIPPED / "HUB.json"), HubTable, where="models/HUB.json")


def hub_model(name: str) -> tuple[str, HubModel] | None:
    """Return the name to call a model by, and its row; None where the table does not have it.

    Raises BadModel, with the part that is not modelled, for a model that is known and cannot be described.
    """
    said = _SITE.sub("", name.strip()).strip("/")
    for key, plain in _spellings(_spelt_out(said)):
        found = _index().get(key)
        if isinstance(found, RefusedModel):
            raise BadModel(
                f"{said[:100]} has a part that is not modelled",
                why=found.why,
                remedy="take a model of another family with the same size",
            )
        if found is not None:
            return (next(i for i in found.ids if _same(i, key)) if plain else said), found
    return None


def _spelt_out(said: str) -> str:
    """Return the table's name with the same letters and digits as a short one: `llama3.1-8b`, `phi4`.

    `-Instruct` and the like may be left out. A name that is in the table, or may mean several shapes, stays as it is.
    """
    return said if "/" in said or said.casefold() in _index() else _by_letters().get(_letters(said), said)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


@cache
def _by_letters() -> dict[str, str]:
    found: dict[str, list[tuple[int, str]]] = {}
    entries: tuple[HubModel | RefusedModel, ...] = (*hub_table().rows, *hub_table().refused)
    for row, entry in enumerate(entries):
        for name in entry.ids:
            last = name.rpartition("/")[2].casefold()
            for short in {_letters(last), _letters(_SUFFIX.sub("", last))}:
                found.setdefault(short, []).append((row, name))
    return {letters: names[0][1] for letters, names in found.items() if len({row for row, _ in names}) == 1}


def name_of_file(path: Path, config: Any) -> str:
    """Return the name of a file's model. For a config.json this is its name on the Hub if the file is in the cache of
    huggingface_hub. Else, if no folder was given, it is the name in the file, or its kind and size. Else it is the
    folder.
    """
    if path.name != "config.json":
        return path.stem
    whole = path.resolve()
    if cached := _CACHED.search(whole.parent.as_posix()):
        return cached[1].replace("--", "/", 1)
    said = config.get("_name_or_path") if isinstance(config, dict) else None
    if path.parent == Path() and isinstance(said, str) and ON_THE_HUB.fullmatch(said):
        return said
    kind = config.get("model_type") if isinstance(config, dict) else None
    if path.parent == Path() and isinstance(kind, str) and re.fullmatch(r"[\w.-]{1,40}", kind):
        layers, hidden = (config.get(key) for key in ("num_hidden_layers", "hidden_size"))
        return f"{kind}-{layers}x{hidden}" if isinstance(layers, int) and isinstance(hidden, int) else kind
    return whole.parent.name or "config"


def hub_names_near(name: str) -> list[str]:
    """Return names of the table with a spelling near to `name`."""
    key = _SITE.sub("", name.strip()).casefold()[:100]
    canonical = {i.casefold(): i for row in hub_table().rows for i in row.ids}
    if "/" not in key:
        canonical = {i.rpartition("/")[2]: canonical[i] for i in canonical}
    return [canonical[match] for match in difflib.get_close_matches(key, canonical, n=3, cutoff=0.7)]


def _spellings(said: str) -> Iterator[tuple[str, bool]]:
    """Return the keys to try, the most literal first, and whether each is the full name."""
    table, key = hub_table(), said.casefold()
    yield (key, True)
    organisation, _, last = key.rpartition("/")
    copied = organisation in table.republishers
    if copied:
        yield (last, False)
    for _ in range(_MOST_WORDS):
        plain = re.sub(table.quantised, "", key)
        if plain == key:
            break
        key = plain
        yield (key, False)
        if copied:
            yield (key.rpartition("/")[2], False)


def _same(name: str, key: str) -> bool:
    return key in (name.casefold(), name.casefold().rpartition("/")[2])


@cache
def _index() -> dict[str, HubModel | RefusedModel]:
    """Return rows by lower-case name, and by name without organisation where only one row has it."""
    table = hub_table()
    whole: dict[str, HubModel | RefusedModel] = {}
    short: dict[str, list[HubModel | RefusedModel]] = {}
    entries: tuple[HubModel | RefusedModel, ...] = (*table.rows, *table.refused)
    for row in entries:
        for name in row.ids:
            whole[name.casefold()] = row
            rows = short.setdefault(name.casefold().rpartition("/")[2], [])
            rows += [] if row in rows else [row]
    return {**{name: rows[0] for name, rows in short.items() if len(rows) == 1}, **whole}
