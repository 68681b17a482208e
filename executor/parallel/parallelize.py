"""Apply a plan to the decoder: one step per choice of the plan, in the only order in which they compose.

Pipeline stages are built on the meta device; tensor and expert parallelism shard parameters first, FSDP shards what is
left; recomputation is inside compilation, and compilation inside FSDP's hooks, so that a block is compiled whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining.schedules import _PipelineSchedule

from executor.launch import legal
from executor.model.adapters import train_only
from executor.model.decoder import Decoder, init_weights
from executor.model.vocabulary_loss import HeadInPieces, VocabularyLoss
from executor.overlap.fsdp_exchange import push_exchanges
from executor.parallel import pipeline
from executor.parallel.activation_checkpoint import apply_activation_checkpoint
from executor.parallel.cast_units import cast_units
from executor.parallel.context_parallel import RingAttention, UlyssesAttention, positions
from executor.parallel.data_parallel import Replica, apply_fsdp
from executor.parallel.expert_parallel import apply_expert_parallel
from executor.parallel.meshes import Meshes
from executor.parallel.tensor_parallel import apply_tensor_parallel
from simulator.config.model import Model
from simulator.config.plan import COPY_ENGINE, Plan
from simulator.config.runtime import Runtime
from simulator.config.savers import ACTIVATION_OFFLOAD, CHUNKED_LOSS
from simulator.config.workload import Workload
from simulator.pipeline.schedules.registry import schedule_of_plan
from simulator.runtimes.library import recompute_stops_early

FSDP, CASTS = "FSDP", "casts"  # what holds parameters
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelModel:
    """The part of a model that this rank holds under a plan.

    `parts` are its decoders (one per pipeline stage), `modules` what is called: the parts, or DDP around the only one.
    `schedule` is None without a pipeline. `autocast` is the type to compute in where FSDP does not cast.
    """

    parts: tuple[Decoder, ...]
    modules: tuple[nn.Module, ...]
    schedule: _PipelineSchedule | None
    loss: VocabularyLoss
    has_first: bool
    has_last: bool
    autocast: torch.dtype | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A plan and its inputs. Weights and batches are drawn from `seed`."""

    plan: Plan
    model: Model
    workload: Workload
    runtime: Runtime
    meshes: Meshes
    device: torch.device
    seed: int = 0
    own_table: bool = False  # use the simulator's pipeline table instead of torch's schedule
    as_typed: Runtime | None = None  # wrap as for the types of this one

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """Return the types in which parameters are stored, computed with, and reduced."""
        runtime = self.runtime
        return DTYPES[runtime.param_dtype], DTYPES[runtime.activation_dtype], DTYPES[runtime.reduce_dtype]


def parallelize(setup: Setup) -> ParallelModel:
    """Build this rank's part of the model as the plan says; a collective call.

    Raises BadPlan or BadModel for what the executor cannot run.
    """
    plan, model, workload, meshes = setup.plan, setup.model, setup.workload, setup.meshes
    legal.check(plan, model, workload, setup.runtime)
    store, compute, _ = setup.dtypes
    table = schedule_of_plan(plan, plan.micro_batches(workload.global_batch_size))
    stages = legal.split(model, plan, table, meshes.coordinate("pp"), runtime=setup.runtime.name)
    with torch.device("meta"):
        parts = tuple(
            train_only(Decoder(model, s.layers, first=s.first, last=s.last), model, setup.runtime.adapter).to(store)
            for s in stages
        )
    loss = VocabularyLoss(
        model.vocab, _tp_mesh(setup), compiled=setup.runtime.compile, tokens_first=_tokens_first(plan)
    )
    for part, stage in zip(parts, stages, strict=True):
        if CHUNKED_LOSS in setup.runtime.savers and part.output is not None:
            part.output = HeadInPieces.of(part.output, loss)
        _shard_over_ranks(setup, part)
        _recompute_and_compile(setup, part, stage.index)
        wrapping = wrapper(plan, setup.as_typed or setup.runtime)
        if wrapping == FSDP:
            _apply_fsdp(setup, part)
        part.to_empty(device=setup.device)
        if wrapping != FSDP:
            part.tie()  # to_empty unties plain modules; FSDP keeps shared parameters shared
        init_weights(part, seed=setup.seed, parameter_shards=part.parameter_shards)
        part.set_positions(positions(workload.seq_len, meshes.coordinate("cp"), plan.cp, setup.device), compute)
        if wrapping == CASTS:
            cast_units(part, compute, reshard_after_forward=_reshards(plan))

    modules: tuple[nn.Module, ...] = parts
    if _is_replicated_only(plan) and plan.dp_replicate > 1:
        modules = tuple(Replica(part, meshes.group("dp_replicate"), setup.device) for part in parts)
    schedule = None
    if plan.pp > 1:

        def loss_per_token(logits: Tensor, targets: Tensor) -> Tensor:
            total: Tensor = loss(logits, targets)
            return total / workload.tokens_per_step

        schedule = pipeline.build_schedule(
            stages,
            modules,
            table,
            group=meshes.group("pp"),
            device=setup.device,
            shapes=_shapes(plan, model, workload, meshes.coordinate("tp")),
            dtype=store if _is_replicated_only(plan) else compute,
            loss=loss_per_token,
            own_table=setup.own_table,
        )
    return ParallelModel(
        parts=parts,
        modules=modules,
        schedule=schedule,
        loss=loss,
        has_first=any(s.first for s in stages),
        has_last=any(s.last for s in stages),
        autocast=autocast_type(plan, setup.runtime),
    )


