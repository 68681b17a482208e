"""Runs of one and of two layers of a runtime, wide and narrow.

A wide run has the plan's own layer, and shows the device and what a step adds to kernels alone. A narrow run has the
same parallelism with tensors so small that the device is hardly busy: its time is the host's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from planner.calibrate.calibration_request import TYPICAL_LAYERS, VOCABULARY, one_layer
from planner.calibrate.planned_step import PlannedStep
from simulator.calibration.items import LayerItem
from simulator.config.model import MixtureOfExperts, Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.runtimes.library import runtime_spec

MAX_RANKS = 4
# With 256 tokens the kernels of such a layer take at most as long on the device as their launches on the host.
NARROW: dict[str, Any] = {"hidden": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn": 1024, "vocab": 1024}
# Parts that a layer of Llama or Qwen 3 does not have.
PLAIN: dict[str, Any] = {
    "gated_mlp": True,
    "norm": "rmsnorm",
    "sliding_window": 0,
    "sliding_layers": 0,
    "learned_positions": 0,
    "rotary": True,
    "parallel_residual": False,
    **dict.fromkeys(("norm_bias", "qkv_bias", "attention_out_bias", "mlp_bias", "head_bias", "qk_norm_wide"), False),
}
NARROW_TOKENS = 256  # tokens of a rank's micro batch
NARROW_EXPERTS = MixtureOfExperts(experts=8, experts_per_token=2, ffn=256)
EXPERTS = MixtureOfExperts(experts=64, experts_per_token=8, ffn=768)
DEPTH, SEQUENCES = 32, 16  # layers of the typical models; sequences in a step


def typical_steps(name: str, gpus: int) -> list[PlannedStep]:
    """Return steps of typical models under every kind of parallelism that `gpus` GPUs allow, for a runtime by name.

    There is a small model whose layers sometimes wait for the host, a large one, and one with experts.
    """
    many = min(MAX_RANKS, 1 << (gpus.bit_length() - 1))
    known = runtime_spec(name).recompute
    wide, small, middle = (replace(one_layer(TYPICAL_LAYERS[i], VOCABULARY), layers=DEPTH) for i in (0, 1, 3))
    sparse = replace(middle, family="qwen3", qk_norm=True, moe=EXPERTS)
    half = many // 2
    of_small = [
        Plan(dp_shard=many),
        Plan(),
        Plan(tp=many, sequence_parallel=True),
        Plan(dp_shard=2, tp=half, sequence_parallel=True),
        Plan(cp=many),
        Plan(dp_shard=many, recompute="full"),
        Plan(recompute="full"),
        Plan(dp_shard=many, recompute="selective-op"),
        Plan(pp=2, dp_shard=half, schedule="1F1B"),
        Plan(dp_replicate=many),
    ]
    found = [_step(name, small, plan, 2048) for plan in of_small]
    found += [_step(name, small, plan, 2048, compiled=True) for plan in (of_small[0], of_small[2], of_small[1])]
    found += [_step(name, wide, plan, 8192) for plan in (of_small[0], of_small[2], of_small[1])]
    found.append(_step(name, sparse, Plan(dp_shard=many, ep=many), 2048))
    return list(dict.fromkeys(one for one in found if one.plan.recompute in known and one.plan.gpus in {1, many}))


def _step(name: str, model: Model, plan: Plan, seq_len: int, *, compiled: bool = False) -> PlannedStep:
    return PlannedStep(
        model=model,
        plan=plan,
        workload=Workload(seq_len=seq_len, global_batch_size=SEQUENCES),
        runtime=_types(Runtime(name=name, compile=compiled), plan),
    )


def _types(runtime: Runtime, plan: Plan) -> Runtime:
    """Return the runtime with the types that it uses under a plan.

    Mixed precision comes with FSDP, also where it wraps a single rank; otherwise a divided model computes in the type
    in which it is stored.
    """
    if runtime_spec(runtime.name).fsdp.wraps_one in {"always", "grouped"}:
        return runtime
    cut = plan.tp * plan.pp > 1 and plan.dp_shard * plan.cp == 1
    return replace(runtime, param_dtype=runtime.activation_dtype) if cut else runtime


def runs_here(runtime: Runtime) -> bool:
    """Return whether the executor can run layers of a runtime."""
    return bool(runtime_spec(runtime.name).tools.layers)


def timed_runtime(runtime: Runtime) -> Runtime:
    """Return the runtime whose narrow layers are timed for `runtime`: the same, or the executor's, which shows the
    host's speed.
    """
    return runtime if runs_here(runtime) else Runtime(name="meshwright")


def narrow_requests(step: PlannedStep, gpus: int) -> list[LayerItem]:
    """Return the narrow runs whose host does the same work as the plan's: of its layer and, under a pipeline, of two
    stages.

    For a runtime that the executor cannot run, a plain layer of the executor on one GPU, which shows the host's speed.
    """
    if not runs_here(step.runtime):
        plain = replace(step, model=one_layer(TYPICAL_LAYERS[0], VOCABULARY), runtime=timed_runtime(step.runtime))
        return [_narrow(plain, Plan(), (1, 8))]
    single = single_layer_plan(step.plan, gpus)
    found = [] if single is None else [_narrow(step, single, (1, 8))]
    if step.plan.pp > 1 and gpus > 1:
        shards = 2 if gpus > 3 and step.plan.dp_shard > 1 else 1
        found.append(_narrow(step, Plan(pp=2, dp_shard=shards, schedule="1F1B", recompute=step.plan.recompute), (2,)))
    return found


def _narrow(step: PlannedStep, plan: Plan, counts: tuple[int, ...]) -> LayerItem:
    plan = replace(plan, micro_batch_size=1, tp_overlap="none", reshard_after_forward=None)
    moe = None if step.model.moe is None else NARROW_EXPERTS
    model = replace(
        step.model, **NARROW, name="narrow layer", layers=1, moe=moe, latent=None, sliding_window=0, sliding_layers=0
    )  # fmt: skip
    rounds = 2 * plan.pp if plan.pp > 1 else 1
    workload = replace(
        step.workload,
        seq_len=NARROW_TOKENS * plan.cp,
        global_batch_size=plan.data_parallel * plan.micro_batch_size * rounds,
    )
    return replace(_request(model, plan, workload, _types(step.runtime, plan)), counts=counts)


def _request(model: Model, plan: Plan, workload: Workload, runtime: Runtime) -> LayerItem:
    """Return a run. Embeddings are not tied: that does not change layers, and not every runtime ties them."""
    if runtime_spec(runtime.name).tools.layers == "torchtitan":
        model = torchtitan_network(model)
    model = replace(model, layers=1, tied_embeddings=False)
    return LayerItem(ranks=plan.gpus, model=model, plan=plan, workload=workload, runtime=runtime)


def torchtitan_network(model: Model) -> Model:
    """Return the closest to `model` of torchtitan's models that calibration runs: Llama and Qwen 3."""
    plain = replace(model, **PLAIN, latent=None)
    if model.moe is not None:
        moe = replace(model.moe, shared_ffn=0, shared_gate=False, dense_layers=0, dense_layer_ids=())
        return replace(plain, qk_norm=True, moe=moe)
    if model.qk_norm or model.head_dim * model.heads != model.hidden:
        return replace(plain, qk_norm=True)
    return replace(plain, tied_embeddings=False)


