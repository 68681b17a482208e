"""The inputs of a step that reads prompts while answers go on: rows of integers that the host writes and sends at once.

Rows of tokens are in the order answers, prompts, padding. Padding is a sequence of its own in the page of no sequence,
so a step of any size can be replayed from the graph of a larger one: a graph launches in a few microseconds what takes
the host a few milliseconds to launch one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np
from torch import Tensor

from executor.serving.cache import PAGE, CacheSlot
from simulator.serving.engine import READ_GRAPH_PROMPTS, Engine

Row = TypeVar("Row")
Part = tuple[CacheSlot, Tensor, int]  # of a prompt: its tokens (tokens,) and the number of earlier ones
EVEN = 2  # a field begins at a multiple of 16 bytes, since Triton compiles a kernel anew for other addresses


@dataclass(frozen=True, slots=True)
class StepSize:
    """What one step has room for: rows of tokens, prompts, answers; `keys` of prompts that have earlier tokens, 0 if
    none has.
    """

    rows: int
    prompts: int
    answers: int
    keys: int = 0

    def bounds(self) -> list[tuple[int, int]]:
        """Return where each field of `StepInputs` begins and ends in the tensor that is sent."""
        rows, written, ends = self.rows, self.prompts + self.answers, self.prompts + 2
        cached = (self.keys, ends if self.keys else 0)
        lengths = (rows, rows, rows, self.answers, self.answers, written, written, written, written, ends, *cached)
        begins = accumulate((length + length % EVEN for length in lengths), initial=0)
        return [(begin, begin + length) for begin, length in zip(begins, lengths, strict=False)]


@dataclass(frozen=True, slots=True)
class StepInputs(Generic[Row]):
    """Integers of one step, rows of a tensor or of a numpy array; what has no use is zero or names no sequence."""

    tokens: Row  # (rows,) of prompts; those of answers are on the device
    positions: Row  # (rows,) likewise
    slots: Row  # (rows,) of the cache, likewise
    going: Row  # (answers,) slots of the sequences that go on
    is_going: Row  # (answers,) 1 for the rows that are answers
    last: Row  # (prompts + answers,) row of the last token of each prompt, then of each answer
    written: Row  # (prompts + answers,) slot of the sequence that gets the token after it
    kept: Row  # (prompts + answers,) 1 if the sequence's position counts on, 0 if it begins at `added`
    added: Row  # (prompts + answers,) to its position
    query_ends: Row  # (prompts + 2,) row at which each prompt ends, from where the first begins to the end of padding
    cached: Row  # (keys,) slots of the cache of all keys of prompts, if some have earlier tokens
    key_ends: Row  # (prompts + 2,) the same for `cached`

    @classmethod
    def of(cls, flat: Any, size: StepSize) -> StepInputs[Any]:
        """Return views of one tensor or array (n,)."""
        return cls(*(flat[begin:end] for begin, end in size.bounds()))


def size_of(parts: Sequence[Part], going: int) -> StepSize:
    """Return the size of a step without padding."""
    ends = [(tokens.numel(), begin) for _, tokens, begin in parts]
    read = sum(length for length, _ in ends)
    keys = read + sum(begin for _, begin in ends) if any(begin for _, begin in ends) else 0
    return StepSize(going + read, len(parts), going, keys)


def captured_sizes(engine: Engine, most_rows: int, answers: int) -> list[StepSize]:
    """Return the sizes to capture for steps of up to `most_rows` of which up to `answers` are answers, in ascending
    order.
    """
    every = range(1, max((most for most, _ in engine.read_graphs), default=0) + 1)
    rows = sorted({engine.captured_tokens(tokens, 1) for tokens in every if tokens <= most_rows})
    return [StepSize(size, READ_GRAPH_PROMPTS, answers) for size in rows]


def holds(captured: StepSize, step: StepSize) -> bool:
    """Return whether a step can be replayed with this size."""
    fits = captured.rows >= step.rows and captured.prompts >= step.prompts and captured.answers >= step.answers
    return fits and not step.keys


def written_inputs(size: StepSize, parts: Sequence[Part], going: Sequence[int], nobody: int) -> np.ndarray:
    """Return the inputs of a step as one array; `going` are slots of answers, `nobody` the slot of no sequence."""
    flat = np.zeros(size.bounds()[-1][1], dtype=np.int64)
    to: StepInputs[np.ndarray] = StepInputs.of(flat, size)
    answers, row, key = len(going), len(going), 0
    to.going[:], to.written[:] = nobody, nobody
    to.going[:answers], to.is_going[:answers] = going, 1
    to.query_ends[:], to.query_ends[0] = size.rows, answers
    for index, (held, tokens, begin) in enumerate(parts):
        end, after = begin + tokens.numel(), row + tokens.numel()
        at = np.arange(end)
        places = (np.asarray(held.pages)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)[:end]
        to.tokens[row:after], to.positions[row:after], to.slots[row:after] = tokens.cpu(), at[begin:], places[begin:]
        to.query_ends[index + 1], to.last[index] = after, after - 1
        to.written[index], to.added[index] = held.slot, end
        if size.keys:
            to.cached[key : key + end] = places
            key += end
            to.key_ends[index + 1 :] = key
        row = after
    ended = slice(len(parts), len(parts) + answers)
    to.last[ended], to.written[ended] = range(answers), going
    to.kept[ended], to.added[ended] = 1, 1
    return flat
