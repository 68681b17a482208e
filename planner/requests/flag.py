"""Flags of a command as data, made from the fields of its request.

A flag's name in JSON is its long form without dashes at the front and with underscores inside: `--seq-len` is
`seq_len`.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from enum import EnumType
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from simulator.config.plan import PLAN_FIELDS
from simulator.config.plan_schema import Kind
from topology.errors import UserError

# Flags whose value is a known name or a file.
NAMES_OR_FILES = frozenset({"model", "cluster", "case", "file", "first", "second", "runtime", "requests"})
WRITTEN = frozenset({"out", "state", "svg", "csv"})  # flags with the name of a file to write
_KEY = "flag"  # key in the metadata of a dataclass field
_PLAIN = (bool, int, float, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a command is asked. `said` are the fields that were stated, be it with their defaults."""

    said: frozenset[str] = frozenset()


R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag of a command. `off` spells the opposite of a flag that is on or off; None where there is none.

    `type` is that of its field, `kind` bool, int, float or str; `choices` are the words of an enumeration, `many` says
    that it may be given again. `parameter` is its name in Python; `at` where its value goes: a field, or a field and a
    key of it.
    """

    name: str
    parameter: str
    at: tuple[str, ...]
    type: Any
    spellings: tuple[str, ...] = ()  # empty for an argument without a flag
    kind: type = str
    choices: tuple[str, ...] = ()
    many: bool = False
    required: bool = False
    default: Any = None
    least: float | None = None
    most: float | None = None
    help: str | None = None
    metavar: str | None = None
    environment: str | None = None  # the environment variable with its value
    percent: bool = False
    program: bool = False  # its first word is a program to start
    hidden: bool = False
    prints: str = ""  # a switch that prints this text and exits
    show_default: bool = True

    @property
    def item(self) -> Any:
        """The type of one value."""
        only = next(member for member in _members(self.type) if member is not NoneType)
        return get_args(only)[0] if self.many else only

    @property
    def option(self) -> str:
        """The long form; "" for what stands without a flag."""
        return self.spellings[0].partition("/")[0] if self.spellings else ""

    @property
    def off(self) -> str | None:
        return (self.spellings[0].partition("/")[2] if self.spellings else "") or None

    @property
    def others(self) -> tuple[str, ...]:
        """Its other names."""
        return tuple(_name(word) for word in self.spellings[1:])

    @property
    def writes(self) -> bool:
        return self.name in WRITTEN

    @property
    def reads(self) -> bool:
        return not self.writes and (Path in _members(self.type) or self.name in NAMES_OR_FILES)

    def words(self, value: Any) -> list[str]:
        """Return the words of a command line that say `value`, once for each of several. What stands without a flag
        comes after `--`.
        """
        if isinstance(value, list):
            return [word for one in value for word in self.words(one)]
        if self.kind is bool:
            return [self.option] if value else [self.off] if self.off else []
        return [f"{self.option}={value}"] if self.option else [str(value)]


# --- fields of requests -----------------------------------------------------------------------------------------------


def option(default: Any, *spellings: str, **known: Any) -> Any:
    """Return a field of a request that is an option; `known` are fields of `Flag`."""
    return field(default=default, metadata={_KEY: {"spellings": spellings, **known}})


def required(*spellings: str, **known: Any) -> Any:
    """Return a field that is an option which must be given."""
    return field(metadata={_KEY: {"spellings": spellings, "required": True, **known}})


def argument(default: Any, **known: Any) -> Any:
    """Return a field that stands without a flag."""
    return field(default=default, metadata={_KEY: known})


def required_argument(**known: Any) -> Any:
    """Return a field that stands without a flag and must be given."""
    return field(metadata={_KEY: {"required": True, **known}})


def group(of: type) -> Any:
    """Return a field that is a dataclass of options, each a flag of the command."""
    return field(default_factory=of, metadata={_KEY: {"group": lambda at: _own_flags(of, at)}})


def plan_flags() -> Any:
    """Return a field with what is stated of one plan, by its field: a flag for each that has one."""
    return field(default_factory=dict, metadata={_KEY: {"group": _plan_flags}})


def search_flags() -> Any:
    """Return a field with the text that states the values of a plan's field that a search may choose, by field."""
    return field(default_factory=dict, metadata={_KEY: {"group": _search_flags}})


