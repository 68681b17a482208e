"""A plan, applied: each line of `parallelize` is one choice of the plan, in the only order in which they compose.

Pipeline stages are cut while nothing has memory yet; tensor parallelism cuts parameters first and FSDP cuts the rest;
recomputation lies inside compilation, and compilation inside FSDP's hooks, so that a gathered block is compiled whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from executor import legal, pipeline
from executor.activation_checkpoint import apply_activation_checkpoint
from executor.context_parallel import RingAttention, positions
from executor.data_parallel import Replica, apply_fsdp
from executor.expert_parallel import apply_expert_parallel
from executor.init_weights import init_weights
from executor.meshes import Meshes
from executor.model import Decoder
from executor.tensor_parallel import apply_tensor_parallel
from executor.ulysses import UlyssesAttention
from executor.vocabulary_loss import VocabularyLoss
from simulator.model import Model
from simulator.plan import Plan
from simulator.runtime import Runtime
from simulator.runtime_library import stops_early
from simulator.workload import Workload

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """What one rank holds of a plan. `schedule` is None without a pipeline; `parts` are decoders without wrappers."""

    parts: tuple[Decoder, ...]
    modules: tuple[nn.Module, ...]  # what is called: the parts, or DDP around the only one
    schedule: Any
    loss: VocabularyLoss
    has_first: bool
    has_last: bool
    autocast: torch.dtype | None  # the type to compute in where FSDP does not see to it


def parallelize(
    plan: Plan,
    model: Model,
    workload: Workload,
    runtime: Runtime,
    meshes: Meshes,
    *,
    device: torch.device,
    seed: int,
    own_table: bool = False,
) -> Parallel:
    """Build this rank's part of `model` as `plan` says, with weights drawn from `seed`; a collective call."""
    legal.check(plan, model, workload, runtime, device=device.type)
    store, compute, reduce = (DTYPES[d] for d in (runtime.param_dtype, runtime.compute_dtype, runtime.reduce_dtype))
    micro_batches = plan.micro_batches(workload.global_batch_size)
    table = legal.schedule_table(plan, micro_batches)
    stages = legal.split(model, plan, table, meshes.coordinate("pp"), runtime=runtime.name)
    tp_mesh = meshes.dense["tp"] if plan.tp > 1 else None
    with torch.device("meta"):
        parts = tuple(Decoder(model, s.layers, first=s.first, last=s.last).to(store) for s in stages)

    # With tensor or pipeline parallelism, FSDP is applied for the sake of precision even when it shards nothing, and
    # whatever the types are: what is verified in wide ones is built as what is timed in narrow ones.
    alone = _alone(plan)
    sharded = not alone
    for part, stage in zip(parts, stages, strict=True):
        if tp_mesh is not None:
            apply_tensor_parallel(
                part,
                tp_mesh.get_group(),
                sequence_parallel=plan.sequence_parallel,
                experts_cut=plan.ep > 1,
                overlap=plan.tp_overlap,
            )
        if plan.cp > 1:
            method = legal.cp_method(plan, runtime)
            for block in part.layers.values():
                attention, group = block.attention, meshes.group("cp")
                by_heads = method == "all_to_all"
                attention.core = (
                    UlyssesAttention(group, attention.core)
                    if by_heads
                    else RingAttention(group, method, width=model.head_dim, dtype=compute, device=device)
                )
        if meshes.sparse is not None:
            apply_expert_parallel(part, meshes.sparse["ep"].get_group())
        modes = plan.recompute_per_stage
        recompute = modes[stage.index] if modes else plan.recompute
        # As the plan's runtime has it, so that a run shows what the description predicts.
        apply_activation_checkpoint(part, recompute, early_stop=stops_early(runtime), compiled=runtime.compile)
        if runtime.compile:
            for block in part.layers.values():
                block.compile()
        if sharded:
            apply_fsdp(
                part,
                _data_mesh(meshes.dense, "fsdp", plan),
                expert_mesh=None if meshes.sparse is None else _data_mesh(meshes.sparse, "efsdp", plan),
                precision=MixedPrecisionPolicy(param_dtype=_if(compute is not store, compute), reduce_dtype=reduce),
                reshard_after_forward=plan.pp == 1
                if plan.reshard_after_forward is None
                else plan.reshard_after_forward,
            )
        part.to_empty(device=device)
        if not sharded:
            part.tie()  # FSDP keeps shared parameters shared; plain modules come back from the meta device without
        init_weights(part, seed=seed, cuts=part.cuts)
        part.set_positions(positions(workload.seq_len, meshes.coordinate("cp"), plan.cp, device), compute)

    modules: tuple[nn.Module, ...] = parts
    if alone and plan.dp_replicate > 1:
        modules = tuple(Replica(part, meshes.group("dp_replicate"), device) for part in parts)
    loss = VocabularyLoss(model.vocab, tp_mesh, compiled=runtime.compile, tokens_first=_tokens_first(plan))
    schedule = None
    if plan.pp > 1:

        def per_token(logits: Tensor, targets: Tensor) -> Tensor:
            return loss(logits, targets) / workload.tokens_per_step

        schedule = pipeline.build_runtime(
            stages,
            modules,
            table,
            group=meshes.group("pp"),
            device=device,
            shapes=_shapes(plan, model, workload),
            dtype=compute if sharded else store,
            loss=per_token,
            own_table=own_table,
        )
    return Parallel(
        parts=parts,
        modules=modules,
        schedule=schedule,
        loss=loss,
        has_first=any(s.first for s in stages),
        has_last=any(s.last for s in stages),
        autocast=autocast_type(plan, runtime),
    )


def autocast_type(plan: Plan, runtime: Runtime) -> torch.dtype | None:
    """Return the type that autocast computes in; None where FSDP sees to it, or parameters have it.

    Whole copies, or one GPU: no FSDP, so autocast does what FSDP's precision does elsewhere.
    """
    store, compute = DTYPES[runtime.param_dtype], DTYPES[runtime.compute_dtype]
    return _if(_alone(plan) and compute is not store, compute)


def _alone(plan: Plan) -> bool:
    return plan.dp_shard * plan.cp * plan.tp * plan.pp == 1


def _data_mesh(mesh: DeviceMesh, shards: str, plan: Plan) -> DeviceMesh:
    """Return the axes that data parallelism uses: replicas only where there are any."""
    return mesh["dp_replicate", shards] if plan.dp_replicate > 1 else mesh[shards]


def _tokens_first(plan: Plan) -> bool:
    """Return whether hidden states are (S, B, h): tokens that tensor parallelism cuts lie first."""
    return plan.tp > 1 and plan.sequence_parallel


def _if(wanted: bool, dtype: torch.dtype) -> torch.dtype | None:
    return dtype if wanted else None


def _shapes(plan: Plan, model: Model, workload: Workload) -> dict[str, tuple[int, ...]]:
    """Return what crosses the boundaries of stages, per micro batch and rank."""
    batch, tokens = plan.micro_batch_size, workload.seq_len // plan.cp
    hidden, logits = (batch, tokens), (batch, tokens)
    if _tokens_first(plan):
        hidden, logits = (tokens // plan.tp, batch), (tokens, batch)
    return {
        "tokens": (batch, tokens),
        "hidden": (*hidden, model.hidden),
        "logits": (*logits, model.vocab // plan.tp),
    }
