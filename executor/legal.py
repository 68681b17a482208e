"""What this executor can run, decided from shapes alone: before any process is started, and without torch."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.model import Model
from simulator.overlap_sites import NONE, SITES, mode_at, modes_in
from simulator.plan import Plan
from simulator.runtime import Runtime
from simulator.runtime_library import runtime_spec
from simulator.schedule_tables import build_schedule
from simulator.schedules import Kind, Schedule
from simulator.stages import stage_layers
from simulator.workload import Workload
from topology.errors import BadModel, BadPlan

RECOMPUTE = ("none", "selective-op", "selective", "full")
DTYPES = ("float64", "float32", "bfloat16", "float16")
# The plan's word for an overlap mode, and `executor.overlap`'s. Asynchronous tensor parallelism is torch's own.
OVERLAP_MODES = {
    "chunked": "chunked",
    "ring": "ring",
    "copy_engine": "copy_engine",
    "fused": "fused",
    "async": "torch_symm_mem",
}
CP_METHODS = ("ring", "all_gather", "all_to_all")
DEFAULT_SCHEDULE = "1F1B"


def check(plan: Plan, model: Model, workload: Workload, runtime: Runtime, *, device: str) -> None:
    """Raise BadPlan or BadModel for what this executor cannot run as asked; it never runs something else instead."""
    refuse_unsupported(model)
    problems = []
    if plan.zero_stage not in {None, 0}:
        problems.append(f"ZeRO stage {plan.zero_stage}: say dp_shard, which is FSDP2")
    problems += _overlap_problems(plan, model, runtime)
    if model.heads % plan.tp or (model.latent is None and model.kv_heads % plan.tp):
        problems.append(f"tp {plan.tp} must divide {model.heads} heads and {model.kv_heads} key/value heads")
    if model.vocab % plan.tp:
        problems.append(f"tp {plan.tp} must divide the vocabulary of {model.vocab}")
    multiple = (plan.tp if plan.sequence_parallel else 1) * (2 * plan.cp if plan.cp > 1 else 1)
    if workload.seq_len % multiple:
        problems.append(f"sequence length {workload.seq_len} must be a multiple of {multiple}")
    if runtime.compile and plan.cp > 1 and plan.tp > 1:
        problems.append(
            "compile with cp and tp: torch's partitioner fails on some blocks (seen with 2.13); run it eager"
        )
    if plan.cp > 1:
        problems += _context_problems(plan, model, workload, cp_method(plan, runtime))
    if plan.ep > 1 and model.moe is None:
        problems.append(f"ep {plan.ep}: {model.name} has no experts")
    if plan.ep > 1 and model.moe is not None and model.moe.experts % plan.ep:
        problems.append(f"ep {plan.ep} must divide {model.moe.experts} experts")
    if plan.ep > 1 and plan.tp > 1 and not plan.sequence_parallel:
        problems.append("ep with tp needs sequence_parallel, or each token would be routed tp times")
    if plan.virtual_stages > 1 and plan.pp == 1:
        problems.append("virtual stages need a pipeline")
    if plan.placement and len(plan.placement) != plan.gpus:
        problems.append(f"placement names {len(plan.placement)} GPUs for {plan.gpus} ranks")
    if device == "cuda" and plan.gpus > 1 and len(set(plan.placement or range(plan.gpus))) != plan.gpus:
        problems.append("placement puts two ranks on one GPU")
    modes = sorted({plan.recompute, *plan.recompute_per_stage} - set(RECOMPUTE))
    problems += [f"recompute {mode!r}: one of {', '.join(RECOMPUTE)}" for mode in modes]
    if len(plan.recompute_per_stage) not in {0, plan.pp * plan.virtual_stages}:
        problems.append(
            f"recompute_per_stage names {len(plan.recompute_per_stage)} modes for {plan.pp * plan.virtual_stages} stages"
        )
    if plan.capacity_factor is not None:
        problems.append(f"capacity_factor {plan.capacity_factor:g}: no token is dropped here, and none padded")
    if workload.expert_imbalance != 1.0:
        problems.append(
            f"expert_imbalance {workload.expert_imbalance:g}: the model's own router spreads synthetic tokens, as evenly"
            " as it does; the load cannot be asked for"
        )
    types = (runtime.param_dtype, runtime.compute_dtype, runtime.reduce_dtype)
    problems += [f"type {name}: one of {', '.join(DTYPES)}" for name in types if name not in DTYPES]
    if runtime.optimizer != "adamw":
        problems.append(f"optimizer {runtime.optimizer}: only adamw")
    try:
        plan.micro_batches(workload.global_batch_size)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise BadPlan("the executor cannot run this plan", why="; ".join(problems))
    table = schedule_table(plan, plan.micro_batches(workload.global_batch_size))
    split(model, plan, table, 0, runtime=runtime.name)
    if runtime.compile and any(
        part.kind is Kind.WEIGHT_GRAD for row in table.table for act in row for part in act.leaves
    ):
        raise BadPlan(
            f"{table.name} cannot run compiled",
            why="it runs the gradients of inputs and of weights apart, and compiled code computes both at once",
            remedy="a schedule that does not split the backward pass, or --no-compile",
        )


def _context_problems(plan: Plan, model: Model, workload: Workload, method: str) -> list[str]:
    """Return why a sequence cannot be spread over ranks this way, or nothing."""
    if method not in CP_METHODS:
        return [f"cp_method {method}: one of {', '.join(CP_METHODS)}"]
    if method == "all_to_all":
        heads = model.heads if model.latent is not None else model.kv_heads
        if heads % (plan.tp * plan.cp):
            return [f"cp_method all_to_all shares out heads: tp x cp {plan.tp * plan.cp} must divide {heads}"]
        return []
    found = []
    if model.latent is not None:
        found.append(
            f"cp_method {method} with latent attention, whose values are narrower than its keys: all_to_all can"
        )
    if model.sliding_layers > 0 and model.sliding_window < workload.seq_len:
        found.append(f"cp_method {method} with sliding windows, which reach over parts of ranks: all_to_all can")
    return found


def _overlap_problems(plan: Plan, model: Model, runtime: Runtime) -> list[str]:
    """Return why the plan's tp_overlap cannot be run, or nothing."""
    if plan.tp_overlap == "none" or plan.tp == 1:
        return []
    try:
        modes = modes_in(plan.tp_overlap)
    except BadPlan as error:
        return [f"{error.what}; sites are {', '.join(SITES)}, modes none, {', '.join(OVERLAP_MODES)}"]
    if unknown := [mode for mode in modes if mode not in OVERLAP_MODES]:
        return [f"tp_overlap {', '.join(unknown)}: one of none, {', '.join(OVERLAP_MODES)}"]
    found = []
    if not plan.sequence_parallel:
        found.append(f"tp_overlap {plan.tp_overlap} needs sequence_parallel: it hides gathers and scatters of tokens")
    if runtime.compile:
        found.append(f"tp_overlap {plan.tp_overlap} with compile: the overlapped products are eager")
    if model.latent is not None and any(mode_at(plan.tp_overlap, site) != NONE for site in SITES[:2]):
        found.append(f"tp_overlap {plan.tp_overlap} with latent attention, whose first products are not cut")
    return found


