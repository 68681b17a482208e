"""Which function answers a request. Its module, and what that loads, is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

from planner.io.hub_file import with_fetched_model
from planner.requests.flag import Request
from planner.requests.known import request_of
from planner.requests.serving import is_about_serving
from planner.requests.typer_function import typer_function


def function_of(command: str, server: str | None) -> Callable[..., None]:
    """Return a command as typer takes it, answered here or by the service at `server`. Raises UserError where none
    is.
    """
    if server:
        asks = import_module("planner.remote.command").asks(server, command)
        return typer_function(request_of(command), asks, with_fetched_model)
    return typer_function(request_of(command), partial(answer, command), with_fetched_model)


def answer(command: str, asked: Request) -> None:
    """Print what `planner COMMAND` answers. Raises what it raises; Exit where it ends with a code of its own."""
    folder = "planner.commands.serve" if is_about_serving(command, asked) else "planner.commands"
    getattr(import_module(f"{folder}.{command}"), command)(asked)
