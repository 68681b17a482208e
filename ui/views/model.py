"""What is trained, and how much work a step is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import streamlit as st

from planner.cases import SEQUENCES_PER_GPU
from topology.errors import PlannerError
from ui import data, panels, state, uploads
from ui.charts import model as charts

if TYPE_CHECKING:
    from simulator.model import Model


def upload() -> None:
    """Take an uploaded config.json in: on success it becomes the model of the question."""
    file = st.session_state.get("model_file")
    state.results().pop("model_error", None)
    if file is None:
        return
    try:
        st.session_state["model"] = uploads.keep("model", file.name, file.getvalue()).choice
    except PlannerError as error:
        state.results()["model_error"] = error


def show(question: state.Question) -> None:
    model = data.model(question.model)
    gpus = question.gpus or data.cluster(question.cluster, question.gpus, question.gpu).gpu_count
    batch = question.global_batch or SEQUENCES_PER_GPU * gpus
    panels.heading("Model and workload", _line(model))
    active = model.active_parameters
    panels.figures(
        [
            ("Parameters", f"{model.parameters / 1e9:.2f} B", "Exact, from the shapes of the config."),
            ("Used per token", f"{active / 1e9:.2f} B", "All of them, where there are no experts."),
            ("Layers", str(model.layers), f"{model.moe_layers} of them with experts" if model.moe else "all dense"),
            ("Heads", f"{model.heads} / {model.kv_heads}", "Query heads and key/value heads."),
            ("Hidden", f"{model.hidden:,}", f"Feed-forward {model.ffn:,}, vocabulary {model.vocab:,}."),
        ]
    )
    left, right = st.columns([3, 2], gap="large")
    with left:
        panels.section("Where the parameters are")
        panels.chart(charts.parameters(parts(model), dark=panels.dark()), key="parameters", alt="Parameters by part of the network")
    with right:
        panels.section("One step of training")
        st.dataframe(_workload_rows(model, question.seq_len, batch), hide_index=True, width="stretch")
    panels.assumed(model.assumed)
    panels.section("Add a model", "A Hugging Face config.json, read as plain data. Code it names is never imported.")
    st.file_uploader("config.json", type=["json"], key="model_file", on_change=upload, max_upload_size=1)
    error = state.results().get("model_error")
    if error is not None:
        panels.failure(error)


def _line(model: Model) -> str:
    from planner.tables import model_line  # noqa: PLC0415 - rich is not needed for the frame

    return panels.plain(model_line(model))


def parts(model: Model) -> list[dict[str, object]]:
    """Return parameters by part; they add up to `model.parameters`."""
    attention = model.layers * model.attention_parameters
    dense = model.dense_layers * (model.dense_layer_parameters - model.attention_parameters)
    experts = model.moe_layers * (model.moe_layer_parameters - model.attention_parameters)
    named = {
        "attention": attention,
        "feed-forward": dense,
        "experts and router": experts,
        "embedding": model.embedding_parameters,
        "output head": model.head_parameters,
    }
    rest = model.parameters - sum(named.values())
    return [{"part": name, "parameters": n} for name, n in {**named, "norms and rest": rest}.items() if n > 0]


def _workload_rows(model: Model, seq_len: int, batch: int) -> list[dict[str, str]]:
    tokens = seq_len * batch
    flops = 3 * model.forward_flops_per_token(seq_len)
    states = 16 * model.parameters
    rows = [
        ("Sequence", f"{seq_len:,} tokens"),
        ("Global batch", f"{batch:,} sequences"),
        ("Tokens a step", f"{tokens:,}"),
        ("Model FLOPs a token", f"{flops / 1e9:,.1f} GFLOP"),
        ("Model FLOPs a step", f"{flops * tokens / 1e15:,.1f} PFLOP"),
        ("Attention's share", f"{model.attention_flops_per_token(seq_len) / model.forward_flops_per_token(seq_len):.0%}"),
        ("Parameters, gradients, Adam", f"{states / 2**30:,.0f} GiB at 16 bytes a parameter"),
    ]
    return [{"what": what, "value": value} for what, value in rows]


show(data.question())
