"""The question, as set in the sidebar and stored in the URL.

Every widget of the question is bound to a query parameter, so that a link reproduces the page. Default values do not
appear in the URL, and values that are not among the choices are ignored. Uploaded files are named by their content
(`ui.uploads`) and plans by their degrees, so that no path is ever taken from a URL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import streamlit as st

from planner.question.flags import Flags
from simulator.config.hf_config import shipped_models
from simulator.config.overlap_sites import tp_overlap_slug
from simulator.config.plan import Plan
from simulator.legality.frameworks import FRAMEWORKS
from topology import codec
from topology.catalog.clusters import catalog_names
from topology.catalog.gpus import gpu_kinds
from ui import uploads

OBJECTIVES = ("time", "memory", "pareto")
LISTED = 10  # plans in a result: enough for a scatter plot, few enough to read
FROM_FILE = "as in the file"
MAX_GPUS = 1 << 17  # more than the largest machines have


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The flags of `planner suggest`, as set in the sidebar. `cluster` and `model` are names or uploads."""

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
        """Return a fingerprint of the question."""
        return codec.fingerprint(asdict(self))

    @property
    def cluster_source(self) -> str:
        """Return the argument of `planner suggest --cluster`."""
        return source_of(self.cluster)

    @property
    def model_source(self) -> str:
        return source_of(self.model)

    def flags(self) -> Flags:
        """Return them as `planner suggest` states them."""
        return Flags(
            model=self.model_source,
            cluster=self.cluster_source,
            gpu=self.gpu,
            gpus=None if self.gpus is None else (self.gpus,),
            seq_len=self.seq_len,
            global_batch=self.global_batch,
            runtime={"compile": self.compile or None, "param_dtype": None},
        )

    def command(self) -> str:
        """Return the command line that gives the same result in a terminal."""
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
    """Return the name or path that a choice in the sidebar stands for."""
    upload = uploads.find(choice)
    return str(upload.path) if upload else choice


def _file_name(choice: str) -> str:
    upload = uploads.find(choice)
    return upload.name if upload else choice


def sidebar() -> Inputs:
    """Draw the question and return it."""
    default = Inputs()
    with st.sidebar:
        st.caption("The question, for all pages")
        clusters = [*catalog_names(), *uploads.choices("cluster")]
        cluster = linked_choice(
            "Cluster", clusters, default.cluster, "cluster", "A cluster of the catalogue, or a file you upload."
        )
        gpu = None
        if uploads.find(cluster):
            gpu = _choice(
                "GPU model",
                [FROM_FILE, *(kind.name for kind in gpu_kinds())],
                FROM_FILE,
                "gpu",
                "A topology matrix does not always name its GPUs, and predictions need their rates.",
            )
        linked("gpus", _parse_gpus)
        gpus = st.number_input(
            "GPUs",
            min_value=1,
            max_value=MAX_GPUS,
            value=None,
            step=1,
            placeholder="the whole cluster",
            key="gpus",
            help="A cluster of the catalogue gets as many nodes as needed.",
        )
        to_link("gpus", gpus, None)
        models = [*shipped_models(), *uploads.choices("model")]
        model = linked_choice("Model", models, default.model, "model", "A built-in model, or a config.json you upload.")
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
            "Framework", list(FRAMEWORKS), default.framework, "framework", "Its rules for legal plans, and its kernels."
        )
        objective = _choice(
            "Best by",
            list(OBJECTIVES),
            default.objective,
            "objective",
            "Least step time, least memory, or the Pareto front of both.",
        )
        compiled = st.toggle("torch.compile", key="compile", bind="query-params")
    return Inputs(
        cluster=cluster,
        gpu=None if gpu == FROM_FILE else gpu,
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
    """Set the initial value of a widget from the URL, if `read` accepts the value there."""
    if key not in st.session_state and key in st.query_params:
        value = read(st.query_params[key])
        if value is not None:
            st.session_state[key] = value


def to_link(key: str, value: Any, default: Any) -> None:
    """Write the value of a widget to the URL, unless it is the default."""
    text = None if value == default else str(value)
    if st.query_params.get(key) != text:
        if text is None:
            del st.query_params[key]
        else:
            st.query_params[key] = text


def linked_choice(label: str, options: list[str], default: str, key: str, text: str) -> str:
    """Return the choice of a menu that callbacks may set as well, which Streamlit's own URL binding forbids."""
    linked(key, lambda word: word if word in options else None)
    if st.session_state.get(key, default) not in options:
        del st.session_state[key]
    position = options.index(default) if default in options else 0
    chosen = str(st.selectbox(label, options, index=position, key=key, help=text, persist_state="session"))
    to_link(key, chosen, options[position])
    return chosen


def _parse_gpus(word: str) -> int | None:
    return int(word) if word.isascii() and word.isdigit() and 0 < int(word[:9]) <= MAX_GPUS else None


def plan_name(plan: Plan) -> str:
    """Return a short name of a plan for URLs and menus: `fsdp256 cp2 mb1 selective-op reshard`."""
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
    words += [f"overlap-{tp_overlap_slug(plan.tp_overlap)}"] if plan.tp_overlap != "none" else []
    if plan.layers_per_stage or plan.recompute_per_stage or plan.capacity_factor is not None:
        words.append(f"own-{codec.fingerprint(plan)[:4]}")  # layers or recompute modes by stage would be too long
    return " ".join(words)


def example(name: str) -> Path | None:
    """Return a file of the repository's examples, or None if only the package is installed."""
    path = Path(__file__).resolve().parents[1] / "examples" / name
    return path if path.exists() else None


def results() -> dict[str, Any]:
    """Return the results of this session. Inputs are in the URL, and nothing is in globals."""
    kept: dict[str, Any] = st.session_state.setdefault("_results", {})
    return kept


def view(name: str) -> str:
    """Return the file of a page, for links between pages."""
    return str(Path(__file__).parent / "views" / f"{name}.py")
