"""Which request each command takes; its module is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module

from planner.requests.flag import Request

_TRAINING, _RUNS = ("suggest", "estimate", "explain", "compare", "trace"), ("apply", "tune", "report", "runs")
_MODULES = {
    **dict.fromkeys(_TRAINING, "training"),
    **dict.fromkeys((*_RUNS, "validate", "learn"), "runs"),
    **dict.fromkeys(("probe", "doctor", "collective", "calibrate"), "machines"),
    **dict.fromkeys(("export", "check", "shard", "ui", "service"), "tools"),
}


def request_of(command: str) -> type[Request]:
    """Return the type of a command's request: `Suggest` for `suggest`. Raises KeyError for what is no command."""
    module = import_module(f"planner.requests.{_MODULES[command]}")
    found: type[Request] = getattr(module, command.title())
    return found
