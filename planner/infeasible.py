"""When there is no answer: what is missing, which constraints are in conflict, and the cheapest ways out.

Nothing is recited: a constraint is in the conflict because without it there is an answer, and a relaxation is offered
because a plan was found under it. Memory decides, so questions are only screened for memory, over every legal plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.branch_and_bound import COUNTED, LEAVES, NODES
from planner.candidates import Bounds, Nodes, enumerate_nodes
from planner.costs import cost_table
from planner.frameworks import ANY, Framework
from planner.legality import check
from planner.scaling import scale_memory, with_gpus
from simulator.model import Model
from simulator.plan import Plan
from simulator.plan_columns import PlanColumns
from simulator.runtime import Runtime
from simulator.screening import Screening
from simulator.stages import COUNTED_OUT
from simulator.workload import Workload
from topology.cluster import Cluster
from topology.errors import Infeasible, UserError

GIB = 2.0**30
MOST_GPUS = 1 << 16
# Numbers of nodes tried one by one, for an answer and for a piece of advice; beyond, they double.
EVERY, EVERY_ADVISED = 512, 32
SHORTEST_SEQUENCE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Constrained:
    """A question with everything in it that could be given up."""

    screening: Screening
    framework: Framework
    bounds: Bounds
    gpus: int

    def gap(self) -> float:
        """Return bytes missing to the plan that needs least; negative when it fits, infinite when none is legal."""
        try:
            nodes = self.nodes()
        except UserError:
            return float("inf")  # a cluster or a description that does not come like this
        if not len(nodes):
            return float("inf")
        return leanest(self.screening, nodes, self.recomputes)[0] - self.screening.capacity_bytes

    @property
    def recomputes(self) -> tuple[str, ...]:
        return self.bounds.recomputes or self.framework.recomputes

    def nodes(self) -> Nodes:
        """Larger micro batches never need less memory, so only those of one sequence are looked at."""
        s = self.screening
        bounds = self.bounds if self.bounds.micro_batch else replace(self.bounds, max_micro_batch=1)
        return enumerate_nodes(
            s.model, s.cluster, s.workload, self.framework, gpus=self.gpus, runtime=s.runtime, bounds=bounds
        )

    def ask(self, **changes: Any) -> Constrained:
        """Return the question with fields of the screening changed."""
        return replace(self, screening=replace(self.screening, **changes))


def leanest(screening: Screening, nodes: Nodes, recomputes: tuple[str, ...]) -> tuple[float, Plan]:
    """Return what the leaf that needs least memory reserves on its worst rank, and that plan."""
    shared = screening.blocks(nodes.columns, recomputes)
    least, plan = np.inf, None
    unsure: list[tuple[float, PlanColumns, NDArray[np.intp]]] = []  # schedules to count out, with a lower bound
    for start in range(0, len(nodes), NODES):
        leaves, of_node = nodes.leaves(np.arange(start, min(start + NODES, len(nodes))))
        for begin in range(0, len(leaves), LEAVES):
            some, mine = leaves.take(slice(begin, begin + LEAVES)), of_node[begin : begin + LEAVES]
            reserved = screening.plans(some, shared, mine).reserved_bytes(at_least=True)
            counted = np.isin(some.schedule, COUNTED_OUT)
            row = int(np.argmin(np.where(counted, np.inf, reserved)))
            if not counted[row] and reserved[row] < least:
                least, plan = float(reserved[row]), some.plan(row)
            batches = np.array_split(np.nonzero(counted)[0], -(-len(mine) // COUNTED))
            unsure += [(float(reserved[few].min()), some.take(few), mine[few]) for few in batches if len(few)]
    for bound, some, mine in sorted(unsure, key=lambda part: part[0]):
        if bound >= least:
            break
        reserved = screening.plans(some, shared, mine).reserved_bytes()
        row = int(np.argmin(reserved))
        if reserved[row] < least:
            least, plan = float(reserved[row]), some.plan(row)
    assert plan is not None  # noqa: S101 - callers pass at least one node
    return least, plan


def nothing_legal(
    model: Model, cluster: Cluster, workload: Workload, framework: Framework, found: Nodes, *, gpus: int | None
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
    screening: Screening,
    framework: Framework,
    nodes: Nodes,
    bounds: Bounds,
    *,
    gpus: int | None = None,
    grow: Callable[[int], Cluster] | None = None,
) -> Infeasible:
    """Return the error for a question whose every legal plan needs more memory than there is.

    Says how many GiB are missing on the worst rank of the leanest plan, by what factor, which constraints are in
    conflict, and what each relaxation that was tried comes to.
    """
    model, cluster = screening.model, screening.cluster
    count = gpus if gpus is not None else cluster.gpu_count
    asked = Constrained(screening=screening, framework=framework, bounds=bounds, gpus=count)
    need, plan = leanest(screening, nodes, asked.recomputes)
    estimate = cost_table(model, cluster, screening.workload, [plan], screening.runtime, screening.profile).estimate(0)
    memory, have = estimate.memory, screening.capacity_bytes
    largest = sorted(memory.by_category.items(), key=lambda item: (-item[1], item[0]))[:3]
    offers = list(relaxations(asked, grow))
    kept = ", ".join(conflict(asked))
    return Infeasible(
        f"{model.name} does not fit on {count} GPUs: the leanest of {int(nodes.policies.sum())} legal plans needs "
        f"{need / GIB:.1f} GiB on its worst rank of {have / GIB:.1f} GiB",
        why=f"{(need - have) / GIB:.1f} GiB missing, a factor of {need / have:.2f}, with {describe(plan)}; largest: "
        + ", ".join(f"{name.replace('_', ' ')} {size / GIB:.1f} GiB" for name, size in largest)
        + f". In conflict: {kept}",
        remedy="relax one of: " + "; ".join(offers) if offers else "more GPUs or memory: nothing else tried is enough",
    )


def conflict(asked: Constrained) -> list[str]:
    """Return a smallest set of constraints that cannot hold together: give up any of them and there is a plan.

    One constraint after the other is given up for good unless that would make the question answerable; what must stay
    is in conflict. GPUs and their memory always are: with enough memory anything fits.
    """
    kept = []
    for words, relaxed in _given_up(asked):
        if relaxed.gap() > 0:
            asked = relaxed
        else:
            kept.append(words)
    s = asked.screening
    return [f"{asked.gpus} GPUs", f"{s.cluster.gpu_memory_bytes / GIB:.1f} GiB on each", *kept]


def _given_up(asked: Constrained) -> Iterator[tuple[str, Constrained]]:
    """Yield (words, the question without that constraint), each one as permissive as it can be made."""
    s = asked.screening
    if asked.bounds != Bounds():
        yield "the limits given by flags", replace(asked, bounds=Bounds())
    yield f"sequences of {s.workload.seq_len} tokens", asked.ask(workload=_with_sequence(s.workload, SHORTEST_SEQUENCE))
    yield f"parameters in {s.runtime.param_dtype}", asked.ask(runtime=replace(s.runtime, param_dtype="bfloat16"))
    yield f"the rules of {asked.framework.title}", replace(asked, framework=_most_sharding(asked.framework))


def _with_sequence(workload: Workload, length: int) -> Workload:
    return replace(workload, seq_len=min(length, workload.seq_len))


def _most_sharding(framework: Framework) -> Framework:
    """Return the framework with every ZeRO stage it has, or the rules all frameworks share."""
    if framework.searched_zero_stages:
        return replace(framework, searched_zero_stages=())
    return ANY if not framework.zero_stages and not framework.shard_degree else framework


def relaxations(asked: Constrained, grow: Callable[[int], Cluster] | None) -> Iterator[str]:
    """Yield flags, cheapest change first, under each of which a plan was found to fit."""
    s, bounds = asked.screening, asked.bounds
    if bounds.recomputes and replace(asked, bounds=replace(bounds, recomputes=None)).gap() <= 0:
        yield f"--recompute without {', '.join(bounds.recomputes)} only"
    if bounds.micro_batch and replace(asked, bounds=replace(bounds, micro_batch=None)).gap() <= 0:
        yield "--micro-batch 1"
    sharded = _most_sharding(asked.framework)
    if sharded is not asked.framework and replace(asked, framework=sharded).gap() <= 0:
        stages = ", ".join(map(str, sharded.zero_stages))
        yield f"sharding of parameters and gradients (ZeRO stages {stages}) instead of the optimizer alone"
    lighter = replace(s.runtime, param_dtype="bfloat16")
    if s.runtime.param_dtype == "float32" and asked.ask(runtime=lighter).gap() <= 0:
        yield "--param-dtype bfloat16"
    shorter = _shorter(lambda workload: asked.ask(workload=workload).gap() <= 0, s.workload)
    if shorter:
        yield f"--seq-len {shorter}"
    nearest = nearest_gpus(asked, grow)
    if nearest:
        yield f"--gpus {nearest} (the nearest count that fits)"
    gap = asked.gap()
    if np.isfinite(gap):
        gib = (s.cluster.gpu_memory_bytes + gap) / GIB
        if asked.ask(cluster=scale_memory(s.cluster, (gib * GIB + 2**20) / s.cluster.gpu_memory_bytes)).gap() <= 0:
            yield f"GPUs with {gib:.1f} GiB of memory"


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


# --- how many GPUs ----------------------------------------------------------------------------------------------------


def fewest_for_state(screening: Screening) -> int:
    """Return a number of GPUs below which nothing can fit: parameters, gradients and optimizer sharded over all."""
    spec, runtime = screening.operators.spec, screening.runtime
    param = {"float32": 4.0}.get(runtime.param_dtype, 2.0)
    master = 4.0 if spec.state.master_weights and param < 4 else 0.0
    moments = 0.0 if runtime.optimizer == "sgd" else 2.0 * (4.0 if master else param)
    return max(1, int(np.ceil(screening.model.parameters * (param + moments + master) / screening.capacity_bytes)))


def counts_of(cluster: Cluster, least: int, limit: int, tried: int) -> Iterator[int]:
    """Yield the numbers of GPUs a cluster of this kind comes in: up to a node, then whole nodes; doubled after `tried`."""
    size = len(cluster.groups[0].node.gpus)
    yield from range(max(1, least), size)
    nodes = first = max(1, -(-least // size))
    while nodes * size <= limit:
        yield nodes * size
        nodes = nodes + 1 if nodes < first + tried else 2 * nodes


def nearest_gpus(asked: Constrained, grow: Callable[[int], Cluster] | None) -> int | None:
    """Return a count above that of the question, in whole nodes, with a plan that fits; None beyond reach.

    The smallest one, unless it takes more than `EVERY_ADVISED` nodes more than the state alone.
    """
    cluster = asked.screening.cluster
    size = len(cluster.groups[0].node.gpus)
    if grow is None and cluster.fabric is None and asked.gpus >= size:
        return None  # one machine without a network: there is nothing to add
    least = max(asked.gpus + 1, fewest_for_state(asked.screening))
    found = _first_fit(asked, grow, least=least, tried=EVERY_ADVISED)
    return found[0] if found else None


def _first_fit(
    asked: Constrained,
    grow: Callable[[int], Cluster] | None,
    *,
    least: int,
    limit: int = MOST_GPUS,
    tried: int = EVERY,
) -> tuple[int, Cluster, str] | None:
    """Return the first count from `least` on with a plan that fits, its cluster, and why the count before failed."""
    cluster = asked.screening.cluster
    reason = ""

    def gap(n: int) -> tuple[float, Cluster | None]:
        try:
            on = grow(n) if grow else with_gpus(cluster, n)
        except (UserError, ValueError):
            return float("inf"), None  # a cluster that does not come in this size
        return replace(asked.ask(cluster=on), gpus=n).gap(), on

    for n in counts_of(cluster, least, limit, tried):
        missing, on = gap(n)
        if missing <= 0 and on is not None:
            return n, on, reason
        kind = "no legal plan" if missing == float("inf") else f"{missing / GIB:.1f} GiB missing on the worst rank"
        reason = f"{n} GPUs: {kind}"
    return None


def minimal_gpus(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    framework: Framework,
    runtime: Runtime,
    *,
    profile: Any = None,
    bounds: Bounds | None = None,
    grow: Callable[[int], Cluster] | None = None,
    limit: int = MOST_GPUS,
) -> tuple[int, Cluster, str]:
    """Return the smallest GPU count with a fitting plan, its cluster, and the proof in words.

    Every count is tried in turn: below the first of them the sharded state alone does not fit, up to a node each
    number, then whole nodes; beyond `EVERY` of those in doublings, and then it says so. Raises Infeasible beyond
    `limit` GPUs.
    """
    screening = Screening(model=model, cluster=cluster, workload=workload, runtime=runtime, profile=profile)
    asked = Constrained(screening=screening, framework=framework, bounds=bounds or Bounds(), gpus=cluster.gpu_count)
    least = fewest_for_state(screening)
    found = _first_fit(asked, grow, least=least, limit=limit)
    if found is None:
        raise Infeasible(
            f"{model.name} fits on no cluster of up to {limit} GPUs of this kind",
            why=f"the state alone needs {least} of them",
            remedy="larger GPUs, or fewer constraints",
        )
    count, on, reason = found
    said = [f"on fewer than {least} the sharded state alone does not fit"] if least > 1 else []
    size = len(cluster.groups[0].node.gpus)
    every = (
        "every count" if count <= (-(-least // size) + EVERY) * size else f"every count for {EVERY} nodes, then some,"
    )
    said += [f"{every} from {least} on was tried; {reason}"] if reason else []
    return count, on, "; ".join(said)
