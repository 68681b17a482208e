"""The result of a search: the listed plans, and an account of all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.question.prediction import Method
from planner.question.question import Question
from planner.search.deadline import NOT_EXPLAINED, NOT_SIMULATED
from planner.search.fixes import Fix
from planner.search.flips import FlipPoint, RateCurve
from simulator.config.estimate import Estimate
from simulator.config.plan import Plan
from simulator.legality.rule import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCountRow:
    """The best plan on one GPU count, or the reason why there is none.

    The cost is in the currency of the price given.
    """

    gpus: int
    plan: Plan | None = None
    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    reserved_bytes: float | None = None
    cost_per_million_tokens: float | None = None
    fit_probability: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """A listed plan, predicted by `method`; `lost_because` is None for the first.

    Plans of one `tie` differ by less than the error of the model: the first of them is the simplest.
    """

    rank: int
    plan: Plan
    estimate: Estimate
    method: Method
    tie: int
    fit_probability: float
    lost_because: str | None = None
    flips: tuple[FlipPoint, ...] = ()
    rate_curves: tuple[RateCurve, ...] = ()  # from which its flips by link rates were read
    problems: tuple[Problem, ...] = ()
    cost_per_million_tokens: float | None = None  # in the currency of the given price
    fixes: tuple[Fix, ...] = ()  # for the first plan, if it may not fit: changes that make it fit, cheapest first


@dataclass(frozen=True, slots=True, kw_only=True)
class MayFit:
    """A plan that is faster than the first and may not fit; `faster` is the share of the first's step that it saves."""

    plan: Plan
    estimate: Estimate
    method: Method
    fit_probability: float
    faster: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStats:
    """An account of the search.

    `fitting` plans were not shown to need too much memory; `costed` of them were costed in full, because no bound ruled
    them out, and `simulated` were simulated. `bound_s` is a lower bound of the step over all legal plans that are as
    sure to fit as the first; `gap` is the largest relative distance of the best of them from the optimum of the
    objective; both are by the analytical model. Both assume the runtime's split into stages, unless time was over
    before others were tried. For the `filled` fastest pipelines, layers, recomputation, overlap and placement were
    decided together, which can only improve them; none of those can be better than what was found by more than
    `filled_gap`, relative.
    """

    candidates: int
    legal: int
    fitting: int
    costed: int
    pruned: dict[str, int]
    simulated: int
    seconds: float
    status: str
    objective: str
    bound_s: float
    gap: float
    filled: int = 0
    filled_gap: float = 0.0

    @property
    def proved(self) -> bool:
        """Whether the gap is a bound: for a search that was cut short it is based on the gains of other stages
        elsewhere.
        """
        return self.status == OPTIMAL


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherBatch:
    """A batch whose best plan has `gain` more throughput than the best plan of the batch that was asked for."""

    global_batch_size: int
    plan: Plan
    tokens_per_s_per_gpu: float
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The listed plans, best first, and an account of all others.

    If the first surely fits, `likely` has the faster plans that may fit, fastest first, each more likely to fit than
    those before it.
    """

    question: Question
    search: SearchStats
    plans: tuple[RankedPlan, ...]
    rejected: dict[str, int]
    assumed: tuple[str, ...] = field(default=())
    by_gpus: tuple[GpuCountRow, ...] = ()  # if several GPU counts were compared
    likely: tuple[MayFit, ...] = ()
    other_batch: OtherBatch | None = None  # near the one that was asked for, with a faster plan

    @property
    def may_fit(self) -> MayFit | None:
        """The fastest plan of all, if it may not fit."""
        return self.likely[0] if self.likely else None

    @property
    def cut_short(self) -> bool:
        """Whether a time limit ended the search before it was complete."""
        return NOT_SIMULATED in self.assumed or NOT_EXPLAINED in self.assumed


OPTIMAL = "optimal within the model"
PRELIMINARY = "preliminary"  # the status of results shown before a search has ended
TIED = "a tie with the plan above, as far as the model can tell; the simplest comes first"


def places(plans: Sequence[RankedPlan]) -> list[str]:
    """Return the rank of every plan, with `=` where it ties with the one before it (`TIED`)."""
    before = [None, *(one.tie for one in plans[:-1])]
    return [f"{one.rank}{' =' if one.tie == tie else ''}" for one, tie in zip(plans, before, strict=True)]
