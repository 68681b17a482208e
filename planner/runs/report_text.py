"""The tables of a run's report as rows of text, for the terminal and the HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topology.codec import JsonObject
from topology.units import GIB

Row = tuple[str, ...]


def quantity_rows(answer: Mapping[str, Any]) -> list[Row]:
    """Return (quantity, predicted, range, source, measured, error) of all quantities with a value."""
    rows: list[Row] = []
    for row in answer["quantities"]:
        if row["predicted"] is None and row["measured"] is None:
            continue
        unit = row["unit"]
        low, high = row["low"], row["high"]
        between = "" if low is None or high is None else f"{quantity_text(low, unit)} to {quantity_text(high, unit)}"
        error = "" if row["error"] is None else f"{row['error']:+.1%}"
        rows.append(
            (
                row["name"],
                quantity_text(row["predicted"], unit, with_unit=True),
                between,
                row["source"] or "",
                quantity_text(row["measured"], unit, with_unit=True),
                error,
            )
        )
    return rows


def quantity_text(value: float | None, unit: str, *, with_unit: bool = False) -> str:
    """Return a number as text: GiB for bytes, percent without a unit."""
    if value is None:
        return ""
    if unit == "bytes":
        return f"{value / GIB:.2f}" + (" GiB" if with_unit else "")
    if not unit:
        return f"{value:.1%}"
    text = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return text + (f" {unit}" if with_unit else "")


def term_rows(answer: Mapping[str, Any]) -> list[Row]:
    """Return (term, predicted, measured, difference), and a last row with their sums."""
    rows: list[Row] = [
        (t["name"], f"{t['predicted_s']:.4g}", f"{t['measured_s']:.4g}", f"{t['difference_s']:+.3g}")
        for t in answer["terms"]
    ]
    if rows:
        predicted = sum(t["predicted_s"] for t in answer["terms"])
        measured = sum(t["measured_s"] for t in answer["terms"])
        rows.append(("all", f"{predicted:.4g}", f"{measured:.4g}", f"{predicted - measured:+.3g}"))
    return rows


def collective_rows(answer: Mapping[str, Any]) -> list[Row]:
    """Return (collective, predicted or measured, calls, seconds, exposed seconds)."""
    return [
        (kind, side, f"{found['calls']:.0f}", f"{found['seconds']:.4g}", f"{found['exposed_s']:.4g}")
        for kind in sorted({*answer["collectives"]["predicted"], *answer["collectives"]["measured"]})
        for side in ("predicted", "measured")
        if (found := answer["collectives"][side].get(kind))
    ]


def effect_rows(answer: Mapping[str, Any]) -> list[Row]:
    """Return (setting, requested, took effect, whether they agree)."""
    return [
        (str(e["what"]), str(e["requested"]), str(e["effective"]), "yes" if e["ok"] else "NO")
        for e in answer["effects"]
    ]


def learned_rows(answer: JsonObject) -> list[tuple[str, ...]]:
    """Return (operator, calls, seconds, expected seconds, error) of the operators that deviate most."""
    return [
        (
            row["name"],
            str(row["calls"]),
            f"{row['seconds']:.3g}",
            f"{row['expected_s']:.3g}",
            f"{row['expected_s'] / row['seconds'] - 1:+.0%}",
        )
        for row in answer["learned"]["rows"]
    ]
