"""Page: a tuning, from its state file: the trials, and the posterior of the finalists shrinking trial by trial."""

from __future__ import annotations

import math
from pathlib import Path

import streamlit as st

from planner.tune.history import candidate_words, history
from planner.tune.loop import View
from planner.tune.sessions.session import shown
from planner.tune.state import State, parse_state, read_state
from planner.tune.text import chance_text
from topology.errors import PlannerError
from ui import panels, state
from ui.charts import tuning as charts

MOST_BYTES = 16 * 2**20


def show() -> None:
    st.caption("Plans that planner tune has tried for real, and what each trial said of all others.")
    found = _chosen()
    if found is None:
        return
    if not found.trials:
        panels.empty("No trial yet", "The tuning has begun, and its first trial has not ended.")
        return
    asked, view = found.asked, shown(found)
    _answer(view, asked.within)
    seen = history(view, within=asked.within, unknown_machine=asked.unknown_machine)
    panels.section("Finalists", "What is believed of a step after each trial: the middle, and a band that holds 80 %.")
    panels.chart(
        charts.posterior(seen, dark=panels.dark()), key="posterior", alt="Believed steps of the finalists by trial"
    )
    left, right = st.columns([5, 3], gap="large")
    with left:
        panels.section("Trials", "In the order in which they were made.")
        st.dataframe(_rows(view), hide_index=True, width="stretch", placeholder="-")
    with right:
        panels.section("Is something better left?", "By more than the tuning cares for; it stops at 5 %.")
        panels.chart(
            charts.better_left(seen.better_left, dark=panels.dark()),
            key="left",
            alt="Chance that a better plan is left",
        )


def _chosen() -> State | None:
    """Return the state that is shown: an uploaded one, one in this folder, or the example."""
    uploaded = st.file_uploader("State file of planner tune (state.jsonl)", type=["jsonl"], key="tuning_state")
    try:
        if uploaded is not None:
            if uploaded.size > MOST_BYTES:
                panels.empty("The file is too large", f"States of tunings have up to {MOST_BYTES // 2**20} MiB.")
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
    predicted = one.estimate.step_s.value
    panels.figures(
        [
            ("Best step", f"{best.step_s:.4g} s", "measured"),
            ("Predicted", f"{predicted:.4g} s", "before any trial"),
            ("Trials", str(len(view.trials)), f"of {view.candidates.legal:,} legal plans"),
            ("Better plan left", chance_text(view.outlook.probability), f"by more than {within:.1%}"),
        ]
    )
    st.markdown(f"**{panels.plain(candidate_words(one))}**")


def _rows(view: View) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for number, trial in enumerate(view.trials, start=1):
        row = view.candidates.row(trial.key)
        value, low, high = trial.predicted_s
        rows.append(
            {
                "trial": number,
                "plan": candidate_words(view.candidates.plans[row]) if row is not None else trial.key,
                "status": trial.status.value,
                "measured, s": trial.step_s,
                "believed, s": value if math.isfinite(value) else None,
                "80% from": low,
                "80% to": high,
                "took, s": round(trial.seconds),
                "why": trial.cause or trial.why,
            }
        )
    return rows


show()
