"""Explain an infeasible question: what is missing, which constraints conflict, and which relaxations help.

Everything is tested: a constraint is named because there is a plan without it, and a relaxation because a plan was
found with it. Memory decides, so questions are screened for memory only, over all legal plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.io.figures import gib_text, gpus_text
from planner.io.plan_words import plan_in_words
from planner.question.question import Question
from planner.search.deadline import over
from planner.search.plan_space.candidates import Bounds, Nodes, enumerate_nodes
from planner.search.plan_space.judged import fastest_fitting
from planner.search.plan_space.screened import NODES_AT_ONCE, PLANS_AT_ONCE, Screened
from planner.search.rule_words import rejected_words
from planner.search.savers import more_savers, paged_instead
from planner.search.sizes import (
    MAX_GPUS,
    MAX_NODES_ADVISED,
    MAX_NODES_TRIED,
    gpu_counts,
    min_gpus_for_state,
    most_gpus,
    said_with_nodes,
    with_nodes_for,
)
from simulator.bounds.screening import Screening
from simulator.config.plan import PLAN_FIELDS, Plan
from simulator.config.workload import Workload
from simulator.kernels.low_precision import has_no_bfloat16
from simulator.legality.frameworks import ANY, Framework
from simulator.memory.estimate import with_replay
from simulator.memory.plan_memory import PlanMemory, Replays
from simulator.runtimes.library import compiles
from topology.cluster import Cluster
from topology.errors import Infeasible, Unproved, UserError
from topology.rates.reach import reach
from topology.rates.scaling import scale_memory, with_gpus
from topology.units import MIB, in_gib, two_digits

SHORTEST_SEQUENCE = 512
MOST_REPLAYED = 4  # plans with the lowest bounds of their memory, among which the one that needs least is searched
RATE_SLACK = 0.05  # of rates in advice, which are said to be about so much
CUT_SHORT = " (the time limit ended before more was tried)"
LEAST_ADVICE_S = 1.0  # seconds for finding relaxations if the search has used up its time limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstrainedQuestion:
    """A question with all its constraints, which can be relaxed one by one."""

    question: Question
    bounds: Bounds

    @property
    def screening(self) -> Screening:
        return Screening(self.question)

    def gap(self, deadline: float | None = None) -> float:
        """Return the smallest number of bytes that a plan lacks; at most 0 if one fits, infinite if none is legal.

        With a deadline, only plans examined by then count.
        """
        try:
            nodes = self.nodes()
        except UserError:
            return float("inf")  # the cluster does not exist in this form
        if not len(nodes):
            return float("inf")
        screening, least = self.screening, float("inf")
        for bound, plan in leanest_plans(screening, nodes, self.recomputes):
            if bound > screening.capacity_bytes or (least < float("inf") and over(deadline)):
                return min(least, bound - screening.capacity_bytes)
            held = PlanMemory(self.question, plan)
            if held.fits:
                return 0.0
            least = min(least, held.most_missing_bytes)
        return least

    def best_plan(
        self, deadline: float | None = None, replays: Replays | None = None, slack: float = 0.0
    ) -> Plan | None:
        """Return the fastest plan that surely fits, else that may, to `slack`, of those examined by the deadline."""
        nodes = enumerate_nodes(self.question, bounds=self.bounds)
        if not len(nodes):
            return None
        screened = Screened(self.screening, nodes, self.recomputes, deadline=deadline)
        return fastest_fitting(screened, replays or Replays(self.question), deadline, slack)

    def best_rate(self, deadline: float | None = None) -> tuple[float, float]:
        """Return about `best_plan`'s tokens per second and GPU, and bytes of host memory for each GPU; 0 if none."""
        question, replays = self.question, Replays(self.question)
        if (best := self.best_plan(deadline, replays, RATE_SLACK)) is None:
            return 0.0, 0.0
        found = question.estimate([best])
        step_s = float(found.step_s[0]) + replays[best].full_s
        return question.workload.tokens_per_step / question.count / step_s, found.estimate(0).memory.host_bytes

    @property
    def recomputes(self) -> tuple[str, ...]:
        return self.bounds.words("recompute") or self.question.framework.recomputes

    def nodes(self) -> Nodes:
        """Return the nodes with micro batches of one sequence, since larger ones never need less memory; if none is
        legal, nodes with any micro batch.
        """
        if not self.bounds.spans("micro_batch_size"):
            nodes = enumerate_nodes(self.question, bounds=replace(self.bounds, max_micro_batch=1))
            if len(nodes):
                return nodes
        return enumerate_nodes(self.question, bounds=self.bounds)

    def ask(self, **changes: Any) -> ConstrainedQuestion:
        """Return the same question with fields changed."""
        return replace(self, question=replace(self.question, **changes))


