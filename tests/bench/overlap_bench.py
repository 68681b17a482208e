"""What the parts of the overlap bench share: inputs, time left, and interleaved timing on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from tests.executor.workers.overlap_checks import Ranks

ROUNDS = 5
CALL_S = 10e-3  # of calls in a row for one sample
WARM_S = 2.0


class Bench(Ranks):
    def __init__(self, out: str, seconds: float, rows: tuple[int, ...] = (), operations: tuple[str, ...] = ()) -> None:
        super().__init__(out, seconds)
        self.rows, self.operations = rows, operations

    def times(self, calls: dict[str, Callable[[], object]], *, rounds: int = ROUNDS) -> dict[str, float]:
        """Return the median seconds of one call of each; a call that raises on this machine is left out."""
        inner = {}
        for name, call in list(calls.items()):
            for _ in range(2):
                call()
            torch.cuda.synchronize()
            dist.barrier()
            inner[name] = max(4, min(200, int(CALL_S / max(self._sample(call, 3), 1e-6))))
        counts = torch.tensor(list(inner.values()), device=self.device)
        dist.all_reduce(counts, dist.ReduceOp.MIN)
        inner = dict(zip(inner, counts.tolist(), strict=True))
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                samples[name].append(self._sample(call, inner[name]))
        mine = torch.tensor([median(values) for values in samples.values()], dtype=torch.float64, device=self.device)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        return dict(zip(samples, mine.tolist(), strict=True))

    @staticmethod
    def _sample(call: Callable[[], object], inner: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(inner):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / inner

    def warm(self, seconds: float = WARM_S) -> None:
        a, b = self.draw(8192, 8192), self.draw(8192, 8192)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for _ in range(20):
                a @ b
            torch.cuda.synchronize()
        dist.barrier()
