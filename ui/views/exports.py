"""Page: the plan as a file of its own, and as the configuration of the tool that will run it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import streamlit as st

from planner.export.targets.registry import ALL_TARGETS
from planner.io import plan_words
from topology.errors import PlannerError
from ui import data, panels
from ui.question import state

if TYPE_CHECKING:
    from planner.export.draft import Target
    from planner.search.result import RankedPlan, SearchResult


def show(question: state.Inputs) -> None:
    del question
    result, ranked = data.answer()
    chips, settings = plan_words.plan_chips(ranked.plan), plan_words.plan_settings(ranked.plan)
    st.caption(f"{panels.counted(ranked.plan.gpus, 'GPU')}: {panels.plain(chips)} · {panels.plain(settings)}")
    _own(result, ranked)
    panels.section("For other tools")
    names = [f"{target.title} {target.version}".strip() for target in ALL_TARGETS]
    tabs = st.tabs(names, key="target", bind="query-params", on_change="rerun")
    for tab, target in zip(tabs, ALL_TARGETS, strict=True):
        if tab.open:
            with tab:
                _target(result, ranked, target)


def _own(result: SearchResult, ranked: RankedPlan) -> None:
    left, right = st.columns([3, 1], vertical_alignment="center")
    left.markdown(
        "**plan.json** contains the plan, its estimate, and the complete model, cluster and workload."
        " `planner apply` runs it, `planner estimate` and `planner trace` read it, and it is refused on a machine it"
        " was not made for."
    )
    right.download_button(
        "Download plan.json",
        data=data.plan_file_text(result, ranked),
        file_name="plan.json",
        mime="application/json",
        icon=":material/download:",
        key="download_plan",
        on_click="ignore",
        width="stretch",
    )


def _target(result: SearchResult, ranked: RankedPlan, target: Target) -> None:
    try:
        done = data.exported(result, ranked, target)
    except PlannerError as error:
        panels.failure(error)
        return
    for label, lines, hue in (("not expressed", done.not_expressed, "orange"), ("also needed", done.needed, "blue")):
        for line in lines:
            st.markdown(f":{hue}-badge[{label}] {panels.plain(line)}")
    for line in done.notes:
        st.caption(panels.plain(line))
    left, right = st.columns([3, 1], vertical_alignment="center")
    left.markdown(f"`{panels.plain(done.file_name)}` · plan `{done.plan_hash}` · {len(done.settings)} settings")
    right.download_button(
        f"Download {done.file_name}",
        data=done.text,
        file_name=done.file_name,
        mime="text/plain",
        icon=":material/download:",
        key=f"download_{target.name}_{target.version}",
        on_click="ignore",
        width="stretch",
    )
    st.code(done.text, language=_language(done.file_name), line_numbers=True, height=520)


def _language(name: str) -> str:
    known = {"toml": "toml", "yaml": "yaml", "yml": "yaml", "json": "json", "py": "python"}
    return known.get(name.rpartition(".")[2], "bash")


show(data.question())
