"""Sequences that are continued together: their state on the device, and decode steps replayed from captured CUDA
graphs.

Every sequence has a slot with its last token, its position and the numbers of its pages. A step gathers the slots of
the sequences it continues, so sequences need not be moved when others start or end; the host uploads the list of slots
only when it changes. Rows that pad a batch to the size of a captured graph use a slot of no sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from executor.serving.cache import PAGE, PagedCache, pages_of
from executor.serving.decoder import ServedDecoder
from executor.serving.operators import Chunks

EVERY = 8


@dataclass(slots=True)
class CacheSlot:
    """The state of a sequence on the device."""

    slot: int
    pages: list[int]


@dataclass(slots=True)
class Captured:
    """A decode step for one batch size: a replay reads `rows` and writes `scores`."""

    rows: Tensor
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
        self.tables[held.slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32).to(self.model.device)
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

    def mix(self, parts: Sequence[tuple[CacheSlot, Tensor, int]], going: Sequence[CacheSlot]) -> Tensor:
        """Read a part of each prompt, its tokens (tokens,) and the number of earlier ones, and continue `going` by a
        token.

        Returns scores (parts + going, V here). Scores after a part that does not end its prompt are not used.
        """
        read = [tokens.numel() for _, tokens, _ in parts]
        ends = [begin + length for length, (_, _, begin) in zip(read, parts, strict=True)]
        places = [self._places(held, end) for (held, _, _), end in zip(parts, ends, strict=True)]
        before = tuple(begin for _, _, begin in parts)
        # A single copy, before the first kernel: each copy waits for all earlier launches.
        positions, slots, cached, tokens, read_rows, going_rows, read_to, query_ends, key_ends = self._upload(
            torch.cat([torch.arange(begin, end) for begin, end in zip(before, ends, strict=True)]),
            torch.cat([place[begin:] for place, begin in zip(places, before, strict=True)]),
            torch.cat(places) if any(before) else [],
            torch.cat([tokens for _, tokens, _ in parts]),
            [held.slot for held, _, _ in parts],
            [one.slot for one in going],
            ends,
            [0, *accumulate(read)],
            [0, *accumulate(ends)],
        )
        chunks = Chunks(
            lengths=tuple(read),
            before=before,
            positions=positions,
            slots=slots,
            cached=cached if any(before) else None,
            query_ends=query_ends.int(),
            key_ends=key_ends.int(),
        )
        at = self.positions[going_rows]
        tokens = torch.cat((tokens, self.tokens[going_rows]))
        scores = self.model.mix(tokens, chunks, (at, self.tables[going_rows]), self.cache)
        rows = torch.cat((read_rows, going_rows))
        self.tokens[rows] = self.model.likeliest(scores)
        self.positions[rows] = torch.cat((read_to, at + 1))
        return scores

    def _upload(self, *rows: Tensor | list[int]) -> Sequence[Tensor]:
        """Copy several rows of integers to the device at once; one int64 tensor (n,) each."""
        host = [torch.as_tensor(row, dtype=torch.int64, device="cpu") for row in rows]
        sent: Sequence[Tensor] = torch.cat(host).to(self.model.device).split([row.numel() for row in host])
        return sent

    def go_on(self, held: Sequence[CacheSlot]) -> Tensor:
        """Write one more token of every sequence; return the scores (sequences, V here) from which it was chosen."""
        going = tuple(one.slot for one in held)
        size = self._graph_size(len(going))
        captured = self._graphs.get(size)
        if captured is None:
            return self._step(self._padded(going, size))
        if going != self._going or size != self._size:
            captured.rows.copy_(self._padded(going, size))
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

    def _places(self, held: CacheSlot, tokens: int) -> Tensor:
        """Return the cache's slots (tokens,) for the first tokens of a sequence, on the host."""
        at = torch.arange(tokens)
        return torch.tensor(held.pages)[at // PAGE] * PAGE + at % PAGE

    def _rows(self, held: Sequence[CacheSlot]) -> Tensor:
        return torch.tensor([one.slot for one in held], dtype=torch.int64).to(self.model.device)

    # --- captured steps -----------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Capture a step for each batch size up to `max_sequences`; on a CPU nothing is captured.

        Largest first: memory that kernels of this repository share between ranks cannot grow while a graph is captured.
        """
        self._graphs, self._going, self._size = {}, (), 0
        if self.model.device.type != "cuda":
            return
        sizes = graph_sizes(self.max_sequences)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for size in reversed(sizes):
                self._step(self._padded((), size))  # compiles kernels and opens communicators
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        pool = None
        for size in reversed(sizes):
            rows, graph = self._padded((), size), torch.cuda.CUDAGraph()
            # NCCL's watchdog queries events from its own thread, which a global capture mode would forbid.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                scores = self._step(rows)
            pool = pool or graph.pool()
            self._graphs[size] = Captured(rows, scores, graph)

    def _graph_size(self, sequences: int) -> int:
        fitting = [size for size in self._graphs if size >= sequences]
        return min(fitting, default=sequences)

    def _padded(self, going: tuple[int, ...], size: int) -> Tensor:
        nobody = [self.max_sequences] * (size - len(going))
        return torch.tensor([*going, *nobody], dtype=torch.int64).to(self.model.device)


def graph_sizes(most: int) -> tuple[int, ...]:
    """Return the batch sizes to capture: 1, 2, 4, then every eighth up to `most`, and `most` itself."""
    small = [size for size in (1, 2, 4) if size <= most]
    return tuple(sorted({*small, *range(EVERY, most + 1, EVERY), most}))
