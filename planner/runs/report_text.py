"""The tables of a run's report as rows of text, for the terminal and for the page: one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

from topology.codec import JsonObject
from topology.units import GIB

Row = tuple[str, ...]
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem }
th, td { padding: 0.2rem 0.8rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
svg { width: 100%; height: auto }
"""


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


def learned_rows(answer: JsonObject) -> list[Row]:
    """Return (operator, calls, seconds, expected seconds, error) of the operators that deviate most."""
    return [
        (
            row["name"],
            str(row["calls"]),
            f"{row['seconds']:.3g}",
            f"{row['expected_s']:.3g}",
            f"{row['expected_s'] / row['seconds'] - 1:+.0%}",
        )
        for row in answer.get("learned", {"rows": ()})["rows"]
    ]


def tables(answer: JsonObject) -> Iterator[tuple[Row, list[Row], str]]:
    """Yield (headings, rows, the line below) of the report's tables that have rows."""
    blame = f"to blame: {answer['blame']}" if answer["blame"] else ""
    every: tuple[tuple[Row, list[Row], str], ...] = (
        (("quantity", "predicted", "80% range", "source", "measured", "error"), quantity_rows(answer), ""),
        (("where the step went", "predicted s", "measured s", "difference s"), term_rows(answer), blame),
        (("collective", "side", "calls", "seconds", "exposed s"), collective_rows(answer), ""),
        (("setting", "requested", "took effect", "agree"), effect_rows(answer), ""),
        (("operator in the step", "calls", "measured s", "expected s", "error"), learned_rows(answer), ""),
    )
    yield from (one for one in every if one[1])


def to_html(answer: JsonObject, words: str, picture: str) -> str:
    """Return the page. `answer` is from `RunReport.answer`, `words` the plan as text, `picture` an SVG or empty."""
    title = f"{answer['model']}, {words}"
    verdict = {True: "as predicted", False: "not as predicted", None: "not compared"}[answer["within"]]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>Run {escape(answer['id'])} of {escape(answer['taken_at'])}: {escape(answer['status'])}, {verdict}.</p>",
        "<p>Errors are predicted / measured &minus; 1, differences predicted &minus; measured.</p>",
    ]
    for heads, rows, below in tables(answer):
        parts += [html_table(heads, rows), f"<p>{escape(below)}.</p>" if below else ""]
    parts += ["<h2>Timelines</h2>", picture] if picture else []
    parts += [f"<p>Note: {escape(note)}.</p>" for note in answer["notes"]]
    return page(title, parts)


def page(title: str, parts: Iterable[str]) -> str:
    """Return a page of HTML that refers to no other file."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style>" + "\n".join(parts) + "</html>\n"
    )


def html_table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>{body}</table>"
