"""How slow an all-reduce may be before tensor parallelism is no faster than fewer GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.serving.question.question import ServingQuestion
from simulator.serving.deployment import Pool
from simulator.serving.forward_pass import ForwardPass


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Tensor parallelism of `tp` compared with `fewer` GPUs, for a token of a single answer, in seconds. `all_reduce_s`
    is the predicted time of an all-reduce, `limit_s` the time up to which `tp` is faster; negative if even free
    communication would not help.
    """

    tp: int
    fewer: int
    token_s: float
    fewer_token_s: float
    all_reduce_s: float
    limit_s: float

    @property
    def pays(self) -> bool:
        return self.token_s < self.fewer_token_s


def break_even(
    question: ServingQuestion, tp: int, fewer: int = 1, *, context: int = 0, all_reduce_s: float | None = None
) -> BreakEven:
    """Return when `tp` GPUs answer a single request faster than `fewer`. `all_reduce_s` is a measured time."""
    keys = float(context or question.traffic.prompt.mean + question.traffic.output.mean / 2)

    def costs(degree: int) -> ForwardPass:
        pool = Pool(tp=degree)
        return ForwardPass(question.model, question.cluster, question.deployment(pool), pool)

    def token_s(costs: ForwardPass) -> float:
        return costs.seconds(prompt_tokens=0, pairs=0.0, sequences=1, keys=keys)

    many, few = costs(tp), costs(fewer)
    reductions = many.reductions()
    found = BreakEven(
        tp=tp,
        fewer=fewer,
        token_s=token_s(many),
        fewer_token_s=token_s(few),
        all_reduce_s=many.reduced_s(1) / reductions,
        limit_s=0.0,
    )
    alone = found.token_s - found.all_reduce_s * reductions
    taken = found.all_reduce_s if all_reduce_s is None else all_reduce_s
    limit = (found.fewer_token_s - alone) / reductions
    return replace(found, token_s=alone + taken * reductions, all_reduce_s=taken, limit_s=limit)
