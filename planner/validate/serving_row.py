"""One row of serving points as its source wrote it, with types and ranges checked. Other fields are not read, and named
where they could say how it was run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta

from topology.codec import JsonObject, convert
from topology.errors import BadInput

T = TypeVar("T")
_FIELD = re.compile(r"(.*) - at `\$\.([a-z_]+)")  # as msgspec says what is wrong, and where

Degree = Annotated[int, Meta(ge=1, le=1024)]
Tokens = Annotated[float, Meta(ge=1, le=1 << 20)]
Requests = Annotated[int, Meta(ge=1, le=1 << 16)]
Milliseconds = Annotated[float, Meta(ge=1e-6, le=1e9)]
Rate = Annotated[float, Meta(ge=1e-6, le=1e9)]


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
    "source", "mode", "quality", "note", "missing_fields", "total_tok_s", "output_tok_s", "req_s", "e2e_latency_ms",
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
