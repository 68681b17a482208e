"""Published serving measurements, one per row, with their predictions by the serving simulation.

A row names hardware, model, engine, precision, degrees, lengths, and how clients asked (`metric_kind`); what it leaves
open is assumed and listed. A row that describes something the simulation does not cover is skipped with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.serving import sglang_of, trtllm_of, vllm_of
from planner.validate.makers_settings import as_makers_set
from planner.validate.offline_benchmark import as_benchmark_sets, is_benchmark, requests_sent
from planner.validate.serving_row import (
    FIRST_SOLD,
    STATES_MEMORY,
    ServingRow,
    cluster_of,
    model_of,
    read_row,
    side_of,
    unread,
)
from simulator.config.estimate import Interval
from simulator.config.model import Model
from simulator.serving.deployment import Deployment, Pool, Speculation
from simulator.serving.engine import OVERLAPS_BATCHES, engine_of
from simulator.serving.estimate import ServingEstimate, estimate_serving
from simulator.serving.kv_cache import cache_capacity
from simulator.serving.latency import Distribution, Latency
from simulator.serving.traffic import Lengths, Traffic, steady_requests
from topology.cluster import Cluster
from topology.codec import JsonObject
from topology.errors import Infeasible, UserError

QUANTITIES = {"ttft": "ttft_s", "tpot": "tpot_s", "throughput": "output_tokens_per_s_per_gpu"}
# Least length of requests as a share of the stated lengths: if a row states that share, and otherwise. Requests of
# exactly one length would begin and end together for ever, unlike those of real clients.
STATED, UNSAID = 0.8, 0.9
EACH = 10  # requests per client if a row does not state how many were sent
FULL = 0.95  # most of a GPU's memory that a deployment which ran can have used
_ENGINES = {
    "trtllm": "trtllm", "tensorrt": "trtllm", "trt": "trtllm", "dynamo-trt": "trtllm",
    "vllm": "vllm", "sglang": "sglang", "dynamo-sglang": "sglang",
}  # fmt: skip


class NotCovered(Exception):
    """The row measures something that the simulation does not model; the message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One row as a question."""

    model: Model
    cluster: Cluster
    deployment: Deployment
    traffic: Traffic
    assumed: tuple[str, ...] = ()


def validate_point(data: Mapping[str, Any]) -> JsonObject:
    """Return the row of a report: predicted, measured, signed errors, or why it was skipped."""
    nothing = dict.fromkeys(QUANTITIES)
    result: JsonObject = {
        "id": str(data.get("id", "")), "group": "", "measured": None, "predicted": None, "error": nothing,
        "held": nothing, "within_interval": None, "skipped": None, "assumed": [], "medians": [], "tails": {},
    }  # fmt: skip
    try:
        row = read_row(data)
        found = _measured(row)
        result |= {"group": _group(row), "measured": found, "medians": _medians(row)}
        point = read_point(row)
        estimate = estimate_serving(point.model, point.cluster, point.deployment, point.traffic)
    except (NotCovered, UserError, Infeasible) as problem:
        return result | {"skipped": str(problem).splitlines()[0]}
    compared = _compared(estimate, found, result["medians"])
    assumed = [*point.assumed, *(f"the field {name} is not read" for name in unread(data))]
    return result | compared | {"assumed": assumed, "tails": _tails(row, estimate.latency)}


def _group(row: ServingRow) -> str:
    """Return a key that is equal for rows of one source on one machine."""
    model = row.model.rsplit("/", 1)[-1]
    engine = next(iter((row.backend or "").split()), "?")
    return f"{row.source_group} | {row.hardware} | {model} | {engine}"


def _compared(estimate: ServingEstimate, found: Mapping[str, float | None], medians: Sequence[str]) -> JsonObject:
    latency, first, token = estimate.latency, estimate.ttft_s, estimate.tpot_s
    intervals = (
        _around_median(first, latency.ttft_s) if "ttft" in medians else first,
        _around_median(token, latency.tpot_s) if "tpot" in medians else token,
        estimate.output_tokens_per_s_per_gpu,
    )
    errors: dict[str, float | None] = {}
    held: dict[str, bool | None] = {}
    for (name, key), interval in zip(QUANTITIES.items(), intervals, strict=True):
        seen = found[key]
        errors[name] = interval.value / seen - 1 if seen else None
        held[name] = interval.low <= seen <= interval.high if seen else None
    known = [inside for inside in held.values() if inside is not None]
    return {
        "predicted": {key: interval.value for key, interval in zip(QUANTITIES.values(), intervals, strict=True)},
        "error": errors,
        "held": held,
        "within_interval": all(known) if known else None,
    }


def _tails(row: ServingRow, seen: Latency) -> dict[str, float]:
    """Return errors of the percentiles that a row states, by its own names for them."""
    times = {"ttft": seen.ttft_s, "tpot": seen.tpot_s}
    names = [(f"{time}_{part}_ms", getattr(times[time], part)) for time in times for part in ("p95", "p99")]
    return {name: 1e3 * found / said - 1 for name, found in names if (said := getattr(row, name))}


def _around_median(mean: Interval, seen: Distribution) -> Interval:
    """Return the range of a mean, moved to the median."""
    scale = seen.p50 / mean.value if mean.value else 1.0
    return replace(mean, value=seen.p50, low=mean.low * scale, high=mean.high * scale)


def _medians(row: ServingRow) -> list[str]:
    """Return the times of which a row states only the median."""
    named = {"ttft": (row.ttft_ms, row.ttft_median_ms), "tpot": (row.tpot_ms, row.tpot_median_ms)}
    return [name for name, (mean, median) in named.items() if mean is None and median is not None]


def _measured(row: ServingRow) -> dict[str, float | None]:
    """Return a row's measurements, in seconds and in output tokens per second and GPU."""
    throughput = row.output_tok_s_per_gpu
    # Of separated engines sources count output by the GPUs that write answers, but all tokens by all GPUs.
    if (throughput is None or row.disagg) and row.total_tok_s_per_gpu and row.isl and row.osl:
        throughput = row.total_tok_s_per_gpu * row.osl / (row.isl + row.osl)
    # In a closed loop the gap between streamed pieces, which may hold several tokens, is not the time of a token.
    between = row.tpot_ms or row.tpot_median_ms or (None if row.concurrency else row.itl_ms)
    first = row.ttft_ms or row.ttft_median_ms
    return {
        "ttft_s": first and first / 1e3,
        "tpot_s": between and between / 1e3,
        "output_tokens_per_s_per_gpu": throughput,
    }


