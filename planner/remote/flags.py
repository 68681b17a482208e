"""The flags of a command as data: what a request to the service may say, and the command line that it becomes.

A flag's name in JSON is its long form without dashes at the front and with underscores inside: `--seq-len` is `seq_len`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import EnumType
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from typer.models import ArgumentInfo, OptionInfo

SERVED = ("suggest", "estimate", "explain", "compare", "check", "trace", "apply", "tune")
RUNS = frozenset({"apply", "tune"})  # commands that use the machine itself: one at a time, never started twice
# Flags that name something known or a file.
NAMES_OR_FILES = frozenset({"model", "cluster", "case", "file", "first", "second", "runtime", "requests"})
WRITTEN = frozenset({"out", "state", "svg"})  # flags that name what is written
# What commands write in any case: the flag that names it, and a name.
ALWAYS_WRITTEN = {"apply": ("out", "run"), "trace": ("out", "trace.json"), "tune": ("state", "state.jsonl")}
CONTINUED = "resume"  # a file that is sent, and goes on in the place of what would be written


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag of a command. `off` spells the opposite of a flag that is on or off; None where there is none.

    `kind` is bool, int, float or str; `choices` are the words of an enumeration. `parameter` is its name in Python.
    """

    name: str
    parameter: str
    option: str  # "" for what stands without a flag
    off: str | None
    others: tuple[str, ...]
    kind: type
    choices: tuple[str, ...]
    required: bool
    default: Any
    least: float | None
    most: float | None
    help: str
    reads: bool
    writes: bool

    def words(self, value: Any) -> list[str]:
        """Return the words of a command line that say `value`. What stands without a flag comes after `--`."""
        if self.kind is bool:
            return [self.option] if value else [self.off] if self.off else []
        return [f"{self.option}={value}"] if self.option else [str(value)]


def flags_of_command(command: Callable[..., Any]) -> dict[str, Flag]:
    """Return the flags of a command by their names, in the order of its parameters; its context is none."""
    found = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.annotation is typer.Context:
            continue
        flag = _flag(parameter)
        found[flag.name] = flag
    return found


def command_line(command: str, flags: dict[str, Flag], values: dict[str, Any]) -> list[str]:
    """Return the arguments of `planner` for what was said, by name."""
    stated = [(flags[name], value) for name, value in values.items()]
    options = [word for flag, value in stated if flag.option for word in flag.words(value)]
    bare = [
        word for name, flag in flags.items() if not flag.option and name in values for word in flag.words(values[name])
    ]
    return [command, *options, *(["--", *bare] if bare else [])]


def _flag(parameter: inspect.Parameter) -> Flag:
    kind, info = _unwrapped(parameter.annotation)
    kinds: list[Any] = [one for one in _members(kind) if one is not NoneType]
    # Inside Annotated, typer takes the first spelling where a default would stand.
    words = [] if isinstance(info, ArgumentInfo) else [str(info.default), *(info.param_decls or ())]
    option, off = _on_and_off(words[0]) if words else ("", None)
    others = tuple(_on_and_off(word)[0] for word in words[1:])
    name = _name(option) if option else parameter.name
    only = kinds[0]
    words_of: Any = only if isinstance(only, EnumType) else ()
    choices = tuple(str(word.value) for word in words_of)
    is_path = only is Path
    plain = str if choices or is_path or only not in {bool, int, float, str} else only
    return Flag(
        name=name,
        parameter=parameter.name,
        option=option,
        off=off,
        others=tuple(map(_name, others)),
        kind=plain,
        choices=choices,
        required=parameter.default is inspect.Parameter.empty,
        default=None if parameter.default is inspect.Parameter.empty else parameter.default,
        least=info.min,
        most=info.max,
        help=(info.help or "").replace("\b", ""),
        reads=name not in WRITTEN and (is_path or name in NAMES_OR_FILES),
        writes=name in WRITTEN,
    )


def _on_and_off(declaration: str) -> tuple[str, str | None]:
    on, _, off = declaration.partition("/")
    return on, off or None


def _name(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _unwrapped(annotation: Any) -> tuple[Any, OptionInfo | ArgumentInfo]:
    """Return the type and typer's description of an annotated parameter."""
    if get_origin(annotation) is not Annotated:
        raise TypeError(f"{annotation} has no description")
    kind, *notes = get_args(annotation)
    info = next(note for note in notes if isinstance(note, (OptionInfo, ArgumentInfo)))
    return kind, info


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in {Union, UnionType} else (kind,)
