"""The order of stages' work on micro batches in 1F1B: forward until the next stages have work, then backward as soon as
possible.

A stage with n stages after it runs n forward passes, then alternates a forward pass of the next and a backward pass of
the earliest micro batch, so it keeps tensors for the backward passes of n + 1 micro batches at most (Narayanan et al.,
arXiv 2104.04473, section 2.2). The part shared by all micro batches comes first, and its gradients last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.sharding.backends.works import Work, Writer, is_message
from simulator.sharded.program import Exchange

FORWARD, BACKWARD = 0, 1
SHARED = -1


@dataclass(frozen=True, slots=True)
class Turn:
    """A work in the order of a stage; of a message, the half that belongs to this stage."""

    work: Work
    stage: int

    def add_to(self, writer: Writer) -> None:
        """Write the instruction."""
        if not is_message(self.work):
            writer.add(self.work)
        elif self.stage == _stages(self.work)[0]:
            writer.send(self.work)
        else:
            writer.receive(self.work)


def turns(works: Sequence[Work], in_forward: int, stages: int, micro_batches: int) -> list[Turn]:
    """Return the works of all stages in 1F1B order, one stage after another; the first `in_forward` are the forward
    pass.
    """
    blocks: dict[tuple[int, int, int], list[Turn]] = {}
    for number, work in enumerate(works):
        phase = FORWARD if number < in_forward else BACKWARD
        for stage in _stages(work):
            blocks.setdefault((stage, phase, work.micro_batch), []).append(Turn(work, stage))
    order = [(stage, *block) for stage in range(stages) for block in _one_stage(stages - 1 - stage, micro_batches)]
    return [turn for block in order for turn in blocks.get(block, ())]


def _stages(work: Work) -> tuple[int, ...]:
    return work.do.stages if is_message(work) and isinstance(work.do, Exchange) else (work.stage,)


def _one_stage(after: int, micro_batches: int) -> Iterator[tuple[int, int]]:
    """Yield (phase, micro batch) for a stage with this number of stages after it."""
    ahead = min(after, micro_batches)
    yield FORWARD, SHARED
    yield from ((FORWARD, number) for number in range(ahead))
    for number in range(micro_batches - ahead):
        yield FORWARD, ahead + number
        yield BACKWARD, number
    yield from ((BACKWARD, number) for number in range(micro_batches - ahead, micro_batches))
    yield BACKWARD, SHARED
