"""Judge a configuration of training or of serving, as `planner check` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from planner.configs.answer import Checked, check_text
from planner.configs.formats.configuration import CheckFlags
from planner.configs.formats.kinds import read_configuration
from planner.configs.serving import CheckedServing, check_serving
from planner.configs.serving_start import serving_engine
from planner.serving.question.from_flags import ServingFlags
from topology.errors import UserError


def check_any(
    text: str,
    where: str,
    flags: CheckFlags,
    clients: Mapping[str, Any] | None = None,
    *,
    search: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> Checked | CheckedServing:
    """Judge a configuration; `clients` are fields of ServingFlags that describe the requests.

    Raises UserError for flags without a meaning for this kind, BadInput for a text that cannot be read.
    """
    said = {name: value for name, value in (clients or {}).items() if value is not None}
    if not serving_engine(text):
        _refuse(said, "training")
        return check_text(text, where, flags, search=search, progress=progress)
    training = ("seq_len", "global_batch", "micro_batch", "launch")
    _refuse({name: getattr(flags, name) for name in training if getattr(flags, name)}, "serving")
    _refuse({name: value for name, value in said.items() if name not in CLIENTS}, "serving")
    return check_serving(text, where, flags, ServingFlags(**said), search=search, progress=progress)


CLIENTS = frozenset(field.name for field in fields(ServingFlags)) & {
    *("isl", "osl", "vary", "concurrency", "request_rate", "arrivals", "requests", "cached_prompt"),
    *("ttft", "tpot", "objective", "gpu_price", "separate"),
}  # the command itself states the rest


def _refuse(said: Mapping[str, Any], kind: str) -> None:
    if said:
        raise UserError(f"{', '.join(said)}: not about a configuration of {kind}", remedy="leave it out")


def named_by(text: str, where: str, launch: str = "") -> frozenset[str]:
    """Return the fields of CheckFlags that a configuration states itself. Raises BadInput as `check_any` does."""
    if serving_engine(text):
        return frozenset({"model", "seq_len", "global_batch"})
    found = read_configuration(text, where, CheckFlags(launch=launch))
    named = {name for name in ("model", "cluster", "gpus") if getattr(found, name) is not None}
    return frozenset(named | ({"seq_len", "global_batch"} - found.leaves_open))
