"""Files for tools that tune models: read back, each says the plan, the adapter and the savers it was written for."""

import json
from itertools import product
from pathlib import Path

import pytest

from planner.configs.asked import CheckFlags
from planner.configs.formats.kinds import read_configuration
from planner.export.frameworks.tuning import TUNING
from planner.export.mapping import NotModelled, read
from planner.export.targets.registry import export, find_target
from simulator.config.adapter import Adapter
from simulator.config.optimizers import canonical_optimizer
from simulator.config.plan import Plan
from tests.planner.test_export import job
from topology.catalog.clusters import cluster
from topology.errors import Infeasible

PLAN = Plan(dp_shard=8, recompute="full", micro_batch_size=4, reshard_after_forward=True)
CONTEXTS = Plan(cp=8, recompute="full", micro_batch_size=4, reshard_after_forward=True)
REPLICAS = Plan(dp_replicate=8, recompute="full", micro_batch_size=4)
LORA = Adapter(kind="lora", rank=16, target_modules=("q_proj", "v_proj"), dropout=0.05)
EVERY = Adapter(kind="dora", rank=8, target_modules=("all-linear",), base_weights="nf4")
SAME = ("tp", "cp", "dp_replicate", "dp_shard", "micro_batch_size", "recompute", "seq_len", "global_batch_size")
TYPES = {"param_dtype": "bfloat16", "compute_dtype": "bfloat16"}


def asked(plan: Plan = PLAN, **runtime):
    return job(plan, framework="pytorch", **{**TYPES, **runtime})


def read_back(done, gpus: int = 8, given=TYPES):
    found = read_configuration(done.text, done.file_name, CheckFlags())
    facts = {"gpus": gpus, "gpus_per_node": 8, "layers": 32, "moe": False, "max_positions": 0, **given}

    assert not found.unknown, done.target
    assert found.model is not None
    return read(found.table, found.settings, facts)


@pytest.mark.parametrize("target", TUNING, ids=lambda target: target.name)
@pytest.mark.parametrize("adapter", [None, LORA, EVERY], ids=["full", "lora", "qdora"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "pagedadamw8bit"])
def test_a_file_says_its_plan_to_the_readers(target, adapter, optimizer) -> None:
    gpus = 1 if optimizer.startswith("paged") else 8
    plan = PLAN.with_(dp_shard=gpus, reshard_after_forward=None if gpus == 1 else True)
    written = asked(plan, adapter=adapter, optimizer=optimizer, cluster=cluster("dgx-h100", gpus=gpus))
    facts, back = written.facts(), read_back(export(written, target), gpus)

    assert {key: back.get(key, 1) for key in SAME} == {key: facts[key] for key in SAME}
    assert canonical_optimizer(back["optimizer"]) == optimizer
    if adapter is None:
        assert back["adapter"] is None
        return
    said = back["adapter"]
    assert (said["kind"], said["rank"], said["dropout"]) == (adapter.kind, adapter.rank, adapter.dropout)
    assert (said["base_weights"] == "nf4") == adapter.packed
    assert len(said["target_modules"]) == (7 if adapter is EVERY else 2)


NAMED = {"param_dtype": "parameters in", "reduce_dtype": "gradients reduced in", "tp_overlap": "overlap async"}


@pytest.mark.parametrize(
    ("target", "plan"),
    [
        *((target, plan) for target in TUNING for plan in (PLAN.with_(tp_overlap="async"), REPLICAS)),
        *((find_target(name), CONTEXTS) for name in ("axolotl", "automodel")),
    ],
    ids=lambda value: getattr(value, "name", None),
)
@pytest.mark.parametrize("param", ["bfloat16", "float32"])
@pytest.mark.parametrize("reduced", ["bfloat16", "float32"])
def test_types_and_overlaps_that_a_file_does_not_say_are_named(target, plan, param, reduced) -> None:
    done = export(asked(plan, param_dtype=param, reduce_dtype=reduced), target)
    back = read_back(done, given={})

    assert (back.get("dp_replicate", 1), back["dp_shard"], back.get("cp", 1)) == (
        plan.dp_replicate,
        plan.dp_shard,
        plan.cp,
    )
    asked_for = {"param_dtype": param, "reduce_dtype": reduced, "tp_overlap": plan.tp_overlap}
    differ = {fact for fact, value in asked_for.items() if back.get(fact, "none") != value}
    assert differ == {fact for fact in NAMED if any(line.startswith(NAMED[fact]) for line in done.not_expressed)}


