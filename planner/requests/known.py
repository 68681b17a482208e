"""Which request each command takes, imported when it is asked for; which commands a service answers, and the files that
these write.
"""

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
SERVED = ("suggest", "estimate", "explain", "compare", "check", "trace", "apply", "tune")
RUNS = frozenset({"apply", "tune"})  # commands that use the machine itself: one at a time, never started twice
SHORT = frozenset({"estimate", "compare"})  # answered within seconds, for any request
# Files that a command writes in any case: the flag for the file, and its name.
ALWAYS_WRITTEN = {"apply": ("out", "run"), "trace": ("out", "trace.json"), "tune": ("state", "state.jsonl")}
# Files that a long-running command writes while it runs, in the folder of its job.
SO_FAR = {"apply": "run/records/rank0.jsonl", "tune": ALWAYS_WRITTEN["tune"][1]}
CONTINUED = "resume"  # a file that is sent, and continued instead of writing a new one


def request_of(command: str) -> type[Request]:
    """Return the type of a command's request: `Suggest` for `suggest`. Raises KeyError for what is no command."""
    module = import_module(f"planner.requests.{_MODULES[command]}")
    found: type[Request] = getattr(module, command.title())
    return found