def least_memory_plan(screening: Screening, nodes: Nodes, recomputes: tuple[str, ...]) -> tuple[Plan, PlanMemory]:
    """Return the plan that needs least memory, and the bytes its allocators hold."""
    leanest = leanest_plans(screening, nodes, recomputes)
    best = PlanMemory(screening.scenario, leanest[0][1])
    for bound, plan in leanest[1:]:
        if bound >= best.peak_bytes:
            break
        held = PlanMemory(screening.scenario, plan)
        if held.reserved_bytes < best.reserved_bytes:
            best = held
    return best.plan, best


def leanest_plans(screening: Screening, nodes: Nodes, recomputes: tuple[str, ...]) -> list[tuple[float, Plan]]:
    """Return the plans with the lowest bounds of allocated bytes, lowest first."""
    shared = screening.blocks(nodes.columns, recomputes)
    leanest: list[tuple[float, Plan]] = []
    for start in range(0, len(nodes), NODES_AT_ONCE):
        leaves, of_node = nodes.leaves(np.arange(start, min(start + NODES_AT_ONCE, len(nodes))))
        for begin in range(0, len(leaves), PLANS_AT_ONCE):
            some, some_nodes = leaves.take(slice(begin, begin + PLANS_AT_ONCE)), of_node[begin : begin + PLANS_AT_ONCE]
            allocated = screening.plans(some, shared, some_nodes).allocated_and_reserved_bytes()[:, 0]
            rows = np.argsort(allocated, kind="stable")[:MOST_REPLAYED]
            leanest += [(float(allocated[row]), some.plan(int(row))) for row in rows]
    return sorted(leanest, key=lambda one: one[0])[:MOST_REPLAYED]


def no_legal_plan(question: Question, found: Nodes, ways: Sequence[str], deadline: float | None = None) -> Infeasible:
    """Return the error for a question without a legal plan: the broken rules, one example, and the `ways` in which
    there is a plan. All of them were tried unless the `deadline` has passed.
    """
    count, framework = question.count, question.framework
    if reason := question.runtime.not_modelled:
        return Infeasible(reason, remedy=question.runtime.modelled_instead)
    reached = reach(question.cluster)
    if count > reached.gpus:
        return Infeasible(
            f"a plan of {count} GPUs cannot run on {question.cluster.name}",
            why=reached.why,
            remedy=f"--gpus {reached.gpus}"
            if reached.gpus > 0
            else "plan for GPUs without MIG: choose them, or a catalogue cluster",
        )
    plainest = Plan(dp_shard=count) if not framework.zero_stages else Plan(dp_replicate=count, zero_stage=0)
    example = next(iter(question.problems(plainest)), None)
    gpu = question.cluster.slowest_kind
    if example and question.runtime.compute_dtype == "float16" and has_no_bfloat16(gpu):
        example = replace(example, message=f"{example.message}, and {gpu.name} no tensor cores for bfloat16")
    counts = ", ".join(f"{why} ({n:,})" for why, n in rejected_words({**found.rejected, **found.pruned}).items())
    return Infeasible(
        f"no legal plan for {question.model.name} on {gpus_text(count)} in {framework.title}",
        why=f"combinations of degrees rejected: {counts}"
        + (f". Data parallel alone: {example.message}" if example else ""),
        remedy=(
            "; or ".join(ways)
            if ways
            else "another model, cluster or framework: no change of the batch, the sequence, the precision or the"
            " number of GPUs by itself that was tried gives a plan"
        )
        + (CUT_SHORT if over(deadline) else ""),
    )