def _plan_flags(at: tuple[str, ...]) -> list[Flag]:
    kinds: dict[Kind, type] = {Kind.COUNT: int, Kind.SWITCH: bool, Kind.NUMBER: float, Kind.WORD: str, Kind.COUNTS: str}
    return [
        Flag(
            name=known.parameter,
            parameter=known.parameter,
            at=(*at, known.name),
            spellings=(known.flag,),
            type=Union[kinds[known.kind], None],  # noqa: UP007 - made of a value
            kind=kinds[known.kind],
            least=known.least if known.kind is Kind.COUNT else None,
            most=known.most if known.kind is Kind.COUNT and known.most < 1 << 16 else None,
            help=known.help,
        )
        for known in PLAN_FIELDS.values()
        if known.flag
    ]


def _search_flags(at: tuple[str, ...]) -> list[Flag]:
    return [
        Flag(
            name=known.parameter,
            parameter=known.parameter,
            at=(*at, known.name),
            spellings=(known.flag,),
            type=str | None,
            help=known.search_help,
            metavar=None if known.choices else "VALUES",
        )
        for known in PLAN_FIELDS.values()
        if known.search_help
    ]


def value_of(asked: Request, flag: Flag) -> Any:
    """Return the value of a flag in a request; None where a table of fields has none."""
    found: Any = asked
    for part in flag.at:
        found = found.get(part) if isinstance(found, Mapping) else getattr(found, part)
    return found


def values_of(*groups: Any) -> dict[str, Any]:
    """Return the values of dataclasses of options, by parameter."""
    return {one.name: getattr(part, one.name) for part in groups for one in fields(part)}


# --- a request as flags, and back -------------------------------------------------------------------------------------


def flags_of(request: type) -> Mapping[str, Flag]:
    """Return the flags of a command by their names, in the order of its request's fields."""
    return _flags_of(cast("Hashable", request))


@cache
def _flags_of(request: Any) -> Mapping[str, Flag]:
    return {flag.name: flag for flag in _own_flags(request, ())}


def _own_flags(request: type, at: tuple[str, ...]) -> list[Flag]:
    hints = get_type_hints(request)
    found: list[Flag] = []
    for one in fields(request):
        known: Mapping[str, Any] | None = one.metadata.get(_KEY)
        if known is None:
            continue
        within: Callable[[tuple[str, ...]], list[Flag]] | None = known.get("group")
        found += within((*at, one.name)) if within else [_flag(one, hints[one.name], known, at)]
    return found


def _flag(one: Field[Any], kind: Any, known: Mapping[str, Any], at: tuple[str, ...]) -> Flag:
    only = next(member for member in _members(kind) if member is not NoneType)
    many = get_origin(only) is list
    words: Any = only if isinstance(only, EnumType) else ()
    spellings: tuple[str, ...] = known.get("spellings", ())
    return Flag(
        name=_name(spellings[0].partition("/")[0]) if spellings else one.name,
        parameter=one.name,
        at=(*at, one.name),
        type=kind,
        kind=only if only in _PLAIN else str,
        choices=tuple(str(word.value) for word in words),
        many=many,
        default=None if one.default is MISSING else one.default,
        **known,
    )


def build(request: type[R], given: Mapping[str, Any], said: Iterable[str] = ()) -> R:
    """Return the request with the values that are given by parameter. Raises UserError for a number that is not
    finite.
    """
    values: dict[str, Any] = {}
    for flag in flags_of(request).values():
        if flag.parameter not in given:
            continue
        value = given[flag.parameter]
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"--{flag.parameter.replace('_', '-')} is {value}", remedy="a finite number")
        if flag.name in NAMES_OR_FILES and isinstance(value, str) and not value.strip():
            raise UserError(f"{flag.option or flag.name} is empty", remedy="name one, or leave it out")
        within = values
        for part in flag.at[:-1]:
            within = within.setdefault(part, {})
        within[flag.at[-1]] = value
    return _built(request, {**values, "said": frozenset(said)})


