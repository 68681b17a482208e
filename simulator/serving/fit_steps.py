"""Fit corrections of an engine's costs to samples of its steps.

The time of a decode step has a part by tokens and a part by cached keys. Both are modelled, and least squares of
relative errors find how much longer each takes: the first as additional time of each kernel, for each number of
answers, the second as a ratio. Prefill steps have a part by tokens and one by pairs of a query and a key. A step that
took as long to issue as to run says nothing of its kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import numpy as np

from simulator.config.model import Model
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.forward_pass import ForwardPass
from simulator.serving.measured import LaunchTime, MeasuredServing, MeasuredSteps, Ratio, scaled
from topology.cluster import Cluster
from topology.codec import convert
from topology.profile.profile import CollectiveSample
from topology.profile.samples import ServingSample

HOST_BOUND = 0.9  # share of a step's time for issuing it, above which the device waited for the host
LATEST_S = 1e-3  # most seconds by which one kernel takes longer or shorter than modelled
BOUNDS = (0.05, 20.0)  # smallest and largest ratio; beyond them a sample measures something else


@dataclass(frozen=True, slots=True)
class _Priced:
    """A sample with its modelled seconds: the part that grows with tokens, and attention."""

    tokens: float
    measured: float
    grows: float
    attention: float
    launches: float


def fit_serving(
    samples: Sequence[ServingSample], collectives: Sequence[CollectiveSample], cluster: Cluster, engine: str
) -> MeasuredServing | None:
    """Return the corrections from samples taken on GPUs of `cluster`; None without usable samples."""
    own = [sample for sample in samples if sample.engine == engine and not sample.invalid]
    reductions = tuple(sample for sample in collectives if sample.ranks <= cluster.gpu_count)
    steps = tuple(
        _steps([sample for sample in own if sample.tp == tp], cluster, engine, tp)
        for tp in sorted({sample.tp for sample in own})
        if tp <= cluster.gpu_count
    )
    if not steps and not reductions:
        return None
    return MeasuredServing(steps=steps, collectives=reductions)


def _steps(samples: list[ServingSample], cluster: Cluster, engine: str, tp: int) -> MeasuredSteps:
    first = "own" if any(sample.all_reduce == "own" for sample in samples) else "nccl"
    timed = [sample for sample in samples if sample.all_reduce in {first, ""}]
    costs: dict[str, ForwardPass] = {}
    for sample in timed:
        if str(sample.model.get("name")) not in costs:
            model = convert(sample.model, Model, where="a sample's model")
            costs[model.name] = ForwardPass(model, cluster, Deployment(engine=engine, pool=Pool(tp=tp)), Pool(tp=tp))
    found = _host(MeasuredSteps(tp=tp, reduced=_reduced(timed, costs)), timed, costs)
    decoded = [_priced(sample, costs, found) for sample in timed if sample.phase == "decode"]
    read = [_priced(sample, costs, found) for sample in timed if sample.phase == "prefill" and not _host_bound(sample)]
    low, cached = _decode_times(decoded)
    high, pair = _prefill_ratios(read)
    return replace(found, by_answers=tuple(low), by_tokens=tuple(high), cached_ratio=cached, pair_ratio=pair)


def _host_bound(sample: ServingSample) -> bool:
    return sample.issued_s >= HOST_BOUND * sample.queued_s


def _priced(sample: ServingSample, costs: dict[str, ForwardPass], found: MeasuredSteps) -> _Priced:
    """Return a step's measured and modelled device seconds, without all-reduces if these were timed themselves."""
    cost = costs[str(sample.model.get("name"))]
    batch, context = int(sample.batch), sample.context
    reads = sample.phase == "prefill"
    tokens = batch * context if reads else batch
    parts = cost.parts(
        prompt_tokens=tokens if reads else 0,
        pairs=batch * context * (context + 1) / 2 if reads else 0.0,
        sequences=0 if reads else batch,
        keys=0.0 if reads else float(batch * context),
        readers=batch,
    )
    attention = parts.pop("attention", 0.0)
    for outside in ("host", "launches"):
        parts.pop(outside, None)
    measured = (sample.queued_s or sample.seconds) - parts.pop("inputs", 0.0)
    if found.reduced and tokens <= found.reduced[-1].tokens:
        measured -= parts.pop("all_reduce", 0.0) * float(scaled(found.reduced, np.array([float(tokens)]))[0])
    return _Priced(float(tokens), measured, sum(parts.values()), attention, cost.launches.count)


