"""A runtime's own costs from whole runs: factors of kernels, collectives, memory and host costs relative to a similar
description.

A few runs say little about many costs, so the fit is least squares of logarithms around the description. The prior
spread of a cost is that between runtimes; the spread of a run is the error of a right description, larger for runs with
less kernel time.

Published grids contain runs that stalled or shared their machine; a loss that hardly grows beyond a few spreads gives
such rows no weight. Memory is fitted before steps, with a factor for state and one for saved tensors. A run with a full
GPU waits for its allocator in every micro batch, so it shows the cost of that and almost nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.learn.solver import Solution, solve
from planner.question.cases import Case
from planner.question.learned_runtime import CROSSING, FACTORS, FLUSH, MEMORY_FACTORS, Fitted, costs_of
from planner.question.question import Question
from planner.validate.validation import compared_bytes, measured_step_s
from simulator.analytical.memory import CONTEXT_BYTES, STATE
from simulator.calibration.calibration import Calibration, RuntimeCosts
from simulator.calibration.gaussian import conditioned
from simulator.config.estimate import NORMAL_80, Estimate
from simulator.config.model import Model
from simulator.memory.estimate import with_replay
from simulator.memory.flushes import FLUSH_S_PER_BYTE
from simulator.runtimes.library import runtime_spec
from topology import codec
from topology.units import GIB

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Answer = dict[str, float]

# Spreads of logarithms: of a run around a right description; of the factors of kernels and collectives between
# runtimes; of a host's costs, which differ by 2 to 5 between hosts and runtimes (examples/profiles/hosts.md). The
# others are assumed.
RUN_SPREAD, REST_SPREAD = 0.05, 0.1  # of a run that is all kernels, and what the share of other time adds
MEMORY_SPREAD = 0.1
FULL_SPREAD = 0.4  # of flushes on a full GPU: their number depends on sizes that no description has
FACTOR_SPREAD = {
    "kernel_factor": 0.25,
    "collective_factor": 0.35,
    "network_factor": 0.7,
    "memory_factor": 0.3,
    "activation_factor": 0.3,
    FLUSH: 2.0,  # one per micro batch, or tens
}
HOST_SPREAD = 1.5
# Value of a cost that is described as zero; 1 ms for others. A flush returns 80 GB.
LEAST_S = {"launch_s": 5e-6, CROSSING: 50e-6, FLUSH: FLUSH_S_PER_BYTE * 80e9}
USUAL_LEAST_S = 1e-3
HOST_COSTS = (
    "launch_s",
    "tp_layer_s",
    "tp_rank_layer_s",
    "fsdp_layer_s",
    "ddp_layer_s",
    "cp_layer_s",
    "ep_layer_s",
    "rest_s",
)
LEAST_BEHIND = 0.2  # share of the runs, the fastest compared with the description, that the first kernel factor is from
# Share of a rank's usable memory above which its allocator flushes and retries; the step then says nothing of other
# costs. The rest is communicators and fragments. Source: assumed.
FULL = 0.9
FEWEST = 3  # fewest runs with a time or a memory for a fit


def unnamed(model: Model) -> Model:
    """Return a model without its name, since a case may name its model after itself."""
    return replace(model, name="", assumed=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run: its case, step and memory; None where the source does not state it."""

    case: Case
    step_s: float | None
    memory_bytes: float | None

    @property
    def fills(self) -> bool:
        """Whether the run used so much of its GPU's memory that the allocator flushes."""
        usable = self.case.question.cluster.gpu_memory_bytes - CONTEXT_BYTES
        return self.memory_bytes is not None and self.memory_bytes > FULL * usable

    @property
    def group(self) -> str:
        """The key of runs that are left out together for cross-validation: the model."""
        return codec.fingerprint(unnamed(self.case.question.model))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Costs, and the covariance of their logarithms in the order of `names`, which begin with those of memory."""

    names: tuple[str, ...]
    logs: Floats
    covariance: Floats
    usual: Floats

    @property
    def values(self) -> Answer:
        return dict(zip(self.names, (self.usual * np.exp(self.logs)).tolist(), strict=True))

    def with_costs_of(self, cases: Sequence[Case], like: str) -> Fit:
        """Return the fit with costs that only `cases` have, at their prior values and spreads."""
        usual = usual_values(like)
        names = tuple(name for name in _occurring(usual, cases) if name not in self.names)
        covariance = np.diag(np.concatenate([np.zeros(len(self.names)), priors(names) ** 2]))
        covariance[: len(self.names), : len(self.names)] = self.covariance
        return Fit(
            names=self.names + names,
            logs=np.concatenate([self.logs, np.zeros(len(names))]),
            covariance=covariance,
            usual=np.concatenate([self.usual, [usual[name] for name in names]]),
        )

    @property
    def of_steps(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in MEMORY_FACTORS)

    @property
    def covariance_of_steps(self) -> Floats:
        first = len(self.names) - len(self.of_steps)
        return self.covariance[first:, first:]

    def fitted(self) -> dict[str, Fitted]:
        """Return every cost with its 80 % range."""
        width = NORMAL_80 * np.sqrt(np.diag(self.covariance))
        return {
            name: Fitted(value=value, low=value * float(np.exp(-w)), high=value * float(np.exp(w)))
            for (name, value), w in zip(self.values.items(), width, strict=True)
        }


def measured_of(case: Case) -> Measured:
    """Return what a case measured."""
    step, _ = measured_step_s(case)
    peak = case.measured.get("peak_memory_gib")
    number = float(peak) if isinstance(peak, int | float) and not isinstance(peak, bool) and peak > 0 else None
    return Measured(case=case, step_s=step, memory_bytes=None if number is None else number * GIB)


def usual_values(like: str) -> Answer:
    """Return the described values of everything that is fitted."""
    host = runtime_spec(like).host
    costs = {name: max(getattr(host, name), LEAST_S.get(name, USUAL_LEAST_S)) for name in HOST_COSTS}
    return (
        dict.fromkeys(FACTORS, 1.0)
        | costs
        | {name: LEAST_S[name] for name in (CROSSING, FLUSH)}
        | {"rest_s": host.rest_s + host.step_s, "step_s": 0.0}
    )


class PredictedCases:
    """Cases whose plans are predicted repeatedly; cases with the same question are predicted together."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.cases = cases
        together: dict[str, list[int]] = {}
        for place, case in enumerate(cases):
            q = case.question
            together.setdefault(codec.fingerprint((unnamed(q.model), q.cluster, q.workload, q.runtime)), []).append(
                place
            )
        self.groups = list(together.values())

    def predicted(self, values: Mapping[str, float], *, compiled: bool, replayed: bool = False) -> list[Estimate]:
        """Return the estimates of all plans with given costs of their runtime; with the allocator's replay if
        `replayed`.
        """
        found: dict[int, Estimate] = {}
        for places in self.groups:
            question = self.cases[places[0]].question
            asked = replace(question, calibration=_with_costs(question, values, compiled=compiled))
            table = asked.estimate([self.cases[place].plan for place in places])
            for row, place in enumerate(places):
                estimate = table.estimate(row)
                found[place] = with_replay(asked, self.cases[place].plan, estimate) if replayed else estimate
        return [found[place] for place in range(len(self.cases))]

    def steps_s(self, answers: Sequence[Mapping[str, float]], *, compiled: bool) -> Floats:
        """Return the steps of all plans for each of several sets of costs, shape (sets, plans)."""
        found = np.zeros((len(answers), len(self.cases)))
        for places in self.groups:
            question = self.cases[places[0]].question
            known = [_with_costs(question, values, compiled=compiled) for values in answers]
            asked = replace(question, calibration=known[0])
            plans = [self.cases[place].plan for place in places]
            table = asked.estimate(plans * len(answers), each_with=[one for one in known for _ in plans])
            found[:, places] = table.step_s.reshape(len(answers), len(plans))
        return found


