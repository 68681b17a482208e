"""Make a request of Python keyword arguments, and answer it with the module of its command."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from planner.io.hub_file import with_fetched_model
from planner.requests.flag import from_keywords
from planner.requests.known import request_of
from planner.requests.serving import is_about_serving
from planner.requests.training import Estimate, Suggest
from topology.errors import UserError

# Flags about what a command prints or draws, with what Python has instead.
_PRINTED = {
    "json": "to_dict() of the answer",
    "sarif": "to_sarif() of the answer about a folder",
    "svg": "the command draws it: planner suggest --svg",
    "csv": "the command writes it: planner suggest --csv",
}


def answer(command: str, keywords: Mapping[str, Any]) -> Any:
    """Return the typed answer to a command's flags; what `out` names is written where there is a legal plan.

    Raises UserError for an argument that is no flag of the command, or one about what it prints.
    """
    for name, instead in _PRINTED.items():
        if keywords.get(name) not in (None, False):
            raise UserError(f"{name} is how the command prints", remedy=instead)
    asked = from_keywords(request_of(command), with_fetched_model(keywords), command=command)
    serves = command != "check" and is_about_serving(command, asked)
    module = import_module(f"planner.answers.{'serve.' if serves else ''}{command}")
    found = getattr(module, command)(asked)
    if isinstance(asked, (Suggest, Estimate)) and asked.out is not None and getattr(found, "legal", True):
        picked = {"pick": asked.pick} if isinstance(asked, Suggest) and asked.pick is not None else {}
        found.save(asked.out, force=asked.force, **picked)
    return found
