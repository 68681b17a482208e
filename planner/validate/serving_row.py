"""One row of serving points as its source wrote it, with types and ranges checked; what is not named here is not
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from topology.codec import JsonObject, convert

Degree = Annotated[int, Meta(ge=1, le=1024)]
Tokens = Annotated[float, Meta(ge=1, le=1 << 20)]
Requests = Annotated[int, Meta(ge=1, le=1 << 16)]
Milliseconds = Annotated[float, Meta(ge=1e-6, le=1e9)]
Rate = Annotated[float, Meta(ge=1e-6, le=1e9)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRow:
    """Lengths are tokens, times milliseconds, rates a second. None: the source does not say."""

    id: str = ""
    source_group: str = ""
    hardware: str = ""
    model: str = ""
    backend: str | None = None
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
    itl_ms: Milliseconds | None = None
    output_tok_s_per_gpu: Rate | None = None
    total_tok_s_per_gpu: Rate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Engines that only read prompts, or only write answers."""

    workers: Degree | None
    tp: Degree = 1
    pp: Degree = 1
    ep: Degree = 1
    dp_attention: Degree = 1


def read_row(data: Mapping[str, Any]) -> ServingRow:
    """Return a row. Raises BadInput, naming the field, for a value that cannot be."""
    return convert(dict(data), ServingRow, where=f"point {str(data.get('id', ''))[:80]}", others=True)


def side_of(row: ServingRow, name: str) -> Side:
    """Return the `prefill` or `decode` engines of a row that keeps them apart, in either of the sources' spellings."""
    if isinstance(row.disagg, dict):
        keys = {
            "workers": "num_workers",
            "tp": "tp_size",
            "pp": "pp_size",
            "ep": "moe_ep_size",
            "dp_attention": "attention_dp_size",
        }
        stated = {key: row.disagg.get(f"{name}_{theirs}") for key, theirs in keys.items()}
    else:
        stated = {key: getattr(row, f"{name}_{key}") for key in ("workers", "tp", "ep")}
        if getattr(row, f"{name}_dp_attention"):  # as SGLang counts: the attention of every rank of `tp` is its own
            stated |= {"dp_attention": stated["tp"], "tp": 1}
    known = {key: value for key, value in stated.items() if value is not None}
    return convert({"workers": None} | known, Side, where=f"point {row.id[:80]}: {name}")