def no_fitting_plan(
    question: Question,
    nodes: Nodes,
    bounds: Bounds,
    *,
    grow: Callable[[int], Cluster] | None = None,
    deadline: float | None = None,
) -> Infeasible:
    """Return the error for a question all of whose legal plans need too much memory.

    It states how many GiB are missing on the worst rank of the plan with least memory, which constraints conflict, and
    which relaxations lead to a plan, as far as found by the deadline, a reading of `time.monotonic`.
    """
    constrained, screening = ConstrainedQuestion(question=question, bounds=bounds), Screening(question)
    plan, held = least_memory_plan(screening, nodes, constrained.recomputes)
    memory = with_replay(question, plan, question.estimate([plan]).estimate(0), held).memory
    # What communicators hold comes on top of what torch reserves.
    needed_bytes, capacity_bytes = memory.reserved_bytes + memory.communicator_bytes, memory.capacity_bytes
    largest = sorted(memory.by_category.items(), key=lambda item: (-item[1], item[0]))[:3]
    until = None if deadline is None else max(deadline, time.monotonic() + LEAST_ADVICE_S)
    conflicting = ", ".join(conflicting_constraints(constrained, until))
    relaxations_found = relaxations(constrained, grow, until)
    late = over(until)
    return Infeasible(
        f"{question.model.name} does not fit on {gpus_text(question.count)}:"
        f" the leanest of {int(nodes.leaf_counts.sum()):,} legal plans needs {gib_text(needed_bytes)} GiB of"
        f" {gib_text(capacity_bytes)} on its fullest GPU",
        why=f"{gib_text(needed_bytes - capacity_bytes)} GiB missing, a factor of"
        f" {two_digits(needed_bytes / capacity_bytes)},"
        f" with {plan_in_words(plan)}; largest: "
        + ", ".join(f"{name.replace('_', ' ')} {gib_text(size)} GiB" for name, size in largest)
        + f". In conflict: {conflicting}",
        remedy=("relax one of: " + "; ".join(relaxations_found) if relaxations_found else "more GPUs or memory")
        + (CUT_SHORT if late else "" if relaxations_found else ": nothing else tried is enough"),
    )


def nothing_fits(question: Question, nodes: Nodes, bounds: Bounds) -> Infeasible:
    """Return the error of `no_fitting_plan` without conflicts and relaxations, which is far quicker."""
    screening = Screening(question)
    _, held = least_memory_plan(screening, nodes, ConstrainedQuestion(question=question, bounds=bounds).recomputes)
    return Infeasible(
        f"{gib_text(held.reserved_bytes - held.left_bytes)} GiB missing on the worst rank",
        why=f"no legal plan of {question.model.name} fits on {gpus_text(question.count)}",
        remedy="more GPUs or memory; without --time-limit, or with a longer one, the answer says what else would do",
    )


def conflicting_constraints(constrained: ConstrainedQuestion, deadline: float | None = None) -> list[str]:
    """Return a minimal set of conflicting constraints: without any one of them there is a plan.

    Constraints are dropped one after the other unless that makes the question feasible; those that cannot be dropped
    conflict, as far as tried by the deadline. The GPUs and their memory always are.
    """
    conflicting = []
    for words, relaxed in _without_each_constraint(constrained):
        if over(deadline):
            break
        if relaxed.gap() > 0:
            constrained = relaxed
        else:
            conflicting.append(words)
    question = constrained.question
    return [gpus_text(question.count), f"{in_gib(question.cluster.gpu_memory_bytes)} on each", *conflicting]


def _without_each_constraint(constrained: ConstrainedQuestion) -> Iterator[tuple[str, ConstrainedQuestion]]:
    """Yield (description of a constraint, the question with it relaxed as far as possible)."""
    s = constrained.question
    if constrained.bounds != Bounds():
        yield "the limits given by flags", replace(constrained, bounds=Bounds())
    yield (
        f"sequences of {s.workload.seq_len} tokens",
        constrained.ask(workload=_with_sequence(s.workload, SHORTEST_SEQUENCE)),
    )
    yield f"parameters in {s.runtime.param_dtype}", constrained.ask(runtime=replace(s.runtime, param_dtype="bfloat16"))
    yield (
        f"the rules of {constrained.question.framework.title}",
        constrained.ask(framework=_most_sharding(constrained.question.framework)),
    )


def _with_sequence(workload: Workload, length: int) -> Workload:
    return replace(workload, seq_len=min(length, workload.seq_len))


