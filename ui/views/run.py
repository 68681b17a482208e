"""Page: run the chosen plan, follow it, stop it, and see it laid over its prediction."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import streamlit as st

from planner.io import plan_words
from planner.io.figures import gpus_text
from topology.codec import JsonObject
from ui import data, jobs, panels
from ui.background import service
from ui.canvas import measured_run
from ui.question import state
from ui.views import run_curves

if TYPE_CHECKING:
    from planner.search.result import RankedPlan, SearchResult

COMMANDS = ("apply",)
LAUNCHERS = {"local": "this machine", "slurm": "Slurm", "ray": "Ray", "trainjob": "Kubernetes TrainJob"}


def show() -> None:
    result, ranked = data.answer()
    if not jobs.ready("planner apply plan.json"):
        return
    _form(result, ranked)
    found = jobs.chosen(COMMANDS)
    if found is not None and found["state"] in jobs.WAITS:
        jobs.follow(found["job"], run_curves.so_far)
    elif found is not None:
        answer = jobs.ending(found)
        if answer is not None and "text" in answer:
            _job_file(answer)
        measured_run.show_job(found)
        run_curves.ended(found)
        st.page_link(
            state.view("measured"),
            label="All runs with their predictions",
            icon=":material/straighten:",
            query_params=state.link(),
        )
    jobs.history("Runs", COMMANDS)


def _form(result: SearchResult, ranked: RankedPlan) -> None:
    panels.section(
        f"Run #{ranked.rank}  {plan_words.plan_chips(ranked.plan)}",
        f"{panels.plain(plan_words.plan_settings(ranked.plan))}."
        f" It runs {panels.plain(jobs.where())}; results are checked against one process before anything is timed.",
    )
    here = None if service.server() else jobs.gpus_here()
    if here is not None and here < ranked.plan.gpus:
        st.markdown(
            f":orange[{panels.ICONS['warning']}] {_gpus_words(here)}, and the plan needs {ranked.plan.gpus}: here, its"
            " results can be checked on the CPU; Slurm, Ray or Kubernetes run it on a cluster."
        )
    with st.form("run"):
        first, second, third, fourth = st.columns(4, vertical_alignment="bottom")
        device = first.segmented_control(
            "Device", ["cuda", "cpu"], default="cuda", required=True, help="cpu checks numbers only, on a small model."
        )
        minutes = second.number_input("Minutes at most", 1, 60, 2)
        steps = third.number_input("Steps to measure", 1, 1000, 10)
        by = fourth.selectbox(
            "Launcher",
            list(LAUNCHERS),
            format_func=LAUNCHERS.__getitem__,
            help="Slurm, Ray and Kubernetes run the plan on a cluster.",
        )
        image = st.text_input(
            "Container image, for Kubernetes", placeholder="registry/image:tag", help="It holds meshwright and torch."
        )
        submit = st.checkbox(
            "Submit the job, follow it, and collect its run",
            help="With sbatch, kubectl or Ray's job API from the machine on which the service runs."
            " Without it, the job's file is only written.",
        )
        if st.form_submit_button("Run", icon=":material/play_arrow:"):
            wrong = _contradiction(str(by), str(image or ""), submit=submit)
            if not wrong and here is not None and device == "cuda" and by == "local" and here < ranked.plan.gpus:
                wrong = f"{_gpus_words(here)}: choose cpu, or Slurm, Ray or Kubernetes as the launcher."
            if wrong:
                st.warning(wrong)
                return
            said: JsonObject = {"budget": f"{minutes}m", "steps": int(steps)}
            said |= {"device": device} if by == "local" or device == "cpu" else {}
            said |= {} if by == "local" else {"launcher": by, "submit": submit}
            said |= {"image": image} if by == "trainjob" else {}
            said["plan"] = {"name": "plan.json", "content": data.plan_file_text(result, ranked)}
            jobs.begin("apply", said)


def _gpus_words(count: int) -> str:
    return "This machine has no GPU" if not count else f"This machine has {gpus_text(count)}"


def _contradiction(by: str, image: str, *, submit: bool) -> str:
    """Return the contradictions in the form, and what to change; empty if there are none."""
    if by == "local":
        return "A job is submitted to Slurm, Ray or Kubernetes: choose one of them as the launcher." if submit else ""
    if by == "trainjob" and not image.strip():
        return "Kubernetes needs a container image."
    return ""


def _job_file(answer: JsonObject) -> None:
    """Show a job's file that was written for a scheduler, and how it is started."""
    panels.section("The job", panels.plain("; ".join(answer["advice"])))
    name = Path(answer["file"]).name
    st.download_button(
        f"Download {name}", data=answer["text"], file_name=name, icon=":material/download:", on_click="ignore"
    )
    st.code(answer["text"], language="bash" if answer["launcher"] == "slurm" else "yaml")


show()