def read_point(row: ServingRow) -> Point:
    """Return the question of a row. Raises NotCovered and UserError."""
    assumed: list[str] = []
    if row.isl is None or row.osl is None:
        raise NotCovered(f"{'isl' if row.isl is None else 'osl'} is not stated")
    model = model_of(row.model)
    deployment = replace(_deployment(row, model, assumed), speculation=_speculation(row, model))
    cluster = cluster_of(row.hardware, deployment.gpus)
    if cluster.slowest_kind.name in FIRST_SOLD.values() and not STATES_MEMORY.search(row.hardware):
        assumed.append(f"{cluster.slowest_kind.title}: the name alone is that of the cards sold first")
    deployment = as_makers_set(row, model, cluster, deployment, assumed)
    if row.kv_cache is None and deployment.kv_cache == "bfloat16":
        assumed.append("KV cache: 16 bits")
    if is_benchmark(row, deployment):
        deployment = as_benchmark_sets(row, model, cluster, deployment, assumed)
    if not deployment.max_num_seqs and not deployment.max_num_batched_tokens:
        assumed.append("limits of the scheduler: the engine's own")
    if not row.disagg and not cache_capacity(model, cluster, deployment, deployment.pool).tokens:
        deployment = replace(deployment, memory_fraction=FULL)
        assumed.append(f"memory: {FULL:.0%} of it, since what the engine takes by default has no room for a cache")
    traffic = _traffic(
        row, Lengths(mean=round(row.isl)), Lengths(mean=round(row.osl)), model, cluster, deployment, assumed
    )
    return Point(model=model, cluster=cluster, deployment=deployment, traffic=traffic, assumed=tuple(assumed))


def engine_named(backend: str, date: str = "") -> str:
    """Return our engine for a source's words for its software and its release, or an empty string.

    `date` is the day that it was measured on, year first.
    """
    word, release, date = _said(backend, date)
    found = next((_ENGINES[name] for name in sorted(_ENGINES, key=len, reverse=True) if word.startswith(name)), "")
    if found in {"vllm", "sglang"}:
        return vllm_of(release, date) if found == "vllm" else sglang_of(release, date)
    if found != "trtllm":
        return found
    # Releases 0.x.post are those of NVIDIA Dynamo, which has its own numbers and is newer than TensorRT-LLM 1.2's
    # first.
    dynamo = word.startswith("dynamo") or re.fullmatch(r"v?0[0-9.]*\.post[0-9]+", release)
    return "trtllm12" if dynamo else trtllm_of(release, date)


def _said(backend: str, date: str) -> tuple[str, str, str]:
    """Return the name, the release and the day in a source's words; a year in parentheses is a day."""
    word, said, *_ = [*(backend.lower().split() or [""]), ""]
    release = re.sub(r"-cu[0-9]+$", "", said.rstrip(","))
    year = re.fullmatch(r"\(([0-9]{4})\)", release)
    return (word, "", date or year[1]) if year else (word, release, date)


