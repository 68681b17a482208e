"""Trials that are looked up in recorded runs, so that the loop runs without a GPU.

A recorded run is a case with a measured step or an outcome. Runs of one model, cluster and workload are one question;
their plans are its candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.question.cases import Case, load_case
from planner.question.question import Question
from planner.tune.candidates import Candidate, Candidates, in_order
from planner.tune.trials import Chosen, Status, Trial
from planner.validate.validation import measured_step_s
from simulator.legality.rules import is_legal
from topology import codec
from topology.errors import PlannerError
from topology.units import GIB

START_S = 25.0  # time for processes, groups and a model: torchtitan's on four H200s
COMPILE_S = 40.0
STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The result of a recorded run. Without a step it failed; `reserved_bytes` if the source states it."""

    step_s: float | None
    reserved_bytes: float | None = None
    status: Status = Status.FINISHED


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTrials:
    """Looks up trials; `recorded` is by the key of a candidate. Seconds are those of such a trial."""

    recorded: Mapping[str, Recorded]
    begin_s: float = START_S
    compile_s: float = COMPILE_S

    def start_s(self, candidate: Candidate) -> float:
        return self.begin_s + (self.compile_s if candidate.runtime.compile else 0.0)

    def steps(self) -> int:
        return STEPS

    def shares_start(self, one: Candidate, other: Candidate) -> bool:
        del one, other
        return False

    def run(self, plans: Sequence[tuple[Candidate, Chosen]], left_s: float) -> Iterator[Trial]:
        for candidate, chosen in plans:
            seen = self.recorded[candidate.key]
            seconds = self.start_s(candidate) + (STEPS * seen.step_s if seen.step_s else 0.0)
            if seconds > left_s:
                yield Trial(key=candidate.key, status=Status.OUT_OF_TIME, predicted_s=chosen.predicted_s)
                return
            left_s -= seconds
            yield Trial(
                key=candidate.key,
                status=seen.status,
                step_s=seen.step_s,
                reserved_bytes=seen.reserved_bytes,
                seconds=seconds,
                predicted_s=chosen.predicted_s,
                why=chosen.why,
                machine="recorded runs",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedQuestion:
    """A question of recorded runs: its candidates, and the result of each."""

    name: str
    ids: tuple[str, ...]  # of its runs
    question: Question  # of its first run
    candidates: Candidates
    recorded: Mapping[str, Recorded]

    @property
    def best_s(self) -> float:
        return min(one.step_s for one in self.recorded.values() if one.step_s)


def recorded_questions(cases: Iterable[Mapping[str, Any]]) -> list[RecordedQuestion]:
    """Return the questions of which at least two plans have a measured step, in the order of the cases.

    Cases that cannot be predicted, are not legal in their framework, or state neither a step nor a failure are left
    out. Of several runs of one plan and runtime the first counts.
    """
    groups: dict[tuple[object, ...], list[tuple[Case, Recorded]]] = {}
    for raw in cases:
        try:
            case = load_case(raw)
            seen = _seen(case)
            if seen is None or not is_legal(case.question.problems(case.plan)):
                continue
            question = case.question
            key = (
                codec.fingerprint(replace(question.model, name="", assumed=())),
                codec.fingerprint(replace(question.cluster, name="")),
                codec.fingerprint(question.workload),
                case.plan.gpus,
            )
        except PlannerError:
            continue
        groups.setdefault(key, []).append((case, seen))
    return [made for runs in groups.values() if (made := _question(runs)) is not None]


def _question(runs: Sequence[tuple[Case, Recorded]]) -> RecordedQuestion | None:
    plans: dict[str, tuple[Candidate, Recorded]] = {}
    for case, seen in runs:
        try:
            estimate = case.question.estimate([case.plan]).estimate(0)
        except PlannerError:
            continue
        one = Candidate(plan=case.plan, runtime=case.question.runtime, estimate=estimate)
        plans.setdefault(one.key, (one, seen))
    if sum(seen.step_s is not None for _, seen in plans.values()) < 2:
        return None
    return RecordedQuestion(
        name=runs[0][0].id,
        ids=tuple(case.id for case, _ in runs),
        question=runs[0][0].question,
        candidates=in_order([one for one, _ in plans.values()], legal=len(plans)),
        recorded={key: seen for key, (_, seen) in plans.items()},
    )


def _seen(case: Case) -> Recorded | None:
    step, _ = measured_step_s(case)
    peak = case.measured.get("peak_memory_gib")
    held = float(peak) * GIB if isinstance(peak, (int, float)) and not isinstance(peak, bool) and peak > 0 else None
    if step is not None:
        return Recorded(step_s=step, reserved_bytes=held)
    if case.outcome == "oom":
        return Recorded(step_s=None, status=Status.OUT_OF_MEMORY)
    return Recorded(step_s=None, status=Status.FAILED) if case.outcome == "failed" else None
