"""What a checkpointed block runs again: everything, or only what backward needs."""

import pytest

from simulator.analytical.scenario import Scenario
from simulator.columns.plan_table import plan_table
from simulator.config.adapter import Adapter
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.lowering.training import plan_context
from simulator.runtimes.library import spec_for
from simulator.runtimes.model_operators import operators_for
from simulator.runtimes.recomputation import run_again
from topology.catalog.clusters import cluster

MODEL = load_model("llama3-8b")
MOE = load_model("qwen3-30b-a3b")


def not_again(runtime, *, model=MODEL, plan=None):
    """Names of the operators of a layer that run in a full block's forward and not again."""
    plan = plan or Plan(dp_shard=8, recompute="full")
    workload = Workload(task="train", seq_len=4096, global_batch_size=64)
    context = plan_context(Scenario(model=model, cluster=cluster("dgx-h100"), workload=workload, runtime=runtime), plan)
    operators = operators_for(model, runtime)
    layer = operators.moe_layer if model.moe else operators.dense_layer
    again = run_again(layer, context.spec.recompute["full"], runtime, context.table)
    holds = run_again(layer, context.spec.recompute["full"], Runtime(name="megatron-lm"), context.table)
    return {operator.name for operator, rows, all_of in zip(layer, again, holds, strict=True) if all_of[0] > rows[0]}


@pytest.mark.parametrize(
    ("runtime", "early"),
    [
        (Runtime(name="megatron-lm"), False),  # re-entrant: CheckpointFunction runs the whole block
        (Runtime(name="pytorch"), True),
        (Runtime(name="torchtitan"), False),  # early_stop is off by default since 0.2.0
        (Runtime(name="torchtitan", version="0.2.2"), False),
        (Runtime(name="torchtitan", version="0.1.0"), True),
        (Runtime(name="torchtitan", version="0.2.2", compile=True), True),  # nobody reads the last product's result
    ],
    ids=lambda value: f"{value.name}-{value.version}-{value.compile}" if isinstance(value, Runtime) else str(value),
)
def test_the_last_product_runs_again_only_where_checkpoints_run_whole(runtime, early):
    skipped = not_again(runtime)
    assert ("w2" in skipped) == early
    assert skipped <= {"w2", "reduce", "add_input_gradients", "residual"}


@pytest.mark.parametrize(
    ("kind", "compiled", "dropped"), [("lora", True, True), ("lora", False, False), ("dora", True, False)]
)
def test_a_compiler_drops_the_last_product_beside_an_adapter_that_reads_its_input(kind, compiled, dropped):
    """The adapter runs after its product, which an eager checkpoint repeats; DoRA's magnitude reads results."""
    adapter = Adapter(kind=kind, rank=16, target_modules=("all-linear",))
    skipped = not_again(Runtime(name="meshwright", compile=compiled, adapter=adapter))
    assert ("w2" in skipped) == dropped
    assert "w2_lora_a" not in skipped


def test_the_collective_behind_the_last_product_goes_with_it():
    plan = Plan(dp_shard=2, tp=4, sequence_parallel=True, recompute="full")
    assert {"w2", "scatter"} <= not_again(Runtime(name="pytorch"), plan=plan)


def test_experts_run_again_since_their_results_are_weighed():
    """Backward of the weighted sum needs what experts gave, so only what follows the sum is left out."""
    assert not_again(Runtime(name="pytorch"), model=MOE) <= {"residual"}


def selective(runtime, model=MODEL):
    """Return the names of what selective recomputation by operator runs again of a layer on eight GPUs."""
    operators = operators_for(model, runtime).dense_layer
    table = plan_table([Plan(dp_shard=8, recompute="selective-op")], Workload(seq_len=4096, global_batch_size=64))
    again = run_again(operators, spec_for(runtime).recompute["selective-op"], runtime, table)
    return {operator.name for operator, rows in zip(operators, again, strict=True) if rows[0]}


@pytest.mark.parametrize(
    ("version", "again"),
    [("0.1.0", False), ("0.2.0", True), ("2025-11", True), ("0.2.1", False), (None, False)],
)
def test_attention_runs_again_where_its_kernel_was_not_among_what_is_kept(version, again):
    """Version 0.2.0 preferred cuDNN, which its list got later (pull request 2095)."""
    assert ("sdpa" in selective(Runtime(name="torchtitan", version=version))) == again


def test_products_in_nvfp4_are_not_kept():
    """Torchao multiplies by `_scaled_mm_v2`, which torchtitan's list lacks; MXFP8's products are in it."""
    products = {"wq", "wk", "wv", "wo", "w1", "w3"}  # the last product's result is not needed
    again = {
        recipe: products & selective(Runtime(name="torchtitan", compute_dtype=dtype, low_precision_recipe=recipe))
        for dtype, recipe in (("float4", "nvfp4"), ("float8", "mxfp8"))
    }

    assert again == {"nvfp4": products, "mxfp8": {"wk", "wo", "w3"}}
