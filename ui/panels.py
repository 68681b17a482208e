"""What every page shows the same way: headings, figures, and the states in which there is nothing to draw."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import streamlit as st

from topology.errors import Infeasible, PlannerError

ICONS = {"info": ":material/info:", "warning": ":material/warning:", "error": ":material/error:"}


def dark() -> bool:
    """Return whether the browser shows the dark theme."""
    return st.context.theme.type == "dark"


def plain(text: object) -> str:
    """Return text that Markdown shows as it is: names come from files, and files are not trusted."""
    return re.sub(r"([\\`*_{}\[\]()<>#+!|~$:])", r"\\\1", str(text)).replace("\n", " ")


def code(text: str) -> str:
    """Return text as Markdown shows it in a fixed width, where nothing but the fence means anything."""
    return f"`{text.replace('`', '')}`"


def in_percent(rows: Sequence[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    """Return the rows of a table with fractions as percents, so that all of a column have the same decimals."""
    return [{**row, **{name: 100 * row[name] for name in names if row.get(name) is not None}} for row in rows]


def section(title: str, about: str = "") -> None:
    st.subheader(title, anchor=False)
    if about:
        st.caption(about)


def figures(cells: Sequence[tuple[str, str, str]]) -> None:
    """Show a row of figures: what, the value with its unit, and where it comes from."""
    for column, (label, value, about) in zip(st.columns(len(cells)), cells, strict=True):
        column.metric(label, value, help=about or None, border=True)


def chart(drawn: Any, *, key: str, alt: str) -> None:
    """Show a chart in the colours it brings; `alt` says in words what it shows."""
    st.altair_chart(drawn, theme=None, key=key, alt=alt, width="stretch")


def empty(title: str, about: str, *, icon: str = ":material/inbox:") -> None:
    """Say why there is nothing here, and how something comes to be here."""
    with st.container(border=True):
        st.markdown(f"##### {icon} {title}")
        st.markdown(about)


def failure(error: PlannerError) -> None:
    """Show an error of ours as what, why and what to do; a question without an answer is no fault."""
    if isinstance(error, Infeasible):
        infeasible(error)
        return
    with st.container(border=True):
        st.markdown(f"##### :red[:material/error:] {plain(error.what)}")
        _told(error)


def infeasible(error: PlannerError) -> None:
    with st.container(border=True):
        st.markdown(f"##### :orange[:material/block:] {plain(error.what)}")
        _told(error)
        st.caption(
            "Every legal plan was costed: this is an answer, not a fault. Change the question in the sidebar and it is"
            " asked again."
        )


def _told(error: PlannerError) -> None:
    if error.why:
        st.markdown(f"**Why** · {plain(error.why)}")
    if error.remedy:
        st.markdown(f"**What to do** · {plain(error.remedy)}")


def finding(severity: str, what: str, rows: Sequence[tuple[str, str]]) -> None:
    """Show something that a person should know about the machine."""
    hue = {"error": "red", "warning": "orange"}.get(severity, "blue")
    with st.container(border=True):
        st.markdown(f":{hue}[{ICONS.get(severity, ICONS['info'])}] **{plain(what)}**")
        for label, text in rows:
            if text:
                st.markdown(f":gray[{label}] &nbsp; {plain(text)}")


def assumed(lines: Sequence[str]) -> None:
    """List defaults that stood in for what was not said."""
    if not lines:
        return
    with st.expander(f"{len(lines)} assumptions", icon=":material/rule:"):
        st.markdown("\n".join(f"- {plain(line)}" for line in lines))
