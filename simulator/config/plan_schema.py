"""Metadata of a plan's fields besides type and default: names, flags, bounds, and how searches choose them.

Every field of `simulator.config.plan.Plan` is one entry of this kind. Flags, keys of cases, columns, limits of searches
and words of answers follow from it, so a new field needs only an entry there and the model that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, get_args, get_type_hints

MAX_GPUS = 1 << 20  # of one plan
MAX_COUNT = 1 << 31  # a batch or length beyond this is a mistake, and would overflow 64-bit products
MAX_LAYERS = 100_000
MAX_WORD = 64  # characters of a name
_KEY = "plan"  # key of the metadata of a dataclass field


class Kind(StrEnum):
    """The kind of a field's value."""

    COUNT = "whole number"
    NUMBER = "number"
    SWITCH = "on or off"
    WORD = "word"
    COUNTS = "whole numbers"
    WORDS = "words"

    @property
    def listed(self) -> bool:
        """Whether it is a list: it has no column, and no search varies it."""
        return self in {Kind.COUNTS, Kind.WORDS}


_KINDS = {
    int: Kind.COUNT,
    float: Kind.NUMBER,
    bool: Kind.SWITCH,
    str: Kind.WORD,
    tuple[int, ...]: Kind.COUNTS,
    tuple[str, ...]: Kind.WORDS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanField:
    """One field of a plan. `name`, `kind`, `optional` and `default` are those of the dataclass.

    `words` is its name in texts, `short` its symbol in products of degrees and in names of plans. `flag` and `help` are
    the option of commands about one plan, "" without one. `search_help` is the end of the help text of the `suggest`
    option that limits a search to stated values; "" without such an option. `least` and `most` are the range of whole
    numbers; `choices` the allowed words, empty where a framework may have its own; `longest` the most characters of a
    word. `yes` is the word that `true` means in a source. `needs` is the degree that must exceed 1 for the field to
    have a meaning. When a field in `follows` is changed, this one is chosen again, unless it is stated as well.
    """

    name: str = ""
    kind: Kind = Kind.COUNT
    optional: bool = False
    default: Any = None
    words: str = ""
    short: str = ""
    flag: str = ""
    help: str = ""
    search_help: str = ""
    least: int = 0
    most: int = MAX_COUNT
    choices: tuple[str, ...] = ()
    longest: int = MAX_WORD
    yes: str = ""
    needs: str = ""
    follows: tuple[str, ...] = ()

    @property
    def parameter(self) -> str:
        """The name of the flag in JSON and in Python: `micro_batch` for `--micro-batch`."""
        return self.flag.partition("/")[0].lstrip("-").replace("-", "_")

    @property
    def title(self) -> str:
        """The field's name as a label, with a capital letter."""
        return self.words[:1].upper() + self.words[1:]

    @property
    def is_degree(self) -> bool:
        """Whether it is a number of ranks, or of stages on a rank, and so a factor of a product of degrees."""
        return self.kind is Kind.COUNT and self.most == MAX_GPUS and not self.optional


def entry(default: Any, words: str = "", **known: Any) -> Any:
    """Return a field of a dataclass with its `PlanField`."""
    return field(default=default, metadata={_KEY: PlanField(default=default, words=words, **known)})


def degree(words: str, **known: Any) -> Any:
    """Return a field with default 1 whose value is from 1 to `MAX_GPUS`."""
    return entry(1, words, least=1, most=MAX_GPUS, **known)


def fields_of(plan: type) -> Mapping[str, PlanField]:
    """Return the entries of a dataclass by field name, in order."""
    hints = get_type_hints(plan)
    found = {}
    for one in fields(plan):
        kinds = [part for part in (get_args(hints[one.name]) or (hints[one.name],)) if part is not type(None)]
        kind = _KINDS.get(hints[one.name]) or _KINDS[kinds[0]]
        known: PlanField = one.metadata[_KEY]
        found[one.name] = replace(
            known,
            name=one.name,
            kind=kind,
            optional=type(None) in get_args(hints[one.name]),
            words=known.words or one.name.replace("_", " "),
        )
    return found
