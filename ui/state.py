"""What is asked, as the sidebar and the URL hold it.

Every widget of the question is tied to a query parameter, so that a link reproduces the page; a value that is the
default leaves the URL clean, and one that is not among the choices is ignored. Files are named by their content
(`ui.uploads`), plans by their degrees: no path ever comes out of a URL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import streamlit as st

from planner.frameworks import FRAMEWORKS
from simulator.hf_config import shipped_models
from simulator.overlap_sites import brief
from simulator.plan import Plan
from topology import codec
from topology.catalog import catalog_names
from topology.gpus import gpu_kinds
from ui import uploads

OBJECTIVES = ("time", "memory", "pareto")
LISTED = 10  # plans in an answer: enough for a scatter, few enough to read
AS_WRITTEN = "as the file says"
TOO_MANY = 1 << 17  # GPUs; the largest machines built have fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The flags of `planner suggest`, as the sidebar has them. `cluster` and `model` are names or kept uploads."""

    cluster: str = "dgx-h100"
    gpu: str | None = None
    gpus: int | None = None
    model: str = "llama3-8b"
    seq_len: int = 8192
    global_batch: int | None = None
    framework: str = "torchtitan"
    objective: str = "time"
    compile: bool = False

    @property
    def key(self) -> str:
        """Return what identifies the question."""
        return codec.fingerprint(asdict(self))

    @property
    def cluster_source(self) -> str:
        """Return what `planner suggest --cluster` would be given."""
        return source_of(self.cluster)

    @property
    def model_source(self) -> str:
        return source_of(self.model)

    def command(self) -> str:
        """Return the command line that gives the same answer in a terminal."""
        words = ["planner", "suggest", "--model", _file_name(self.model), "--cluster", _file_name(self.cluster)]
        words += ["--gpu", self.gpu] if self.gpu else []
        words += ["--gpus", str(self.gpus)] if self.gpus else []
        words += ["--seq-len", str(self.seq_len)]
        words += ["--global-batch", str(self.global_batch)] if self.global_batch else []
        words += ["--framework", self.framework]
        words += ["--objective", self.objective] if self.objective != "time" else []
        words += ["--compile"] if self.compile else []
        return " ".join(quote(word) for word in [*words, "--top", str(LISTED)])


def source_of(choice: str) -> str:
    """Return the name or the path that a choice stands for."""
    upload = uploads.find(choice)
    return str(upload.path) if upload else choice


def _file_name(choice: str) -> str:
    upload = uploads.find(choice)
    return upload.name if upload else choice


def sidebar() -> Question:
    """Draw the question and return it."""
    default = Question()
    with st.sidebar:
        st.caption("The question, on every page")
        clusters = [*catalog_names(), *uploads.choices("cluster")]
        cluster = linked_choice(
            "Cluster", clusters, default.cluster, "cluster", "A shipped machine, or a file you upload."
        )
        gpu = None
        if uploads.find(cluster):
            gpu = _choice(
                "GPU model",
                [AS_WRITTEN, *(kind.name for kind in gpu_kinds())],
                AS_WRITTEN,
                "gpu",
                "A topology matrix does not always say which GPUs it shows, and without their rates nothing is predicted.",
            )
        linked("gpus", _whole)
        gpus = st.number_input(
            "GPUs",
            min_value=1,
            max_value=TOO_MANY,
            value=None,
            step=1,
            placeholder="the whole cluster",
            key="gpus",
            help="A shipped cluster takes as many nodes as this needs.",
        )
        to_link("gpus", gpus, None)
        models = [*shipped_models(), *uploads.choices("model")]
        model = linked_choice("Model", models, default.model, "model", "A shipped model, or a config.json you upload.")
        left, right = st.columns(2)
        seq_len = left.number_input(
            "Sequence",
            min_value=128,
            max_value=1 << 22,
            value=default.seq_len,
            step=1024,
            key="seq",
            bind="query-params",
            help="Tokens in a sequence.",
        )
        batch = right.number_input(
            "Global batch",
            min_value=1,
            max_value=1 << 24,
            value=None,
            step=1,
            placeholder="8 a GPU",
            key="batch",
            bind="query-params",
            help="Sequences in an optimizer step.",
        )
        framework = _choice(
            "Framework", list(FRAMEWORKS), default.framework, "framework", "Its legality rules, and its kernels."
        )
        objective = _choice(
            "Best by",
            list(OBJECTIVES),
            default.objective,
            "objective",
            "Least step time, least memory, or all plans that no other beats in both.",
        )
        compiled = st.toggle("torch.compile", key="compile", bind="query-params")
    return Question(
        cluster=cluster,
        gpu=None if gpu == AS_WRITTEN else gpu,
        gpus=gpus,
        model=model,
        seq_len=seq_len,
        global_batch=batch,
        framework=framework,
        objective=objective,
        compile=compiled,
    )