def _most_sharding(framework: Framework) -> Framework:
    """Return the framework with all its ZeRO stages, or the rules that all frameworks share."""
    if framework.searched_zero_stages:
        return replace(framework, searched_zero_stages=())
    return ANY if not framework.zero_stages and not framework.shard_degree else framework


def relaxations(
    constrained: ConstrainedQuestion, grow: Callable[[int], Cluster] | None, deadline: float | None = None
) -> list[str]:
    """Return the flags with which a fitting plan was found by the deadline, each with its throughput per GPU, highest
    first.
    """
    found = []
    for text, relaxed in _relaxed(constrained, grow, deadline):
        if relaxed.gap() <= 0:
            found.append((text, (0.0, 0.0) if over(deadline) else relaxed.best_rate(deadline)))
        if over(deadline):
            break
    found.sort(key=lambda one: -one[1][0])
    return [f"{text}{_at(*figures)}" for text, figures in found]


def _at(rate: float, host_bytes: float) -> str:
    host = f", {gib_text(host_bytes)} GiB of host memory a GPU" if host_bytes else ""
    return f" (about {two_digits(rate)} tokens/s/GPU{host})" if rate else ""


def _relaxed(
    constrained: ConstrainedQuestion, grow: Callable[[int], Cluster] | None, deadline: float | None
) -> Iterator[tuple[str, ConstrainedQuestion]]:
    """Yield (flags, question with them) for everything that may be relaxed; whether a plan then fits is not known."""
    s, bounds = constrained.question, constrained.bounds
    for name in bounds.stated:
        lifted: dict[str, None] = {name: None}
        yield f"another {PLAN_FIELDS[name].flag}", replace(constrained, bounds=bounds.fixing(**lifted))
    for word in s.framework.offloads[1:] if bounds.words("offload") is None else ():
        yield f"--offload {word}", replace(constrained, bounds=bounds.fixing(offload=(word,)))
    sharded = _most_sharding(s.framework)
    if sharded is not s.framework:
        stages = ", ".join(map(str, sharded.zero_stages))
        words = f"sharding of parameters and gradients (ZeRO stages {stages}) instead of the optimizer alone"
        yield words, constrained.ask(framework=sharded)
    for savers in more_savers(s.runtime):
        yield (
            f"--saver {','.join((*s.runtime.savers, *savers))}",
            constrained.ask(runtime=s.runtime.with_savers(savers)),
        )
    if paged := paged_instead(s.runtime):
        yield f"--optimizer {paged.optimizer}", constrained.ask(runtime=paged)
    if not s.runtime.compile and compiles(s.runtime):
        yield "--compile", constrained.ask(runtime=replace(s.runtime, compile=True))
    if s.runtime.param_dtype == "float32":
        yield "--param-dtype bfloat16", constrained.ask(runtime=replace(s.runtime, param_dtype="bfloat16"))
    shorter = _shorter(lambda workload: constrained.ask(workload=workload).gap() <= 0, s.workload)
    if shorter:
        yield f"--seq-len {shorter}", constrained.ask(workload=_with_sequence(s.workload, shorter))
    nearest = nearest_fitting_gpus(constrained, grow, deadline)
    if nearest:
        count, cluster = nearest
        yield f"--gpus {count}, the nearest count that fits", constrained.ask(cluster=cluster, gpus=count)
    elif grow and most_gpus(s.cluster, grow) == s.count and said_with_nodes(s.cluster, s.cluster.node_count):
        more = nearest_fitting_gpus(constrained, lambda n: with_nodes_for(s.cluster, n), deadline)
        if more:
            said = said_with_nodes(s.cluster, more[1].node_count)
            yield f"--cluster {said}, the fewest such nodes that fit", constrained.ask(cluster=more[1], gpus=more[0])
    gap = constrained.gap()
    if np.isfinite(gap):
        needed = (s.cluster.gpu_memory_bytes + gap + MIB) / s.cluster.gpu_memory_bytes
        larger = scale_memory(s.cluster, needed)
        yield f"GPUs with {in_gib(larger.gpu_memory_bytes, 0)} of memory", constrained.ask(cluster=larger)


