"""Times of steps of given shapes, continuing answers or reading prompts, and of the sums over ranks in them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from executor.gpu.device import synchronize
from executor.measure.rank_group import max_over_ranks
from executor.serving.cache import PAGE, CacheSlot, pages_of
from executor.serving.engine import Engine
from executor.serving.request import StepShape

WARM_UP, REPEATS, PROMPT_REPEATS = 2, 8, 2
MEASURED = WARM_UP + 2 * REPEATS
SUMS = 16  # sums over ranks in one graph


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step in the slowest rank, medians. `queued_s` with the host ahead of the device, `seconds` with
    the host waiting for each step before it starts the next, as it does while requests come and go; `issued_s` until
    the host had launched all kernels.
    """

    phase: str
    batch: int
    context: int
    queued_s: float
    seconds: float
    issued_s: float


def time_step(engine: Engine, shape: StepShape) -> StepTime | str:
    """Time a step; return its time, or a sentence if there is no room for it. A collective call."""
    room = shape.context + MEASURED
    if shape.batch > engine.max_sequences or room > engine.max_tokens:
        return f"{shape} is beyond the limits of the engine"
    if shape.batch * pages_of(room) > engine.cache.free_pages:
        return (
            f"{shape} needs {shape.batch * pages_of(room)} pages of {PAGE} tokens, {engine.cache.free_pages} are free"
        )
    held = [engine.hold(room) for _ in range(shape.batch)]
    try:
        took = _decode(engine, held, shape) if shape.phase == "decode" else _prefill(engine, held, shape)
    finally:
        for one in held:
            engine.release(one)
    queued, seconds, issued = took
    return StepTime(
        phase=shape.phase,
        batch=shape.batch,
        context=shape.context,
        queued_s=queued,
        seconds=seconds,
        issued_s=issued,
    )


def time_all_reduce(engine: Engine, tokens: int) -> float:
    """Return seconds of one sum over the ranks of `tokens` hidden vectors, with the residual and the norm that follow,
    replayed from a graph. A collective call.
    """
    model = engine.model
    part = torch.zeros((tokens, model.model.hidden), dtype=model.dtype, device=model.device)
    residual = torch.zeros_like(part)

    def run() -> None:
        for _ in range(SUMS):
            model.sum_and_norm(part, residual, model.norm)

    return _timed(engine, _replayed(run, model.device), REPEATS)[0] / SUMS


def _replayed(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return a function that replays `run` as a CUDA graph; on a CPU `run` itself."""
    if device.type != "cuda":
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles kernels
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        run()
    return graph.replay


def _decode(engine: Engine, held: list[CacheSlot], shape: StepShape) -> tuple[float, float, float]:
    engine.set_position(held, shape.context)
    return _timed(engine, lambda: engine.go_on(held), REPEATS)


def _prefill(engine: Engine, held: list[CacheSlot], shape: StepShape) -> tuple[float, float, float]:
    generator = torch.Generator().manual_seed(shape.context)
    texts = [torch.randint(engine.model.model.vocab, (shape.context,), generator=generator) for _ in held]
    prompts = list(zip(held, texts, strict=True))
    return _timed(engine, lambda: engine.read(prompts), PROMPT_REPEATS)


def _timed(engine: Engine, run: Callable[[], Any], repeats: int) -> tuple[float, float, float]:
    """Return the seconds of a run with the host ahead, with the host waiting, and until it was issued, on the slowest
    rank.
    """
    device = engine.model.device
    for _ in range(WARM_UP):
        run()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize(device)
    queued = (time.perf_counter() - begin) / repeats
    waited, issued = [], []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        issued.append(time.perf_counter() - begin)
        synchronize(device)
        waited.append(time.perf_counter() - begin)
    found = [queued, median(waited), median(issued)]
    if engine.model.spread.group is not None:
        found = max_over_ranks(found, device=device, group=engine.model.spread.group)
    return found[0], found[1], found[2]
