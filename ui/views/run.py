"""Page: run the chosen plan on this machine, follow it, stop it, and see it beside its prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import streamlit as st

from planner.explain.tables import policy_text
from planner.remote.flags import RUNS
from topology.errors import PlannerError
from ui import data, panels, service, state

if TYPE_CHECKING:
    from planner.search.result import RankedPlan, SearchResult
    from planner.service.documents import JobDocument

WAITS = frozenset({"queued", "running"})
SHOWN = 20


def show(question: state.Inputs) -> None:
    del question
    result, ranked = data.answer()
    if missing := service.missing():
        panels.empty(
            "Runs from the page need the service",
            f"Missing here: {', '.join(missing)}. Install them with `pip install 'meshwright[service]'`, or run"
            " `planner apply plan.json` in a terminal.",
        )
        return
    try:
        service.queue()
    except PlannerError as error:
        panels.failure(error)
        return
    left, right = st.columns([2, 3], gap="large")
    with left:
        _form(result, ranked)
    with right:
        job = st.query_params.get("job")
        if job:
            _job(str(job))
        else:
            panels.empty("No run is shown", "Start one, or choose one below.", icon=":material/play_circle:")
    _history()


def _form(result: SearchResult, ranked: RankedPlan) -> None:
    panels.section(
        f"Run #{ranked.rank}  {state.plan_chips(ranked.plan)}",
        f"{panels.plain(policy_text(ranked.plan))}. Numbers are checked against one process before anything is timed.",
    )
    with st.form("run"):
        device = st.segmented_control(
            "On", ["cuda", "cpu"], default="cuda", required=True, help="cpu checks numbers only, on a small model."
        )
        minutes = st.number_input("Minutes at most", 1, 60, 2)
        steps = st.number_input("Steps to measure", 1, 1000, 10)
        if st.form_submit_button("Run", icon=":material/play_arrow:"):
            said: dict[str, Any] = {"budget": f"{minutes}m", "steps": int(steps), "device": device}
            said["plan"] = {"name": "plan.json", "content": data.plan_file_text(result, ranked)}
            _start(said)


def _start(said: dict[str, Any]) -> None:
    try:
        st.query_params["job"] = service.queue().ask(service.USER, "apply", said)
    except PlannerError as error:
        panels.failure(error)


def _job(job: str) -> None:
    found = service.queue().read(service.USER, job)
    if found is None:
        panels.empty("There is no such run", "The link names a run that is not kept here.", icon=":material/link_off:")
    elif found.state in WAITS:
        _follow(job)
    else:
        _ended(found)


@st.fragment(run_every=1.0)
def _follow(job: str) -> None:
    """Show a run that has not ended; only this part of the page runs again until it has."""
    found = service.queue().read(service.USER, job)
    if found is None or found.state not in WAITS:
        st.rerun()
        return
    with st.container(border=True):
        left, right = st.columns([5, 1], vertical_alignment="center")
        left.markdown(
            f":material/hourglass_top: **{found.state.capitalize()}** · {panels.plain(found.progress or '...')}"
        )
        if right.button("Stop", key="stop_run", icon=":material/stop_circle:", width="stretch"):
            service.queue().cancel(service.USER, job)
            st.rerun()


def _ended(found: JobDocument) -> None:
    if found.state == "cancelled":
        panels.empty("Stopped", "The run was stopped before it ended.", icon=":material/stop_circle:")
        return
    if found.error is not None:
        panels.failure(PlannerError(found.error.message, why=found.error.why, remedy=found.error.remedy))
    document = found.result
    if not isinstance(document, dict):
        return
    panels.section(f"The run: {panels.plain(document.get('status', found.state))}", "Predicted beside measured.")
    measured, predicted = document.get("measured") or {}, document.get("predicted") or {}
    cells: list[panels.Figure] = []
    step = (measured.get("step_s") or {}).get("median")
    if step is not None:
        expected = (predicted.get("step_s") or {}).get("value")
        below = f"predicted {expected:.3g} s" if expected else "not predicted for this machine"
        cells.append(("Measured step", f"{step:.3g} s", "The median of the measured steps.", below))
    if rate := measured.get("tokens_per_s"):
        cells.append(("Tokens/s", f"{rate:,.0f}", "Measured, of all ranks together."))
    if cells:
        panels.figures(cells)
    if isinstance(checked := document.get("verified"), dict):
        same = checked.get("ok")
        st.markdown(
            ":green[:material/check_circle:] Loss and gradients are those of one process."
            if same
            else ":red[:material/error:] Loss or gradients differ from those of one process."
        )
    if isinstance(failed := document.get("failure"), dict):
        st.markdown(f":orange[:material/warning:] {panels.plain(failed.get('message', ''))}")
    if document.get("id"):
        st.page_link(
            state.view("measured"),
            label="All runs beside their predictions",
            icon=":material/straighten:",
            query_params=state.link(),
        )


def _history() -> None:
    panels.section("Runs and tunings of the service here", "Select one to see it.")
    kept = [row for row in service.queue().jobs.newest(service.USER, 200) if row["command"] in RUNS][:SHOWN]
    if not kept:
        st.caption("None yet.")
        return
    names = [row["id"] for row in kept]

    def pick() -> None:
        selected = st.session_state["run_history"]["selection"]["rows"]
        if selected:
            st.query_params["job"] = names[selected[0]]

    st.dataframe(
        [
            {
                "command": row["command"],
                "state": row["state"],
                "seconds": round((row["finished_s"] or 0.0) - row["started_s"])
                if row["finished_s"] and row["started_s"]
                else None,
                "run": row["id"][:12],
            }
            for row in kept
        ],
        key="run_history",
        hide_index=True,
        on_select=pick,
        selection_mode="single-row",
        width="stretch",
        placeholder="-",
    )


show(data.question())
