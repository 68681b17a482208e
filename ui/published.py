"""The published runs that predictions were compared with, and which of them is nearest to a question."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import log2
from typing import Any

from ui.charts.look import words

OTHER_FRAMEWORK, OTHER_GPU = 4.0, 3.0  # each counts as this many doublings of GPUs or parameters


def nearest(
    compared: Iterable[Mapping[str, Any]], *, parameters: float, gpu: str, gpus: int, framework: str
) -> Mapping[str, Any] | None:
    """Return the row of `planner validate --json` whose run is most like a question; None where no row says what it is
    about.
    """

    def distance(row: Mapping[str, Any]) -> float:
        about = row["about"]
        far: float = (
            abs(log2(about["gpus"] / gpus))
            + abs(log2(about["parameters"] / parameters))
            + OTHER_FRAMEWORK * (about["framework"] != framework)
            + OTHER_GPU * (about["gpu"] != gpu)
        )
        return far

    usable = [row for row in compared if row.get("about") and row["error"]["step"] is not None]
    return min(usable, key=distance, default=None)


def sentence(row: Mapping[str, Any]) -> str:
    """Return what a compared run was and how far off its prediction is."""
    about, error = row["about"], row["error"]
    source = words(row["file"].removesuffix(".json"))
    parts = [f"step predicted {step_off(row)}"]
    parts += [f"memory {_off(error['memory'], 'high', 'low')}"] if error["memory"] is not None else []
    billions = about["parameters"] / 1e9
    size = f"{billions:.0f}" if billions >= 10 else f"{billions:.2g}"
    by = "" if about["framework"] in {"any", source} else f" with {about['framework']}"
    what = f"{size} B parameters on {about['gpus']:,} x {about['gpu']}{by}"
    return f"{what} ({source}): {', '.join(parts)}"


def step_off(row: Mapping[str, Any]) -> str:
    """Return how far off the predicted step of a compared run is."""
    return _off(row["error"]["step"], "long", "short")


def _off(error: float, more: str, less: str) -> str:
    return "as measured" if abs(error) < 0.005 else f"{abs(error):.0%} too {more if error > 0 else less}"
