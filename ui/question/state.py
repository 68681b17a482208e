"""The question, as set on the first page or in the sidebar, and stored in the URL.

Every widget of the question is bound to a query parameter, so that a link reproduces the page. Default values do not
appear in the URL, and values that are not among the choices are ignored. Clusters and models may also be typed, as the
command line takes them, but only what it reads without a file: uploaded files are named by their content
(`ui.question.uploads`) and plans by their degrees, so that no path is ever taken from a URL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

from planner.question.flags import Flags, flags_of_search
from planner.question.recipes import SEQ_LEN, default_length
from planner.requests.flag import shell_line
from planner.requests.training import Objective, Suggest
from simulator.config.hf_config import is_known, load_model, shipped_models
from simulator.legality.frameworks import FRAMEWORKS, framework_named
from simulator.serving.deployment import CACHE_BYTES, WEIGHT_BYTES
from simulator.serving.engine import engines
from topology import codec
from topology.catalog.cluster_file import is_said
from topology.catalog.clusters import catalog_names
from topology.catalog.gpus import gpu_kinds
from topology.errors import PlannerError
from ui.question import typed, uploads

OBJECTIVES = ("time", "memory", "pareto")
LISTED = 10  # plans in a result: enough for a scatter plot, few enough to read
FROM_FILE = "as in the file"
USUAL = "usual for the GPUs"  # the framework that the command line takes where none is named
AS_STORED = "as stored"  # weights in the format of the checkpoint
MAX_GPUS = 1 << 17  # more than the largest machines have
MAX_SEQ = 1 << 22
MAX_BATCH = 1 << 24
MAX_CLIENTS = 4096
MAX_TARGET_MS = 600_000
MAX_PRICE = 1000
SERVING_OBJECTIVES = ("throughput", "latency", "cost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The flags of `planner suggest`, as set in the sidebar. `cluster` and `model` are names or uploads."""

    cluster: str = "dgx-h100"
    gpu: str | None = None
    gpus: int | None = None
    model: str = "llama3-8b"
    seq_len: int = 8192
    global_batch: int | None = None
    framework: str | None = None
    objective: str = "time"
    compile: bool = False
    param_dtype: str | None = None

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

    def request(self, *, by_name: bool = False) -> Suggest:
        """Return what `planner suggest` is asked; `by_name` has uploads as the files are called that were uploaded."""
        return Suggest(
            model=file_name(self.model) if by_name else self.model_source,
            cluster=file_name(self.cluster) if by_name else self.cluster_source,
            gpu=self.gpu,
            gpus=None if self.gpus is None else str(self.gpus),
            seq_len=self.seq_len,
            global_batch=self.global_batch,
            framework=self.framework,
            objective=Objective(self.objective),
            compile_model=(self.compile and _compiles(self.framework)) or None,
            param_dtype=self.param_dtype,
            top=LISTED,
        )

    def flags(self) -> Flags:
        """Return the question as it is looked up."""
        return flags_of_search(self.request())

    def command(self) -> str:
        """Return the command line that gives the same result in a terminal."""
        return shell_line("suggest", self.request(by_name=True), always=("model", "cluster"))


def source_of(choice: str) -> str:
    """Return the name or path for a choice in the sidebar."""
    upload = uploads.find(choice)
    return str(upload.path) if upload else choice


def file_name(choice: str) -> str:
    """Return the name of a choice; for an upload the name of the uploaded file."""
    upload = uploads.find(choice)
    return upload.name if upload else choice


# --- the link
# ----------------------------------------------------------------------------------------------------------


def _count(most: int) -> Callable[[str], int | None]:
    def read(word: str) -> int | None:
        return int(word) if word.isascii() and word.isdigit() and 0 < int(word[:9]) <= most else None

    return read


