"""What a checkpointed block runs again: everything, or only what backward needs."""

import pytest

from simulator.analytical.scenario import Scenario
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.lowering.training import plan_context
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


def test_the_collective_behind_the_last_product_goes_with_it():
    plan = Plan(dp_shard=2, tp=4, sequence_parallel=True, recompute="full")
    assert {"w2", "scatter"} <= not_again(Runtime(name="pytorch"), plan=plan)


def test_experts_run_again_since_their_results_are_weighed():
    """Backward of the weighted sum needs what experts gave, so only what follows the sum is left out."""
    assert not_again(Runtime(name="pytorch"), model=MOE) <= {"residual"}
