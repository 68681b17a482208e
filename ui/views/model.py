"""Page: the model, and the work of one training step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import streamlit as st

from planner.explain.tables import model_line
from planner.question.recipes import default_batch
from topology.units import MIB
from ui import data, panels, rows
from ui.charts import detail as charts
from ui.question import state

if TYPE_CHECKING:
    from simulator.config.model import Model


def show(question: state.Inputs) -> None:
    model = data.model(question.model)
    gpus = question.gpus or data.cluster(question.cluster, question.gpus, question.gpu).gpu_count
    batch = question.global_batch or default_batch(model, question.seq_len, gpus)[0]
    st.caption(_line(model))
    active = model.active_parameters
    panels.figures(
        [
            ("Parameters", f"{model.parameters / 1e9:.2f} B", "Exact, from the shapes of the config."),
            ("Used per token", f"{active / 1e9:.2f} B", "All of them in a dense model."),
            ("Layers", str(model.layers), f"{model.moe_layers} of them with experts" if model.moe else "all dense"),
            ("Heads", f"{model.heads} / {model.kv_heads}", "Query heads and key/value heads."),
            ("Hidden", f"{model.hidden:,}", f"Feed-forward {model.ffn:,}, vocabulary {model.vocab:,}."),
        ]
    )
    left, right = st.columns([3, 2], gap="large")
    with left:
        panels.section("Where the parameters are")
        panels.chart(
            charts.parameters(rows.part_rows(model), dark=panels.dark()),
            key="parameters",
            alt=f"Parameters by part of the network; most are in {rows.largest_part(model)}",
        )
    with right:
        panels.section("One step of training")
        st.dataframe(rows.workload_rows(model, question.seq_len, batch), hide_index=True, width="stretch")
    panels.assumed(model.assumed)
    panels.section("Add a model", "A Hugging Face config.json, read as plain data. Code it names is never imported.")
    panels.file_field("config.json", "model_file", "model", ["json"], most_bytes=MIB)


def _line(model: Model) -> str:
    return panels.plain(model_line(model))


show(data.question())
