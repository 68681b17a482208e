"""DeepSpeed: the JSON file that `deepspeed.initialize` takes.

JSON has no comments, so the header is a section of its own, which DeepSpeed ignores. Its `train_batch_size` is left out
with AutoTP: see `deepspeed_fields`.
"""

from __future__ import annotations

from planner.export.degrees import to_zero_stage
from planner.export.draft import Draft, Target
from planner.export.frameworks.deepspeed_fields import TABLE
from planner.export.job import ExportJob, require_legal
from planner.export.mapping import nested
from planner.export.mapping import write as settings_of
from planner.export.script import common_device_list, host_order_notes, run_line, torchrun_words
from simulator.config.model import Model
from simulator.config.overlap_sites import tp_overlap_label
from topology.errors import Infeasible

VERSION = "0.19.8"
TITLE = f"DeepSpeed {VERSION}"
FILE = "deepspeed.json"
# Model families whose layers of experts AutoEP finds (module_inject/auto_ep_presets).
EXPERT_PRESETS = {
    "mixtral": "mixtral",
    "qwen3_moe": "qwen3_moe",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
}


def write(job: ExportJob) -> Draft:
    """Return the configuration. Raises Infeasible for what DeepSpeed cannot run."""
    plan = job.plan
    # FSDP2 degrees become a ZeRO stage; legality is checked for the plan as it is written.
    stage = to_zero_stage(plan)
    written = plan.with_(
        zero_stage=stage,
        dp_replicate=plan.data_parallel,
        dp_shard=1,
        sequence_parallel=False,
        tp_overlap="none",
        ep_overlap="none",
        recompute=plan.recompute if plan.recompute in {"none", "full"} else "full",
        cp_method="all_to_all" if plan.cp > 1 else None,
    )
    notes = require_legal(job.with_plan(written), "deepspeed", TITLE)
    hybrid = stage == 3 and plan.zero_stage is None and plan.dp_replicate > 1
    facts = job.with_plan(written).facts() | {"tp_overlap": plan.tp_overlap, "hpz": plan.dp_shard if hybrid else None}
    settings = settings_of(TABLE, facts)
    if plan.ep > 1:
        settings["expert_parallel.preset_model"] = _preset(job.question.model)
    hosts = job.hosts()
    devices = common_device_list(hosts, TITLE)
    words = torchrun_words(hosts, node_rank="0", address="FIRST_HOST")
    return Draft(
        body=nested(settings),
        settings=settings,
        not_expressed=_not_expressed(job, hybrid=hybrid),
        needed=(
            f"a program that calls deepspeed.initialize(config={FILE!r}) and sets optimizer and learning rate",
            *_program_needs(job, stage),
        ),
        run=run_line(job, [*words, "YOUR_PROGRAM.py"], devices=devices),
        notes=(*notes, *host_order_notes(hosts)),
        plan=written,
    )


def _preset(model: Model) -> str:
    if model.family not in EXPERT_PRESETS:
        raise Infeasible(
            f"{TITLE} finds no experts in a model of family {model.family}",
            why=f"its automatic expert parallelism knows {', '.join(EXPERT_PRESETS)}",
            remedy="plan with ep 1, or --to megatron",
        )
    return EXPERT_PRESETS[model.family]


def _program_needs(job: ExportJob, stage: int) -> list[str]:
    """Return what the user's program must do for a plan that JSON alone cannot express."""
    plan, needs = job.plan, []
    if plan.pp > 1:
        layers = f", of layers that are tensor-parallel over {plan.tp} ranks by themselves" if plan.tp > 1 else ""
        needs.append(
            f"the model as deepspeed.pipe.PipelineModule with topology=PipeModelDataParallelTopology(num_pp={plan.pp},"
            f" num_mp={plan.tp}, num_dp={plan.data_parallel}){layers};"
            f" engine.train_batch() runs the {job.micro_batches} micro batches of a step"
        )
    elif plan.tp > 1:
        # deepspeed/runtime/engine.py, `_apply_autotp_partitioning`: in 0.18.6, not in 0.18.5. With 0.18.3 each of two
        # H200 held the whole model.
        needs.append(
            "DeepSpeed 0.18.6 or later: before it, deepspeed.initialize divides no weights by `tensor_parallel`"
        )
        needs.append(
            f"the same sequences on all {plan.tp} ranks of a tensor-parallel group."
            " train_batch_size is left out: DeepSpeed would check it against all ranks;"
            f" {job.question.workload.global_batch_size} sequences make a step"
        )
    if plan.cp > 1:
        needs.append(
            "attention by DeepSpeed's Ulysses (deepspeed.sequence.layer.DistributedAttention) and sequences that are"
            f" cut over {plan.cp} ranks"
        )
    if plan.ep > 1 and stage in {1, 2}:
        needs.append(
            "parameter groups by deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer:"
            " ZeRO-1 and 2 want experts in groups of their own"
        )
    return needs


def _not_expressed(job: ExportJob, *, hybrid: bool) -> tuple[str, ...]:
    plan, runtime = job.plan, job.question.runtime
    not_expressed = [f"sequence length {job.question.workload.seq_len}: set it in the program"]
    if plan.zero_stage is None and plan.dp_shard > 1:
        not_expressed.append("FSDP2 is written as ZeRO, which is another implementation")
    if hybrid:
        not_expressed.append(
            f"{plan.dp_replicate} replicas of shards: gradients and optimizer are sharded over all ranks,"
            f" and parameters gathered among {plan.dp_shard} (ZeRO++ hpZ)"
        )
    if plan.sequence_parallel and plan.tp > 1:
        not_expressed.append("sequence parallelism with tensor parallelism: DeepSpeed's AutoTP has none")
    if plan.recompute != "none":
        whole = "" if plan.recompute == "full" else ", which recomputes whole layers"
        not_expressed.append(f"recompute {plan.recompute!r}: call your model's gradient_checkpointing_enable(){whole}")
    if plan.cp > 1 and plan.cp_method not in {None, "all_to_all"}:
        not_expressed.append(f"context parallelism by {plan.cp_method}: DeepSpeed's is Ulysses, all-to-all over heads")
    if plan.tp_overlap != "none":
        not_expressed.append(
            f"tensor-parallel overlap {tp_overlap_label(plan.tp_overlap)}: written as tp_overlap_comm,"
            " which decides by itself where"
        )
    if plan.ep_overlap != "none":
        not_expressed.append("all-to-all of experts alongside compute")
    if runtime.compute_dtype == "float8":
        not_expressed.append("float8 products")
    if runtime.compile:
        not_expressed.append("torch.compile of the model: call engine.compile()")
    return tuple(not_expressed)


TARGET = Target(name="deepspeed", version=VERSION, title="DeepSpeed", file_name=FILE, write=write, table=TABLE)