def _with_costs(question: Question, values: Mapping[str, float], *, compiled: bool) -> Calibration:
    """Return the calibration of a question with given costs of its runtime."""
    below = question.calibration or Calibration(gpu=question.cluster.slowest_kind)
    return replace(below, runtimes={(runtime_spec(question.runtime.name).names[0], compiled): costs_of(values, rows=1)})


class Runs:
    """Runs with their measurements, predicted repeatedly."""

    def __init__(self, runs: Sequence[Measured]) -> None:
        self.runs = runs
        self.asked = PredictedCases([run.case for run in runs])
        self.micro_batches = np.array(
            [run.case.plan.micro_batches(run.case.question.workload.global_batch_size) for run in runs]
        )

    def logs(self, values: Mapping[str, float], *, compiled: bool) -> Floats:
        """Return log(predicted / measured) of step and memory, shape (runs, 2); 0 where not measured."""
        rows = []
        predicted = self.asked.predicted(values, compiled=compiled, replayed=True)
        for run, found in zip(self.runs, predicted, strict=True):
            memory = compared_bytes(run.case, found.memory)[0]
            rows.append(
                (
                    np.log(found.step_s.value / run.step_s) if run.step_s else 0.0,
                    np.log(memory / run.memory_bytes) if run.memory_bytes else 0.0,
                )
            )
        return np.array(rows, dtype=np.float64).reshape(-1, 2)

    def steps(self, answers: Sequence[Mapping[str, float]], full: Flags, *, compiled: bool) -> Floats:
        """Return log(predicted / measured) of steps for several sets of costs, shape (sets, runs); runs in `full` are
        on GPUs whose allocator flushes; 0 where not measured.
        """
        found = self.asked.steps_s([{**values, FLUSH: 0.0} for values in answers], compiled=compiled)
        flushes = np.array([[values.get(FLUSH, 0.0)] for values in answers])
        predicted = found + full * self.micro_batches * flushes
        measured = np.array([run.step_s or np.nan for run in self.runs])
        return np.asarray(np.where(np.isnan(measured), 0.0, np.log(predicted / measured)))

    def described_memory(self, *, compiled: bool) -> tuple[Floats, Floats]:
        """Return the predicted bytes of state and in total, for the measured quantity of each run."""
        state, whole = [], []
        for run, found in zip(self.runs, self.asked.predicted({}, compiled=compiled, replayed=True), strict=True):
            rank = run.case.measured.get("memory_rank")
            stage = rank // (run.case.plan.gpus // run.case.plan.pp) if isinstance(rank, int) else -1
            known = 0 <= stage < len(found.memory.by_stage)
            categories = found.memory.by_stage[stage] if known else found.memory.by_category
            state.append(sum(categories.get(name, 0.0) for name in STATE))
            whole.append(compared_bytes(run.case, found.memory)[0])
        return np.array(state), np.array(whole)