def _shard_over_ranks(setup: Setup, part: Decoder) -> None:
    """Apply tensor, context and expert parallelism to a stage, in this order."""
    plan, meshes = setup.plan, setup.meshes
    if (tp_mesh := _tp_mesh(setup)) is not None:
        apply_tensor_parallel(
            part,
            tp_mesh.get_group(),
            sequence_parallel=plan.sequence_parallel,
            expert_parallel=plan.ep > 1,
            overlap=plan.tp_overlap,
        )
    if plan.cp > 1:
        method, group = legal.cp_method(plan, setup.runtime), meshes.group("cp")
        _, compute, _ = setup.dtypes
        for block in part.blocks().values():
            block.attention.core = (
                UlyssesAttention(group, block.attention.core)
                if method == "all_to_all"
                else RingAttention(group, method, width=setup.model.head_dim, dtype=compute, device=setup.device)
            )
    if meshes.sparse is not None:
        apply_expert_parallel(part, meshes.sparse["ep"].get_group())


def _recompute_and_compile(setup: Setup, part: Decoder, stage: int) -> None:
    """Apply the stage's recomputation, then compile each block; `early_stop` is from the runtime description."""
    plan, runtime = setup.plan, setup.runtime
    recompute = plan.recompute_per_stage[stage] if plan.recompute_per_stage else plan.recompute
    apply_activation_checkpoint(
        part,
        recompute,
        early_stop=recompute_stops_early(runtime),
        compiled=runtime.compile,
        away=ACTIVATION_OFFLOAD in runtime.savers,
    )
    if runtime.compile:
        for block in part.blocks().values():
            block.compile()


def _apply_fsdp(setup: Setup, part: Decoder) -> None:
    """Apply FSDP2 with the runtime's types."""
    plan, meshes = setup.plan, setup.meshes
    store, compute, reduce = setup.dtypes
    mesh = _data_mesh(meshes.dense, "fsdp", plan)
    precision = MixedPrecisionPolicy(param_dtype=None if compute is store else compute, reduce_dtype=reduce)
    apply_fsdp(
        part,
        mesh,
        expert_mesh=None if meshes.sparse is None else _data_mesh(meshes.sparse, "efsdp", plan),
        precision=precision,
        reshard_after_forward=_reshards(plan),
    )
    if plan.fsdp_exchange == COPY_ENGINE:
        push_exchanges([*part.blocks().values()], mesh.get_group(), setup.device, precision)


def _tp_mesh(setup: Setup) -> DeviceMesh | None:
    return setup.meshes.dense["tp"] if setup.plan.tp > 1 else None


def autocast_type(plan: Plan, runtime: Runtime) -> torch.dtype | None:
    """Return the type that autocast computes in; None where FSDP casts, or parameters have that type already.

    One GPU or plain replicas (DDP) have no FSDP, whose mixed precision autocast replaces.
    """
    store, compute = DTYPES[runtime.param_dtype], DTYPES[runtime.activation_dtype]
    return compute if _is_replicated_only(plan) and compute is not store else None


def wrapper(plan: Plan, runtime: Runtime) -> str:
    """Return what holds a stage's parameters: FSDP, to shard them, to reduce gradients that stages, replicas or experts
    share, or for compiled mixed precision; CASTS where one rank casts its own; or nothing.

    Over one rank FSDP2's hooks take two fifths of the host's time of a tensor-parallel layer
    (examples/profiles/hosts.md).
    """
    if _is_replicated_only(plan):
        return ""
    if plan.tp != plan.gpus or plan.ep > 1:
        return FSDP
    if DTYPES[runtime.param_dtype] is DTYPES[runtime.activation_dtype]:
        return ""
    return FSDP if runtime.compile or runtime.adapter is not None else CASTS


def _reshards(plan: Plan) -> bool:
    return plan.pp == 1 if plan.reshard_after_forward is None else plan.reshard_after_forward


def _is_replicated_only(plan: Plan) -> bool:
    """Return whether every rank holds the whole model: one GPU, or plain data parallelism."""
    return plan.dp_shard * plan.cp * plan.tp * plan.pp == 1


def _data_mesh(mesh: DeviceMesh, shards: str, plan: Plan) -> DeviceMesh:
    """Return the axes of data parallelism, including `dp_replicate` only if there are several replicas."""
    return mesh["dp_replicate", shards] if plan.dp_replicate > 1 else mesh[shards]


def _tokens_first(plan: Plan) -> bool:
    """Return whether hidden states are (S, B, h), as sequence parallelism lays them out."""
    return plan.tp > 1 and plan.sequence_parallel


def _shapes(plan: Plan, model: Model, workload: Workload, tp_rank: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tokens, hidden states and logits at stage boundaries, per micro batch and rank."""
    batch, tokens = plan.micro_batch_size, workload.seq_len // plan.cp
    hidden, logits = (batch, tokens), (batch, tokens)
    vocab = -(-model.vocab // plan.tp)  # words per rank, the remainder on the last rank, as in `ParameterShard`
    if _tokens_first(plan):
        hidden, logits = (tokens // plan.tp, batch), (tokens, batch)
    return {
        "tokens": (batch, tokens),
        "hidden": (*hidden, model.hidden),
        "logits": (*logits, min(vocab, model.vocab - vocab * tp_rank)),
    }
