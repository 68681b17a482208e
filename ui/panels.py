"""Widgets that all pages share: headings, figures, findings, errors, and panels for missing content."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec

import streamlit as st

from planner.explain.answer_text import assumed_parts, tokens_text
from planner.io.figures import rate_text
from simulator.config.estimate import Estimate
from simulator.config.plan import Plan
from topology.errors import Infeasible, PlannerError
from topology.units import MIB
from ui import rows
from ui.charts import detail as charts
from ui.charts.look import PICK
from ui.charts.look import Figure as Drawing
from ui.charts.row_types import PlanRow
from ui.question import share_link, state, uploads

if TYPE_CHECKING:
    from ui.differences import StepDifference

PAGES = "pages"  # the part of the frame that links to all pages
Asked = ParamSpec("Asked")
ICONS = {"info": ":material/info:", "warning": ":material/warning:", "error": ":material/error:"}


def dark() -> bool:
    """Return whether the browser shows the dark theme."""
    return st.context.theme.type == "dark"


def words_first() -> None:
    """Let the browser draw what the page has written, before it gets charts to draw."""
    time.sleep(0.08)


def part(name: str) -> Callable[[Callable[Asked, None]], Callable[Asked, None]]:
    """Make a function draw a part of a page, which a change of a widget in it runs alone. An error is shown in its
    place; a callback runs other parts by `st.rerun(scope=names)`.
    """

    def part_of(draw: Callable[Asked, None]) -> Callable[Asked, None]:
        @st.fragment(key=name)
        @wraps(draw)
        def drawn(*args: Asked.args, **kwargs: Asked.kwargs) -> None:
            try:
                draw(*args, **kwargs)
            except PlannerError as error:
                failure(error)

        return drawn

    return part_of


def plain(text: object) -> str:
    """Return `text` escaped for Markdown: names come from files, which are not trusted."""
    return re.sub(r"([\\`*_{}\[\]()<>#+!|~$:]|^-)", r"\\\1", str(text)).replace("\n", " ")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where it is not one: `2 ranks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def code(text: str) -> str:
    """Return `text` as inline code in Markdown."""
    return f"`{text.replace('`', '')}`"


Row = dict[str, str | float | None]


def in_percent(rows: Sequence[Row], *names: str) -> list[Row]:
    """Return the rows of a table with the fractions in columns `names` as percentages."""
    return [
        {**row, **{name: 100 * value for name in names if isinstance(value := row.get(name), float)}} for row in rows
    ]


def section(title: str, about: str = "") -> None:
    st.subheader(title, anchor=False)
    if about:
        st.caption(about)


# label, value with unit, what it is, what stands below it line by line, and where it comes from
# (`topology.cluster.Source`)
Figure = tuple[str, str, str] | tuple[str, str, str, str] | tuple[str, str, str, str, object]


class Near(NamedTuple):
    """The published run nearest to a question: the error of its predicted step, and its description."""

    off: str
    sentence: str


def figures(cells: Sequence[Figure], near: Near | None = None) -> None:
    """Show a row of figures, which wraps on a narrow screen. `near` stands next to the range of the first, a step."""
    with st.container(horizontal=True, gap="small", key=f"figures_{cells[0][0].lower().replace(' ', '_')}"):
        for label, value, about, *more in cells:
            below, source = (*more, None, None)[:2]
            with st.container(border=True, gap="xxsmall"):
                first, *lines = (below or "").split("\n")
                st.metric(label, value, first or None, help=about or None, delta_color="off", delta_arrow="off")
                for line in lines:
                    st.markdown(f":small[{plain(line)}]")
                if near is not None and label == cells[0][0]:
                    st.markdown(f":small[nearest published run: {plain(near.off)}]", help=plain(f"{near.sentence}."))
                if source is not None:
                    badge(source)


def estimate_figures(estimate: Estimate, plan: Plan | None = None, step_label: str = "Step") -> list[Figure]:
    """Return what every page shows of an estimate: step and, with its `plan`, batch, tokens a second, utilization and
    memory.
    """
    source = estimate.step_s.source
    step, within = rows.step_figure(estimate)
    if plan is not None:
        within += f"\nof {tokens_text(estimate, plan)} tokens"
    held, verdict = rows.memory_figure(estimate.memory)
    peak = f"of {estimate.peak_flops / 1e12:.0f} TFLOP/s"
    reserved = "What the allocator reserves on the worst rank, of what a rank can use."
    return [
        (step_label, step, "One optimizer step; below it is where 80 % of steps are expected.", within, source),
        ("Tokens/s per GPU", rate_text(estimate), "", "", source),
        ("MFU", f"{estimate.mfu:.0%}", "Model FLOPs against the dense peak.", peak, source),
        ("Memory", held, reserved, verdict, estimate.memory.peak_bytes.source),
    ]


def chart(drawn: Drawing, *, key: str, alt: str) -> None:
    """Show a chart in its own colours; `alt` describes it in words."""
    st.vega_lite_chart(spec=drawn.to_dict(validate=False), theme=None, key=key, alt=alt, width="stretch")


def plan_chart(drawn: Drawing, *, key: str, alt: str, chosen: Sequence[str], on_pick: Callable[[str], None]) -> None:
    """Show a chart whose points are plans, with rings around those `chosen`; `on_pick` gets the name of one that is
    clicked.
    """
    # A chart remembers its last click and reports only a different one. So each choice has a chart of its own.
    own = f"{key} {' '.join(chosen)}"

    def pick() -> None:
        picked = st.session_state[own]["selection"][PICK]
        if picked:
            on_pick(str(picked[0]["plan"]))

    with st.container(key=key):
        spec = drawn.to_dict(validate=False)
        st.vega_lite_chart(
            spec=spec, theme=None, key=own, alt=alt, width="stretch", on_select=pick, selection_mode=PICK
        )


def step_difference(found: StepDifference, about: str, *, key: str) -> None:
    """Show two steps term by term. `about` says which is compared with which."""
    if not found.bars:
        empty("No difference in time", "No term differs by enough to be known.", icon=":material/drag_handle:")
        return
    largest = max(found.bars, key=lambda bar: abs(bar["delta"]))
    drawn = charts.differences(found.bars, unit=found.unit, dark=dark())
    chart(drawn, key=key, alt=f"{about}: {found.net} a step; the largest term is {largest['name']}, {largest['text']}")


def side_by_side(rows: Sequence[Mapping[str, str]], first: str, second: str, *, alt: str) -> None:
    """Show two things side by side, under their headings: rows of what, first, second. Words wrap on a narrow
    screen.
    """
    second = second if second != first else f"{second} (other)"
    table = [
        {" ": plain(row["what"]), plain(first): plain(row["first"]), plain(second): plain(row["second"])}
        for row in rows
    ]
    st.table(table, hide_index=True, alt=alt)


def plan_table(
    rows: Sequence[PlanRow],
    columns: Mapping[str, Any],
    *,
    key: str,
    on_pick: Callable[[list[PlanRow]], None],
    mode: Literal["single-row", "multi-row"],
    ticked: Sequence[str],
) -> None:
    """Show the rows of plans in `columns`, in their order, those of the plans `ticked` with a tick.

    `on_pick` gets the rows that are ticked after a change. The column of plans is as wide as they need, so that short
    ones leave a phone room for what decides.
    """
    longest = max((len(row["chips"]) for row in rows), default=0)
    columns = {**columns, "chips": st.column_config.TextColumn("plan", width=min(230, 22 + 6 * longest))}
    wanted = [i for i, row in enumerate(rows) if row["plan"] in ticked]
    present = st.session_state.get(key, {}).get("selection", {}).get("rows", [])
    if sorted(present) != wanted:  # chosen elsewhere, or the rows have changed
        st.session_state[key] = {"selection": {"rows": wanted, "columns": [], "cells": []}}

    def pick() -> None:
        on_pick([rows[i] for i in st.session_state[key]["selection"]["rows"]])

    st.dataframe(
        rows,
        key=key,
        placeholder="-",
        hide_index=True,
        on_select=pick,
        selection_mode=mode,
        width="stretch",
        height="content",  # no plan is out of sight
        column_order=tuple(columns),
        column_config=columns,
    )


def empty(title: str, about: str, *, icon: str = ":material/inbox:") -> None:
    """Show why there is nothing to show, and what would change that."""
    with st.container(border=True):
        st.markdown(f"##### {icon} {title}")
        st.markdown(about)


def failure(error: PlannerError) -> None:
    """Show an error as what, why and what to do. An infeasible question is not shown as a fault."""
    if isinstance(error, Infeasible):
        infeasible(error)
        return
    with st.container(border=True):
        st.markdown(f"##### :red[:material/error:] {plain(error.what)}")
        _show_reasons(error)


def infeasible(error: PlannerError) -> None:
    with st.container(border=True):
        st.markdown(f"##### :orange[:material/block:] {plain(error.what)}")
        _show_reasons(error)
        count = re.search(r"--gpus (\d+)", error.remedy)
        if count:
            st.button(f"Ask for {int(count[1]):,} GPUs", key="ask_more_gpus", on_click=_ask_gpus, args=(int(count[1]),))
        st.caption("Every legal plan was checked: this is an answer, not an error.")


def _ask_gpus(count: int) -> None:
    st.session_state["gpus"] = count


def _show_reasons(error: PlannerError) -> None:
    if error.why:
        st.markdown(f"**Why** · {plain(error.why)}")
    if error.remedy:
        st.markdown(f"**What to do** · {plain(in_words(error.remedy))}")


def in_words(remedy: str) -> str:
    """Return a remedy for pages, which have fields instead of flags: `--gpus 128` becomes `128 GPUs`; command lines are
    kept.
    """
    return "; ".join(part if COMMAND.search(part) else _fields(part) for part in remedy.split("; "))


COMMAND = re.compile(r"\b(?:planner|pip|torchrun) [a-z]")


def _fields(part: str) -> str:
    counted = re.sub(r"--gpus (\d+)", r"\1 GPUs", part)
    return re.sub(r"--([a-z]+(?:-[a-z]+)*) ", lambda flag: f"{flag[1].replace('-', ' ')} ", counted)


def finding(severity: str, what: str, rows: Sequence[tuple[str, str]]) -> None:
    """Show a finding about the machine."""
    hue = {"error": "red", "warning": "orange"}.get(severity, "blue")
    with st.container(border=True):
        st.markdown(f":{hue}[{ICONS.get(severity, ICONS['info'])}] **{plain(what)}**")
        for label, text in rows:
            if text:
                st.markdown(f":gray[{label}] &nbsp; {plain(text)}")


TITLE = "Plan a training run"
PURPOSE = (
    "**meshwright finds the fastest way to train a model on your GPUs, and says why.** Ask here; the answer follows."
)
SOURCES: dict[str, Literal["green", "blue", "gray", "orange"]] = {
    "measured": "green",
    "fitted": "blue",
    "datasheet": "gray",
    "assumed": "orange",
}
SOURCE_WORDS = {"fitted": "calibrated"}


def purpose() -> None:
    """Show what this program is for."""
    st.markdown(PURPOSE)


def badge(source: object) -> None:
    """Show where a number comes from as a coloured word: measured, calibrated, datasheet or assumed."""
    word = str(source)
    st.badge(SOURCE_WORDS.get(word, word), color=SOURCES.get(word, "gray"))


def bring_files() -> None:
    """Let a person paste or upload the machine or the model that the question is about."""
    with st.popover("Paste or upload a machine or a model", icon=":material/upload_file:"):
        st.caption("Nothing in a file is run, and it stays on this computer.")
        st.text_area(
            "The output of nvidia-smi topo -m, an NCCL topology file, a cluster file, or a model's config.json",
            key="pasted",
            height=160,
        )
        st.button("Use the text", key="use_pasted", on_click=_use_pasted)
        file_field("The same as a file", "brought")


def file_field(
    label: str,
    key: str,
    kind: uploads.Kind | None = None,
    types: Sequence[str] | None = None,
    *,
    most_bytes: int = uploads.MAX_BYTES,
) -> None:
    """Let the user upload a machine or a model, and use it for the question; show why if it cannot be used."""
    st.file_uploader(
        label, type=types, key=key, on_change=_use_file, args=(key, kind), max_upload_size=most_bytes // MIB
    )
    error = state.results().get(f"{key}_error")
    if error is not None:
        failure(error)


def _use_pasted() -> None:
    text = str(st.session_state.get("pasted") or "")
    if text.strip():
        _use("pasted", text.encode(), "brought")


def _use_file(key: str, kind: uploads.Kind | None) -> None:
    file = st.session_state.get(key)
    state.results().pop(f"{key}_error", None)
    if file is not None:
        _use(file.name, file.getvalue(), key, kind)


def _use(name: str, content: bytes, key: str, kind: uploads.Kind | None = None) -> None:
    """Keep a file and make it the model or the cluster of the question, whichever it is."""
    kind = kind or ("model" if uploads.is_model(content) else "cluster")
    state.results().pop(f"{key}_error", None)
    try:
        st.session_state[kind] = uploads.store(kind, name, content).choice
    except PlannerError as error:
        state.results()[f"{key}_error"] = error
        return
    if kind == "cluster":
        st.session_state["gpus"] = None  # all of them: the count asked for another machine may not exist here


def take_files_of_link() -> None:
    """Store the files in a link, and remove them from the address; show an error if they cannot be read."""
    word = st.query_params.get(share_link.PARAMETER)
    if not word:
        return
    del st.query_params[share_link.PARAMETER]
    try:
        share_link.unpack(word)
    except PlannerError as error:
        failure(error)


@st.fragment  # opening it runs nothing else
def terminal(command: str) -> None:
    """Offer the command line that asks the same. It is drawn once it is opened: a browser loads and runs 1.5 MB for
    it.
    """
    opened = st.expander(
        "The same question in a terminal", icon=":material/terminal:", key="terminal", on_change="rerun"
    )
    if opened.open:
        opened.code(command, language="bash", wrap_lines=True)


def share(question: state.Inputs) -> None:
    """Offer a link that holds the whole question."""
    with st.popover("Share", icon=":material/link:"):
        st.caption("The link holds the whole question, uploaded files included; it works in any explorer.")
        try:
            st.code(
                share_link.address(state.link(), (question.cluster, question.model)), language=None, wrap_lines=True
            )
        except PlannerError as error:
            failure(error)


def not_here(unknown: Sequence[state.Unresolved]) -> None:
    """Show the words of a link that are unknown here, and offer remedies; the link is not changed."""
    for word in unknown:
        with st.container(border=True):
            file = word.key in {"cluster", "model"}
            what = (
                f"This link names a {word.label} that is not here"
                if file
                else f"This link's {word.label} cannot be used"
            )
            st.markdown(f"##### :orange[:material/link_off:] {what}")
            st.markdown(f"**{plain(word.word)}**")
            if file:
                st.markdown(
                    "Uploaded files stay on the computer they were uploaded to."
                    " With the same file, the link works here:"
                )
                kind: uploads.Kind = "cluster" if word.key == "cluster" else "model"
                brought = st.file_uploader("The file", key=f"missing_{kind}", label_visibility="collapsed")
                if brought is not None:
                    _bring(kind, word.word, brought.name, brought.getvalue())
            st.button("Ask without it", key=f"without_{word.key}", on_click=_leave_out, args=(word.key,))


def _leave_out(key: str) -> None:
    del st.query_params[key]


def _bring(kind: uploads.Kind, wanted: str, name: str, content: bytes) -> None:
    try:
        kept = uploads.store(kind, wanted.rpartition(" (")[0] or name, content)
    except PlannerError as error:
        failure(error)
        return
    if kept.choice == wanted:
        st.rerun()
    st.markdown(f"{plain(name)} is another file: the link was made with one of other content.")


def assumed(lines: Sequence[str]) -> None:
    """List the defaults that were assumed."""
    if not lines:
        return
    lines = assumed_parts(lines)
    with st.expander(f"{len(lines)} assumption{'s' if len(lines) > 1 else ''}", icon=":material/rule:"):
        st.markdown("\n".join(f"- {plain(line)}" for line in lines))
