"""How long steps of given shapes take: answers that go on, or prompts that are read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from executor.serving.cache import PAGE, pages_of
from executor.serving.engine import Engine, Held
from executor.serving.request import StepShape

WARM_UP, REPEATS, PROMPT_REPEATS = 2, 8, 2
MEASURED = WARM_UP + 2 * REPEATS


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step in the slowest rank, medians. `queued_s` with the host ahead of the device, `seconds` with the
    host waiting for each step before it starts the next, as it does while requests come and go.
    """

    phase: str
    batch: int
    context: int
    queued_s: float
    seconds: float


def time_step(engine: Engine, shape: StepShape) -> dict[str, Any] | str:
    """Time a step; return its record, or in words why it has no room. A collective call."""
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
    return asdict(
        StepTime(phase=shape.phase, batch=shape.batch, context=shape.context, queued_s=took[0], seconds=took[1])
    )


def _decode(engine: Engine, held: list[Held], shape: StepShape) -> tuple[float, float]:
    engine.set_position(held, shape.context)
    return _timed(engine, lambda: engine.go_on(held), REPEATS)


def _prefill(engine: Engine, held: list[Held], shape: StepShape) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(shape.context)
    texts = [torch.randint(engine.model.model.vocab, (shape.context,), generator=generator) for _ in held]
    prompts = list(zip(held, texts, strict=True))
    return _timed(engine, lambda: engine.read(prompts), PROMPT_REPEATS)


def _timed(engine: Engine, run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Return seconds of a run with the host ahead and with the host waiting, in the slowest rank."""
    device = engine.model.device
    for _ in range(WARM_UP):
        run()
    wait(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    wait(device)
    queued = (time.perf_counter() - begin) / repeats
    waited = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        wait(device)
        waited.append(time.perf_counter() - begin)
    found = torch.tensor([queued, median(waited)], dtype=torch.float64, device=device)
    if engine.model.spread.group is not None:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=engine.model.spread.group)
    return float(found[0]), float(found[1])


def wait(device: torch.device) -> None:
    """Let the host wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