def layer_request(question: PlannedStep, gpus: int) -> LayerItem | None:
    """Return the run of one and two layers that is closest to the plan on `gpus` GPUs; None if there is none, or the
    executor cannot run the runtime.

    Pipeline parallelism is dropped, as it does not change a layer; then data parallelism is reduced, and only then
    context and tensor parallelism.
    """
    plan = single_layer_plan(question.plan, gpus)
    if plan is None or not runs_here(question.runtime):
        return None
    workload = replace(question.workload, global_batch_size=plan.data_parallel * plan.micro_batch_size)
    model = question.model
    moe = model.moe
    if moe is not None and moe.dense_layers:
        model = replace(model, moe=replace(moe, dense_layers=0, dense_layer_ids=()))
    return _request(model, plan, workload, _types(question.runtime, plan))


def single_layer_plan(plan: Plan, gpus: int) -> Plan | None:
    """Return the plan without pipeline parallelism, reduced to `gpus` ranks; None if that is impossible."""
    single = replace(
        plan,
        pp=1,
        virtual_stages=1,
        schedule=None,
        layers_per_stage=(),
        recompute_per_stage=(),
        placement=(),
        # A pipelined plan computes in the dtype of FSDP's mixed precision only if something is sharded.
        dp_shard=max(plan.dp_shard, 2) if plan.pp > 1 and gpus > plan.tp * plan.cp else plan.dp_shard,
    )
    for axis in ("dp_replicate", "dp_shard", "cp", "tp"):
        while single.gpus > gpus and getattr(single, axis) % 2 == 0:
            single = replace(single, **{axis: getattr(single, axis) // 2})
    if single.gpus > gpus:
        return None
    return replace(single, ep=math.gcd(single.ep, single.dp_shard * single.cp * single.tp))
