"""What the executor refuses, before it starts anything and without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from executor.launch.legal import check, split
from simulator.config.hf_config import load_model
from simulator.config.model import MixtureOfExperts, Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.pipeline.schedules.registry import schedule_of_plan
from topology.errors import BadModel, BadPlan

ROOT = Path(__file__).parents[2]
LLAMA = load_model("tiny-llama")  # 4 layers, 8 heads, 4 key/value heads, vocabulary 1024
WORK = Workload(seq_len=64, global_batch_size=8)


def complaint(plan: Plan, model: Model = LLAMA, work: Workload = WORK, **runtime: object) -> str:
    with pytest.raises((BadPlan, BadModel)) as caught:
        check(plan, model, work, Runtime(**runtime))  # type: ignore[arg-type]
    return str(caught.value)


def test_legal_plans_pass() -> None:
    for plan in (
        Plan(),
        Plan(dp_shard=2, tp=2, cp=2, sequence_parallel=True),
        Plan(pp=2, virtual_stages=2, schedule="Interleaved1F1B"),
    ):
        check(plan, LLAMA, WORK, Runtime())


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(tp=8), "4 key/value heads"),
        (Plan(tp=2, sequence_parallel=True, cp=64), "sequence 64 is not divisible by 2 x cp 64"),
        (Plan(ep=2, dp_shard=2), "no experts"),
        (Plan(virtual_stages=2), "without a pipeline"),
        (Plan(dp_shard=3), "global batch 8 is not divisible by data parallel 3 x micro batch 1"),
        (Plan(zero_stage=3, dp_replicate=2), "say dp_shard"),
        (Plan(tp=2, tp_overlap="hope"), "modes none, chunked"),
        (Plan(tp=2, tp_overlap="mlp_in=chunked"), "with sequence parallelism"),
        (Plan(tp_overlap="chunked"), "needs tp > 1"),
        (Plan(tp=2, tp_overlap="mlp=chunked"), "sites are attention_in"),
        (Plan(recompute="block"), "recompute 'block'"),
        (Plan(recompute_per_stage=("full", "none")), "2 modes for 1 stages"),
        (Plan(pp=2, recompute_per_stage=("full", "some")), "recompute 'some'"),
        (Plan(cp=8, cp_method="all_to_all"), "4 key/value heads over tp 1 x cp 8 = 8 ranks"),
        (Plan(cp=2, cp_method="hope"), "no context parallelism by hope"),
        (Plan(capacity_factor=1.25), "capacity_factor 1.25"),
        (Plan(placement=(0, 1)), "2 GPUs, 2 of them distinct; the plan has 1 ranks"),
        (Plan(pp=7), "hold nothing"),
        (Plan(pp=2, schedule="Nothing"), "no schedule 'Nothing'"),
    ],
)
def test_what_it_cannot_run_it_refuses(plan: Plan, words: str) -> None:
    assert words in complaint(plan)


def test_a_load_of_experts_that_cannot_be_asked_for_is_refused() -> None:
    assert "expert_imbalance 1.5" in complaint(
        Plan(), work=Workload(seq_len=64, global_batch_size=8, expert_imbalance=1.5)
    )


def test_overlapped_products_are_eager() -> None:
    plan = Plan(tp=2, sequence_parallel=True, tp_overlap="chunked")

    assert "overlapped products are eager" in complaint(plan, compile=True)


def test_schedules_that_split_the_backward_pass_are_eager() -> None:
    """Torch's own check looks at whole stages and would miss blocks that are compiled one by one."""
    assert "splits the backward pass" in complaint(Plan(pp=2, schedule="ZBH1"), compile=True)
    check(Plan(pp=2, schedule="1F1B"), LLAMA, WORK, Runtime(compile=True))


def test_compiled_context_and_tensor_parallelism_together_are_refused() -> None:
    plan = Plan(cp=2, tp=2, sequence_parallel=True)

    assert "partitioner fails" in complaint(plan, compile=True)
    check(plan, LLAMA, WORK, Runtime())


def test_two_ranks_on_one_gpu_are_refused() -> None:
    assert "1 of them distinct" in complaint(Plan(dp_shard=2, placement=(1, 1)))


def test_models_it_cannot_express_are_refused_by_name() -> None:
    assert "latent attention" in complaint(Plan(cp=2), load_model("deepseek-v3"))
    assert "layer norms" in complaint(Plan(), load_model("gpt2"))


def test_experts_are_refused_where_tokens_would_be_routed_twice() -> None:
    moe = Model(
        name="moe", family="moe", layers=2, hidden=32, heads=4, kv_heads=4, head_dim=8, ffn=64, vocab=64,
        moe=MixtureOfExperts(experts=4, experts_per_token=2, ffn=32),
    )  # fmt: skip

    assert "routed 2 times" in complaint(Plan(tp=2, ep=2), moe)
    assert "4 experts % ep 8" in complaint(Plan(dp_shard=8, ep=8), moe)


def test_stages_cover_the_layers_once_and_only_the_ends_have_ends() -> None:
    plan = Plan(pp=2, virtual_stages=2, schedule="Interleaved1F1B", layers_per_stage=(1, 1, 1, 1))
    table = schedule_of_plan(plan, 4)

    parts = [part for rank in range(2) for part in split(LLAMA, plan, table, rank, runtime="torchtitan")]

    assert sorted(layer for part in parts for layer in part.layers) == [0, 1, 2, 3]
    assert [part.index for part in parts if part.first] == [0]
    assert [part.index for part in parts if part.last] == [3]
    assert [part.index for part in split(LLAMA, plan, table, 0, runtime="torchtitan")] == [0, 2]


def test_tied_embeddings_are_refused_in_a_pipeline() -> None:
    assert "ties its embedding" in complaint(Plan(pp=2), load_model("llama3.2-1b"))


def test_the_controller_needs_no_torch() -> None:
    """A machine without torch, or with a broken one, still gets a report."""
    code = "import sys, executor.run.apply, executor.launch.legal; sys.exit('torch' in sys.modules)"

    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)
