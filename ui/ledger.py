"""The ledger of fresh runs (`examples/validation/fresh.jsonl`), by draw: errors of predictions that were recorded
before any run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import streamlit as st

from topology import codec
from ui.question import state

SOURCES = {"datasheet": "from datasheets", "calibrated": "calibrated there"}


def draws() -> tuple[dict[str, str | int], ...]:
    """Return the draws of the repository's ledger, newest first; nothing where only the package is installed."""
    path = state.example("validation/fresh.jsonl")
    return () if path is None else _draws(str(path), path.stat().st_mtime)


@st.cache_resource(max_entries=1, show_spinner=False)
def _draws(path: str, changed: float) -> tuple[dict[str, str | int], ...]:
    del changed
    return tuple(draw_rows(codec.parse_lines(codec.read_text(Path(path)))))


def draw_rows(ledger: Iterable[Mapping[str, Any]]) -> list[dict[str, str | int]]:
    """Return a row for each draw, the newest first: where it ran, how many runs were measured, and their errors."""
    draws: dict[str, list[Mapping[str, Any]]] = {}
    for row in ledger:
        draws.setdefault(row["draw"], []).append(row)
    return [_draw_row(name, rows) for name, rows in sorted(draws.items(), reverse=True)]


def _draw_row(name: str, rows: list[Mapping[str, Any]]) -> dict[str, str | int]:
    ran = [row for row in rows if row["status"] == "ok" and row["measured"]]
    host = rows[0]["host"]
    steps = {source: _errors(ran, source, "step_s") for source in SOURCES}
    best = "calibrated" if steps["calibrated"] else "datasheet"
    inside = [
        row["predicted"][best]["step_low_s"] <= row["measured"]["step_s"] <= row["predicted"][best]["step_high_s"]
        for row in ran
        if best in row["predicted"]
    ]
    return {
        "draw": name,
        "GPUs": f"{host['gpus']} x {host['gpu']}",
        "runs": len(ran),
        **{f"step, {words}": _summary(steps[source]) for source, words in SOURCES.items()},
        "in the 80 % range": f"{mean(inside):.0%}" if inside else "-",
        "memory": _summary(_errors(ran, best, "reserved_bytes")),
    }


def _errors(ran: list[Mapping[str, Any]], source: str, quantity: str) -> list[float]:
    pairs = [(row["predicted"].get(source, {}).get(quantity), row["measured"][quantity]) for row in ran]
    return [predicted / measured - 1 for predicted, measured in pairs if predicted and measured]


def _summary(errors: list[float]) -> str:
    """Return the mean of absolute errors and the worst: `5.9% (worst +26%)`."""
    return f"{mean(map(abs, errors)):.1%} (worst {max(errors, key=abs):+.0%})" if errors else "-"