@pytest.mark.parametrize(
    ("tool", "savers"),
    [
        ("torchtune", ("activation_offload", "chunked_loss")),
        ("axolotl", ("activation_offload", "fused_linear_loss")),
        ("llama-factory", ("fused_linear_loss",)),
    ],
)
def test_savers_are_keys_of_tools_that_have_them(tool, savers) -> None:
    assert set(read_back(export(asked(savers=savers), find_target(tool)))["savers"]) == set(savers)


KNOWN = json.loads((Path(__file__).parents[1] / "data/tuning_keys.json").read_text())
PLANS = (
    PLAN,
    PLAN.with_(offload="parameters"),
    Plan(dp_shard=4, dp_replicate=2, recompute="full", micro_batch_size=4, reshard_after_forward=False),
    Plan(dp_shard=4, tp=2, sequence_parallel=True, recompute="none", micro_batch_size=2),
    Plan(dp_shard=4, cp=2, recompute="full", micro_batch_size=2),
    Plan(micro_batch_size=2),
)
SAVERS = ((), ("activation_offload",), ("fused_linear_loss",), ("chunked_loss",), ("optimizer_in_backward",))


@pytest.mark.parametrize("target", TUNING, ids=lambda target: target.name)
def test_every_key_is_one_of_the_tools_own_schema(target) -> None:
    """Names of fields in the tools' own classes and recipes (`source` in the file of names)."""
    known = {key for line in KNOWN[target.name]["keys"] for key in line.split()}
    written: set[str] = set()
    for plan, adapter, savers in product(PLANS, (None, LORA, EVERY), SAVERS):
        try:
            written |= export(asked(plan, adapter=adapter, savers=savers), target).settings.keys()
        except Infeasible:
            continue

    assert len(written) >= 20
    assert written <= known


@pytest.mark.parametrize(
    ("tool", "plan", "runtime", "said"),
    [
        # utils/schemas/validation.py: bitsandbytes' AdamW in 8 bits stops under FSDP2, contexts ask for flash-attn.
        ("axolotl", PLAN, {"optimizer": "adamw8bit"}, {"optimizer": "adamw_torch_8bit"}),
        ("torchtune", PLAN, {"optimizer": "adamw8bit"}, {"optimizer._component_": "torchao.optim.AdamW8bit"}),
        ("axolotl", CONTEXTS, {}, {"attn_implementation": "flash_attention_2", "fsdp_version": 2}),
        # transformers reads `offload` of `fsdp`, and fsdp_config.offload_params nowhere.
        ("llama-factory", PLANS[1], {}, {"fsdp": "full_shard auto_wrap offload"}),
        ("llama-factory", PLAN, {}, {"use_reentrant_gc": False}),
        ("axolotl", PLAN, {}, {"gradient_checkpointing_kwargs.use_reentrant": False}),
        ("automodel", PLANS[1], {}, {"distributed.offload_policy._target_": "torch.distributed.fsdp.CPUOffloadPolicy"}),
        ("automodel", PLANS[2], {}, {"distributed.reshard_after_forward": False}),
        # components/distributed/mesh_utils.py: replicas must be fewer than data-parallel ranks.
        ("automodel", REPLICAS, {}, {"distributed.strategy": "ddp"}),
    ],
)
def test_keys_mean_what_the_plan_says(tool, plan, runtime, said) -> None:
    assert said.items() <= export(asked(plan, **runtime), find_target(tool)).settings.items()


@pytest.mark.parametrize(
    ("plan", "runtime", "named"),
    [
        (Plan(dp_shard=4, tp=2, recompute="full"), {"optimizer": "adamw8bit"}, "adamw8bit"),
        (Plan(dp_shard=8, micro_batch_size=4, recompute="none"), {"savers": ("activation_offload",)}, "offload"),
    ],
)
def test_what_axolotl_refuses_is_not_written(plan, runtime, named) -> None:
    with pytest.raises(Infeasible, match=named):
        export(asked(plan, **runtime), find_target("axolotl"))


