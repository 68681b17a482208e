"""Page: a tuning, started here or read from its state file: trials, and the posterior of the finalists shrinking."""

from __future__ import annotations

import math
from pathlib import Path

import streamlit as st

from planner.io import plan_words
from planner.io.figures import interval_text
from planner.tune.candidates import Candidate
from planner.tune.history import history
from planner.tune.loop import View
from planner.tune.sessions.session import shown
from planner.tune.state import State, parse_state, read_state
from planner.tune.text import chance_text
from simulator.config.estimate import Interval
from topology.cluster import Source
from topology.errors import PlannerError
from topology.units import MIB
from ui import data, jobs, panels, rows
from ui.background import service
from ui.charts import measured as charts
from ui.charts.row_types import JobDocument
from ui.question import state

MOST_BYTES = 16 * MIB
COMMANDS = ("tune",)
WIDE = 280  # pixels of a finalist's chart: one fits a phone, four a screen
STATE = "state.jsonl"
# Frameworks whose plans can be tried: by our executor, or by the framework's own trainer.
TRIED = {"meshwright executor": "meshwright", "torchtitan": "torchtitan"}


def show() -> None:
    st.caption("Plans tried for real, and what each trial says of all others. It ends when nothing better is likely.")
    found = None
    if jobs.ready("planner tune --model ... --budget 10m"):
        _form()
        found = jobs.chosen(COMMANDS)
        with st.container(key="tuning_of_job"):
            if found is not None and found["state"] in jobs.WAITS:
                jobs.follow(found["job"], _so_far)
            elif found is not None:
                jobs.ending(found)
                _ended(found)
        jobs.history("Tunings", COMMANDS)
    if found is None:
        with st.container(key="tuning_of_file"):
            panels.section("A tuning from its state file")
            read = _chosen()
            if read is not None:
                _show(read)


def _form() -> None:
    asked = data.question()
    panels.section("Tune for this question", f"Trials run {panels.plain(jobs.where())}, one after the other.")
    with st.form("tune"):
        first, second, third, fourth = st.columns([9, 7, 7, 7], vertical_alignment="bottom", gap="small")
        framework = first.selectbox("Framework", list(TRIED))
        device = second.segmented_control(
            "Device", ["cuda", "cpu"], default="cuda", required=True, help="On cpu, times mean little."
        )
        minutes = third.number_input("Minutes for all trials", 1, 24 * 60, 10)
        trials = fourth.number_input("Trials at most", 1, 1000, 20)
        recorded = st.file_uploader(
            "Recorded runs instead of trials (cases as JSON): what was measured is looked up, nothing runs",
            type=["json"],
        )
        if st.form_submit_button("Tune", icon=":material/science:"):
            jobs.begin(
                "tune", jobs.tune_request(asked, TRIED[framework], str(device), int(minutes), int(trials), recorded)
            )


def _so_far(job: str) -> None:
    """Show the trials that a tuning has made so far."""
    text = service.jobs().so_far(job).decode("utf-8", errors="replace")
    # The last line may be half written.
    whole = text[: text.rfind("\n") + 1]
    if not whole:
        st.caption("The plans that could be best are being found.")
        return
    try:
        _show(parse_state(whole, where=STATE))
    except PlannerError as error:
        st.caption(panels.plain(error.what))


def _ended(found: JobDocument) -> None:
    wrote = next((one for one in found["artifacts"] if Path(one["name"]).name == STATE), None)
    if wrote is None:
        return
    try:
        kept = service.jobs().content(wrote)
        _show(parse_state(kept.decode("utf-8", errors="replace"), where=STATE))
    except PlannerError as error:
        panels.failure(error)
        return
    st.download_button(
        "State file, to go on with: planner tune --resume",
        data=kept,
        file_name=STATE,
        icon=":material/download:",
        on_click="ignore",
    )


