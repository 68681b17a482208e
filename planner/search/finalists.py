"""The last round: predict every plan to list by the most accurate method, and sort them.

Plans that surely fit come first, then those that are less likely to fit, level by level. Within each level, plans
closer than TIE to the fastest are a tie, of which the simplest comes first; then the next fastest and its ties.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from planner.question.prediction import INSTRUCTION_S, Method, Prediction, predict, simulated_length
from planner.question.question import Question
from planner.search.deadline import over
from simulator.analytical.estimates import Counted, counted_rows
from simulator.config.estimate import LEVELS, Estimate
from simulator.config.overlap_sites import NONE
from simulator.config.plan import NCCL, Plan
from simulator.legality.rules import is_legal
from simulator.memory.estimate import with_replay
from simulator.memory.plan_memory import Replays
from simulator.pipeline.schedules.registry import schedule_kind
from topology.cores import on_cores

# Relative. Half of all pairs of plans measured on one machine for one question differ from their predicted ratio by
# more: vTrain (16 to 512 A100) 3 %, torchtitan on H200 4 to 5 %, BLOOM's 8 %, simumax on B200 7 %.
TIE = 0.05
ORDER_MARGIN = 0.02  # share of a step that another order of GPUs must save to be worth setting
# Share of a step that other exchanges of FSDP must save: within it the analytical model and a simulation agree.
EXCHANGE_MARGIN = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalist:
    """A plan, its estimate, and the method of the estimate. Plans with the same `tie` cannot be distinguished by the
    model.
    """

    plan: Plan
    estimate: Estimate
    method: Method = Method.ANALYTICAL
    tie: int = 0
    counted: Counted | None = field(default=None, compare=False)  # by the analytical model


def counted_finalists(
    question: Question, plans: Sequence[Plan], others: Sequence[Plan], replays: Replays, *, exchanges: bool
) -> list[Finalist]:
    """Return plans, and those of the others that are faster than all of them, with their estimates by the analytical
    model and their replayed memory.

    With `exchanges`, FSDP's blocks are exchanged in other ways of the framework where this is faster by the analytical
    model and fits as surely: it changes no other choice, so that the search itself need not vary it.
    """
    every = [*plans, *others]
    tried = _other_exchanges(question, every) if exchanges else []
    rows = counted_rows(question.estimate([*every, *(plan for _, plan in tried)]))
    found = [_replayed(question, one, replays) for one in rows[: len(every)]]
    for (number, _), other in zip(tried, rows[len(every) :], strict=True):
        if other.step_s * (1 + EXCHANGE_MARGIN) < rows[number].step_s:
            variant = _replayed(question, other, replays)
            found[number] = min(found[number], variant, key=lambda one: (certainty(one), one.estimate.step_s.value))
    fastest = min(one.estimate.step_s.value for one in found[: len(plans)])
    return [*found[: len(plans)], *(one for one in found[len(plans) :] if one.estimate.step_s.value < fastest)]


def _replayed(question: Question, one: Counted, replays: Replays) -> Finalist:
    estimate = with_replay(question, one.plan, one.estimate, replays[one.plan])
    return Finalist(plan=one.plan, estimate=estimate, counted=one)


def _other_exchanges(question: Question, plans: Sequence[Plan]) -> list[tuple[int, Plan]]:
    """Return (number, the plan with other exchanges) where these are legal."""
    words = question.framework.fsdp_exchanges
    changed = [(number, plan.with_(fsdp_exchange=word)) for number, plan in enumerate(plans) for word in words]
    return [(number, plan) for number, plan in changed if is_legal(question.problems(plan))]


def predict_all(
    question: Question,
    finalists: Sequence[Finalist],
    replays: Replays,
    progress: Callable[[str], None] | None = None,
    *,
    deadline: float | None = None,
) -> list[Finalist] | None:
    """Return the same plans with the estimates of `predict`, with ranks in the order of GPUs if another order gains
    little.

    None if the deadline, a reading of `time.monotonic`, passes before the last plan is begun, since steps by two
    methods cannot be in one list.
    """
    here = os.getpid()

    def predicted(number: int) -> Finalist | None:
        if over(deadline):
            return None
        turn = f"simulating plan {number + 1} of {len(finalists)}"
        tell = None if progress is None or os.getpid() != here else partial(_report, progress, turn)
        return _predicted(question, finalists[number], finalists, replays, tell)

    seconds = INSTRUCTION_S * sum(simulated_length(question, one.plan) for one in finalists)
    found = on_cores([partial(predicted, number) for number in range(len(finalists))], seconds=seconds)
    done = [one for one in found if one is not None]
    return done if len(done) == len(found) else None


def _predicted(
    question: Question,
    finalist: Finalist,
    finalists: Sequence[Finalist],
    replays: Replays,
    tell: Callable[[str], None] | None,
) -> Finalist:
    plan, prediction = finalist.plan, Prediction(estimate=finalist.estimate, method=Method.ANALYTICAL)
    if simulated_length(question, plan):  # otherwise the prediction would be the same
        prediction = predict(question, plan, held=replays[plan], counted=finalist.counted, progress=tell)
    plain = replace(plan, placement=())
    same_gpus = tuple(range(plan.gpus)) == tuple(sorted(plan.placement)) != plan.placement
    if same_gpus and all(plain != other.plan for other in finalists):
        in_order = predict(question, plain, held=replays[plain], progress=tell)
        if in_order.estimate.step_s.value <= prediction.estimate.step_s.value * (1 + ORDER_MARGIN):
            plan, prediction = plain, in_order
    return replace(finalist, plan=plan, estimate=prediction.estimate, method=prediction.method)


def _report(progress: Callable[[str], None], turn: str, line: str) -> None:
    progress(f"{turn}: {line}")


def in_order(finalists: Sequence[Finalist], objective: str) -> list[Finalist]:
    """Return the plans best first, with their ties numbered. Sorted by memory, and in a Pareto front, there are no
    ties.
    """
    if objective in {"memory", "pareto"}:
        by_memory = objective == "memory"
        ordered = sorted(
            finalists, key=lambda one: one.estimate.memory.reserved_bytes if by_memory else one.estimate.step_s.value
        )
        ordered = ordered if by_memory else _undominated(ordered)
        return [replace(one, tie=number) for number, one in enumerate(ordered, start=1)]
    found: list[Finalist] = []
    # A stable sort: plans that are equal in all of these keep the order of the enumeration.
    left = sorted(finalists, key=lambda one: (certainty(one), one.estimate.step_s.value))
    while left:
        limit = left[0].estimate.step_s.value * (1 + TIE)
        tied = [one for one in left if certainty(one) == certainty(left[0]) and one.estimate.step_s.value <= limit]
        tie = found[-1].tie + 1 if found else 1
        found += [replace(one, tie=tie) for one in sorted(tied, key=lambda one: len(mechanisms(one.plan)))]
        left = [one for one in left if one not in tied]
    return found


def certainty(one: Finalist) -> int:
    """Return how many of LEVELS are more than a plan is likely to fit: 0 if it surely fits; more than all of them if it
    is predicted not to fit.
    """
    memory = one.estimate.memory
    missed = sum(memory.fit_probability < least for least in LEVELS)
    return missed if missed < len(LEVELS) or memory.fits else missed + 1


def _undominated(fastest_first: Sequence[Finalist]) -> list[Finalist]:
    found: list[Finalist] = []
    for one in fastest_first:
        if not found or one.estimate.memory.reserved_bytes < found[-1].estimate.memory.reserved_bytes:
            found.append(one)
    return found


def mechanisms(plan: Plan) -> tuple[str, ...]:
    """Return the features that a plan needs to be configured and maintained, as words; a simpler plan has fewer."""
    named = {
        "replicas": plan.dp_replicate > 1 and (plan.dp_shard > 1 or bool(plan.zero_stage)),
        "tensor parallelism": plan.tp > 1,
        "context parallelism": plan.cp > 1,
        "expert parallelism": plan.ep > 1,
        "a pipeline": plan.pp > 1,
        "several stages a rank": plan.virtual_stages > 1,
        "a schedule that splits the backward pass": plan.pp > 1 and schedule_kind(plan.schedule_name).splits_backward,
        "layers or recomputation stated by stage": bool(plan.layers_per_stage or plan.recompute_per_stage),
        "overlapped tensor parallelism": plan.tp_overlap != NONE,
        "overlapped all-to-all of experts": plan.ep_overlap != NONE,
        "exchanges of FSDP by copy engines": plan.fsdp_exchange != NCCL,
        "state in host memory": plan.offload != "none",
    }
    return tuple(name for name, used in named.items() if used)
