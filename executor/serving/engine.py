"""Sequences that are continued together: their state on the device, and steps replayed from captured CUDA graphs.

Every sequence has a slot with its last token, its position and the numbers of its pages. A step gathers the slots of
the sequences it continues, so sequences need not be moved when others start or end; the host uploads the list of slots
only when it changes. Rows that pad a batch to the size of a captured graph use a slot of no sequence.
`mixed_step` has the inputs of steps that read prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from executor.serving.cache import PAGE, CacheSlot, PagedCache, pages_of
from executor.serving.decoder import ServedDecoder, cache_slots
from executor.serving.mixed_step import Part, StepInputs, StepSize, captured_sizes, holds, size_of, written_inputs
from executor.serving.operators import Chunks
from simulator.serving.engine import engine_of

ENGINE = "meshwright"  # its name in engines.toml
EVERY = 8


@dataclass(slots=True)
class Captured:
    """A step of one size: a replay reads `inputs`, of a step without prompts the slots of its sequences, and writes
    `scores`.
    """

    inputs: Tensor
    scores: Tensor
    graph: torch.cuda.CUDAGraph


@dataclass(slots=True, eq=False)
class Engine:
    """One rank's model, cache and slots. All ranks make the same calls in the same order."""

    model: ServedDecoder
    cache: PagedCache
    max_sequences: int
    max_tokens: int  # of one sequence
    tokens: Tensor = field(init=False)  # (slots,) the last token of each sequence
    positions: Tensor = field(init=False)  # (slots,) position of that token
    tables: Tensor = field(init=False)  # (slots, pages)
    _graphs: dict[int, Captured] = field(default_factory=dict)
    _read_graphs: dict[StepSize, Captured] = field(default_factory=dict)  # smallest first
    _free: list[int] = field(init=False)
    _going: tuple[int, ...] = ()
    _size: int = 0

    def __post_init__(self) -> None:
        slots, device = self.max_sequences + 1, self.model.device  # the last slot belongs to no sequence
        self._free = list(range(self.max_sequences - 1, -1, -1))
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.positions = torch.zeros(slots, dtype=torch.int64, device=device)
        self.tables = torch.zeros((slots, pages_of(self.max_tokens)), dtype=torch.int32, device=device)

    # --- sequences ----------------------------------------------------------------------------------------------

    def hold(self, tokens: int) -> CacheSlot:
        """Reserve a slot and pages for a sequence of up to `tokens`. Raises Infeasible if there is no room."""
        pages = self.cache.take(tokens)
        held = CacheSlot(self._free.pop(), pages)
        self.tables[held.slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        return held

    def release(self, held: CacheSlot) -> None:
        self.cache.give_back(held.pages)
        self._free.append(held.slot)

    def set_position(self, held: Sequence[CacheSlot], position: int) -> None:
        """Mark `position` tokens of each sequence as cached without reading any; for timing."""
        self.positions[self._rows(held)] = position

    def read(self, prompts: Sequence[tuple[CacheSlot, Tensor]]) -> Tensor:
        """Read whole prompts (tokens,) into the cache and write the first token of each answer; return their scores."""
        return self.mix([(held, tokens, 0) for held, tokens in prompts], ())

    def mix(self, parts: Sequence[Part], going: Sequence[CacheSlot]) -> Tensor:
        """Read a part of each prompt, its tokens (tokens,) and the number of earlier ones, and continue `going` by a
        token.

        Returns scores (parts + going, V here). Scores after a part that does not end its prompt are not used.
        """
        step = size_of(parts, len(going))
        size = next((size for size in self._read_graphs if holds(size, step)), step)
        host = written_inputs(size, parts, [one.slot for one in going], self.max_sequences)
        captured = self._read_graphs.get(size)
        if captured is None:
            # A single copy, before the first kernel: each copy waits for all earlier launches.
            scores = self._mixed(torch.from_numpy(host).to(self.model.device), size, _lengths(parts))
        else:
            captured.inputs.copy_(torch.from_numpy(host))
            captured.graph.replay()
            scores = captured.scores
        return scores[: len(parts) + len(going)]

    def _mixed(self, sent: Tensor, size: StepSize, longest: tuple[int, int]) -> Tensor:
        """Read prompts and continue answers as the inputs `sent` (n,) say; `longest` are the tokens of the longest part
        of a prompt and of all that it attends to.
        """
        inputs: StepInputs[Tensor] = StepInputs.of(sent, size)
        is_going, at, tables = inputs.is_going.bool(), self.positions[inputs.going], self.tables[inputs.going]
        of_answers = (self.tokens[inputs.going], at, cache_slots(at, tables, PAGE))
        for rows, own in zip((inputs.tokens, inputs.positions, inputs.slots), of_answers, strict=True):
            torch.where(is_going, own, rows[: size.answers], out=rows[: size.answers])
        query_ends = inputs.query_ends.int()
        chunks = Chunks(
            longest=longest,
            cached=inputs.cached if size.keys else None,
            query_ends=query_ends,
            key_ends=inputs.key_ends.int() if size.keys else query_ends,
        )
        places = (inputs.positions, inputs.slots)
        scores = self.model.mix(inputs.tokens, places, chunks, (is_going, at, tables), inputs.last, self.cache)
        self.tokens[inputs.written] = self.model.likeliest(scores)
        self.positions[inputs.written] = self.positions[inputs.written] * inputs.kept + inputs.added
        return scores

    def go_on(self, held: Sequence[CacheSlot]) -> Tensor:
        """Write one more token of every sequence; return the scores (sequences, V here) from which it was chosen."""
        going = tuple(one.slot for one in held)
        size = self._graph_size(len(going))
        captured = self._graphs.get(size)
        if captured is None:
            return self._step(self._padded(going, size).to(self.model.device))
        if going != self._going or size != self._size:
            captured.inputs.copy_(self._padded(going, size))
            self._going, self._size = going, size
        captured.graph.replay()
        return captured.scores[: len(going)]

    def _step(self, rows: Tensor) -> Tensor:
        """Continue the sequences of `rows` (B,) of slots by a token."""
        positions = self.positions[rows]
        scores = self.model.go_on(self.tokens[rows], positions, self.tables[rows], self.cache)
        self.tokens[rows] = self.model.likeliest(scores)
        self.positions[rows] = positions + 1
        self.positions[-1:] = 0  # the slot of no sequence stays in its only page
        return scores

    def _rows(self, held: Sequence[CacheSlot]) -> Tensor:
        return torch.tensor([one.slot for one in held], dtype=torch.int64).to(self.model.device)

    # --- captured steps -----------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Capture steps of each batch size up to `max_sequences`, and those that read; on a CPU nothing is captured.

        Largest first: memory that kernels of this repository share between ranks cannot grow while a graph is captured.
        """
        self._graphs, self._read_graphs, self._going, self._size = {}, {}, (), 0
        if self.model.device.type != "cuda":
            return
        most = self.max_sequences * self.max_tokens
        read = captured_sizes(engine_of(ENGINE), most, self.max_sequences)[::-1]
        sizes = graph_sizes(self.max_sequences)[::-1]
        steps: list[tuple[Tensor, Callable[[Tensor], Tensor]]] = [
            *((self._nothing(size), partial(self._mixed, size=size, longest=(size.rows, size.rows))) for size in read),
            *((self._padded((), size).to(self.model.device), self._step) for size in sizes),
        ]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for inputs, step in steps:
                step(inputs)  # compiles kernels and opens communicators
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        pool, captured = None, []
        for inputs, step in steps:
            graph = torch.cuda.CUDAGraph()
            # NCCL's watchdog queries events from its own thread, which a global capture mode would forbid.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                scores = step(inputs)
            pool = pool or graph.pool()
            captured.append(Captured(inputs, scores, graph))
        self._read_graphs = dict(zip(read[::-1], captured[len(read) - 1 :: -1], strict=True))
        self._graphs = dict(zip(sizes, captured[len(read) :], strict=True))

    def _nothing(self, size: StepSize) -> Tensor:
        """Return the inputs of a step that only has padding."""
        return torch.from_numpy(written_inputs(size, (), (), self.max_sequences)).to(self.model.device)

    def _graph_size(self, sequences: int) -> int:
        fitting = [size for size in self._graphs if size >= sequences]
        return min(fitting, default=sequences)

    def _padded(self, going: tuple[int, ...], size: int) -> Tensor:
        """Return slots (size,), on the host."""
        nobody = [self.max_sequences] * (size - len(going))
        return torch.tensor([*going, *nobody], dtype=torch.int64)


def graph_sizes(most: int) -> tuple[int, ...]:
    """Return the batch sizes to capture: 1, 2, 4, then every eighth up to `most`, and `most` itself."""
    small = [size for size in (1, 2, 4) if size <= most]
    return tuple(sorted({*small, *range(EVERY, most + 1, EVERY), most}))


def _lengths(parts: Sequence[Part]) -> tuple[int, int]:
    """Return the tokens of the longest part of a prompt, and of the longest with its earlier tokens."""
    read = [(tokens.numel(), begin + tokens.numel()) for _, tokens, begin in parts]
    # At least two: for queries of one token each, FlashAttention takes rows for sequences.
    return max(2, *(length for length, _ in read)), max(end for _, end in read)
