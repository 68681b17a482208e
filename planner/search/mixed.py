"""Machines of several kinds: what a plan on all of them costs, and what their parts do by themselves.

A synchronous step goes by the slowest rank, so all are planned as the slowest kind. That is compared with the same plan
on as many GPUs of the fastest kind, and with the best plan on the nodes of each kind alone, of which the best is the
answer. Work in proportion to speed (more layers, or larger micro batches, where GPUs are faster) is bounded and not
planned: no framework that is described here divides a batch unequally, and stages on unlike GPUs have no cost here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from planner.question.prediction import predict
from planner.question.question import Question
from simulator.config.estimate import Estimate
from simulator.config.plan import Plan
from topology.cluster import Cluster, GpuKind
from topology.errors import Infeasible, Unproved

if TYPE_CHECKING:
    from planner.search.result import SearchResult

NOT_IN_PROPORTION = (
    "frameworks here give every data-parallel rank the same micro batches, and stages on unlike GPUs have no cost"
    " here: plan the parts by themselves with --cluster"
)


def parts_of(cluster: Cluster) -> list[Cluster]:
    """Return the nodes of each kind by themselves, a node's kind being that of its slowest GPU; none of one kind."""
    by_kind: dict[str, list[int]] = {}
    for place, group in enumerate(cluster.groups):
        slowest = replace(cluster, groups=(group,)).slowest_kind.name
        by_kind.setdefault(slowest, []).append(place)
    if len(by_kind) < 2:
        return []
    found = []
    for places in by_kind.values():
        groups = tuple(cluster.groups[place] for place in places)
        gpus = sum(group.count * len(group.node.gpus) for group in groups)
        part = replace(cluster, groups=groups)
        found.append(replace(part, name=f"{gpus} x {part.slowest_kind.title} of {cluster.name}"))
    return found


def is_mixed(cluster: Cluster) -> bool:
    """Return whether a cluster has GPUs of several kinds."""
    return len({gpu.kind for group in cluster.groups for gpu in group.node.gpus}) > 1


def with_parts(
    whole: Callable[[], SearchResult], part: Callable[[Cluster], SearchResult], cluster: Cluster, objective: str
) -> SearchResult:
    """Return the better of the best plans on all of `cluster` and on the nodes of each kind, by `objective`, and what
    each of them takes. Raises what `whole` raises where no part has a plan either.
    """
    found, failure = _tried(whole)
    alone = [(one, _tried(lambda one=one: part(one))[0]) for one in parts_of(cluster)]  # type: ignore[misc]
    known = [result for result in (found, *(result for _, result in alone)) if result is not None]
    if not known:
        assert failure is not None  # noqa: S101 - the whole has no plan then
        raise failure
    from planner.search.gpu_counts import objective_value  # noqa: PLC0415 - of a search, not of an estimate

    best = min(known, key=lambda result: objective_value(result.plans[0].estimate, objective))
    notes = [] if found is None else [price_of(found.question, found.plans[0].plan, found.plans[0].estimate)]
    notes += [f"{one.name} alone: {_step(result) if result else 'no plan fits'}" for one, result in alone]
    if best is not found:
        used, everything = best.plans[0].plan.gpus, "no plan fits" if found is None else _step(found)
        notes.append(f"{used} of {cluster.gpu_count} GPUs are used: on all of them {everything}")
    if found is not None and all(result for _, result in alone) and alone:
        rates = sum(1 / result.plans[0].estimate.step_s.value for _, result in alone if result)
        notes.append(f"work in proportion to speed would take {1 / rates:.3g} s a step at best; {NOT_IN_PROPORTION}")
    return replace(best, assumed=(*best.assumed, *notes))


def _tried(search: Callable[[], SearchResult]) -> tuple[SearchResult | None, Infeasible | Unproved | None]:
    try:
        return search(), None
    except (Infeasible, Unproved) as error:
        return None, error


def _step(result: SearchResult) -> str:
    return f"{result.plans[0].estimate.step_s.value:.3g} s a step"


def price_of(question: Question, plan: Plan, estimate: Estimate) -> str:
    """Return what a plan on GPUs of several kinds takes longer than it would on as many of the fastest kind."""
    cluster = question.cluster
    used = {gpu.kind for group in cluster.groups for gpu in group.node.gpus}
    fastest = max((cluster.kind(name) for name in used), key=_rate)
    groups = tuple(
        replace(
            group,
            node=replace(
                group.node,
                gpus=tuple(replace(gpu, kind=fastest.name, memory_bytes=None) for gpu in group.node.gpus),
            ),
        )
        for group in cluster.groups
    )
    alike = replace(question, cluster=replace(cluster, groups=groups), calibration=None)
    step_s, alike_s = estimate.step_s.value, predict(alike, plan).estimate.step_s.value
    return (
        f"the step goes by the slowest GPUs: the plan on all {plan.gpus} takes {step_s:.3g} s,"
        f" {step_s / alike_s - 1:.0%} longer than the {alike_s:.3g} s it would take if all were {fastest.title}"
    )


def parts_text(cluster: Cluster) -> str:
    """Return how the parts of a machine of several kinds are planned by themselves."""
    kinds = (f"{part.gpu_count} x {part.slowest_kind.name}" for part in parts_of(cluster))
    return f"{NOT_IN_PROPORTION} ({', '.join(kinds) or 'without the slow GPUs'})"


def _rate(kind: GpuKind) -> float:
    return kind.peak_flops.get("bfloat16", 0.0)
