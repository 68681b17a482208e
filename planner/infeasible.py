"""When there is no answer: what is missing, how much, and the smallest change that would give one.

The advice is computed, not recited: each relaxation is tried on the leanest plans (micro batch 1, full recompute) and
listed only with what it came to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.candidates import Bounds, Candidates, enumerate_candidates
from planner.costs import cost_table
from planner.frameworks import Framework
from planner.legality import check
from planner.scaling import with_gpus
from simulator.model import Model
from simulator.plan import Plan
from simulator.runtime import Runtime
from simulator.workload import Workload
from topology.cluster import Cluster
from topology.errors import Infeasible, UserError

if TYPE_CHECKING:
    from planner.search import Costs

GIB = 2.0**30
MOST_GPUS = 1 << 16
SHORTEST_SEQUENCE = 512


def nothing_legal(
    model: Model, cluster: Cluster, workload: Workload, framework: Framework, found: Candidates, *, gpus: int | None
) -> Infeasible:
    """Return the error for a question without a legal plan: which rules stood in the way, and one worked example."""
    count = gpus if gpus is not None else cluster.gpu_count
    plainest = Plan(dp_shard=count) if not framework.zero_stages else Plan(dp_replicate=count, zero_stage=0)
    example = next(iter(check(plainest, model, cluster, workload, framework, gpus=gpus)), None)
    counts = ", ".join(f"{name} {n}" for name, n in {**found.rejected, **found.pruned}.items())
    return Infeasible(
        f"no legal plan for {model.name} on {count} GPUs in {framework.title}",
        why=f"grids rejected by rule: {counts}" + (f". Data parallel alone: {example.message}" if example else ""),
        remedy=f"change --global-batch (now {workload.global_batch_size}), --gpus, or --framework",
    )


def nothing_fits(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    framework: Framework,
    runtime: Runtime,
    found: Candidates,
    costs: Costs,
    *,
    profile: Any = None,
    gpus: int | None = None,
    grow: Callable[[int], Cluster] | None = None,
) -> Infeasible:
    """Return the error for a question whose every legal plan needs more memory than there is.

    Says how many GiB are missing on the worst rank of the leanest plan, by what factor, the nearest GPU count that
    fits, and what each relaxation comes to.
    """
    row = int(np.argmin(costs.reserved_bytes))
    plan = found.columns.plan(row)
    memory = cost_table(model, cluster, workload, [plan], runtime, profile).estimate(0).memory
    need, have = float(costs.reserved_bytes[row]), float(memory.capacity_bytes)
    count = gpus if gpus is not None else cluster.gpu_count
    largest = sorted(memory.by_category.items(), key=lambda item: (-item[1], item[0]))[:3]

    def fits(on: Cluster, asked: Workload, with_runtime: Runtime, n: int) -> bool:
        return leanest_gap(model, on, asked, framework, with_runtime, n, profile=profile) <= 0

    offers = []
    nearest = nearest_gpus(lambda on, n: fits(on, workload, runtime, n), cluster, count, grow)
    if nearest:
        offers.append(f"--gpus {nearest} (the nearest count that fits)")
    shorter = _shorter(lambda asked: fits(cluster, asked, runtime, count), workload)
    if shorter:
        offers.append(f"--seq-len {shorter}")
    lighter = replace(runtime, param_dtype="bfloat16")
    if runtime.param_dtype == "float32" and fits(cluster, workload, lighter, count):
        offers.append("--param-dtype bfloat16")
    tried = "a shorter sequence and 16-bit parameters do not help" if not shorter else ""
    return Infeasible(
        f"{model.name} does not fit on {count} GPUs: the leanest of {len(found)} legal plans needs {need / GIB:.1f} GiB "
        f"on its worst rank of {have / GIB:.1f} GiB",
        why=f"{(need - have) / GIB:.1f} GiB missing, a factor of {need / have:.2f}, with {describe(plan)}; largest: "
        + ", ".join(f"{name.replace('_', ' ')} {size / GIB:.1f} GiB" for name, size in largest),
        remedy="relax one of: " + "; ".join(offers) if offers else f"more GPUs or memory; {tried}".rstrip("; "),
    )


def _shorter(fits: Callable[[Workload], bool], workload: Workload) -> int | None:
    """Return the longest halving of the sequence that fits, None when even the shortest does not."""
    lengths = []
    length = workload.seq_len // 2
    while length >= SHORTEST_SEQUENCE:
        lengths.append(length)
        length //= 2
    # If the shortest does not fit, the state alone is too large and no length will.
    if not lengths or not fits(replace(workload, seq_len=lengths[-1])):
        return None
    return next(n for n in lengths if fits(replace(workload, seq_len=n)))


def describe(plan: Plan) -> str:
    """Return a plan in a few words: degrees above one, micro batch and recompute."""
    degrees = [
        f"{label} {value}"
        for label, value in (
            ("dp", plan.dp_replicate),
            ("fsdp", plan.dp_shard),
            ("tp", plan.tp),
            ("cp", plan.cp),
            ("ep", plan.ep),
            ("pp", plan.pp),
        )
        if value > 1
    ] or ["one GPU"]
    zero = [f"ZeRO-{plan.zero_stage}"] if plan.zero_stage else []
    return ", ".join([*degrees, *zero, f"micro batch {plan.micro_batch_size}", f"recompute {plan.recompute}"])


def leanest_gap(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    framework: Framework,
    runtime: Runtime,
    gpus: int,
    *,
    profile: Any = None,
) -> float:
    """Return the bytes missing to the plan that needs least memory on `gpus` GPUs; negative when it fits.

    Micro batch 1, full recompute and no virtual stages are where memory is least, so only those are costed. Infinite
    when nothing is legal.
    """
    from planner.search import evaluate  # noqa: PLC0415 - the two files call each other, once

    lean = Bounds(max_micro_batch=1, max_virtual_stages=1, recomputes=("full",))
    found = enumerate_candidates(model, cluster, workload, framework, gpus=gpus, runtime=runtime, bounds=lean)
    if not len(found):
        return float("inf")
    costs = evaluate(found, model, cluster, workload, runtime, profile=profile)
    row = int(np.argmin(np.where(costs.fits, -1.0, costs.reserved_bytes)))
    if costs.fits[row]:
        return -1.0
    table = cost_table(model, cluster, workload, [found.columns.plan(row)], runtime, profile)
    return float(costs.reserved_bytes[row] - table.estimate(0).memory.capacity_bytes)


def nearest_gpus(
    fits: Callable[[Cluster, int], bool], cluster: Cluster, gpus: int, grow: Callable[[int], Cluster] | None
) -> int | None:
    """Return the smallest count above `gpus`, in whole nodes, for which `fits(cluster, count)`; None beyond reach."""
    size = len(cluster.groups[0].node.gpus)
    if grow is None and cluster.fabric is None and gpus >= size:
        return None  # one machine without a network: there is nothing to add

    def tried(n: int) -> bool:
        try:
            return fits(grow(n) if grow else with_gpus(cluster, n), n)
        except UserError:
            return False  # a cluster that does not come in this size

    low, high = max(1, gpus // size), max(1, gpus // size)
    while not tried(high * size) or high * size <= gpus:
        low, high = high, high * 2
        if high * size > MOST_GPUS:
            return None
    while high - low > max(1, high // 16):  # a sixteenth is fine enough for advice
        middle = (low + high) // 2
        low, high = (low, middle) if tried(middle * size) else (middle, high)
    return high * size


def minimal_gpus(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    framework: Framework,
    runtime: Runtime,
    *,
    profile: Any = None,
    grow: Callable[[int], Cluster] | None = None,
    limit: int = MOST_GPUS,
) -> tuple[int, Cluster, str]:
    """Return the smallest GPU count with a fitting plan, its cluster, and what bound the next smaller one.

    Parts of a node come first (divisors of its size), then whole nodes. Raises Infeasible beyond `limit` GPUs.
    """
    size = len(cluster.groups[0].node.gpus)
    parts = [n for n in range(1, size) if size % n == 0]
    reason = ""

    def at(n: int) -> Cluster:
        return grow(n) if grow else with_gpus(cluster, n)

    def gap(n: int) -> float:
        try:
            return leanest_gap(model, at(n), workload, framework, runtime, n, profile=profile)
        except UserError:
            return float("inf")

    def bound(n: int, missing: float) -> str:
        kind = "no legal plan" if missing == float("inf") else f"{missing / GIB:.1f} GiB missing on every rank"
        return f"{n} GPUs: {kind}"

    for n in parts:
        missing = gap(n)
        if missing <= 0:
            return n, at(n), reason
        reason = bound(n, missing)
    whole = nearest_gpus(lambda _, n: gap(n) <= 0, cluster, 0, at)
    if whole is None or whole > limit:
        raise Infeasible(
            f"{model.name} fits on no cluster of up to {limit} GPUs of this kind", why=reason, remedy="use larger GPUs"
        )
    if whole > size:
        below = whole - size
        reason = bound(below, gap(below))
    return whole, at(whole), reason