def _engine(row: ServingRow, assumed: list[str]) -> str:
    backend, date = row.backend or "", row.date or ""
    found = engine_named(backend, date)
    if not found:
        assumed.append(f"engine {row.backend!r}: scheduled as vLLM of the time")
    unsaid = not _said(backend, date)[1]
    if found == "vllm07" and unsaid:
        assumed.append("release of vLLM: one before 0.8, by the date")
    if found == "vllm013" and unsaid:
        assumed.append("release of vLLM: one before 0.14, which schedules while the GPU waits")
    if found == "sglang059" and unsaid:
        assumed.append("release of SGLang: one before 0.5.10, by the date")
    return found or vllm_of("", _said(backend, date)[2])


def _deployment(row: ServingRow, model: Model, assumed: list[str]) -> Deployment:
    weights, cache = _formats(row, model, assumed)
    if row.disagg:
        prefill, pool = _pool_apart(row, "prefill"), _pool_apart(row, "decode")
    else:
        prefill, pool = None, _pool(row, model, assumed)
    engine = _engine(row, assumed)
    program = engine_of(engine).program
    if row.two_batch_overlap and program not in OVERLAPS_BATCHES:
        raise NotCovered(f"two-batch overlap, which {engine_of(engine).title} is not known to have")
    return Deployment(
        engine=engine, pool=pool, prefill=prefill, weights=weights, kv_cache=cache,
        max_num_seqs=row.max_num_seqs or 0, max_num_batched_tokens=row.max_num_batched_tokens or 0,
        receive_every=row.scheduler_recv_interval or 1, two_batches=bool(row.two_batch_overlap),
    )  # fmt: skip


def _pool(row: ServingRow, model: Model, assumed: list[str]) -> Pool:
    """Return the pool of a row. Tensor and expert parallelism share ranks, although some sources multiply them."""
    if (row.n_gpus or 1) > 1 and not (row.tp or row.pp or row.ep or row.dp_attention or row.replicas):
        raise NotCovered(f"how {row.n_gpus} GPUs share the model is not stated")
    tp, pp, ep = row.tp or 1, row.pp or 1, (row.ep or 1) if model.moe else 1
    copies = row.dp or 1
    if copies > 1 and row.dp_attention is None:  # in vLLM's terms: ranks share experts, or the model is copied
        row = replace(row, dp_attention=copies) if ep > 1 else replace(row, replicas=copies * (row.replicas or 1))
    if row.dp_attention is True:  # in SGLang's terms: every rank of `tp` has its own attention
        tp, dp = 1, tp
    else:
        dp = int(row.dp_attention or 1)
    ranks, stated = tp * dp, dp
    if ep > 1 and ranks == ep * ep and row.moe_tp == ep:
        tp, dp, ranks = (ep, 1, ep) if dp == 1 else (1, ep, ep)
        assumed.append(f"attention and experts share {ep} GPUs: the row multiplies their degrees")
    if ep > ranks or ranks % ep:
        raise NotCovered(f"experts over {ep} ranks, where attention has {ranks}")
    engines = row.replicas or 1
    taken = engines * ranks * pp
    if row.n_gpus is not None and row.n_gpus < taken:
        raise NotCovered(f"the degrees take {taken} GPUs, the row states {row.n_gpus}")
    if row.n_gpus is not None and row.n_gpus > taken:
        assumed.append(f"one engine of {ranks * pp} GPUs, though the row states {row.n_gpus}")
    if row.replicas is None:
        engines = _sharing_clients(row, stated, assumed)
    return Pool(engines=engines, tp=tp, pp=pp, ep=ep, dp_attention=dp)


def _sharing_clients(row: ServingRow, dp: int, assumed: list[str]) -> int:
    """Return how many engines share the clients of a row that states the batch of one of its `dp` ranks."""
    batch = (row.batch_size or 0) * dp
    if not batch or not row.concurrency or row.concurrency % batch:
        return 1
    engines = row.concurrency // batch
    if engines > 1:
        assumed.append(f"{engines} engines: {row.concurrency} clients in batches of {batch}")
    return engines


def _clients_of_batches(row: ServingRow, assumed: list[str]) -> int:
    """Return how many clients fill the batches of the engines that generate answers; 0 if a row does not state them."""
    side = side_of(row, "decode")
    clients = (side.batch or 0) * side.dp_attention * (side.workers or 0)
    if clients:
        assumed.append(f"{clients} clients: as many as the batches of the engines that write answers hold")
    return clients


