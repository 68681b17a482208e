"""Page: a configuration of another tool, dropped here: legal or not, what it costs, and what to change, as diffs of
it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import streamlit as st

from planner.configs.formats.configuration import CheckFlags
from planner.configs.formats.kinds import read_configuration
from planner.configs.serving_start import serving_engine
from simulator.config.estimate import Estimate
from topology import codec
from topology.codec import JsonObject
from topology.units import GIB, MIB, in_seconds
from ui import data, panels, rows
from ui.question import state, uploads

READ = (
    "torchtitan TOML or command, Megatron-LM command line or script, Megatron-Bridge recipe dump, DeepSpeed JSON,"
    " accelerate YAML, TrainingArguments, YAML of axolotl, LLaMA-Factory, torchtune, LitGPT, nanotron, GPT-NeoX or NeMo"
    " AutoModel, vllm serve or SGLang command"
)


def show(question: state.Inputs) -> None:
    st.caption(f"Bring the configuration that you have: {READ}. Nothing in it is run.")
    text, name = _given()
    left, right = st.columns([3, 1], vertical_alignment="bottom")
    launch = left.text_input(
        "The line that starts it, if there is one",
        key="check_launch",
        placeholder="torchrun --nproc-per-node 8 train.py ...",
        help="Its GPUs and the program's arguments count, too.",
    )
    if right.button("Check", key="check", type="primary", width="stretch", disabled=not text):
        st.session_state["checked"] = (text, name, launch)
    asked = st.session_state.get("checked")
    if asked is None:
        panels.empty(
            "Drop a file, or paste its text",
            "The answer says whether it is legal, whether it fits, how fast it is, and what to change in the file"
            " itself. What it leaves open of model, machine, GPUs, sequence and batch is the question's:"
            f" {panels.plain(question.model)} on {panels.plain(question.cluster)}.",
            icon=":material/fact_check:",
        )
        return
    named = named_by(*asked)
    found = data.checked(question, *asked, of_the_file=named - _chosen_instead(question, named))
    if found is not None:
        _answer(found, asked[1])


def _given() -> tuple[str, str]:
    """Return the text and the name of the configuration that was dropped or pasted."""
    file = st.file_uploader("A configuration", key="check_file", max_upload_size=uploads.MAX_BYTES // MIB)
    if file is not None:
        name = uploads.harmless(file.name)
        return uploads.text_of(name, file.getvalue()), name
    pasted = str(st.text_area("Or its text", key="check_text", height=140) or "")
    return pasted, f"pasted{_suffix(pasted)}"


def _chosen_instead(question: state.Inputs, named: frozenset[str]) -> frozenset[str]:
    """Return the settings of the question that replace those of the file: only those chosen here."""
    words = {"model": f"model {question.model}", "cluster": f"cluster {question.cluster}"}
    words |= {"gpus": f"{question.gpus} GPUs"} if question.gpus else {}
    offered = [key for key in words if key in named]
    if not offered:
        return frozenset()
    chosen = st.pills(
        "The file names its own; ask with the question's instead",
        offered,
        selection_mode="multi",
        key="check_instead",
        format_func=lambda key: panels.plain(words[key]),
        help="What is not chosen stays as the file says it.",
    )
    return frozenset(chosen)


def _suffix(text: str) -> str:
    """Return the ending that a file with this text would have, by which configurations are distinguished."""
    if text.lstrip().startswith("{"):
        return ".json"
    if serving_engine(text) or re.search(r"(?m)^[ \t]*--|^#!", text):
        return ".sh"
    return ".toml" if re.search(r"(?m)^[ \t]*\[[\w.]+\][ \t]*$", text) else ".yaml"


def _answer(found: JsonObject, name: str) -> None:
    version = f" {found['version']}" if found["version"] else ""
    about = f"{found['model']} on {found['cluster']}" if found.get("model") else ""
    panels.section(f"{name}: {found['framework']}{version}", panels.plain(about))
    serving = found.get("task") == "serve"
    for question in found.get("questions") or []:
        panels.finding("info", question["what"], [("say it with", question["remedy"])])
    for problem in found["problems"]:
        grade = {"illegal": "error", "legal-but-slow": "warning"}.get(str(problem["grade"]), "info")
        panels.finding(grade, problem["message"], [("nearest", ", ".join(map(str, problem.get("nearest", []))))])
    if found["unknown"]:
        st.markdown(f"**Not understood, and not counted:** {panels.plain(', '.join(found['unknown']))}")
    if found["estimate"] is None and found["legal"] is False:
        st.markdown(":red[:material/error:] **Not legal:** it would not run.")
    elif found["estimate"] is None:
        st.markdown("**No estimate** before that is known.")
    elif serving:
        _serving_figures(found["estimate"])
    else:
        estimate = codec.convert(found["estimate"], Estimate, where="estimate", others=True)
        panels.figures(panels.estimate_figures(estimate, step_label="Step as it is"))
    changes, best = found["changes"], found["best"]
    if changes:
        panels.section("The one change that gains most", panels.plain(changes[0]["what"]))
        each = "token" if serving else "step"
        st.markdown(f"{in_seconds(changes[0]['step_s'])} a {each}, {'fits' if changes[0]['fits'] else 'may not fit'}.")
        _diff(changes[0]["diff"], name, "change")
        if changes[1:]:
            others = [
                {"or": one["what"], each: in_seconds(one["step_s"]), "fits": "yes" if one["fits"] else "no"}
                for one in changes[1:]
            ]
            st.dataframe(others, hide_index=True, width="stretch")
    if best is not None and not serving:
        estimate = codec.convert(best["estimate"], Estimate, where="estimate", others=True)
        step, (held, verdict) = in_seconds(estimate.step_s.value), rows.memory_figure(estimate.memory)
        panels.section("The best plan", f"{step} a step; memory {held}, {verdict}. As a change of the same file.")
        _diff(best["diff"], name, "best")
    elif found.get("no_better"):
        st.markdown(panels.plain(found["no_better"]))
    panels.assumed(found.get("assumed") or [])


def _serving_figures(estimate: JsonObject) -> None:
    """Show what clients would see, from the document alone: a service elsewhere may have made it."""
    first, token, rate = (estimate[name] for name in ("ttft_s", "tpot_s", "output_tokens_per_s_per_gpu"))
    held, room = sum(estimate["memory"]["by_category"].values()) / GIB, estimate["memory"]["capacity_bytes"] / GIB
    panels.figures(
        [
            ("First token", in_seconds(first["value"]), "In the mean.", _range(first)),
            ("A token", in_seconds(token["value"]), "After the first, on average.", _range(token)),
            ("Tokens/s per GPU", f"{rate['value']:,.0f}", "Of answers.", ""),
            ("Memory of a GPU", f"{held:.0f} GiB", f"Of {room:.1f} GiB, with the KV cache.", ""),
        ]
    )


def _range(interval: Mapping[str, float]) -> str:
    return f"{in_seconds(interval['low'])} to {in_seconds(interval['high'])}"


def _diff(text: str, name: str, key: str) -> None:
    st.code(text, language="diff", wrap_lines=True)
    st.download_button(
        "Download as a patch",
        data=text,
        file_name=f"{Path(name).stem}-{key}.patch",
        icon=":material/download:",
        key=f"patch_{key}",
        on_click="ignore",
    )


def named_by(text: str, where: str, launch: str = "") -> frozenset[str]:
    """Return which fields of CheckFlags a configuration says itself. Raises BadInput for a text that cannot be read."""
    if serving_engine(text):
        return frozenset({"model", "seq_len", "global_batch"})
    found = read_configuration(text, where, CheckFlags(launch=launch))
    named = {name for name in ("model", "cluster", "gpus") if getattr(found, name) is not None}
    return frozenset(named | ({"seq_len", "global_batch"} - found.leaves_open))


show(data.question())
