"""One row of serving points as its source wrote it, with types and ranges checked. Other fields are not read, and named
where they could say how it was run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta

from simulator.config.hf_config import load_model, named_model
from simulator.config.hub_models import hub_table
from simulator.config.model import Model
from topology.catalog.clusters import cluster_from_case
from topology.catalog.gpus import gpu_kind
from topology.cluster import Cluster
from topology.codec import JsonObject, convert
from topology.errors import BadCluster, BadInput, BadModel, UserError

# Words that do not change a model's shapes.
_MODEL_NOISE = re.compile(r"[-_ ](instruct|hf|fp8|nvfp4|mxfp4|awq|chat|0528|v0\.1|99\.9|99)\b|^meta-|\bmeta-")
T = TypeVar("T")
_FIELD = re.compile(r"(.*) - at `\$\.([a-z_]+)")  # as msgspec says what is wrong, and where

# GPUs whose plain name is that of the cards sold first, which have less and slower memory than later ones, whose name
# says so: clouds have nvidia-tesla-a100 and nvidia-a100-80gb (Google), ND A100 v4 and NDm A100 v4 (Azure), p4d and p4de
# (AWS). The only source here that says "A100" ran on such cards: the jobs of argonne-lcf/LLM-Inference-Bench @4211f5d4
# vLLM/A100 mount home:eagle:grand, the file systems of Polaris, whose nodes have four A100 of 40 GB.
FIRST_SOLD = {"a100": "a100-sxm-40gb"}
STATES_MEMORY = re.compile(r"\d\s?GB", re.IGNORECASE)
Degree = Annotated[int, Meta(ge=1, le=1024)]
Tokens = Annotated[float, Meta(ge=1, le=1 << 20)]
Requests = Annotated[int, Meta(ge=1, le=1 << 16)]
Milliseconds = Annotated[float, Meta(ge=1e-6, le=1e9)]
Rate = Annotated[float, Meta(ge=1e-6, le=1e9)]


@cache
def _shipped() -> dict[str, str]:
    """Return models by their name on the Hub and by other names of the same shapes, both plain."""
    text = (resources.files("simulator") / "models" / "SOURCES.json").read_text("utf-8")
    names: dict[str, str] = {}
    for name, entry in json.loads(text).items():
        for spelled in (name, entry.get("hub", ""), *entry.get("same_shapes", ())):
            names[plain(spelled)] = name
    for row in hub_table().rows:
        for spelled in (*row.ids, *row.also):
            names.setdefault(plain(spelled), row.ids[0])
    for refused in hub_table().refused:  # loading them gives the reason
        for spelled in refused.ids:
            names.setdefault(plain(spelled), spelled)
    return names


def plain(name: str) -> str:
    """Return a model's name without owner, suffixes of format and training, and separators."""
    rest = name.lower().rsplit("/", 1)[-1]
    while (shorter := _MODEL_NOISE.sub("", rest)) != rest:
        rest = shorter
    return re.sub(r"[^a-z0-9.]", "", rest)


def model_of(name: str) -> Model:
    """Return the model for a source's name or a name on the Hub.

    Raises BadModel if there is none, and for a model with a part that is not modelled.
    """
    shipped = _shipped().get(plain(name))
    found = load_model(shipped) if shipped else named_model(name)
    if found is None:
        raise BadModel(f"model {name!r} is not among the known ones", remedy="give a config.json of it")
    return found