def cp_method(plan: Plan, runtime: Runtime) -> str:
    """Return how keys and values travel: as the plan says, or as the runtime does where it leaves that open."""
    return plan.cp_method or runtime_spec(runtime.name).context_parallel


def refuse_unsupported(model: Model) -> None:
    """Raise BadModel naming everything that this decoder cannot express."""
    moe = model.moe
    missing = [
        what
        for present, what in (
            (model.latent is not None and model.qkv_bias, "biases in latent attention"),
            (model.learned_positions > 0, "learned positions"),
            (model.norm != "rmsnorm" or model.norm_bias, f"norms of kind {model.norm}"),
            (model.norms_per_layer != 2, f"{model.norms_per_layer} norms in a layer"),
            (not model.final_norm, "no final norm"),
            (not model.gated_mlp, "feed-forward without a gate"),
            (model.qk_norm and model.qk_norm_wide, "a query norm over all heads"),
            (model.attention_out_bias or model.mlp_bias or model.head_bias, "biases other than on q, k and v"),
            (not model.rotary, "attention without rotary positions"),
            (model.parallel_residual, "parallel residuals"),
            (moe is not None and moe.expert_bias, "biases on experts"),
        )
        if present
    ]
    if missing:
        raise BadModel(
            f"the executor's model has no {', no '.join(missing)}",
            why=f"{model.name} needs it; a run without it would measure another model",
            remedy="run a Llama, Qwen or Mixtral shape, or export the plan to a framework",
        )


# --- pipeline stages ---


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """One stage's share of the model."""

    index: int
    layers: range
    first: bool
    last: bool


def schedule_table(plan: Plan, micro_batches: int) -> Schedule:
    """Return the table of a plan's schedule. Raises BadPlan when there is none for these degrees."""
    name = plan.schedule or ("Interleaved1F1B" if plan.virtual_stages > 1 else DEFAULT_SCHEDULE)
    return build_schedule(name, ranks=plan.pp, micro_batches=micro_batches, stages_per_rank=plan.virtual_stages)


def split(model: Model, plan: Plan, table: Schedule, rank: int, *, runtime: str) -> tuple[StagePart, ...]:
    """Return the stages that pipeline rank `rank` holds. Raises BadPlan when layers and stages do not fit."""
    if model.tied_embeddings and plan.pp > 1:
        raise BadPlan(
            f"{model.name} ties its embedding and its head, which are on different stages",
            why="their gradients would have to be added across the pipeline, which the executor does not do",
            remedy="use pp 1",
        )
    counts = stage_layers(model.layers, plan, runtime_spec(runtime).pipeline)
    if len(counts) != table.stages or sum(counts) != model.layers:
        raise BadPlan(f"{model.layers} layers do not spread over {table.stages} stages as {counts}")
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return tuple(
        StagePart(
            index=stage,
            layers=range(starts[stage], starts[stage] + counts[stage]),
            first=stage == 0,
            last=stage == table.stages - 1,
        )
        for stage in table.stages_of(rank)
    )
