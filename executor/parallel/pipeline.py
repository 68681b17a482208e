"""Pipeline parallelism with torch.distributed.pipelining.

The schedule is torch's schedule of that name, or our own table (`simulator.pipeline.schedules`). torch's runtime loads
the table, so the simulated schedule is the one that runs. Communication: hidden states to the next stage and their
gradients back, one message per micro batch and stage boundary.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from executor.launch.legal import StagePart
from simulator.pipeline.schedules.registry import SCHEDULES
from simulator.pipeline.schedules.table import Schedule


class _Stage(PipelineStage):
    """A stage whose graph outlives the first half of a split backward pass.

    After computing the gradients of the inputs torch detaches a stage's output from the graph. That frees an autograd
    function written in Python to which no other node refers, although the gradients of its weights are still needed:
    torch 2.11 then fails ("Attribute '_input_metadata' is invalid"). A reference to the output's own node keeps the
    graph alive, without the loss.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.graphs: dict[int, list[Node | None]] = {}  # by micro batch, kept between the two halves

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not full_backward:
            outputs, _ = self.fwd_cache[bwd_chunk_id]
            self.graphs[bwd_chunk_id] = [output.grad_fn for output in outputs]
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self.graphs.pop(bwd_chunk_id, None)


def build_schedule(
    parts: Sequence[StagePart],
    modules: Sequence[nn.Module],
    table: Schedule,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    loss: Callable[[Tensor, Tensor], Tensor],
    own_table: bool,
) -> _PipelineSchedule:
    """Return torch's schedule object for this rank's stages. `shapes`: of tokens, hidden and logits of a micro batch.

    `own_table` runs our table even where torch has the schedule; a schedule that torch lacks always uses our table.
    """
    stages = [
        _Stage(
            module,
            part.index,
            table.stages,
            device,
            input_args=_tokens(shapes["tokens"]) if part.first else _states(shapes["hidden"], dtype),
            output_args=_states(shapes["logits"] if part.last else shapes["hidden"], dtype),
            group=group,
        )
        for part, module in zip(parts, modules, strict=True)
    ]
    if not own_table and SCHEDULES[table.name].in_torch:
        kind = get_schedule_class(table.name)
        own = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
        schedule: _PipelineSchedule = kind(own, table.micro_batches, loss_fn=loss, scale_grads=False)
        return schedule
    runtime = _PipelineScheduleRuntime(stages, table.micro_batches, loss_fn=loss, scale_grads=False)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(table.csv(), encoding="utf-8")
        runtime._load_csv(str(path), format="compute_only")  # noqa: SLF001 - the runtime's only door for tables
    return runtime


def _tokens(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.long, device="meta")


def _states(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an example tensor; from torch 2.13 on, a stage sends gradients only for examples that require them."""
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def run(schedule: _PipelineSchedule, tokens: Tensor | None, targets: Tensor | None) -> list[Tensor]:
    """Run one step's micro batches; return their losses, empty on ranks without the last stage."""
    losses: list[Tensor] = []
    # The concatenated logits of all micro batches are not needed and would be the largest tensor of the run.
    step: Callable[..., object] = schedule.step
    extra = {"return_outputs": False} if "return_outputs" in inspect.signature(step).parameters else {}
    arguments = () if tokens is None else (tokens,)
    step(*arguments, target=targets, losses=losses, **extra)
    return losses
