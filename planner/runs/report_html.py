"""The report of a run as one self-contained HTML file: tables, and the timelines as an inline SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from planner.runs.report_text import collective_rows, effect_rows, quantity_rows, term_rows

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem }
th, td { padding: 0.2rem 0.8rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
svg { width: 100%; height: auto }
"""


def to_html(answer: Mapping[str, Any], words: str, picture: str) -> str:
    """Return the page. `answer` is from `RunReport.answer`, `words` the plan as text, `picture` an SVG or empty."""
    title = f"{answer['model']}, {words}"
    verdict = {True: "as predicted", False: "not as predicted", None: "not compared"}[answer["within"]]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>Run {escape(answer['id'])} of {escape(answer['taken_at'])}: {escape(answer['status'])}, {verdict}.</p>",
        "<p>Errors are predicted / measured &minus; 1.</p>",
        html_table(("quantity", "predicted", "80% range", "source", "measured", "error"), quantity_rows(answer)),
    ]
    if answer["terms"]:
        parts += [
            "<h2>Where the step's time went</h2>",
            html_table(("term", "predicted s", "measured s", "predicted - measured s"), term_rows(answer)),
            f"<p>{escape(answer['blame'])}.</p>",
        ]
    if picture:
        parts += ["<h2>Timelines</h2>", picture]
    rows = collective_rows(answer)
    if rows:
        heads = ("collective", "side", "calls", "seconds", "exposed s")
        parts += ["<h2>Collectives</h2>", html_table(heads, rows)]
    rows = effect_rows(answer)
    if rows:
        parts += ["<h2>Requested and took effect</h2>", html_table(("what", "requested", "took effect", "agree"), rows)]
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