def _nodes(case: Case) -> int:
    return -(-case.plan.gpus // case.question.cluster.gpus_per_node)


# Costs that only some cases have.
OCCURS: dict[str, Callable[[Case], bool]] = {
    "network_factor": lambda case: _nodes(case) > 1,
    CROSSING: lambda case: _nodes(case) > 1,
    "tp_layer_s": lambda case: case.plan.tp > 1,
    "tp_rank_layer_s": lambda case: case.plan.tp > 1 and case.plan.pp > 1,
    "fsdp_layer_s": lambda case: case.plan.dp_shard > 1,
    "ddp_layer_s": lambda case: case.plan.dp_replicate > 1,
    "cp_layer_s": lambda case: case.plan.cp > 1,
    "ep_layer_s": lambda case: case.plan.ep > 1,
    FLUSH: lambda case: measured_of(case).fills,
}


def _occurring(usual: Answer, cases: Sequence[Case]) -> tuple[str, ...]:
    """Return the costs that the step of any of `cases` depends on."""
    return tuple(
        name
        for name, value in usual.items()
        if value > 0
        and name not in MEMORY_FACTORS
        and (name not in OCCURS or any(OCCURS[name](case) for case in cases))
    )


def fit(runs: Sequence[Measured], like: str, *, compiled: bool = False, start: Answer | None = None) -> Fit:
    """Return the costs that fit `runs` best around the description `like`; without runs, those of the description with
    its spreads.
    """
    usual, known = usual_values(like), Runs(runs)
    of_memory = _fit_memory(known, compiled=compiled)
    of_steps = _fit_steps(known, usual, of_memory, compiled=compiled, start=start or {})
    both = (of_memory, of_steps)
    widths = [len(one.names) for one in both]
    covariance = np.zeros((sum(widths), sum(widths)))
    covariance[: widths[0], : widths[0]], covariance[widths[0] :, widths[0] :] = (one.covariance for one in both)
    return Fit(
        names=of_memory.names + of_steps.names,
        logs=np.concatenate([one.logs for one in both]),
        covariance=covariance,
        usual=np.concatenate([one.usual for one in both]),
    )


def _fit_memory(known: Runs, *, compiled: bool) -> Fit:
    """Return the factor of memory, and the further factor of memory that is no state."""
    measured = np.array([run.memory_bytes is not None for run in known.runs], dtype=bool)
    seen = np.log([run.memory_bytes for run in known.runs if run.memory_bytes is not None])
    state, whole = (column[measured] for column in known.described_memory(compiled=compiled))

    def missed(logs: Floats) -> Floats:
        held = [RuntimeCosts(reserved=one, activations=more).held_bytes(whole, state) for one, more in np.exp(logs)]
        return np.asarray((np.log(held) - seen) / MEMORY_SPREAD)

    found = solve(missed, np.zeros(len(MEMORY_FACTORS)), priors(MEMORY_FACTORS))
    return _fitted(MEMORY_FACTORS, np.ones(len(MEMORY_FACTORS)), found)


def _fit_steps(known: Runs, usual: Answer, memory: Fit, *, compiled: bool, start: Answer) -> Fit:
    names = _occurring(usual, [run.case for run in known.runs])
    values = np.array([usual[name] for name in names])
    timed = np.array([run.step_s is not None for run in known.runs], dtype=bool)
    full = np.array([run.fills for run in known.runs], dtype=bool)

    def answer(logs: Floats) -> Answer:
        return {"step_s": 0.0, **memory.values, **dict(zip(names, (values * np.exp(logs)).tolist(), strict=True))}

    def missed(logs: Floats) -> Floats:
        return known.steps([answer(one) for one in logs], full, compiled=compiled)[:, timed]

    # Hosts and collectives only add to kernels, so the runs with the shortest steps relative to the prediction show
    # kernels best.
    begin = dict.fromkeys(names, 0.0)
    free = timed & ~full
    if free.any():
        described = known.steps([{FLUSH: 0.0}], full, compiled=compiled)[0, free]
        begin["kernel_factor"] = -float(np.quantile(described, 1 - LEAST_BEHIND))
    begin |= {name: math.log(start[name] / usual[name]) for name in names if name in start}
    spreads = np.where(full, FULL_SPREAD, RUN_SPREAD)[timed]
    first = solve(lambda logs: missed(logs) / spreads, np.array(list(begin.values())), priors(names))
    of_kernels = first.jacobian[:, names.index("kernel_factor")] * spreads
    spreads = np.where(full[timed], FULL_SPREAD, spread_of_runs(of_kernels))
    found = solve(lambda logs: missed(logs) / spreads, first.found, priors(names), loss="cauchy")
    return _fitted(names, values, found)


def spread_of_runs(of_kernels: Floats) -> Floats:
    """Return the spread of runs around a right description, by the share of kernels in their steps."""
    return np.asarray(np.hypot(RUN_SPREAD, REST_SPREAD * (1 - np.clip(of_kernels, 0.0, 1.0))))


def priors(names: Sequence[str]) -> Floats:
    """Return the prior spreads of the logarithms of costs around the description."""
    return np.array([FACTOR_SPREAD.get(name, HOST_SPREAD) for name in names])


def _fitted(names: tuple[str, ...], usual: Floats, found: Solution) -> Fit:
    # The residual spread of the rows widens the costs' uncertainty.
    jacobian = found.jacobian / max(_spread(found.residuals), 1.0)
    return Fit(
        names=names,
        logs=found.found,
        covariance=conditioned(np.diag(priors(names) ** 2.0), jacobian, np.ones(len(jacobian))),
        usual=usual,
    )


def _spread(values: Floats) -> float:
    """Return the spread of a normal distribution with this median distance from 0, which is robust to outliers."""
    return float(np.median(np.abs(values))) / 0.6745 if len(values) else 0.0


def errors(runs: Sequence[Measured], found: Fit, *, compiled: bool) -> tuple[list[float], list[float]]:
    """Return predicted / measured - 1 of steps and of memory."""
    rows = Runs(runs).logs({"step_s": 0.0, **found.values}, compiled=compiled)
    return (
        [float(np.expm1(step)) for run, (step, _) in zip(runs, rows, strict=True) if run.step_s],
        [float(np.expm1(memory)) for run, (_, memory) in zip(runs, rows, strict=True) if run.memory_bytes],
    )


def left_out_errors(runs: Sequence[Measured], whole: Fit, like: str, *, compiled: bool) -> dict[str, float | None]:
    """Return mean absolute errors of runs whose group was left out of the fit: by model, else by number of GPUs, else
    by run.
    """
    keys = [run.group for run in runs]
    if len(set(keys)) < 2:
        keys = [str(run.case.plan.gpus) for run in runs]
    if len(set(keys)) < 2:
        keys = [run.case.id for run in runs]
    steps: list[float] = []
    memories: list[float] = []
    for key in dict.fromkeys(keys):
        rest = [run for run, group in zip(runs, keys, strict=True) if group != key]
        mine = [run for run, group in zip(runs, keys, strict=True) if group == key]
        step, memory = errors(mine, fit(rest, like, compiled=compiled, start=whole.values), compiled=compiled)
        steps, memories = steps + step, memories + memory
    return {
        "step": float(np.mean(np.abs(steps))) if steps else None,
        "memory": float(np.mean(np.abs(memories))) if memories else None,
    }