def _pool_apart(row: ServingRow, name: str) -> Pool:
    side = side_of(row, name)
    if side.workers is None:
        raise NotCovered("how many engines read prompts and how many write answers is not stated")
    ep = min(side.ep, side.tp * side.dp_attention)
    return Pool(engines=side.workers, tp=side.tp, pp=side.pp, ep=ep, dp_attention=side.dp_attention)


def _speculation(row: ServingRow, model: Model) -> Speculation | None:
    """Return a row's speculative decoding. Raises NotCovered if it does not state how many tokens are accepted."""
    if row.spec_decode in {"none", None, ""} and row.draft_tokens is None:
        return None
    if row.spec_decode not in {"mtp", None, ""}:
        raise NotCovered(f"speculative decoding ({row.spec_decode}) is not covered")
    missing = [name for name in ("draft_tokens", "accepted_tokens") if getattr(row, name) is None]
    if missing:
        raise NotCovered(f"speculative decoding (mtp) without {' and '.join(missing)}")
    if not model.multi_token_layers:
        raise NotCovered(f"speculative decoding (mtp) of {row.model}, which has no prediction layer")
    return Speculation(draft=row.draft_tokens or 1, accepted=row.accepted_tokens or 0.0)


def _formats(row: ServingRow, model: Model, assumed: list[str]) -> tuple[str, str]:
    """Return (weights, cache) by the words of `precision` and, where it has none, the model's own name."""
    words = f"{row.precision or ''} {row.model}".lower()
    if "mxfp4" in words or model.family == "gpt_oss":  # its checkpoints have only this format
        weights = "mxfp4"
    elif "fp4" in words:
        weights = "float4"
    elif "int4" in words:
        weights = "int4"
    elif "fp8" in words:
        weights = "float8"
    else:
        weights = "bfloat16"
        if not re.search(r"bf16|fp16", words):
            assumed.append("weights: 16 bits")
    # NVIDIA's own quantised checkpoints have an 8-bit cache (kv_cache_quant_algo in their hf_quant_config.json), and
    # those in nvfp4 are NVIDIA's.
    if row.kv_cache is not None:
        return weights, row.kv_cache
    quantised = weights == "float4" or (weights == "float8" and row.model.startswith("nvidia/"))
    if "kv" in words or quantised:
        return weights, "float8"
    return weights, "bfloat16"


def _traffic(
    row: ServingRow,
    prompt: Lengths,
    output: Lengths,
    model: Model,
    cluster: Cluster,
    deployment: Deployment,
    assumed: list[str],
) -> Traffic:
    """Return the traffic of clients, from `metric_kind` and concurrency or rate."""
    kind = row.metric_kind
    if "80-100" in kind:
        prompt, output = replace(prompt, low=STATED), replace(output, low=STATED)
    elif row.concurrency and "static" not in kind:
        prompt, output = replace(prompt, low=UNSAID), replace(output, low=UNSAID)
        assumed.append(f"lengths: {UNSAID:.0%} to 100% of those stated")
    base = Traffic(prompt=prompt, output=output)
    if row.request_rate_qps:
        assumed.append("arrivals: Poisson")
        return replace(base, request_rate=row.request_rate_qps, requests=500)
    if "static" in kind or kind.startswith(("latency of one static", "prefill latency")):
        batch = row.batch_size or 1
        return replace(base, concurrency=batch, requests=batch, static=True)
    if "saturated" in kind and row.max_num_seqs:
        clients = row.max_num_seqs * deployment.pool.engines * deployment.pool.dp_attention
        return replace(base, concurrency=clients, requests=steady_requests(clients), steady=True)
    if at_once := re.search(r"all ([0-9]{1,5}) requests at once", row.note or ""):
        sent = int(at_once[1])
        return replace(base, concurrency=sent, requests=sent)
    clients = row.concurrency or (_clients_of_batches(row, assumed) if row.disagg else 0)
    if clients:
        assumed.append(f"requests: {EACH} a client" + ("" if row.disagg else ", the first ones to the server"))
        return replace(base, concurrency=clients, requests=EACH * clients, first=not row.disagg)
    if is_benchmark(row, deployment):
        sent = requests_sent(prompt.mean, output.mean)
        assumed.append(f"requests: {sent} at once, as trtllm-bench's makers send it with such lengths")
        return replace(base, concurrency=sent, requests=sent)
    if kind.startswith("max throughput"):
        room = cache_capacity(model, cluster, deployment, deployment.pool, length=base.usual).tokens
        room *= deployment.pool.engines
        most = engine_of(deployment.engine).max_num_seqs * deployment.pool.engines
        running = max(1, min(most, room // (prompt.mean + output.mean)))
        return replace(base, concurrency=4 * running, requests=4 * running)
    raise NotCovered("neither concurrency nor a rate of requests is stated")
