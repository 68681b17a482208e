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
    """The best plan on one GPU count, or the problem why there is none.

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
    rate_curves: tuple[RateCurve, ...] = ()  # that its flips by link rates were read off
    problems: tuple[Problem, ...] = ()
    cost_per_million_tokens: float | None = None  # in the currency of the given price
    fixes: tuple[Fix, ...] = ()  # of the first plan, where it may not fit: what makes it, cheapest first


@dataclass(frozen=True, slots=True, kw_only=True)
class MayFit:
    """A plan that is faster than the first and not sure to fit; `faster` is the part of the first's step it saves."""

    plan: Plan
    estimate: Estimate
    method: Method
    fit_probability: float
    faster: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStats:
    """An account of the search.

    `fitting` plans were not shown to need too much memory, `costed` of them were costed in full, as no bound ruled them
    out, and `simulated` were simulated. `bound_s` is a lower bound of the step over all legal plans that are as sure to
    fit as the first; `gap` is how far the best of them may be above the optimum by the objective, relative, both by the
    analytical model. Both are for stages as the runtime splits them, unless the time was over before others were tried.
    For the `filled` fastest pipelines, layers, recomputation, overlap and placement were decided together, which can
    only improve them; none of those can be better than what was found by more than `filled_gap`, relative.
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
        """Whether the gap is a bound: of a search that was cut it counts what other stages have gained elsewhere."""
        return self.status == OPTIMAL


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The listed plans, best first, and an account of all others.

    Where the first surely fits, `likely` has the plans that are faster and may fit, the fastest first: each more
    likely to fit than those before it.
    """

    question: Question
    search: SearchStats
    plans: tuple[RankedPlan, ...]
    rejected: dict[str, int]
    assumed: tuple[str, ...] = field(default=())
    by_gpus: tuple[GpuCountRow, ...] = ()  # where several GPU counts were compared
    likely: tuple[MayFit, ...] = ()

    @property
    def may_fit(self) -> MayFit | None:
        """The fastest plan of all, where it is not sure to fit."""
        return self.likely[0] if self.likely else None

    @property
    def cut_short(self) -> bool:
        """Whether a time limit ended before all was said of the plans."""
        return NOT_SIMULATED in self.assumed or NOT_EXPLAINED in self.assumed


OPTIMAL = "optimal within the model"
PRELIMINARY = "preliminary"  # the status of what is shown before a search has ended
TIED = "a tie with the plan above, as far as the model can tell; the simplest comes first"


def places(plans: Sequence[RankedPlan]) -> list[str]:
    """Return the rank of every plan, with `=` where it ties with the one before it (`TIED`)."""
    before = [None, *(one.tie for one in plans[:-1])]
    return [f"{one.rank}{' =' if one.tie == tie else ''}" for one, tie in zip(plans, before, strict=True)]