AXOLOTL = "base_model: NousResearch/Meta-Llama-3-8B\nsequence_len: 2048\nmicro_batch_size: 2\n"
FACTORY = (
    "model_name_or_path: NousResearch/Meta-Llama-3-8B\nstage: sft\ncutoff_len: 2048\nfinetuning_type: lora\n"
    "lora_target: all\nper_device_train_batch_size: 1\n"
)


@pytest.mark.parametrize(
    ("text", "recompute", "reentrant"),
    [
        (AXOLOTL, "none", None),
        (AXOLOTL + "gradient_checkpointing: true\n", "full", True),
        (
            AXOLOTL + "gradient_checkpointing: true\ngradient_checkpointing_kwargs: {use_reentrant: false}\n",
            "full",
            None,
        ),
        (AXOLOTL + "gradient_checkpointing: true\nunfrozen_parameters: [lm_head]\n", "full", None),
        (FACTORY, "full", True),
        (FACTORY + "use_reentrant_gc: false\n", "full", None),
        (FACTORY + "disable_gradient_checkpointing: true\n", "none", None),
        (FACTORY + "fsdp: full_shard\nfsdp_config: {version: 2}\n", "full", None),
    ],
)
def test_checkpoints_of_files_that_say_little_are_the_tools_own(text, recompute, reentrant) -> None:
    """Of axolotl: utils/config/__init__.py; of LLaMA-Factory: hparams/model_args.py, model_utils/checkpointing.py."""
    found = read_configuration(text, "run.yaml", CheckFlags())
    facts = {"gpus": 1, "gpus_per_node": 1, "layers": 32, "moe": False, "max_positions": 0, **TYPES}
    back = read(found.table, found.settings, facts)

    assert (back["recompute"], back["reentrant"]) == (recompute, reentrant)


def test_whole_parameters_on_each_rank_of_a_sequence_are_not_taken_for_sharded_ones() -> None:
    found = read_configuration(AXOLOTL + "context_parallel_size: 8\n", "run.yaml", CheckFlags())
    with pytest.raises(NotModelled, match="without FSDP"):
        read(found.table, found.settings, {"gpus": 8, "gpus_per_node": 8})


@pytest.mark.parametrize("tool", ["axolotl", "automodel"])
def test_replicas_beside_tensor_parallelism_are_refused(tool) -> None:
    """Accelerate's and AutoModel's meshes of several axes shard over the data-parallel one."""
    with pytest.raises(Infeasible, match="sharding only"):
        export(asked(Plan(dp_replicate=4, tp=2, recompute="full")), find_target(tool))


@pytest.mark.parametrize("target", TUNING, ids=lambda target: target.name)
def test_what_no_key_says_is_refused_by_name(target) -> None:
    ia3 = Adapter(kind="ia3", target_modules=("k_proj", "v_proj", "down_proj"))
    for written, named in (
        (asked(Plan(dp_shard=4, pp=2, schedule="1F1B", recompute="none")), "pp"),
        (asked(optimizer="muon"), "muon"),
        (asked(savers=("bf16_gradients",)), "bf16_gradients"),
        (asked(compute_dtype="float16"), "float16"),
        (asked(adapter=ia3), "ia3"),
    ):
        with pytest.raises(Infeasible, match=named):
            export(written, target)


def test_what_torchtunes_recipes_refuse_is_not_written() -> None:
    """recipes/full_finetune_distributed.py: a plan of modules for tensor parallelism, no accumulation in backward."""
    for plan, savers, named in (
        (Plan(dp_shard=4, tp=2, sequence_parallel=True, recompute="full"), (), "tp"),
        (Plan(dp_shard=8, recompute="full", micro_batch_size=1), ("optimizer_in_backward",), "optimizer_in_backward"),
    ):
        with pytest.raises(Infeasible, match=named):
            export(asked(plan, savers=savers), find_target("torchtune"))