def _choice(label: str, options: list[str], default: str, key: str, text: str) -> str:
    position = options.index(default) if default in options else 0
    chosen = st.selectbox(label, options, index=position, key=key, bind="query-params", help=text)
    return str(chosen)


def linked(key: str, read: Callable[[str], Any]) -> None:
    """Give a widget its first value from the link, where `read` finds one in it."""
    if key not in st.session_state and key in st.query_params:
        value = read(st.query_params[key])
        if value is not None:
            st.session_state[key] = value


def to_link(key: str, value: Any, default: Any) -> None:
    """Write a widget's value into the link; a default leaves the link clean."""
    text = None if value == default else str(value)
    if st.query_params.get(key) != text:
        if text is None:
            del st.query_params[key]
        else:
            st.query_params[key] = text


def linked_choice(label: str, options: list[str], default: str, key: str, text: str) -> str:
    """Return a choice that callbacks may set too: an upload, a ticked row. Streamlit's own binding forbids that."""
    linked(key, lambda word: word if word in options else None)
    if st.session_state.get(key, default) not in options:
        del st.session_state[key]
    position = options.index(default) if default in options else 0
    chosen = str(st.selectbox(label, options, index=position, key=key, help=text, persist_state="session"))
    to_link(key, chosen, options[position])
    return chosen


def _whole(word: str) -> int | None:
    return int(word) if word.isascii() and word.isdigit() and 0 < int(word[:9]) <= TOO_MANY else None


def plan_name(plan: Plan) -> str:
    """Return a plan in a few words that fit a URL and a menu: `fsdp256 cp2 mb1 selective-op reshard`."""
    degrees = {
        "dp": plan.dp_replicate,
        "fsdp": plan.dp_shard,
        "cp": plan.cp,
        "tp": plan.tp,
        "pp": plan.pp,
        "ep": plan.ep,
    }
    words = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1] or ["one-gpu"]
    if plan.zero_stage is not None:
        words.append(f"zero{plan.zero_stage}")
    if plan.pp > 1:
        words.append((plan.schedule or "1F1B") + (f"x{plan.virtual_stages}" if plan.virtual_stages > 1 else ""))
    words += ["no-sp"] if plan.tp > 1 and not plan.sequence_parallel else []
    words += [f"mb{plan.micro_batch_size}", plan.recompute]
    if plan.reshard_after_forward is not None and plan.dp_shard * plan.cp > 1:
        words.append("reshard" if plan.reshard_after_forward else "keep")
    words += [f"overlap-{brief(plan.tp_overlap)}"] if plan.tp_overlap != "none" else []
    if plan.layers_per_stage or plan.recompute_per_stage or plan.capacity_factor is not None:
        words.append(f"own-{codec.fingerprint(plan)[:4]}")  # layers or recomputation stage by stage: too long to spell
    return " ".join(words)


def example(name: str) -> Path | None:
    """Return a file of the repository's examples, or None where only the package is installed."""
    path = Path(__file__).resolve().parents[1] / "examples" / name
    return path if path.exists() else None


def results() -> dict[str, Any]:
    """Return what this session has worked out: results live here and inputs in the URL, nothing in globals."""
    kept: dict[str, Any] = st.session_state.setdefault("_results", {})
    return kept


def view(name: str) -> str:
    """Return the file of a page, as links between pages name it."""
    return str(Path(__file__).parent / "views" / f"{name}.py")