def _decode_times(priced: list[_Priced]) -> tuple[list[LaunchTime], float]:
    """Return the additional time of a kernel for each number of answers, and the ratio of attention over cached
    keys.
    """
    batches = sorted({one.tokens for one in priced})
    if not priced:
        return [], 1.0
    rows = np.zeros((len(priced), len(batches) + 1))
    for row, one in zip(rows, priced, strict=True):
        row[batches.index(one.tokens)] = one.launches / one.measured
        row[-1] = one.attention / one.measured
    beyond = np.array([1 - one.grows / one.measured for one in priced])
    if len(priced) <= len(batches):  # with one context for each number of answers, attention keeps its modelled time
        rows, beyond = rows[:, :-1], beyond - rows[:, -1]
    found = np.linalg.lstsq(rows, beyond, rcond=None)[0]
    late = [LaunchTime(tokens, float(np.clip(found[i], -LATEST_S, LATEST_S))) for i, tokens in enumerate(batches)]
    return late, _bounded(found[-1]) if len(found) > len(batches) else 1.0


def _prefill_ratios(priced: list[_Priced]) -> tuple[list[Ratio], float]:
    """Return the ratio for each number of tokens read, and the ratio of attention of prompts."""
    if not priced:
        return [], 1.0
    pair = 1.0
    if len({one.tokens for one in priced}) > 1:
        shares = np.array([one.attention / one.measured for one in priced])  # short prompts say little about attention
        rows = np.column_stack(([one.grows / one.measured for one in priced], shares)) * shares[:, None]
        pair = _bounded(np.linalg.lstsq(rows, shares, rcond=None)[0][1])
    by_tokens: dict[float, list[float]] = {}
    for one in priced:
        by_tokens.setdefault(one.tokens, []).append((one.measured - pair * one.attention) / one.grows)
    return [Ratio(tokens, _bounded(fmean(ratios))) for tokens, ratios in sorted(by_tokens.items())], pair


def _reduced(samples: list[ServingSample], costs: dict[str, ForwardPass]) -> tuple[Ratio, ...]:
    """Return the ratios of measured to modelled all-reduces."""
    found: dict[float, list[float]] = {}
    for sample in samples:
        cost = costs[str(sample.model.get("name"))]
        if sample.phase == "all_reduce" and cost.reductions():
            priced = cost.reduced_s(round(sample.batch)) / cost.reductions()
            found.setdefault(sample.batch, []).append(sample.seconds / priced)
    return tuple(Ratio(tokens, _bounded(fmean(ratios))) for tokens, ratios in sorted(found.items()))


def _host(steps: MeasuredSteps, samples: list[ServingSample], costs: dict[str, ForwardPass]) -> MeasuredSteps:
    """Return `steps` with the host's seconds per step, sequence and launch: from loads if there were any, else from
    steps.
    """
    waits = [(sample.batch, sample.seconds) for sample in samples if sample.phase == "host"]
    if not waits:
        timed = [sample for sample in samples if sample.phase == "decode" and sample.queued_s]
        waits = [(sample.batch, max(0.0, sample.seconds - sample.queued_s)) for sample in timed]
    if waits:
        batches, seconds = np.array(waits).T
        several = len(set(batches)) > 1
        slope = max(0.0, float(np.polyfit(batches, seconds, 1)[0])) if several else 0.0
        step_s = max(0.0, float(median(seconds - slope * batches)))
        steps = replace(steps, host_sequence_s=slope, host_step_s=step_s)
    # The launches of a long step wait for room in the device's queue, so the fastest issue shows the host's time. What
    # is replayed from a graph shows nothing of launches.
    launches = [
        sample.issued_s / cost.launches.count
        for sample in samples
        if sample.phase == "prefill" and sample.issued_s
        for cost in (costs[str(sample.model.get("name"))],)
        if not cost.engine.captured_tokens(sample.batch * sample.context, round(sample.batch))
    ]
    return replace(steps, host_launch_s=min(launches, default=0.0))


def _bounded(ratio: float) -> float:
    return float(min(max(ratio, BOUNDS[0]), BOUNDS[1]))
