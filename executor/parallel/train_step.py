"""One optimizer step under a plan, from token ids to updated parameters."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.launch.garbage_collection import keep_freed_memory
from executor.model.shards import ParameterShard, local_tensor
from executor.parallel import gradients, pipeline
from executor.parallel.context_parallel import positions
from executor.parallel.data_parallel import Replica
from executor.parallel.optimizer_in_backward import OptimizerInBackward
from executor.parallel.parallelize import ParallelModel, Setup, parallelize
from simulator.config.plan import Plan
from simulator.config.runtime import TF32
from simulator.config.savers import CHUNKED_LOSS, OPTIMIZER_IN_BACKWARD
from simulator.config.workload import Workload

LEARNING_RATE = 3e-4
CLIP = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The loss per token of the whole batch before the update, and the gradient norm before clipping."""

    loss: float
    gradient_norm: float


class Trainer:
    """A model under a plan, ready to run optimizer steps. Building one is a collective call."""

    def __init__(self, setup: Setup) -> None:
        self.plan, self.model, self.workload, self.meshes = setup.plan, setup.model, setup.workload, setup.meshes
        self.device, self.seed = setup.device, setup.seed
        torch.set_float32_matmul_precision("high" if setup.runtime.compute_dtype == TF32 else "highest")
        keep_freed_memory()
        self.parallel: ParallelModel = parallelize(setup)
        self.micro_batches = self.plan.micro_batches(self.workload.global_batch_size)
        self.in_backward = (
            OptimizerInBackward(self.named_parameters(), self._adamw)
            if OPTIMIZER_IN_BACKWARD in setup.runtime.savers
            else None
        )
        self.in_pieces = CHUNKED_LOSS in setup.runtime.savers
        self._optimizer: torch.optim.Optimizer | None = None
        self._local_parameters: list[tuple[nn.Parameter, nn.Parameter]] = []

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return this rank's parameters under the names they have in the whole model."""
        return [pair for part in self.parallel.parts for pair in part.named_parameters()]

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.named_parameters()]

    @cached_property
    def parameter_shards(self) -> dict[str, ParameterShard]:
        """Shards of the parameters that tensor or expert parallelism has sharded, by name."""
        return {name: shard for part in self.parallel.parts for name, shard in part.parameter_shards.items()}

    def step(self, index: int) -> StepResult:
        """Run one optimizer step on batch `index`."""
        loss = self.backward(index)
        norm = self.update()
        return StepResult(loss=self.total_loss(loss), gradient_norm=float(norm))

    def backward(self, index: int) -> Tensor:
        """Run forward and backward over all micro batches; return this rank's part of the loss.

        The loss is divided by the tokens of the whole batch, so that the parts of all ranks and micro batches add up.
        """
        # Overlapped matmuls run Python code in backward. On autograd's own thread that costs switches of the
        # interpreter lock: 760 instead of 600 us for one attention output on two H200.
        with torch.autograd.set_multithreading_enabled(self.plan.tp_overlap == "none"):
            return self._backward(index)

    def _backward(self, index: int) -> Tensor:
        tokens, targets = self.batch(index)
        if self.parallel.schedule is not None:
            losses = pipeline.run(
                self.parallel.schedule,
                tokens if self.parallel.has_first else None,
                targets if self.parallel.has_last else None,
            )
            total = torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros(())
        else:
            total = self._accumulate(tokens, targets)
        gradients.sum_partial_gradients(self.named_parameters(), self.parameter_shards)
        return total.to(self.device)

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        place = self.meshes.coordinate
        tokens, targets = rank_batch(
            self.plan,
            self.workload,
            vocab=self.model.vocab,
            step=index,
            seed=self.seed,
            data_rank=place("dp_replicate") * self.plan.dp_shard + place("dp_shard"),
            cp_rank=place("cp"),
        )
        return tokens.to(self.device), targets.to(self.device)

    def _accumulate(self, tokens: Tensor, targets: Tensor) -> Tensor:
        module = self.parallel.modules[0]
        total = torch.zeros((), device=self.device)
        pieces = zip(tokens.chunk(self.micro_batches), targets.chunk(self.micro_batches), strict=True)
        for turn, (some, wanted) in enumerate(pieces):
            last = turn == self.micro_batches - 1
            # DDP would all-reduce accumulated gradients again, so it synchronises in the last micro batch only.
            quiet = module.no_sync() if isinstance(module, Replica) and not last else nullcontext()
            with quiet:
                loss = self._loss(module, some, wanted) / self.workload.tokens_per_step
                loss.backward()
            total = total + loss.detach()
        if isinstance(module, Replica):
            module.wait_for_reductions()
        return total

    def _loss(self, module: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the loss over a micro batch; a head in pieces has computed it already."""
        with self._precision():
            given = module(tokens, targets) if self.in_pieces else module(tokens)
        loss: Tensor = given if self.in_pieces else self.parallel.loss(given, targets)
        return loss

    def gradient(self, name: str, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's gradient after a backward pass; an optimizer in the backward pass has kept it."""
        return parameter.grad if self.in_backward is None else self.in_backward.seen.get(name)

    def _precision(self) -> AbstractContextManager[object]:
        kind = self.parallel.autocast
        return nullcontext() if kind is None else torch.autocast(self.device.type, dtype=kind)

    def total_loss(self, part: Tensor) -> float:
        """Return the loss of the whole batch, the sum of each rank's part; a collective call."""
        total = part.detach().double().clone()
        axes = ("dp_replicate", "dp_shard", "cp", "pp")
        for axis in axes:
            if self.meshes.grid[axis].size() > 1:
                dist.all_reduce(total, group=self.meshes.group(axis))
        return float(total)

    def update(self) -> Tensor:
        """Clip the gradients, step the optimizer and clear the gradients; return their norm before clipping."""
        if self.in_backward is not None:  # the optimizers in the backward pass have updated the parameters
            return self.in_backward.norm(self.device)
        stages = self.meshes.group("pp") if self.plan.pp > 1 else None
        norm = gradients.global_norm(self.named_parameters(), self.parameter_shards, stages, self.device)
        if self._optimizer is None:
            self._optimizer = self._build_optimizer()
        for parameter, here in self._local_parameters:
            here.grad = None if parameter.grad is None else local_tensor(parameter.grad)
        # Shards are clipped as plain tensors: torch's function does not support parameters of several meshes.
        shards = [here for _, here in self._local_parameters]
        torch.nn.utils.clip_grads_with_norm_(shards, CLIP, norm.to(shards[0].dtype))
        self._optimizer.step()
        for parameter, here in self._local_parameters:
            parameter.grad = here.grad = None
        return norm

    def _build_optimizer(self) -> torch.optim.Optimizer:
        """Return AdamW over the local shards as plain tensors.

        AdamW is elementwise, so it needs no meshes, and parameters of different meshes (experts and the rest) share one
        call. Built after the first backward pass, since FSDP reallocates its shards in the first forward pass.
        """
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        self._local_parameters = [(p, nn.Parameter(local_tensor(p.detach()))) for p in trained]
        return self._adamw([here for _, here in self._local_parameters])

    def _adamw(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters,
            lr=LEARNING_RATE,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=self.device.type == "cuda",
        )


def row(index: int, step: int, *, vocab: int, seq_len: int, seed: int) -> Tensor:
    """Return one sequence of seq_len + 1 token ids."""
    digest = hashlib.sha256(f"{seed}:{step}:{index}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "little"))
    return torch.randint(vocab, (seq_len + 1,), generator=generator)


def rank_batch(
    plan: Plan, workload: Workload, *, vocab: int, step: int, seed: int, data_rank: int, cp_rank: int
) -> tuple[Tensor, Tensor]:
    """Return (tokens, targets), each (sequences of this data-parallel rank, tokens of this context-parallel rank)."""
    share = workload.global_batch_size // plan.data_parallel
    rows = range(data_rank * share, (data_rank + 1) * share)
    whole = torch.stack([row(i, step, vocab=vocab, seq_len=workload.seq_len, seed=seed) for i in rows])
    own_positions = positions(workload.seq_len, cp_rank, plan.cp, torch.device("cpu"))
    return whole[:, own_positions], whole[:, own_positions + 1]
