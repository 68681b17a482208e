"""A runtime's own costs from whole runs: how far kernels, collectives, memory and the host are from the description it is like.

Few runs say little of many costs, so a fit is least squares of logarithms around the description, each cost as far from it as
runtimes are from each other, and each run as far as a description can be from a run. Published grids have runs that stood
still or shared their machine: the loss grows linearly beyond a few spreads, so that such rows do not decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.learn.solver import solve
from planner.question.cases import Case
from planner.question.learned_runtime import CROSSING, FACTORS, Fitted, costs_of
from planner.validate.validation import GIB, compared_bytes, measured_step_s
from simulator.calibration.calibration import Calibration
from simulator.closed_form.memory import CONTEXT_BYTES
from simulator.config.estimate import Estimate
from simulator.config.model import Model
from simulator.runtimes.library import runtime_spec
from topology import codec

Floats = NDArray[np.float64]
Answer = dict[str, float]

# Spreads of logarithms: of a run around a right description; of what multiplies kernels and collectives between runtimes;
# of a host's costs, which differ by 2 to 5 between hosts and runtimes (examples/profiles/hosts.md). The others are assumed.
RUN_SPREAD = 0.05
FACTOR_SPREAD = {"kernel_factor": 0.25, "collective_factor": 0.7, "network_factor": 0.7}
HOST_SPREAD = 1.0
LEAST_S = {"launch_s": 5e-6, CROSSING: 50e-6}  # of a cost that is described as nothing; 1 ms for others
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
LEAST_BEHIND = 0.2  # share of the runs that a fit takes kernels from before it has taken anything from any
NORMAL_80 = 1.2816  # spreads on either side that hold 80 % of a normal distribution
# Of the memory that a rank can use, above which its allocator gives blocks back and asks again: what a step then takes says
# nothing of the costs here. Communicators and fragments have the rest. Source: assumed.
FULL = 0.9
FEWEST = 3  # runs with a time or a memory, below which nothing is learned


def unnamed(model: Model) -> Model:
    """Return a network without its name, which cases give it after themselves."""
    return replace(model, name="", assumed=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run: its case, its step and its memory; None where the source does not say."""

    case: Case
    step_s: float | None
    memory_bytes: float | None

    @property
    def fills(self) -> bool:
        """Whether the run had as much of its GPU's memory as makes the allocator give blocks back and ask again."""
        usable = self.case.question.cluster.gpu_memory_bytes - CONTEXT_BYTES
        return self.memory_bytes is not None and self.memory_bytes > FULL * usable

    @property
    def group(self) -> str:
        """What runs have in common that left out together make an unseen question: the model."""
        return codec.fingerprint(unnamed(self.case.question.model))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Costs of steps, the covariance of their logarithms in the order of `names`, and what memory is over what is described."""

    names: tuple[str, ...]
    logs: Floats
    covariance: Floats
    usual: Floats
    memory_log: float = 0.0
    memory_spread: float = 0.0

    @property
    def values(self) -> Answer:
        return dict(zip(self.names, (self.usual * np.exp(self.logs)).tolist(), strict=True)) | {
            "memory_factor": math.exp(self.memory_log)
        }

    def fitted(self) -> dict[str, Fitted]:
        """Return every cost with the range that holds it in four of five fits."""
        width = NORMAL_80 * np.array([*np.sqrt(np.diag(self.covariance)), self.memory_spread])
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
    """Return the described value of everything that is fitted."""
    host = runtime_spec(like).host
    costs = {name: max(getattr(host, name), LEAST_S.get(name, USUAL_LEAST_S)) for name in HOST_COSTS}
    return (
        dict.fromkeys(FACTORS, 1.0)
        | costs
        | {CROSSING: LEAST_S[CROSSING]}
        | {"rest_s": host.rest_s + host.step_s, "step_s": 0.0}
    )


class PredictedCases:
    """Cases whose plans are predicted again and again: those that ask the same question, at once."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.cases = cases
        together: dict[str, list[int]] = {}
        for place, case in enumerate(cases):
            q = case.question
            together.setdefault(codec.fingerprint((unnamed(q.model), q.cluster, q.workload, q.runtime)), []).append(
                place
            )
        self.groups = list(together.values())

    def predicted(self, values: Mapping[str, float], *, compiled: bool) -> list[Estimate]:
        """Return the estimates of all plans under costs of their runtime."""
        found: dict[int, Estimate] = {}
        for places in self.groups:
            question = self.cases[places[0]].question
            below = question.calibration or Calibration(gpu=question.cluster.slowest_kind)
            key = (runtime_spec(question.runtime.name).names[0], compiled)
            known = replace(below, runtimes={key: costs_of(values, rows=1)})
            table = replace(question, calibration=known).estimate([self.cases[place].plan for place in places])
            found |= {place: table.estimate(row) for row, place in enumerate(places)}
        return [found[place] for place in range(len(self.cases))]