def _price(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if 0 < value <= MAX_PRICE else None


def clusters() -> list[str]:
    return [*catalog_names(), *uploads.choices("cluster")]


def models() -> list[str]:
    return [*shipped_models(), *uploads.choices("model")]


def _gpu_models() -> list[str]:
    return [FROM_FILE, *(kind.name for kind in gpu_kinds())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A part of the question. `read` returns its value for a word of a link, None where there is none.

    Its widget has a `title` and `text` that explains it: a choice has `options`, and may be `typed` where other words
    are known, too; a number ends at `most` and shows `empty` where it is left open.
    """

    label: str
    read: Callable[[str], Any]
    title: str = ""
    text: str = ""
    default: Any = None
    options: Callable[[], list[str]] = list
    typed: bool = False
    most: int = 0
    empty: str = ""


def _chosen(
    label: str,
    title: str,
    options: Callable[[], list[str]],
    default: str,
    text: str,
    known: Callable[[str], bool] | None = None,
) -> Field:
    def read(word: str) -> str | None:
        return word if word in options() or (known is not None and known(word)) else None

    also = known is not None
    return Field(label=label, read=read, title=title, text=text, default=default, options=options, typed=also)


def _counted(label: str, title: str, most: int, empty: str, text: str, *, default: int | None = None) -> Field:
    return Field(label=label, read=_count(most), title=title, text=text, default=default, most=most, empty=empty)


_DEFAULT = Inputs()
_ALL = "Left open: all of the cluster. A cluster of the catalogue gets as many nodes as needed."
_LENGTH = f"Tokens in a sequence; left open: {SEQ_LEN:,}, or the model's own limit if that is less."
_CLUSTER = "A cluster of the catalogue, one you type (4x8xH100, p5.48xlarge), or a file you upload."
_MODEL = "A built-in model, one you type by its name on the Hub, or a config.json you upload."
_GPU = "A topology matrix does not always name its GPUs, and predictions need their rates."
_BATCH = "Sequences in an optimizer step; left open: a published recipe's."
_AIMS = "Least step time, least memory, or the Pareto front of both."
_SERVED = "Output tokens a GPU, whole answers, or their price."
_RULES = "Its rules for legal plans, and its kernels; usual: torchtitan, or one with float16 for GPUs without bfloat16."
_WEIGHTS = "Their format; as stored: the checkpoint's."
_LOOP = "A closed loop: each asks again when answered."
_RATE = "Poisson arrivals, instead of clients."
_MEAN = "On average."
FIELDS = {
    "cluster": _chosen("cluster", "Cluster", clusters, _DEFAULT.cluster, _CLUSTER, is_said),
    "gpu": _chosen("GPU model", "GPU model", _gpu_models, FROM_FILE, _GPU),
    "gpus": _counted("number of GPUs", "GPUs", MAX_GPUS, "all", _ALL),
    "model": _chosen("model", "Model", models, _DEFAULT.model, _MODEL, is_known),
    "seq": _counted("sequence length", "Sequence", MAX_SEQ, "", _LENGTH),
    "batch": _counted("global batch", "Global batch", MAX_BATCH, "a recipe's", _BATCH),
    "framework": _chosen("framework", "Framework", lambda: [USUAL, *FRAMEWORKS], USUAL, _RULES),
    "objective": _chosen("objective", "Objective", lambda: list(OBJECTIVES), _DEFAULT.objective, _AIMS),
    "compile": Field(label="torch.compile", default=False, read=lambda word: True if word == "true" else None),
    "plan": Field(label="plan", read=str),
    "isl": _counted("prompt length", "Prompt, tokens", MAX_SEQ, "", _MEAN, default=1024),
    "osl": _counted("answer length", "Answer, tokens", MAX_SEQ, "", _MEAN, default=256),
    "clients": _counted("number of clients", "Clients", MAX_CLIENTS, "8 a GPU", _LOOP),
    "rate": _counted("rate of requests", "Requests/s", MAX_CLIENTS, "none", _RATE),
    "engine": _chosen("engine", "Engine", lambda: list(engines()), "vllm", "Its scheduler, its limits, its host time."),
    "weights": _chosen("format of weights", "Weights", lambda: [AS_STORED, *WEIGHT_BYTES], AS_STORED, _WEIGHTS),
    "cache": _chosen(
        "format of the cache", "KV cache", lambda: list(CACHE_BYTES), "bfloat16", "The format of keys and values."
    ),
    "aim": _chosen("serving objective", "Objective", lambda: list(SERVING_OBJECTIVES), "throughput", _SERVED),
    "price": Field(label="price of a GPU", read=_price),
    "ttft": _counted("target of the first token", "First token, ms at most", MAX_TARGET_MS, "no target", _MEAN),
    "tpot": _counted("target of a token", "Further token, ms at most", MAX_TARGET_MS, "no target", _MEAN),
}


# words of a link, and the field of the question for each
_ASKED = {key: key for key in ("cluster", "gpu", "gpus", "model", "framework", "objective", "compile")}
_ASKED |= {"seq": "seq_len", "batch": "global_batch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unresolved:
    """A word of a link that is unknown here."""

    key: str
    label: str
    word: str


def follow_link() -> tuple[Unresolved, ...]:
    """Set the question to that of the URL if a link was opened or Back was pressed.

    Otherwise the URL is that of the browser at the user's last change: later changes by this program may not have
    arrived there, and are kept. Returns the words that are unknown here; the URL is then unchanged.
    """
    words, known = _words(), results().get("link")
    if words == known:
        return ()
    if known is not None and not _from_history():
        _show_link(known)
        return ()
    found = {key: FIELDS[key].read(word) for key, word in words.items()}
    unknown = tuple(
        Unresolved(key=key, label=FIELDS[key].label, word=words[key]) for key, value in found.items() if value is None
    )
    results()["link"] = None if unknown else words
    if not unknown:
        for key, field in FIELDS.items():
            st.session_state[key] = found.get(key, field.default)
    return unknown


def _from_history() -> bool:
    """Return whether Back or Forward was pressed."""
    context = get_script_run_ctx()
    return context is not None and context.is_history_navigation


def _show_link(words: Mapping[str, str]) -> None:
    """Write a link to the URL."""
    for key in FIELDS.keys() - words.keys():
        if key in st.query_params:
            del st.query_params[key]
    changed = {key: word for key, word in words.items() if st.query_params.get(key) != word}
    if changed:
        st.query_params.update(changed)


def _words() -> dict[str, str]:
    return {key: st.query_params[key] for key in FIELDS if key in st.query_params}


def write_link(**values: Any) -> None:
    """Write values to the URL, without those that are defaults. One change by the user is one step of Back."""
    texts = {key: _text(value) for key, value in values.items() if value != FIELDS[key].default}
    words = {key: word for key, word in (results().get("link") or _words()).items() if key not in values} | texts
    results()["link"] = {key: words[key] for key in FIELDS if key in words}
    _show_link(words)


def _text(value: object) -> str:
    return "true" if value is True else str(value)


def link() -> dict[str, str]:
    """Return the question as query parameters, for links between pages."""
    return dict(results().get("link") or {})


def choose_plan(name: str, *, best: bool) -> None:
    """Choose a plan of the answer, for all pages; `best` is what a link without a plan shows."""
    st.session_state["plan"] = name
    write_link(plan=None if best else name)


def choose_best() -> None:
    """Choose the best plan of the answer."""
    st.session_state["plan"] = None
    write_link(plan=None)


# --- the question
# ------------------------------------------------------------------------------------------------------


def ask(*, row: bool, training: bool) -> Inputs:
    """Draw the question and return it: with `row` the most important fields in a row on the page, the rest in the
    sidebar. Raises PlannerError if a typed cluster or model is not known.

    Without `training`, fields for training only are not drawn and keep their values.
    """
    if row:
        first, second, third, fourth = st.columns(4, gap="small")
    else:
        st.sidebar.caption("The question, for all pages")
        first = second = third = fourth = st.sidebar
    with first:
        asked: dict[str, Any] = {"model": choice("model")}
    with second:
        asked["cluster"] = choice("cluster")
        asked["gpu"] = choice("gpu") if uploads.find(asked["cluster"]) else FROM_FILE
    with third:
        asked["gpus"] = number("gpus")
    if training:
        with fourth:
            asked["batch"] = number("batch")
        with st.sidebar:
            asked["seq"] = number("seq", empty=f"{_length_of(asked['model']):,}")
            asked |= {key: choice(key) for key in ("framework", "objective")}
            compiles = _compiles(asked["framework"])
            ticked = st.toggle("torch.compile", key="compile", disabled=not compiles, persist_state="session")
            asked["compile"] = ticked and compiles
    for key in ("model", "cluster"):
        require_known(key, asked[key])
    write_link(**asked)
    return of_link({key: word for key, word in link().items() if FIELDS[key].read(word) is not None}) or Inputs()


def of_link(words: Mapping[str, str]) -> Inputs | None:
    """Return the question of a link; None where a word stands for nothing here."""
    found = {key: FIELDS[key].read(words[key]) if key in words else FIELDS[key].default for key in _ASKED}
    if any(key in words and value is None for key, value in found.items()):
        return None
    found |= {key: None for key, left_open in (("gpu", FROM_FILE), ("framework", USUAL)) if found[key] == left_open}
    found["seq"] = found["seq"] or _length_of(str(found["model"]))
    return Inputs(**{_ASKED[key]: value for key, value in found.items()})


def _compiles(framework: str | None) -> bool:
    """Whether the command line takes --compile of a framework, or of the usual one."""
    return framework in {None, USUAL} or framework_named(str(framework)).tools.compiles


def _length_of(choice: str) -> int:
    """Return the length of sequences that the command line takes for a model where none is stated."""
    if FIELDS["model"].read(choice) is None:
        return SEQ_LEN
    try:
        return default_length(load_model(source_of(choice)))
    except PlannerError:  # an upload that cannot be read, which its page says
        return SEQ_LEN


def choice(key: str) -> str:
    """Draw a choice that the link holds, and return it."""
    field = FIELDS[key]
    if not field.typed and st.session_state.get(key, field.default) not in field.options():
        st.session_state.pop(key)
    return chosen(key, field.default, title=field.title, key=key, persist_state="session")


def chosen(field: str, default: str, *, title: str, key: str, **kept: Any) -> str:
    """Draw a choice among those of a field, under a title and a key of its own, and return it."""
    about = FIELDS[field]
    others = (default, st.session_state.get(key))  # what was typed before stays among the choices
    options = list(dict.fromkeys([*about.options(), *(word for word in others if word)]))
    position, open_ended = options.index(default), about.typed
    shown = st.selectbox(
        title, options, index=position, key=key, help=about.text, accept_new_options=open_ended, **kept
    )
    return str(shown)


def require_known(key: str, word: str) -> None:
    """Raise PlannerError if a typed cluster or model is not known; no file is read for it."""
    if FIELDS[key].read(word) is None:
        raise typed.not_known(key, word)


def number(key: str, *, empty: str = "") -> int | None:
    """Draw a number that the link holds, and return it; None where it is left open, which is shown as `empty`."""
    field = FIELDS[key]
    value = st.number_input(
        field.title,
        min_value=1,
        max_value=field.most,
        value=field.default,
        step=1,
        placeholder=empty or field.empty or None,
        key=key,
        help=field.text,
        persist_state="session",
    )
    return None if value is None else int(value)


def price(label: str) -> float | None:
    """Draw the price of a GPU hour, which the link holds, and return it; None where it is not known."""
    value = st.number_input(
        label,
        min_value=0.01,
        max_value=float(MAX_PRICE),
        value=None,
        step=0.5,
        placeholder="not given",
        key="price",
        help="Of one GPU, in any currency.",
        persist_state="session",
    )
    return None if value is None else float(value)


def example(name: str) -> Path | None:
    """Return a file of the repository's examples, or None if only the package is installed."""
    path = Path(__file__).resolve().parents[2] / "examples" / name
    return path if path.exists() else None


def results() -> dict[str, Any]:
    """Return the results of this session. Inputs are in the URL, and nothing is in globals."""
    kept: dict[str, Any] = st.session_state.setdefault("_results", {})
    return kept


def view(name: str) -> str:
    """Return the file of a page, for links between pages."""
    return str(Path(__file__).parents[1] / "views" / f"{name}.py")
