"""Make a request of Python keyword arguments, and answer it with the module of its command."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from planner.io.hub_file import with_fetched_model
from planner.requests.flag import from_keywords
from planner.requests.known import request_of
from planner.requests.serving import is_about_serving
from topology.errors import UserError


def answer(command: str, keywords: Mapping[str, Any]) -> Any:
    """Return the typed answer to a command's flags. Raises UserError for an argument that is no flag of the command."""
    if "json" in keywords:
        raise UserError("json is how the command prints", remedy="to_dict() of the answer")
    asked = from_keywords(request_of(command), with_fetched_model(keywords), command=command)
    serves = command != "check" and is_about_serving(command, asked)
    module = import_module(f"planner.answers.{'serve.' if serves else ''}{command}")
    return getattr(module, command)(asked)
