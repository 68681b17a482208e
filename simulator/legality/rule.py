"""The types of a rule: its name, grade, predicate over columns, and message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from simulator.columns.plan_columns import PlanColumns
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.legality.frameworks import Framework
from simulator.runtimes.library import is_described, is_later_version, runtime_spec

Mask = NDArray[np.bool_]


class Grade(StrEnum):
    LEGAL = "legal"  # runs; the message states what must be set or what is rounded
    SLOW = "legal-but-slow"  # runs, but wastes something that the message names
    ILLEGAL = "illegal"  # the framework refuses it, or the arithmetic has no meaning


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A rule's finding about a plan: its name, grade, message, and the nearest legal values if any."""

    rule: str
    grade: Grade
    message: str
    nearest: tuple[int, ...] = ()
    nearest_of: str = ""  # the field of the plan that `nearest` is about


class ModelNotKnown(Exception):
    """A rule needed a size of a model that is not known."""


class _NotKnown:
    """Stands for a model of which nothing is known."""

    def __getattr__(self, name: str) -> Any:
        raise ModelNotKnown(name)


UNKNOWN_MODEL = cast(Model, _NotKnown())


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleFacts:
    """The inputs of a rule besides the plan. No rule fails because of an unknown property of the machine.

    Without a runtime there are no findings about types, optimizer and compilation. With `UNKNOWN_MODEL` use
    `problems_without_model` only.
    """

    model: Model
    workload: Workload
    framework: Framework
    runtime: Runtime | None = None
    gpus: int = 0  # GPUs to be used; 0: any number
    gpus_per_node: int = 0  # 0: not known
    nvlink: bool = True
    reach: int = 0  # the number of connected GPUs; `reach_reason` says why not all are
    reach_reason: str = ""
    compute_capability: int = 0  # CUDA's, of the slowest GPUs; 0: not known, or not NVIDIA's
    by_amd: bool = False  # the GPUs are AMD's: software of ROCm runs
    no_low_precision: str = ""  # why the GPUs cannot compute products in the low type that the runtime states

    @property
    def compile(self) -> bool:
        return bool(self.runtime and self.runtime.compile)

    @property
    def cp_method(self) -> str:
        """The runtime's own method of context parallelism."""
        return runtime_spec(self.runtime.name).context_parallel if self.runtime else ""

    @property
    def splits_experts(self) -> str:
        """What the runtime's tensor-parallel ranks do with experts by default."""
        name = self.runtime.name if self.runtime else self.framework.runtime_name
        return runtime_spec(name).splits_experts if is_described(name) else "whole"

    @property
    def version(self) -> str | None:
        return self.runtime.version if self.runtime else None

    @property
    def loss_pieces(self) -> int:
        """The number of equal pieces into which the loss divides a rank's sequence."""
        if self.runtime is None or not is_later_version(self.runtime):
            return 1
        later = runtime_spec(self.runtime.name).later
        return 1 if later is None else later.loss_pieces

    @property
    def activation_dtype(self) -> str:
        """The type of attention, "" without a runtime."""
        return self.runtime.activation_dtype if self.runtime else ""

    @property
    def undescribed_low_precision(self) -> str:
        """Why the runtime's products in low types cannot be predicted; empty if they can."""
        stated = self.runtime
        if stated is None or not stated.low or runtime_spec(stated.name).low_precision is not None:
            return ""
        return f"products of {self.framework.title} in {stated.compute_dtype} are not modelled"

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The types of parameters, products and reduced gradients."""
        stated = self.runtime
        return (stated.param_dtype, stated.compute_dtype, stated.reduce_dtype) if stated else ()


class Level(IntEnum):
    """The stage of the enumeration from which all columns of a rule are known."""

    GRID = 0  # degrees, ZeRO stage, sequence parallelism
    BATCH = 1  # micro batch, virtual stages, schedule
    POLICY = 2  # recompute, resharding, overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule. `say` returns the message, and the field it is about with the nearest values that the rule accepts, if
    any.
    """

    name: str
    grade: Grade
    level: Level
    broken: Callable[[PlanColumns, RuleFacts], Mask]
    say: Callable[[Plan, RuleFacts], tuple[str, str, tuple[int, ...]]]
    applies: Callable[[RuleFacts], bool]
    policy: str = ""  # for rules at the level of policies: the one field that the rule judges

    def problem(self, plan: Plan, facts: RuleFacts) -> Problem:
        message, field, nearest = self.say(plan, facts)
        return Problem(rule=self.name, grade=self.grade, message=message, nearest=nearest, nearest_of=field)


def one_of(column: NDArray[np.str_], names: Iterable[str]) -> Mask:
    """Return where `column` is one of a few names; sorting words, as numpy's isin does, takes ten times as long."""
    found = np.zeros(len(column), dtype=np.bool_)
    for name in names:
        found |= column == name
    return found


def divisors(n: int) -> list[int]:
    """Return the divisors of `n` >= 1 in ascending order."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def nearest_values(values: list[int], value: int) -> tuple[int, ...]:
    """Return the largest of `values` below `value` and the smallest above it."""
    below = [v for v in values if v < value]
    above = [v for v in values if v > value]
    return tuple(([max(below)] if below else []) + ([min(above)] if above else []))


Say = Callable[[Plan, RuleFacts], tuple[str, str, tuple[int, ...]] | str]
Predicate = Callable[[PlanColumns, RuleFacts], Mask]


def batch_rule(name: str, broken: Predicate, say: Say, **settings: Any) -> Rule:
    """Return a rule about micro batches, virtual stages or schedules."""
    return rule(name, broken, say, level=Level.BATCH, **settings)


def policy_rule(name: str, policy: str, broken: Predicate, say: Say, **settings: Any) -> Rule:
    """Return a rule about one policy: recompute, cp_method or tp_overlap."""
    return rule(name, broken, say, level=Level.POLICY, policy=policy, **settings)


def rule(
    name: str,
    broken: Predicate,
    say: Say,
    *,
    grade: Grade = Grade.ILLEGAL,
    level: Level = Level.GRID,
    policy: str = "",
    applies: Callable[[RuleFacts], bool] = lambda q: True,  # noqa: ARG005 - the signature is the interface
) -> Rule:
    def full(plan: Plan, facts: RuleFacts) -> tuple[str, str, tuple[int, ...]]:
        sentence = say(plan, facts)
        if isinstance(sentence, str):
            return sentence, "", ()
        text, field, values = sentence
        nearest = nearest_values([v for v in values if fills(field, v, facts)], int(getattr(plan, field)))
        hint = f"; nearest legal {field.replace('_', ' ')}: {' or '.join(map(str, nearest))}" if nearest else ""
        return text + hint, field, nearest

    return Rule(name=name, grade=grade, level=level, policy=policy, broken=broken, say=full, applies=applies)


def with_nearest(field: str, values: Sequence[int], text: str) -> tuple[str, str, tuple[int, ...]]:
    """Return a rule's message with the nearest values of a field that it would accept."""
    return text, field, tuple(values)


def fills(field: str, value: int, facts: RuleFacts) -> bool:
    """Return whether a plan with this degree can use all GPUs of the question; other degrees may have to change."""
    return field not in {"tp", "cp", "pp"} or not facts.gpus or facts.gpus % value == 0