def _show(found: State) -> None:
    if not found.trials:
        panels.empty("No trial yet", "The tuning has begun, and its first trial has not ended.")
        return
    asked, view = found.request, shown(found)
    _answer(view, asked.within)
    seen = history(view, within=asked.within, unknown_machine=asked.unknown_machine)
    panels.section("Finalists", "The step expected after each trial: its median, and the range that holds 80 %.")
    best = view.best
    finding = f"the best measured step is {best.step_s:.4g} s" if best is not None else "none could be measured"
    with st.container(horizontal=True, gap="small", key="finalists"):
        for number, (plan, drawn) in enumerate(charts.posterior(seen, dark=panels.dark()).items()):
            with st.container(key=f"finalist_{number}", width=WIDE):
                st.caption(panels.plain(plan))
                about = f"Believed step of plan {plan} by trials; after {len(view.trials)} trials {finding}"
                panels.chart(drawn, key=f"posterior_{number}", alt=about)
    panels.section("Trials", "In the order in which they were made.")
    st.dataframe(_rows(view), hide_index=True, width="stretch", placeholder="-", column_config=_COLUMNS)
    panels.section("Chance that a better plan is left", "One that is worth a further trial; the tuning stops at 5 %.")
    panels.chart(
        charts.better_left(seen.better_plan_left, dark=panels.dark()),
        key="left",
        alt=f"Chance that a better plan is left, by trials; in the end {chance_text(view.outlook.probability)}",
    )


def _chosen() -> State | None:
    """Return the state that is shown: an uploaded one, one in this folder, or the example."""
    uploaded = st.file_uploader("State file of planner tune (state.jsonl)", type=["jsonl"], key="tuning_state")
    try:
        if uploaded is not None:
            if uploaded.size > MOST_BYTES:
                panels.empty("The file is too large", f"States of tunings have up to {MOST_BYTES // MIB} MiB.")
                return None
            return parse_state(uploaded.getvalue().decode("utf-8", errors="replace"), where=panels.plain(uploaded.name))
        here = sorted(Path.cwd().glob("meshwright-tune-*/state.jsonl"), reverse=True)[:20]
        example = state.example("tune/vtrain.jsonl")
        named = {str(path.parent.name): path for path in here}
        if example is not None:
            named["example: vTrain's measured runs on eight A100s"] = example
        if not named:
            panels.empty(
                "No tuning here", "`planner tune --model llama3.2-1b --budget 10m` begins one in a new folder."
            )
            return None
        choice = st.selectbox("Tuning", list(named), key="tuning")
        return read_state(named[choice])
    except PlannerError as error:
        panels.failure(error)
        return None


def _answer(view: View, within: float) -> None:
    best = view.best
    if best is None:
        panels.empty("No plan could be measured", "The table says why each trial failed.")
        return
    one = view.candidates.plans[best.row]
    predicted, expected = rows.step_figure(one.estimate)
    panels.figures(
        [
            ("Best step", f"{best.step_s:.4g} s", "measured"),
            ("Predicted", predicted, "Before any trial; below it is where 80 % of steps were expected.", expected),
            ("Trials", str(len(view.trials)), f"of {view.candidates.legal:,} legal plans"),
            ("Better plan left", chance_text(view.outlook.probability), f"by more than {within:.1%}"),
        ]
    )
    st.markdown(f"**{panels.plain(_words(one))}**")


def _words(one: Candidate) -> str:
    return f"{plan_words.plan_chips(one.plan)} ({_settings(one)})"


def _settings(one: Candidate) -> str:
    return f"{plan_words.plan_settings(one.plan)}{', compiled' if one.runtime.compile else ''}"


_COLUMNS = {
    "trial": st.column_config.NumberColumn(width=50),
    "plan": st.column_config.TextColumn(width=180),
    "status": st.column_config.TextColumn(width=75),
    "measured, s": st.column_config.NumberColumn(width=95, format="%.4g"),
    "expected": st.column_config.TextColumn(width=150, help="Before the trial, with the range that holds 80 %."),
    "took, s": st.column_config.NumberColumn(width=65),
    "why": st.column_config.TextColumn(width=220),
    "settings": st.column_config.TextColumn(width=340),
}


def _rows(view: View) -> list[dict[str, object]]:
    made: list[dict[str, object]] = []
    for number, trial in enumerate(view.trials, start=1):
        row = view.candidates.row(trial.key)
        made.append(
            {
                "trial": number,
                "plan": plan_words.plan_chips(view.candidates.plans[row].plan) if row is not None else trial.key,
                "status": trial.status.value.replace("_", " "),
                "measured, s": trial.step_s,
                "expected": _expected(trial.predicted_s),
                "took, s": round(trial.seconds),
                "why": trial.cause or trial.why,
                "settings": _settings(view.candidates.plans[row]) if row is not None else None,
            }
        )
    return made


def _expected(predicted_s: tuple[float, float, float]) -> str | None:
    """Return what a trial was expected to take (middle, low, high; seconds); None where that was not known."""
    middle, low, high = predicted_s
    if not math.isfinite(middle):
        return None
    return interval_text(Interval(value=middle, low=low, high=high, source=Source.FITTED))


show()
