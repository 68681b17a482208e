"""How the known schedules are laid out, and how much of the step they leave idle.

Sources: GPipe (arXiv 1811.06965), 1F1B and its interleaved form (Megatron-LM, arXiv 2104.04473 section 2.2), looped
breadth-first (arXiv 2211.05953), zero bubble H1 and V (arXiv 2401.10241 sections 3.1 and 6), DualPipe (DeepSeek-V3,
arXiv 2412.19437 section 3.2.1) folded to a V (github.com/deepseek-ai/DualPipe). The order of actions equals that of
torch.distributed.pipelining, except that torch's printed 1F1B table has a fault in its last rank; there it equals
what torch's 1F1B runs.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache

from simulator.pipeline.schedules import SCHEDULES, V_SHAPED, Action, Kind, Schedule, stage_rank
from topology.errors import BadPlan


@lru_cache(maxsize=256)
def build_schedule(
    name: str, *, ranks: int, micro_batches: int, stages_per_rank: int = 1, paired: bool = False
) -> Schedule:
    """Return the table of schedule `name`. Raises BadPlan for a combination that the schedule does not have.

    `paired`: a forward and the backward that follows it run together, one more forward ahead, so that they are of two micro
    batches (1F1B and its interleaved form: Megatron-LM, core/pipeline_parallel/combined_1f1b.py and schedules.py). Of such
    pairs the backward is named first: layer by layer it makes room for the forward.
    """
    _refuse_impossible(name, ranks, micro_batches, stages_per_rank)
    rows = []
    for rank in range(ranks):
        stages = [s for s in range(ranks * stages_per_rank) if stage_rank(s, ranks, v_shaped=name in V_SHAPED) == rank]
        row = _Row(backward_first=paired)
        match name:
            case "GPipe":
                _gpipe(row, stages[0], micro_batches)
            case "LoopedBFS":
                _looped_bfs(row, stages, micro_batches)
            case "1F1B":
                warm_up = ranks - 1 - rank + paired
                _interleave(row, stages, micro_batches, micro_batches, warm_up=warm_up, paired=paired)
            case "Interleaved1F1B":
                per_round = _per_round(ranks, micro_batches)
                warm_up = (stages_per_rank - 1) * per_round + 2 * (ranks - 1 - rank) + paired
                _interleave(row, stages, micro_batches, per_round, warm_up=warm_up, paired=paired)
            case "ZBH1":
                _interleave(row, stages, micro_batches, micro_batches, warm_up=ranks - 1 - rank, weights_lag=rank)
            case "InterleavedZeroBubble":
                per_round = _per_round(ranks, micro_batches)
                warm_up = (stages_per_rank - 1) * per_round + ranks - 1 - rank
                _interleave(row, stages, micro_batches, per_round, warm_up=warm_up, weights_lag=rank)
            case "ZBVZeroBubble":
                _zero_bubble_v(row, stages[0], stages[1], rank, ranks, micro_batches)
            case _:
                _dual_pipe_v(row, stages[0], stages[1], rank, ranks, micro_batches)
        actions = row.actions
        if name == "ZBVZeroBubble" and micro_batches < 2 * ranks - 1:
            # It is laid out for at least 2p-1 micro batches; with fewer, the surplus is left out.
            actions = [action for action in actions if action.micro_batch < micro_batches]
        rows.append(tuple(actions))
    return Schedule(
        name=name,
        ranks=ranks,
        stages_per_rank=stages_per_rank,
        micro_batches=micro_batches,
        table=tuple(rows),
        v_shaped=name in V_SHAPED,
    )


def _refuse_impossible(name: str, ranks: int, micro_batches: int, stages_per_rank: int) -> None:
    if name not in SCHEDULES:
        raise BadPlan(f"unknown pipeline schedule {name!r}", remedy=f"one of {', '.join(SCHEDULES)}")
    kind = SCHEDULES[name]
    if ranks < 1 or micro_batches < 1 or stages_per_rank < 1:
        raise BadPlan("a pipeline needs at least one rank, one micro batch and one stage per rank")
    if kind.most_stages == 1 and stages_per_rank != 1:
        raise BadPlan(
            f"{name} has one stage per rank, not {stages_per_rank}", remedy="an interleaved schedule has more"
        )
    if kind.v_shaped and stages_per_rank != 2:
        raise BadPlan(f"{name} has two stages per rank, not {stages_per_rank}")
    if kind.rounds:
        _per_round(ranks, micro_batches)
    if kind.every_stage and micro_batches < (stages := stages_per_rank * ranks):
        raise BadPlan(f"{name} needs at least as many micro batches as stages: {micro_batches} < {stages}")


def _per_round(ranks: int, micro_batches: int) -> int:
    """Return how many micro batches pass one local stage before the next one's turn: about as many as ranks."""
    rounds = max(1, micro_batches // ranks)
    if micro_batches % rounds:
        raise BadPlan(
            f"{micro_batches} micro batches do not divide into {rounds} equal rounds on {ranks} ranks",
            why="interleaved schedules go round the stages in equal rounds",
            remedy=f"use a multiple of {rounds}",
        )
    return micro_batches // rounds


class _Row:
    """One rank's row while it is written. Micro batches of a stage come in order, so only the stage is named."""

    def __init__(self, *, backward_first: bool) -> None:
        self.backward_first = backward_first
        self.actions: list[Action] = []
        self.next: dict[tuple[int, Kind], int] = {}
        self.owed: deque[tuple[int, int]] = deque()  # weight gradients put off: (stage, micro batch)

    def _turn(self, stage: int, kind: Kind) -> int:
        turn = self.next.get((stage, kind), 0)
        self.next[stage, kind] = turn + 1
        return turn

    def forward(self, stage: int) -> None:
        self.actions.append(Action(stage, Kind.FORWARD, self._turn(stage, Kind.FORWARD)))

    def backward(self, stage: int) -> None:
        self.actions.append(Action(stage, Kind.BACKWARD, self._turn(stage, Kind.BACKWARD)))

    def input_grad(self, stage: int) -> None:
        """The first half of a backward; the second is owed."""
        micro_batch = self._turn(stage, Kind.BACKWARD)
        self.actions.append(Action(stage, Kind.INPUT_GRAD, micro_batch))
        self.owed.append((stage, micro_batch))

    def weight_grad(self, stage: int | None = None) -> None:
        """Pay the oldest weight gradient that is owed (of `stage`, if given); nothing if there is none."""
        for entry in self.owed:
            if stage is None or entry[0] == stage:
                self.owed.remove(entry)
                self.actions.append(Action(entry[0], Kind.WEIGHT_GRAD, entry[1]))
                return

    def pair(self, forward: int, backward: int) -> None:
        parts = (
            Action(forward, Kind.FORWARD, self._turn(forward, Kind.FORWARD)),
            Action(backward, Kind.BACKWARD, self._turn(backward, Kind.BACKWARD)),
        )
        self.actions.append(Action(-1, Kind.OVERLAP, -1, parts[::-1] if self.backward_first else parts))


def _gpipe(row: _Row, stage: int, micro_batches: int) -> None:
    for _ in range(micro_batches):
        row.forward(stage)
    for _ in range(micro_batches):
        row.backward(stage)


def _looped_bfs(row: _Row, stages: list[int], micro_batches: int) -> None:
    """All micro batches through one stage, then the next; backward in exactly the opposite order."""
    for stage in stages:
        for _ in range(micro_batches):
            row.forward(stage)
    for stage in reversed(stages):
        row.actions += [Action(stage, Kind.BACKWARD, m) for m in reversed(range(micro_batches))]


def _interleave(
    row: _Row,
    stages: list[int],
    micro_batches: int,
    per_round: int,
    *,
    warm_up: int,
    weights_lag: int | None = None,
    paired: bool = False,
) -> None:
    """Forwards in rounds up the local stages, backwards in rounds down them, `warm_up` forwards ahead.

    With `weights_lag`, backwards are split and each weight gradient follows that many backwards later, which keeps as
    many micro batches in flight on every rank as 1F1B does on the first.
    """
    local, total = len(stages), len(stages) * micro_batches
    warm_up = min(warm_up, total)
    forwards = [stages[k // per_round % local] for k in range(total)]
    backwards = [stages[local - 1 - k // per_round % local] for k in range(total)]
    for stage in forwards[:warm_up]:
        row.forward(stage)
    for turn, stage in enumerate(backwards):
        ahead = warm_up + turn < total
        if ahead and paired:
            row.pair(forwards[warm_up + turn], stage)
            continue
        if ahead:
            row.forward(forwards[warm_up + turn])
        if weights_lag is None:
            row.backward(stage)
        else:
            row.input_grad(stage)
            if turn >= weights_lag:
                row.weight_grad()
    while row.owed:
        row.weight_grad()


def _zero_bubble_v(row: _Row, down: int, up: int, rank: int, ranks: int, micro_batches: int) -> None:
    """ZB-V: `down` is the stage on the way down the ranks, `up` the one on the way back."""

    def both_grads(stage: int) -> None:
        row.input_grad(stage)
        row.weight_grad(stage)

    micro_batches = max(2 * ranks - 1, micro_batches)
    for _ in range(2 * (ranks - rank) - 1):
        row.forward(down)
    for _ in range(rank):
        row.forward(up)
        row.forward(down)
    for _ in range(ranks - rank):
        row.forward(up)
        both_grads(up)
    done_down, done_up = 2 * ranks - 1 - rank, ranks  # forwards so far
    while done_up < micro_batches:
        if done_down < micro_batches:
            row.forward(down)
            done_down += 1
        both_grads(down)
        row.forward(up)
        done_up += 1
        both_grads(up)
    for _ in range(rank):
        row.input_grad(down)
        row.input_grad(up)
    for _ in range(ranks - rank):
        row.input_grad(down)
        row.weight_grad(down)
    for stage in (up, down):
        while any(owed == stage for owed, _ in row.owed):
            row.weight_grad(stage)


def _dual_pipe_v(row: _Row, down: int, up: int, rank: int, ranks: int, micro_batches: int) -> None:
    """DualPipe with its two directions folded into a V: in the steady state every forward rides on a backward."""
    above = ranks - 1 - rank
    for _ in range(2 * above):
        row.forward(down)
    for _ in range(rank + 1):
        row.forward(down)
        row.forward(up)
    for _ in range(above):
        row.input_grad(up)
        row.weight_grad()
        row.forward(up)
    for turn in range(micro_batches - 2 * ranks + rank + 1):
        if turn == 0 and above == 0:
            # On the last rank the two are of one micro batch: nothing to overlap yet.
            row.forward(down)
            row.backward(up)
        else:
            row.pair(down, up)
        row.pair(up, down)
    for _ in range(above):
        row.backward(up)
        row.pair(up, down)
    # The drain: from its middle on, weight gradients are put off to fill the waits at the end.
    half = rank + 1
    for turn in range(2 * (rank + 1)):
        stage = down if turn % 2 else up
        (row.input_grad if turn >= half else row.backward)(stage)
    for _ in range(above):
        row.weight_grad()
        row.input_grad(down)
    while row.owed:
        row.weight_grad()
