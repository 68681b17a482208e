"""Page: predictions compared with measured runs."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING

import streamlit as st

from planner.runs.runs_store import default_path
from topology.errors import PlannerError
from ui import data, ledger, panels, rows
from ui.charts import measured as charts
from ui.question import state
from ui.views import run_curves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from planner.runs.runs_store import RunSummary

SHOWN_DRAWS = 5
MOST_CURVES = 6  # runs that can be distinguished


def show(question: state.Inputs) -> None:
    st.caption("Measured runs compared with their predictions.")
    _fresh()
    _own()
    _published(question)


def _fresh() -> None:
    """Show the draws of the ledger, whose measurements were unknown when they were predicted."""
    found = ledger.draws()
    if not found:
        return
    panels.section(
        "Fresh runs",
        "Drawn at random, predicted by the version of their day, written down, and only then run: no row was known when"
        " it was predicted, and none is removed.",
    )
    st.dataframe(list(found[:SHOWN_DRAWS]), hide_index=True, width="stretch")
    if len(found) > SHOWN_DRAWS:
        with st.expander(f"{len(found) - SHOWN_DRAWS} draws before these"):
            st.dataframe(list(found[SHOWN_DRAWS:]), hide_index=True, width="stretch")


def _own() -> None:
    panels.section("Your runs", "Every planner apply on this machine, newest first.")
    try:
        runs, damaged = data.runs(), data.damaged_runs()
    except PlannerError as error:
        panels.failure(error)
        return
    if damaged:
        names = ", ".join(run.id for run in damaged[:8])
        st.caption(panels.code(f"{len(damaged)} damaged, left out: {names}. planner runs --remove ID takes one off."))
    if not runs:
        panels.empty(
            "No runs yet",
            "`planner apply plan.json` runs a plan on this machine's GPUs, checks its numbers against one process,"
            f" and saves the measurements in {panels.code(_home(default_path()))}."
            " They are then shown here with their prediction.",
            icon=":material/play_circle:",
        )
        return
    shown = _filtered(runs)
    errors = [run.step_error for run in shown if run.step_error is not None]
    if errors:
        panels.figures(
            [
                ("Runs", str(len(shown)), ""),
                ("Step, mean absolute error", f"{mean(map(abs, errors)):.1%}", "predicted against measured"),
                ("Step, median error", f"{median(errors):+.1%}", "signed: negative where the prediction is too fast"),
            ]
        )
    if not shown:
        st.caption("No run is left: take a filter away.")
        return
    table = panels.in_percent([rows.run_row(run) for run in shown], "step", "memory")
    st.caption("Tick runs to see their steps.")
    ticked = st.dataframe(
        table,
        hide_index=True,
        width="stretch",
        placeholder="-",
        column_config=_RUNS,
        key="own_runs",
        on_select="rerun",
        selection_mode="multi-row",
    )
    chosen = [shown[i] for i in ticked["selection"]["rows"] if i < len(shown)][:MOST_CURVES]
    run_curves.saved(chosen)


def _filtered(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """Let a person choose runs by what they were, and show them in groups; return those chosen, group by group."""
    places = st.columns(4, gap="small")
    kept = list(runs)
    for place, (title, what) in zip(places, _GROUPS.items(), strict=False):
        options = sorted({what(run) for run in runs})
        wanted = place.multiselect(title.capitalize(), options, key=f"runs_{title}", placeholder="all")
        kept = [run for run in kept if not wanted or what(run) in wanted]
    group = places[-1].selectbox("In groups by", [NO_GROUPS, *_GROUPS], key="runs_group")
    if group == NO_GROUPS or group is None:
        return kept
    grouped: dict[str, list[RunSummary]] = {}
    for run in kept:
        grouped.setdefault(_GROUPS[group](run), []).append(run)
    st.dataframe([rows.group_row(name, each) for name, each in sorted(grouped.items())], hide_index=True, key="groups")
    return [run for _, each in sorted(grouped.items()) for run in each]


NO_GROUPS = "nothing"
_GROUPS: dict[str, Callable[[RunSummary], str]] = {
    "model": lambda run: run.model,
    "machine": lambda run: f"{run.gpus} x {run.device}",
    "plan": lambda run: run.plan,
}
_RUNS = {
    "ended": st.column_config.TextColumn(width=170),
    "step": st.column_config.NumberColumn("step error, %", format="%+.1f"),
    "memory": st.column_config.NumberColumn("memory error, %", format="%+.1f"),
}


def _home(path: Path) -> str:
    """Return a path with the home folder as `~`."""
    return str(path).replace(str(Path.home()), "~", 1)


def _published(question: state.Inputs) -> None:
    panels.section(
        "Published runs",
        "Predicted by planner validate from datasheets only; nothing was calibrated on these machines. These rows were"
        " known while the model was written: only the fresh runs above were not.",
    )
    published = data.published()
    if not published:
        panels.empty(
            "The case files are not part of the installed package",
            "They are in the repository under `examples/validation/`; `planner validate cases.json` reproduces them.",
            icon=":material/table_chart:",
        )
        return
    near = data.nearest_published(question)
    if near:
        st.markdown(f"**Nearest to your question** · {panels.plain(near.sentence)}.")
    every = rows.compared_rows(published)
    what = st.segmented_control(
        "Show", ["step time", "memory"], default="step time", required=True, key="show", bind="query-params"
    )
    shown = [row for row in every if row["what"] == what]
    if not shown:
        panels.empty("Nothing to compare", "No row of the file states this quantity.")
        return
    with_range = [row for row in shown if row["interval"] != "no range"]
    inside = sum(row["interval"].startswith("inside") for row in with_range) / max(1, len(with_range))
    errors = [row["error"] for row in shown]
    panels.figures(
        [
            ("Rows", f"{len(shown)}", "that state this quantity"),
            ("Mean absolute error", f"{mean(map(abs, errors)):.1%}", "predicted / measured - 1"),
            ("Median error", f"{median(errors):+.1%}", "signed"),
            ("Inside the 80 % range", f"{inside:.0%}", "should be about 80 %"),
        ]
    )
    left, right = st.columns([4, 5], gap="large")
    unit = "s per step" if what == "step time" else "GiB"
    with left:
        panels.section("Predicted against measured", "Equal on the dashed line.")
        panels.chart(
            charts.against(shown, unit=unit, dark=panels.dark()),
            key="against",
            alt=f"Predicted over measured: mean absolute error {mean(map(abs, errors)):.1%}",
        )
    with right:
        panels.section(
            "Error by source", "One tick per run, a diamond for the median; errors beyond 60 % are drawn at the edge."
        )
        panels.chart(
            charts.errors(shown, dark=panels.dark()),
            key="errors",
            alt=f"Signed errors by source; median {median(errors):+.1%}",
        )


show(data.question())
