"""Where a graph is cut into pipeline stages that nobody stated: so that the slowest stage takes least time on a machine.

Stages are runs of operators in the order of the graph. One takes what its operators take forward and backward, whole, by the ranks
of a stage, and the messages at its end in both directions. All cuts that leave every parameter on one stage, and send no more than
twice what the leanest cut sends, are compared by dynamic programming.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from math import inf, prod

import numpy as np

from planner.sharding.layouts.mesh import Mesh
from planner.sharding.operators.operator import Operator, Tensor
from planner.sharding.operators.work import backward_s, operator_work
from planner.sharding.problem.problem import Machine
from planner.sharding.solver.pricing import TimePricing
from simulator.config.runtime import ELEMENT_BYTES
from topology.errors import Infeasible

_LEAN = 2.0  # how many times the bytes of the leanest cut another may send
_GRADIENTS = 2  # of a product: its operand's and its parameter's


def cut_by_time(
    operators: Sequence[Operator],
    tensors: Mapping[str, Tensor],
    parameters: Collection[str],
    count: int,
    axis: str,
    mesh: Mesh,
    machine: Machine,
) -> tuple[int, ...]:
    """Return the stage of every operator, of `count` over `axis` of `mesh`. Raises Infeasible where there are fewer cuts."""
    pricing = TimePricing(machine, mesh)
    before = [0.0, *accumulate(_seconds(one, tensors, pricing) * count / mesh.ranks for one in operators)]
    sent = lean_cuts(operators, tensors, parameters)
    cuts = sorted(sent)
    if len(cuts) < count - 1:
        raise Infeasible(
            f"{len(operators)} operators are not cut into {count} stages",
            why="every parameter is on one stage",
            remedy="fewer stages, or stages that are stated",
        )
    messages = {at: 2 * float(pricing.seconds("send_recv", (axis,), np.array([sent[at]]))[0]) for at in cuts}
    ends = [*cuts, len(operators)]
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]  # by stages so far, and end: the slowest, and its start
    for _ in range(count):
        found: dict[int, tuple[float, int]] = {}
        for end in ends:
            for start, (slowest, _) in best[-1].items():
                if start < end:
                    taken = max(slowest, before[end] - before[start] + messages.get(end, 0.0))
                    if taken < found.get(end, (inf, 0))[0]:
                        found[end] = (taken, start)
        best.append(found)
    end, stages = len(operators), [0] * len(operators)
    for stage in reversed(range(count)):
        start = best[stage + 1][end][1]
        stages[start:end] = [stage] * (end - start)
        end = start
    return tuple(stages)


def lean_cuts(
    operators: Sequence[Operator], tensors: Mapping[str, Tensor], parameters: Collection[str]
) -> dict[int, float]:
    """Return where a stage may begin, with the bytes that are sent there: no more than twice the fewest."""
    sent = _crossing_bytes(operators, tensors, parameters)
    least = min((nbytes for nbytes in sent.values() if nbytes), default=0.0)
    return {at: nbytes for at, nbytes in sent.items() if nbytes <= _LEAN * least}


def evenly(operators: int, count: int, cuts: Collection[int]) -> tuple[int, ...]:
    """Return stages of about as many operators each, cut at places of `cuts`."""
    places: list[int] = []
    for number in range(1, count):
        left = [at for at in sorted(cuts) if at > (places[-1] if places else 0)]
        left = left[: len(left) - (count - 1 - number)]  # later cuts need places, too
        places.append(min(left, key=lambda at: abs(at - operators * number / count)))
    return tuple(sum(one <= position for one in places) for position in range(operators))


def neighbours(stages: Sequence[int], cuts: Collection[int]) -> list[tuple[int, ...]]:
    """Return the stages of operators with one cut moved to the next place, before or after it, of those in `cuts`."""
    places = sorted(cuts)
    now = [at for at in range(1, len(stages)) if stages[at] != stages[at - 1]]
    found = []
    for number, at in enumerate(now):
        before = [place for place in places if (now[number - 1] if number else 0) < place < at][-1:]
        after = [place for place in places if at < place < (now[number + 1] if number + 1 < len(now) else len(stages))][
            :1
        ]
        for place in (*before, *after):
            moved = sorted({*now, place} - {at})
            found.append(tuple(sum(one <= position for one in moved) for position in range(len(stages))))
    return found


def _seconds(operator: Operator, tensors: Mapping[str, Tensor], pricing: TimePricing) -> float:
    if operator.is_view:
        return 0.0
    work = operator_work(operator, tensors, {axis: np.array([float(n)]) for axis, n in operator.sizes.items()})
    roofline = pricing.roofline(operator.result.dtype)
    return float(np.asarray(roofline.seconds(work) + backward_s(work, _GRADIENTS, roofline)).item())


def _crossing_bytes(
    operators: Sequence[Operator], tensors: Mapping[str, Tensor], parameters: Collection[str]
) -> dict[int, float]:
    """Return the bytes of the results that are made before an operator and used from it on, for all where a cut may be."""
    made = {one.result.name: at for at, one in enumerate(operators)}
    uses: dict[str, list[int]] = {}
    for at, one in enumerate(operators):
        for name, _ in one.operands:
            uses.setdefault(name, []).append(at)
    change, closed = [0.0] * (len(operators) + 1), [0] * (len(operators) + 1)
    for name, used in uses.items():
        if name in made:
            nbytes = prod(tensors[name].shape) * ELEMENT_BYTES[tensors[name].dtype]
            change[made[name] + 1] += nbytes
            change[max(used) + 1] -= nbytes
        elif name in parameters:
            closed[min(used) + 1] += 1
            closed[max(used) + 1] -= 1
    sent, shut = list(accumulate(change)), list(accumulate(closed))
    return {at: sent[at] for at in range(1, len(operators)) if not shut[at]}
