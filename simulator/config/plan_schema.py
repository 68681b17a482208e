"""What is known of a field of a plan besides its type and default: how it is named, stated, bounded and chosen.

Every field of `simulator.config.plan.Plan` is one entry of this kind. Flags, keys of cases, columns, limits of searches
and words of answers follow from it, so that a new field is an entry there and the physics that reads it.
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
_KEY = "plan"  # of the metadata of a dataclass field


class Kind(StrEnum):
    """What the value of a field is."""

    COUNT = "whole number"
    NUMBER = "number"
    SWITCH = "on or off"
    WORD = "word"
    COUNTS = "whole numbers"
    WORDS = "words"

    @property
    def listed(self) -> bool:
        """Whether it is a list: columns carry none, and no search varies one."""
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

    `words` is what people call it, `short` its sign in a product of degrees and in names of plans.
    `flag` and `help` are the option of commands about one plan, "" where there is none. `search_help` ends the help of
    the option of `suggest` that lets a search choose among stated values only; "" where a search takes none.
    `least` and `most` are the range of whole numbers; `choices` the words there are, none of them where a framework may
    have words of its own; `longest` the characters of a word. `yes` is the word for a source that says just true.
    `needs` is the degree without which (at 1) the field says nothing; `follows` are the fields with which it is chosen
    anew, unless it is stated with them.
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
        """Its words as a label has them, with a capital."""
        return self.words[:1].upper() + self.words[1:]

    @property
    def is_degree(self) -> bool:
        """Whether it is a number of ranks, or of stages on a rank, which multiplies with others of its kind."""
        return self.kind is Kind.COUNT and self.most == MAX_GPUS and not self.optional


def entry(default: Any, words: str = "", **known: Any) -> Any:
    """Return a field of a dataclass with its `PlanField`."""
    return field(default=default, metadata={_KEY: PlanField(default=default, words=words, **known)})


def degree(words: str, **known: Any) -> Any:
    """Return a field that is 1 unless stated, and at most as large as a plan has GPUs."""
    return entry(1, words, least=1, most=MAX_GPUS, **known)


def fields_of(plan: type) -> Mapping[str, PlanField]:
    """Return the fields of a dataclass of entries, by name and in its order."""
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
