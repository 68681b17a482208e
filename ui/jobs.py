"""Jobs of the service on pages: started, followed while they run, listed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, cast

import streamlit as st

from topology.codec import JsonObject
from topology.errors import PlannerError
from topology.readers.nvml import read_nvml
from ui import panels
from ui.background import service
from ui.charts.row_types import JobDocument
from ui.question import uploads
from ui.question.state import Inputs

if TYPE_CHECKING:
    from streamlit.runtime.uploaded_file_manager import UploadedFile

WAITS = frozenset({"queued", "running"})
SHOWN = 20
ASKED = 200  # newest jobs, which include those of a page


def ready(without: str) -> bool:
    """Return whether jobs can be started; if not, show the reason. `without` is the way to do the same in a
    terminal.
    """
    if missing := service.missing():
        panels.empty(
            "This needs the service",
            f"Missing here: {', '.join(missing)}. Install them with `pip install 'meshwright[service]'`, or run"
            f" `{without}` in a terminal.",
        )
        return False
    try:
        service.jobs()
    except PlannerError as error:
        panels.failure(error)
        return False
    return True


def where() -> str:
    """Return where jobs run, in words."""
    there = service.server()
    return f"on the service {there}" if there else "on this machine"


def gpus_here() -> int:
    """Return how many GPUs this machine has."""
    return len(read_nvml().gpus)


def begin(command: str, said: JsonObject) -> None:
    """Start a job and show it."""
    try:
        st.query_params["job"] = service.jobs().submit(command, said)
    except PlannerError as error:
        panels.failure(error)


def chosen(commands: Sequence[str]) -> JobDocument | None:
    """Return the job named by the link, if it is one of these commands; show a message if there is none."""
    job = st.query_params.get("job")
    if not job:
        return None
    try:
        found = service.read(str(job))
    except PlannerError as error:
        panels.failure(error)
        return None
    if found is None:
        panels.empty("There is no such run", "The link names a run that is not kept here.", icon=":material/link_off:")
        return None
    return found if found["command"] in commands else None


def tune_request(
    asked: Inputs, framework: str, device: str, minutes: int, trials: int, recorded: UploadedFile | None
) -> JsonObject:
    """Return the flags of `planner tune` for a question; with recorded runs, theirs is the question."""
    said: JsonObject = {"trials": trials, "budget": f"{minutes}m"}
    if recorded is not None:
        text = recorded.getvalue().decode("utf-8", errors="replace")
        return {**said, "recorded": {"name": "recorded.json", "content": text}}
    said |= {"model": uploads.sent(asked.model), "framework": framework, "device": device}
    said |= {"seq_len": asked.seq_len, "gpus": asked.gpus, "global_batch": asked.global_batch}
    return {key: value for key, value in said.items() if value is not None}


@st.fragment(run_every=1.0)
def follow(job: str, draw: Callable[[str], None] | None = None) -> None:
    """Show a job that has not ended; only this part of the page runs again until it has. `draw` shows what it has so
    far.
    """
    try:
        found = service.read(job)
    except PlannerError as error:
        panels.failure(error)
        return
    if found is None or found["state"] not in WAITS:
        st.rerun()
    with st.container(border=True):
        left, right = st.columns([5, 1], vertical_alignment="center")
        said = panels.plain(found["progress"] or "...")
        left.markdown(f":material/hourglass_top: **{found['state'].capitalize()}** · {said}")
        if right.button("Stop", key="stop_run", icon=":material/stop_circle:", width="stretch"):
            service.jobs().cancel(job)
            st.rerun()
    if draw is not None:
        draw(job)


def ending(found: JobDocument) -> JsonObject | None:
    """Return the answer of a job that has ended; show how it ended if it has none."""
    if found["state"] == "cancelled":
        panels.empty("Stopped", "The run was stopped before it ended.", icon=":material/stop_circle:")
        return None
    error = found["error"]
    if error is not None:
        panels.failure(PlannerError(error["message"], why=error.get("why", ""), remedy=error.get("remedy", "")))
    return found["result"] if isinstance(found["result"], dict) else None


def history(title: str, commands: Sequence[str]) -> None:
    """List the newest jobs of some commands; one that is selected is shown."""
    panels.section(title)
    try:
        newest = cast("list[JobDocument]", service.jobs().jobs(limit=ASKED))
    except PlannerError as error:
        panels.failure(error)
        return
    kept = [row for row in newest if row["command"] in commands][:SHOWN]
    if not kept:
        st.caption("None yet.")
        return
    st.caption("Select one to see it.")

    def pick() -> None:
        selected = st.session_state["job_history"]["selection"]["rows"]
        if selected:
            st.query_params["job"] = kept[selected[0]]["job"]

    rows = [
        {"started": _clock(row["created_at"]), "state": row["state"], "took": _took(row), "run": row["job"][:12]}
        for row in kept
    ]
    st.dataframe(
        rows,
        key="job_history",
        hide_index=True,
        on_select=pick,
        selection_mode="single-row",
        width="stretch",
        placeholder="-",
    )


def _clock(text: str) -> str:
    return datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _took(row: JobDocument) -> str | None:
    if not row["finished_at"] or not row["started_at"]:
        return None
    took = datetime.fromisoformat(row["finished_at"]) - datetime.fromisoformat(row["started_at"])
    return f"{took.total_seconds():.0f} s"
