"""A request as a command of click: the one place that knows click's options."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import EnumType
from functools import partial
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import click

from planner.requests.flag import Flag, Request, build, flags_of

CONTEXT = {"help_option_names": ["-h", "--help"]}


def click_command(
    name: str,
    request: type[Request],
    answer: Callable[[Request], None],
    prepared: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
) -> click.Command:
    """Return a command with a parameter for each flag of its request, which `answer` then gets.

    `prepared` changes the values of flags before the request is made of them.
    """
    flags = flags_of(request).values()

    def run(**given: Any) -> None:
        source = click.get_current_context().get_parameter_source
        values = prepared({flag.parameter: _plain(flag, given[flag.parameter]) for flag in flags})
        # Given on the command line, possibly with its default value.
        stated = [one for one in values if source(one) is click.core.ParameterSource.COMMANDLINE]
        answer(build(request, values, stated))

    parameters = [_parameter(flag) for flag in flags]
    return _Command(name, CONTEXT, run, parameters, help=request.__doc__)


class _Command(click.Command):
    """A command that says which of two values of a flag it takes: the last, as click does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = args[: args.index("--")] if "--" in args else args
        for one in self.params:
            if isinstance(one, click.Option) and not one.multiple:
                said = [word for word, _ in groupby(_said(one, words))]
                if len(said) > 1:
                    click.echo(
                        f"warning: {one.opts[0]} is given as {' and as '.join(said)}: the last is used", err=True
                    )
        return super().parse_args(ctx, args)


def _said(option: click.Option, words: Sequence[str]) -> Iterator[str]:
    """Yield the values that `words` give an option; of a switch, its word for yes or for no."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        if option.is_flag and word in (*option.opts, *option.secondary_opts):
            yield (option.opts if word in option.opts else option.secondary_opts)[0]
        elif not option.is_flag and word in option.opts:
            yield following
        elif not option.is_flag and word.partition("=")[0] in option.opts:
            yield word.partition("=")[2]


def _plain(flag: Flag, value: Any) -> Any:
    """Return what click read as the request has it: a list of a flag that was given several times."""
    if flag.many:
        return list(value) or flag.default
    return value


def _parameter(flag: Flag) -> click.Parameter:
    shown: dict[str, Any] = {
        "type": _type(flag),
        "help": flag.help,
        "metavar": flag.metavar,
        "required": flag.required,
        "envvar": flag.environment,
    }
    if not flag.required:
        shown["default"] = getattr(flag.default, "value", flag.default)  # for an enumeration, its word
    if not flag.spellings:
        return click.Argument([flag.parameter], nargs=-1 if flag.many else 1, **shown)
    return click.Option(
        [flag.parameter, *flag.spellings],
        is_flag=flag.kind is bool,
        multiple=flag.many,
        hidden=flag.hidden,
        show_default=flag.show_default,
        show_envvar=True,
        is_eager=bool(flag.prints),
        callback=partial(_print_and_end, flag.prints) if flag.prints else None,
        **shown,
    )


def _print_and_end(text: str, context: click.Context, _parameter: click.Parameter, asked: bool) -> bool:
    """Print what a switch prints, and end; an argument that is missing is not missed then."""
    if asked:
        click.echo(text)
        context.exit()
    return asked


def _type(flag: Flag) -> click.ParamType[Any] | Callable[[str], Any] | None:
    """Return what reads a word of a flag; None leaves it to click, as switches are."""
    bounds: Any = (flag.least, flag.most)
    if flag.percent:
        return percent
    if flag.kind is bool:
        return None
    if isinstance(flag.item, EnumType):
        return _Word(flag.item, flag.choices)
    if flag.item is Path:
        return click.Path(path_type=Path)
    if flag.kind is int:
        return click.INT if bounds == (None, None) else _Whole(*bounds)
    if flag.kind is float:
        return click.FLOAT if bounds == (None, None) else click.FloatRange(*bounds)
    return click.STRING


class _Word(click.Choice[str]):
    """One of the words of an enumeration, read as its member."""

    def __init__(self, words: EnumType, choices: tuple[str, ...]) -> None:
        super().__init__(choices)
        self.words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self.words(super().convert(value, param, ctx))


class _Whole(click.IntRange):
    """A whole number. Of 128k it says which two numbers that may be, and takes none of them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        rounded = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)([kKmM])", str(value).strip())
        if rounded:
            power = "km".index(rounded[2].lower()) + 1
            two = " or ".join(f"{float(rounded[1]) * size**power:.0f}" for size in (1024, 1000))
            self.fail(f"{value!r} may be {two}: write the one that is meant.", param, ctx)
        return super().convert(value, param, ctx)


def percent(text: str) -> float:
    """Return the number of percent that `text` says: 15 and 15% are the same. Raises BadParameter (exit 2)."""
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise click.BadParameter(f"{text!r} is not a number of percent")
    return value
