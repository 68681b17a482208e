"""The function that answers a request. Its module is imported when needed."""

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
    """Return a command, answered here or by the service at `server`. Raises UserError for an unknown command."""
    answers = import_module("planner.remote.command").asks(server, name) if server else partial(answer, name)
    return click_command(name, request_of(name), answers, with_fetched_model)


def answer(command: str, asked: Request) -> None:
    """Print what `planner COMMAND` answers. Raises its errors; Exit for an exit code of its own."""
    folder = "planner.commands.serve" if is_about_serving(command, asked) else "planner.commands"
    getattr(import_module(f"{folder}.{command}"), command)(asked)
