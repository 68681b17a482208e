"""Typed, bounded access to an untrusted config.json that has been decoded to plain values.

`ConfigReader` returns the value of a key with the right type and within bounds, or raises BadModel with the key's name.
It remembers which keys were read, so that the others can be refused or reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simulator.config.model_families import IRRELEVANT, SHAPE_CHANGING, Family
from topology.codec import JsonObject
from topology.errors import BadModel

MAX_WIDTH = 2**31 - 1  # no tensor library indexes a larger dimension
MAX_LAYERS = 100_000
SHOWN_UNKNOWN = 12  # largest number of unknown keys that are named


def show(value: object) -> str:
    """Return an untrusted value as short text without control characters."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (dict, list, tuple, set)):
        return f"a {type(value).__name__} of {len(value)}"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class ConfigReader:
    """Typed access to one config. Remembers which keys were read and which defaults were used."""

    def __init__(self, config: JsonObject, name: str, model_type: str, family: Family) -> None:
        self.config = config
        self.name = name
        self.model_type = model_type
        self.family = family
        self.assumed: list[str] = []
        self.read: set[object] = {"model_type"}

    def bad(self, what: str, *, why: str = "", remedy: str = "") -> BadModel:
        return BadModel(f"model {show(self.name)}: {what}", why=why, remedy=remedy)

    def assume(self, key: str, value: object) -> None:
        self.assumed.append(f"{key} not stated: {show(value)} ({self.family.config_class}'s default)")

    def stated(self, *keys: str) -> Any:
        """Return the value of the first of several aliases that is there and not null; None if none is."""
        found = [(key, self.config[key]) for key in keys if self.config.get(key) is not None]
        self.read.update(keys)
        for key, value in found[1:]:
            if value != found[0][1]:
                raise self.bad(
                    f"{found[0][0]!r} is {show(found[0][1])} but {key!r} is {show(value)}",
                    why="both name the same size",
                    remedy="remove one of them",
                )
        return found[0][1] if found else None

    def integer(self, *keys: str, low: int = 1, high: int = MAX_WIDTH) -> int | None:
        """Return an integer within bounds, or None when the key is absent or null."""
        value = self.stated(*keys)
        if value is None:
            return None
        if type(value) is not int:
            raise self.bad(f"{keys[0]!r} must be an integer, not {show(value)}")
        if not low <= value <= high:
            raise self.bad(f"{keys[0]!r} is {show(value)}", why=f"it must lie between {low} and {high}")
        return value

    def size(self, *keys: str, high: int = MAX_WIDTH) -> int:
        """Return a required positive integer."""
        value = self.integer(*keys, high=high)
        if value is None:
            raise self.bad(
                f"{keys[0]!r} is missing",
                why="a size is never assumed: the config class's default is one particular model",
                remedy=f"add {keys[0]!r} to the config",
            )
        return value

    def count(self, *keys: str, default: int = 0, high: int = MAX_WIDTH) -> int:
        """Return an integer from 0, or `default`."""
        value = self.integer(*keys, low=0, high=high)
        return default if value is None else value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.stated(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.bad(f"{key!r} must be true or false, not {show(value)}")
        return value

    def word(self, key: str, choices: Sequence[str], *, default: str) -> str:
        value = self.stated(key)
        if value is None:
            return default
        if type(value) is not str or value.casefold() not in choices:
            raise self.bad(f"{key!r} is {show(value)}", why=f"known: {', '.join(choices)}")
        return value.casefold()

    def indices(self, key: str, layers: int) -> frozenset[int]:
        """Return a list of layer indices, each from 0 to layers - 1."""
        value = self.stated(key)
        if value is None:
            return frozenset()
        if type(value) is not list or any(type(i) is not int or not 0 <= i < layers for i in value):
            raise self.bad(f"{key!r} must list layer indices from 0 to {layers - 1}, not {show(value)}")
        return frozenset(value)

    def report_unread(self) -> None:
        """Refuse keys that change shapes and were not read; note unknown ones."""
        unknown = []
        for key, value in self.config.items():
            if value is None or key in self.read or key in IRRELEVANT:
                continue
            if key == "auto_map":
                self.assumed.append("auto_map ignored: code that a config names is never loaded")
            elif key == "quantization_config":
                self.assumed.append("quantization_config ignored: counts are elements, bytes follow the run's types")
            elif key not in SHAPE_CHANGING:
                unknown.append(key)
            elif value not in (False, 0) and value != []:
                raise self.bad(
                    f"{key!r} is {show(value)}, which {self.model_type!r} does not have",
                    why="it changes the shapes of the network, so any count would be wrong",
                    remedy="set model_type to the family that has it, or remove the key",
                )
        self.assumed += [f"ignored unknown field {show(key)}" for key in unknown[:SHOWN_UNKNOWN]]
        if len(unknown) > SHOWN_UNKNOWN:
            self.assumed.append(f"ignored {len(unknown) - SHOWN_UNKNOWN} more unknown fields")
