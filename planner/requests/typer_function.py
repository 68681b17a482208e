"""A request as a function that typer makes a command of: the one place that knows typer's options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from planner.requests.flag import Flag, Request, build, flags_of


def typer_function(
    request: type[Request],
    answer: Callable[[Request], None],
    prepared: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
) -> Callable[..., None]:
    """Return the function of a command: with a parameter for each flag of its request, which `answer` then gets.

    `prepared` changes the values of flags before the request is made of them.
    """
    flags = flags_of(request).values()

    def command(context: typer.Context, **given: Any) -> None:
        values = prepared(given)
        answer(build(request, values, [name for name in values if _typed(context, name)]))

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("context", keyword, annotation=typer.Context), *map(_parameter, flags)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = request.__doc__
    return command


def _typed(context: typer.Context, parameter: str) -> bool:
    """Return whether the command line has a parameter's option, be it with the value that is the default."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def _parameter(flag: Flag) -> inspect.Parameter:
    shown: dict[str, Any] = {
        "help": flag.help,
        "metavar": flag.metavar,
        "min": flag.least,
        "max": flag.most,
        "rich_help_panel": flag.panel,
        "hidden": flag.hidden,
        "envvar": flag.environment,
        "show_default": flag.show_default,
        "parser": percent if flag.percent else None,
    }
    info = typer.Option(*flag.spellings, **shown) if flag.spellings else typer.Argument(**shown)
    default = inspect.Parameter.empty if flag.required else flag.default
    annotation: Any = Annotated[flag.type, info]
    return inspect.Parameter(flag.parameter, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def percent(text: str) -> float:
    """Return the number of percent that `text` says: 15 and 15% are the same. Raises BadParameter (exit 2)."""
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise typer.BadParameter(f"{text!r} is not a number of percent")
    return value