def cluster_of(hardware: str, gpus: int) -> Cluster:
    """Return a cluster with this number of the named GPUs, in nodes as they are sold. Raises UserError for an unknown
    GPU.
    """
    hardware = hardware[:200]
    said = re.sub(r"\([^)]{0,200}\)|nvidia|virtualized|geforce", " ", hardware, flags=re.IGNORECASE)
    words = re.sub(r"\b(\d{1,4}\s{0,4}GB( HBM\w{0,9})?|GPU|CTS|NVL72)\b|-(?=\d)|-CTS", " ", said, flags=re.IGNORECASE)
    plain = " ".join(words.replace("-", " ").split())
    first = "" if STATES_MEMORY.search(hardware) else FIRST_SOLD.get(plain.lower(), "")
    kind = _sized(said) or first or _gpu(plain)
    rack = 72 if "NVL72" in hardware.upper() else 8
    per_node = min(gpus, rack)
    return cluster_from_case({"gpu": kind, "gpus_per_node": per_node, "nodes": -(-gpus // per_node)})[0]


def _sized(said: str) -> str:
    """Return the GPU of a name that is known with the memory it states, such as one of 40 GB among larger ones."""
    try:
        return gpu_kind(" ".join(said.split())).name
    except UserError:
        return ""


def _gpu(words: str) -> str:
    tried = words.split()
    for count in range(len(tried), 0, -1):
        try:
            return gpu_kind(" ".join(tried[:count])).name
        except UserError:
            continue
    raise BadCluster(f"GPU {words!r} is not in the catalogue", remedy="add it to topology/catalog/gpus.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRow:
    """Lengths are tokens, times milliseconds, rates a second. None: not stated by the source."""

    id: str = ""
    source_group: str = ""
    hardware: str = ""
    model: str = ""
    backend: str | None = None
    date: str | None = None
    precision: str | None = None
    metric_kind: str = ""
    n_gpus: Degree | None = None
    tp: Degree | None = None
    pp: Degree | None = None
    ep: Degree | None = None
    moe_tp: Degree | None = None
    dp_attention: bool | Degree | None = None
    dp: Degree | None = None
    replicas: Degree | None = None
    disagg: bool | JsonObject | None = None
    spec_decode: str | None = None
    draft_tokens: Annotated[int, Meta(ge=1, le=16)] | None = None
    accepted_tokens: Annotated[float, Meta(ge=0, le=16)] | None = None
    max_num_seqs: Requests | None = None
    max_num_batched_tokens: Annotated[int, Meta(ge=16, le=1 << 20)] | None = None
    kv_cache: Literal["bfloat16", "float16", "float8"] | None = None
    scheduler_recv_interval: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    two_batch_overlap: bool | None = None
    isl: Tokens | None = None
    osl: Tokens | None = None
    concurrency: Requests | None = None
    batch_size: Requests | None = None
    request_rate_qps: Rate | None = None
    note: str | None = None
    prefill_tp: Degree | None = None
    prefill_ep: Degree | None = None
    prefill_dp_attention: bool | None = None
    prefill_workers: Degree | None = None
    decode_tp: Degree | None = None
    decode_ep: Degree | None = None
    decode_dp_attention: bool | None = None
    decode_workers: Degree | None = None
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    ttft_median_ms: Milliseconds | None = None
    tpot_median_ms: Milliseconds | None = None
    ttft_p95_ms: Milliseconds | None = None
    ttft_p99_ms: Milliseconds | None = None
    tpot_p95_ms: Milliseconds | None = None
    tpot_p99_ms: Milliseconds | None = None
    itl_ms: Milliseconds | None = None
    output_tok_s_per_gpu: Rate | None = None
    total_tok_s_per_gpu: Rate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Engines that only read prompts, or only generate answers."""

    workers: Degree | None
    batch: Degree | None = None  # requests of one rank of its attention
    tp: Degree = 1
    pp: Degree = 1
    ep: Degree = 1
    dp_attention: Degree = 1


# Fields that say where a row is from or repeat others, or figures that are not compared.
NOTED = frozenset({
    "source", "mode", "quality", "missing_fields", "total_tok_s", "output_tok_s", "req_s", "e2e_latency_ms",
    "prefill_gpus", "decode_gpus",
})  # fmt: skip


def unread(data: Mapping[str, Any]) -> list[str]:
    """Return the fields of a row that state something and that nothing reads."""
    known = NOTED | {field.name for field in fields(ServingRow)}
    return sorted(str(name)[:40] for name, value in data.items() if name not in known and value is not None)


def read_row(data: Mapping[str, Any]) -> ServingRow:
    """Return a row. Raises BadInput, naming the field, for a value that cannot be."""
    return _fields(dict(data), ServingRow, data, {})


def side_of(row: ServingRow, name: str) -> Side:
    """Return the `prefill` or `decode` engines of a row with separate pools, in either of two spellings of sources.

    One of them writes 0 for a degree that is not stated. Raises BadInput, naming the field.
    """
    if isinstance(row.disagg, dict):
        theirs = {
            "workers": f"{name}_num_workers",
            "tp": f"{name}_tp_size",
            "pp": f"{name}_pp_size",
            "ep": f"{name}_moe_ep_size",
            "dp_attention": f"{name}_attention_dp_size",
            "batch": f"{name}_batch_size",
        }
        stated = {key: row.disagg.get(field) or None for key, field in theirs.items()}
    else:
        theirs = {key: f"{name}_{key}" for key in ("workers", "tp", "ep")}
        stated = {key: getattr(row, field) for key, field in theirs.items()}
        if getattr(row, f"{name}_dp_attention"):  # in SGLang's terms: every rank of `tp` has its own attention
            stated |= {"dp_attention": stated["tp"], "tp": 1}
    known = {key: value for key, value in stated.items() if value is not None}
    return _fields({"workers": None} | known, Side, {"id": row.id}, theirs)


def _fields(values: JsonObject, kind: type[T], row: Mapping[str, Any], theirs: Mapping[str, str]) -> T:
    """Return `values` as a `kind`. Raises BadInput with the field of a row that cannot be, in the row's own word."""
    where = f"point {str(row.get('id', ''))[:80]}"
    try:
        return convert(values, kind, where=where, others=True)
    except BadInput as problem:
        found = _FIELD.match(problem.why)
        if found is None:
            raise
        field = theirs.get(found[2], found[2])
        said = str(values.get(found[2]))[:40]
        raise BadInput(
            f"{where}: field {field} is {said}: {found[1].strip().lower()}", remedy="mend the field, or leave it out"
        ) from problem