class Runs:
    """Runs with what they measured, predicted again and again."""

    def __init__(self, runs: Sequence[Measured]) -> None:
        self.runs = runs
        self.asked = PredictedCases([run.case for run in runs])

    def logs(self, values: Mapping[str, float], *, compiled: bool) -> Floats:
        """Return log(predicted / measured) of step and memory, shape (runs, 2); 0 for what was not measured."""
        rows = []
        for run, found in zip(self.runs, self.asked.predicted(values, compiled=compiled), strict=True):
            memory = compared_bytes(run.case, found.memory)[0]
            rows.append(
                (
                    np.log(found.step_s.value / run.step_s) if run.step_s else 0.0,
                    np.log(memory / run.memory_bytes) if run.memory_bytes else 0.0,
                )
            )
        return np.array(rows, dtype=np.float64).reshape(-1, 2)


# Costs of the host that only occur under some plans.
OCCURS = {
    "tp_layer_s": lambda plan: plan.tp > 1,
    "tp_rank_layer_s": lambda plan: plan.tp > 1 and plan.pp > 1,
    "fsdp_layer_s": lambda plan: plan.dp_shard > 1,
    "ddp_layer_s": lambda plan: plan.dp_replicate > 1,
    "cp_layer_s": lambda plan: plan.cp > 1,
    "ep_layer_s": lambda plan: plan.ep > 1,
}


def fit(runs: Sequence[Measured], like: str, *, compiled: bool = False, start: Answer | None = None) -> Fit:
    """Return the costs that meet `runs` best around the description `like`."""
    usual, known = usual_values(like), Runs(runs)
    plans = [run.case.plan for run in runs]
    names = tuple(
        name
        for name, value in usual.items()
        if value > 0 and name != "memory_factor" and (name not in OCCURS or any(OCCURS[name](plan) for plan in plans))
    )
    values = np.array([usual[name] for name in names])
    spreads = np.array([FACTOR_SPREAD.get(name, HOST_SPREAD) for name in names])
    described = known.logs({}, compiled=compiled)
    timed = np.array([run.step_s is not None and not run.fills for run in runs])

    def missed(logs: Floats) -> Floats:
        answer = {"step_s": 0.0, **dict(zip(names, (values * np.exp(logs)).tolist(), strict=True))}
        return np.asarray(known.logs(answer, compiled=compiled)[timed, 0] / RUN_SPREAD, dtype=np.float64)

    # Hosts and collectives only add to kernels, so the runs that are least behind the description show these best.
    begin = dict.fromkeys(names, 0.0) | {
        "kernel_factor": -float(np.quantile(described[timed, 0], 1 - LEAST_BEHIND)) if timed.any() else 0.0
    }
    if start is not None:
        begin |= {name: math.log(start[name] / usual[name]) for name in names if name in start}
    found = solve(missed, np.array(list(begin.values())), spreads)
    # Scatter of the rows around the fit widens what they say of costs.
    jacobian = found.jacobian / max(_spread(found.residuals), 1.0)
    memory = described[[run.memory_bytes is not None for run in runs], 1]
    return Fit(
        names=names,
        logs=found.found,
        covariance=np.asarray(np.linalg.inv(jacobian.T @ jacobian + np.diag(spreads**-2.0)), dtype=np.float64),
        usual=values,
        memory_log=-float(np.median(memory)) if memory.size else 0.0,
        # Of a median: 1.25 times the spread over the root of how many.
        memory_spread=max(1.25 * _spread(memory - np.median(memory)) / math.sqrt(memory.size), 0.0)
        if memory.size
        else 0.0,
    )


def _spread(values: Floats) -> float:
    """Return the spread of a normal distribution with this median distance from 0, which outliers do not widen."""
    return float(np.median(np.abs(values))) / 0.6745 if len(values) else 0.0


def errors(runs: Sequence[Measured], found: Fit, *, compiled: bool) -> tuple[list[float], list[float]]:
    """Return predicted / measured - 1 of steps and of memory."""
    rows = Runs(runs).logs({"step_s": 0.0, **found.values}, compiled=compiled)
    return (
        [float(np.expm1(step)) for run, (step, _) in zip(runs, rows, strict=True) if run.step_s],
        [float(np.expm1(memory)) for run, (_, memory) in zip(runs, rows, strict=True) if run.memory_bytes],
    )


def left_out_errors(runs: Sequence[Measured], whole: Fit, like: str, *, compiled: bool) -> dict[str, float | None]:
    """Return mean absolute errors of runs whose group was left out of the fit: by model, else by number of GPUs, else by run."""
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
