"""torchtitan's own training step with the interface of our own, so that its runs have the same records."""

from __future__ import annotations

import math
from typing import Any

from executor.launch.request import Request
from executor.measure.torchtitan import titan_step
from executor.parallel.train_step import StepResult
from topology.errors import BadPlan


class TitanTrainer:
    """One of torchtitan's Trainers, on random tokens. Building it is a collective call.

    `peak_reserved_bytes` is the largest that a step has reserved: torchtitan resets torch's own count with each step.
    """

    def __init__(self, request: Request, device: Any) -> None:
        """Raises BadPlan for a model that torchtitan does not have, and if ranks share a GPU."""
        if request.gpus and tuple(request.gpus) != tuple(range(len(request.gpus))):
            raise BadPlan("torchtitan runs rank r on GPU r", why=f"the plan places ranks on {list(request.gpus)}")
        self._step = titan_step(request.model, request.plan, request.workload, request.runtime, device)
        self.peak_reserved_bytes = 0

    def step(self, index: int) -> StepResult:
        """Run one optimizer step; batches do not depend on `index`."""
        del index
        seen = self._step()
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, int(seen.get("reserved_bytes", 0)))
        return StepResult(loss=seen.get("loss", math.nan), gradient_norm=seen.get("gradient_norm", math.nan))
