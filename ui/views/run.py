"""Page: run the chosen plan, follow it, stop it, and see it laid over its prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import streamlit as st

from planner.explain.tables import policy_text
from ui import data, jobs, panels, state
from ui.canvas import measured_run

if TYPE_CHECKING:
    from planner.search.result import RankedPlan, SearchResult

COMMANDS = ("apply",)


def show() -> None:
    result, ranked = data.answer()
    if not jobs.ready("planner apply plan.json"):
        return
    _form(result, ranked)
    found = jobs.chosen(COMMANDS)
    if found is not None and found["state"] in jobs.WAITS:
        jobs.follow(found["job"])
    elif found is not None:
        jobs.ending(found)
        measured_run.show_job(found)
        st.page_link(
            state.view("measured"),
            label="All runs beside their predictions",
            icon=":material/straighten:",
            query_params=state.link(),
        )
    jobs.history("Runs", COMMANDS)


def _form(result: SearchResult, ranked: RankedPlan) -> None:
    panels.section(
        f"Run #{ranked.rank}  {state.plan_chips(ranked.plan)}",
        f"{panels.plain(policy_text(ranked.plan))}. It runs {panels.plain(jobs.where())}; numbers are checked against one"
        " process before anything is timed.",
    )
    with st.form("run"):
        first, second, third, fourth = st.columns(4, vertical_alignment="bottom")
        device = first.segmented_control(
            "On", ["cuda", "cpu"], default="cuda", required=True, help="cpu checks numbers only, on a small model."
        )
        minutes = second.number_input("Minutes at most", 1, 60, 2)
        steps = third.number_input("Steps to measure", 1, 1000, 10)
        by = fourth.selectbox(
            "By", ["here", "slurm", "trainjob"], help="slurm and trainjob write a job that runs the plan on a cluster."
        )
        submit = st.checkbox("Hand the job to sbatch or kubectl", help="Without it, the job's file is only written.")
        if st.form_submit_button("Run", icon=":material/play_arrow:"):
            if by == "here" and submit:
                st.warning("sbatch and kubectl take jobs of slurm and trainjob: choose one of them under By.")
                return
            if by != "here" and device == "cpu":
                st.warning("Jobs of slurm and trainjob run on GPUs: choose cuda, or run it here.")
                return
            said: dict[str, Any] = {"budget": f"{minutes}m", "steps": int(steps)}
            said |= {"device": device} if by == "here" else {"launcher": by, "submit": submit}
            said["plan"] = {"name": "plan.json", "content": data.plan_file_text(result, ranked)}
            jobs.begin("apply", said)


show()
