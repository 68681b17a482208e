"""Which function answers a request. Its module, and what that loads, is imported when it is asked for."""

from __future__ import annotations

from functools import partial
from importlib import import_module

import click

from planner.io.hub_file import with_fetched_model
from planner.requests.click_command import click_command
from planner.requests.flag import Request
from planner.requests.known import request_of
from planner.requests.serving import is_about_serving


def command_of(name: str, server: str | None) -> click.Command:
    """Return a command, answered here or by the service at `server`. Raises UserError where none is."""
    answers = import_module("planner.remote.command").asks(server, name) if server else partial(answer, name)
    return click_command(name, request_of(name), answers, with_fetched_model)


def answer(command: str, asked: Request) -> None:
    """Print what `planner COMMAND` answers. Raises what it raises; Exit where it ends with a code of its own."""
    folder = "planner.commands.serve" if is_about_serving(command, asked) else "planner.commands"
    getattr(import_module(f"{folder}.{command}"), command)(asked)