def _built(kind: type[R], values: Mapping[str, Any]) -> R:
    hints = get_type_hints(kind)
    parts = {name: _built(hints[name], value) for name, value in values.items() if is_dataclass(hints[name])}
    return kind(**{**values, **parts})


def from_keywords(request: type[R], keywords: Mapping[str, Any], *, command: str = "") -> R:
    """Return the request with values by the names of flags, as Python states them: numbers, words and paths.

    Raises UserError for a name that is no flag, a flag that must be given and was not, and a value that no flag can
    have.
    """
    flags = flags_of(request)
    names = {spelling: flag for flag in flags.values() for spelling in (flag.name, flag.parameter, *flag.others)}
    given: dict[str, Any] = {}
    for name, value in keywords.items():
        if name not in names:
            near = get_close_matches(name, names, n=1)
            raise UserError(
                f"{name} is no flag of planner {command}".rstrip(),
                remedy=f"did you mean {near[0]}?" if near else f"planner {command} --help lists them",
            )
        if value is not None:
            given[names[name].parameter] = _value(names[name], value)
    missing = [flag.name for flag in flags.values() if flag.required and flag.parameter not in given]
    if missing:
        raise UserError(f"{', '.join(missing)} must be given")
    return build(request, given, given)


def _value(flag: Flag, value: Any) -> Any:
    """Return a value of Python as a flag has it. Raises UserError."""
    only = flag.item
    if isinstance(only, EnumType):
        if str(value) not in flag.choices:
            raise UserError(f"{flag.name} is {value!r}", remedy=f"one of {', '.join(flag.choices)}")
        return only(str(value))
    if flag.many:
        return [only(one) for one in ([value] if isinstance(value, (str, Path)) else value)]
    if only is Path:
        return Path(value)
    if only is str:
        return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    taken: tuple[type, ...] = (int, float) if flag.kind is float else (flag.kind,)
    if not isinstance(value, taken) or isinstance(value, bool) is not (flag.kind is bool):
        raise UserError(f"{flag.name} is {value!r}", remedy=f"give {_KINDS[flag.kind]}")
    low, high = -math.inf if flag.least is None else flag.least, math.inf if flag.most is None else flag.most
    if flag.kind in {int, float} and not low <= float(cast("float", value)) <= high:
        raise UserError(f"{flag.name} is {value!r}", remedy=f"give a number {_within(low, high)}")
    return value


def _within(low: float, high: float) -> str:
    """Return a range in words, with whole numbers written out."""
    least, most = (f"{bound:,}" if isinstance(bound, int) else f"{bound:g}" for bound in (low, high))
    if math.isinf(high):
        return f"of {least} or more"
    return f"of {most} or less" if math.isinf(low) else f"from {least} to {most}"


_KINDS: dict[type, str] = {bool: "True or False", int: "a whole number", float: "a number", str: "a word"}


def command_line(command: str, flags: Mapping[str, Flag], values: Mapping[str, Any]) -> list[str]:
    """Return the arguments of `planner` for what was said, by name."""
    stated = [(flags[name], value) for name, value in values.items()]
    options = [word for flag, value in stated if flag.option for word in flag.words(value)]
    bare = [
        word for name, flag in flags.items() if not flag.option and name in values for word in flag.words(values[name])
    ]
    return [command, *options, *(["--", *bare] if bare else [])]


def shell_line(command: str, asked: Request, *, always: Iterable[str] = ()) -> str:
    """Return the line of a shell that asks the same: flags that differ from their defaults, and those named in any
    case.
    """
    words = ["planner", command]
    for flag in flags_of(type(asked)).values():
        value = value_of(asked, flag)
        if value != flag.default or flag.name in always:
            plain = int(value) if isinstance(value, float) and value.is_integer() else getattr(value, "value", value)
            said = flag.words(plain)
            words += said if flag.kind is bool or not flag.option else [flag.option, said[0].partition("=")[2]]
    return shlex.join(words)


def _name(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in {Union, UnionType} else (kind,)