def _shorter(fits: Callable[[Workload], bool], workload: Workload) -> int | None:
    """Return the longest sequence that fits, halved repeatedly, or None when even the shortest does not."""
    lengths = []
    length = workload.seq_len // 2
    while length >= SHORTEST_SEQUENCE:
        lengths.append(length)
        length //= 2
    # If the shortest does not fit, the model state is too large for any length.
    if not lengths or not fits(replace(workload, seq_len=lengths[-1])):
        return None
    return next(n for n in lengths if fits(replace(workload, seq_len=n)))


# --- number of GPUs ---------------------------------------------------------------------------------------------------


def nearest_fitting_gpus(
    constrained: ConstrainedQuestion, grow: Callable[[int], Cluster] | None, deadline: float | None = None
) -> tuple[int, Cluster] | None:
    """Return a larger GPU count, in whole nodes, with a plan that fits, and its cluster; None up to MAX_GPUS, or after
    the deadline.

    It is the smallest, unless it takes over MAX_NODES_ADVISED nodes more than the model state.
    """
    cluster = constrained.question.cluster
    size = len(cluster.groups[0].node.gpus)
    if grow is None and cluster.fabric is None and constrained.question.count >= size:
        return None  # one machine without a network cannot be extended
    least = max(constrained.question.count + 1, min_gpus_for_state(constrained.screening))
    found = _first_fit(constrained, grow, least=least, tried=MAX_NODES_ADVISED, deadline=deadline)
    return found[:2] if found else None


def _first_fit(
    constrained: ConstrainedQuestion,
    grow: Callable[[int], Cluster] | None,
    *,
    least: int,
    limit: int = MAX_GPUS,
    tried: int = MAX_NODES_TRIED,
    deadline: float | None = None,
) -> tuple[int, Cluster, str] | None:
    """Return the first GPU count from `least` with a plan that fits, its cluster, and why the count before failed."""
    cluster = constrained.question.cluster
    reason = ""

    def gap(n: int) -> tuple[float, Cluster | None]:
        try:
            on = grow(n) if grow else with_gpus(cluster, n)
        except (UserError, ValueError):
            return float("inf"), None  # the cluster does not come in this size
        return constrained.ask(cluster=on, gpus=n).gap(deadline), on

    for n in gpu_counts(cluster, least, limit, tried):
        if over(deadline):
            return None
        missing, on = gap(n)
        if missing <= 0 and on is not None:
            return n, on, reason
        kind = "no legal plan" if missing == float("inf") else f"{gib_text(missing)} GiB missing on the worst rank"
        reason = f"{n} GPUs: {kind}"
    return None


def minimal_gpus(
    question: Question,
    *,
    bounds: Bounds | None = None,
    grow: Callable[[int], Cluster] | None = None,
    deadline: float | None = None,
    limit: int = MAX_GPUS,
) -> tuple[int, Cluster, str]:
    """Return the smallest GPU count with a fitting plan, its cluster, and the proof in words.

    Counts are tried from the first on which the sharded model state fits: each one up to a node, then whole nodes, and
    beyond MAX_NODES_TRIED of those by doubling, which the proof mentions. Raises Infeasible beyond `limit`, and
    Unproved where none was found by the deadline.
    """
    constrained = ConstrainedQuestion(question=replace(question, gpus=None), bounds=bounds or Bounds())
    least = min_gpus_for_state(constrained.screening)
    found = _first_fit(constrained, grow, least=least, limit=limit, deadline=deadline)
    if found is None and over(deadline):
        raise Unproved(
            f"the time limit ended before a number of GPUs was found on which {question.model.name} fits",
            why=f"the state alone needs {least} of them, and larger numbers were tried one after the other",
            remedy="a longer --time-limit, or --gpus with a number",
        )
    if found is None:
        raise Infeasible(
            f"{question.model.name} fits on no cluster of up to {limit} GPUs of this kind",
            why=f"the state alone needs {least} of them",
            remedy="larger GPUs, or fewer constraints",
        )
    count, on, reason = found
    proof = [f"on fewer than {least} the sharded state alone does not fit"] if least > 1 else []
    size = len(question.cluster.groups[0].node.gpus)
    tried = (
        "every count"
        if count <= (-(-least // size) + MAX_NODES_TRIED) * size
        else f"every count for {MAX_NODES_TRIED} nodes, then some,"
    )
    proof += [f"{tried} from {least} on was tried; {reason}"] if reason else []
    return count, on, "; ".join(proof)
