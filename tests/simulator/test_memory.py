"""Memory against hand arithmetic: states per parameter, activations per layer, what sharding leaves."""

import numpy as np
import pytest

from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.config.hf_config import load_model, model_from_config
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.lowering.training import plan_context
from simulator.memory.plan_memory import PlanMemory
from simulator.runtimes.model_operators import operators_for
from simulator.step.held import between_stages_bytes, head_peak_bytes
from topology.catalog.clusters import cluster

GIB = 2**30


def categories(model, plan, runtime, workload, machine="dgx-h100", rank=0):
    table = estimate_plans(
        Scenario(model=model, cluster=cluster(machine, gpus=max(8, plan.gpus)), workload=workload, runtime=runtime),
        [plan],
    )
    return {name: float(column[0, rank]) for name, column in table.memory.categories.items()}


def test_llama3_8b_fully_sharded_over_eight_holds_sixteen_bytes_a_parameter() -> None:
    """8.03e9 parameters x 16 bytes is 119.7 GiB of state, 15.0 GiB on each of 8 GPUs."""
    got = categories(load_model("llama3-8b"), Plan(dp_shard=8), Runtime(), Workload(seq_len=8192, global_batch_size=8))
    state = got["parameters"] + got["gradients"] + got["optimizer"]

    assert state * 8 / GIB == pytest.approx(119.66, abs=0.02)
    assert state / GIB == pytest.approx(14.96, abs=0.01)


@pytest.mark.parametrize(("zero", "bytes_per_parameter"), [(0, 18.0), (1, 6 + 12 / 8), (2, 2 + 16 / 8), (3, 18 / 8)])
def test_megatron_mixed_precision_state_by_zero_stage(zero: int, bytes_per_parameter: float) -> None:
    """2 bytes of parameter, 4 of gradient, 12 of float32 copy and moments (arXiv 2205.05198 reports 18 in all)."""
    model = load_model("llama2-7b")
    runtime = Runtime(name="megatron-lm", param_dtype="bfloat16")
    plan = Plan(dp_replicate=8, zero_stage=zero)
    got = categories(model, plan, runtime, Workload(seq_len=2048, global_batch_size=8))
    state = got["parameters"] + got["gradients"] + got["optimizer"]

    assert state / model.parameters == pytest.approx(bytes_per_parameter, rel=1e-6)


def megatron_gpt(layers: int = 4):
    config = {
        "model_type": "gpt",
        "num_hidden_layers": layers,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "intermediate_size": 4096,
        "vocab_size": 51200,
        "gated_mlp": False,
    }
    return model_from_config(config, name="gpt")


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "recompute", "expected"),
    [
        # Korthikanti et al., arXiv 2205.05198, table 2; s b h = 1, a s / h = A
        (1, False, "none", lambda a: 34 + 5 * a),
        (4, False, "none", lambda a: 10 + 24 / 4 + 5 * a / 4),
        (4, True, "none", lambda a: (34 + 5 * a) / 4),
        (4, True, "selective", lambda a: 34 / 4),
        (4, False, "selective", lambda a: 10 + 24 / 4),
        (4, False, "full", lambda a: 2),
    ],
)
def test_megatron_activations_per_layer_are_the_papers(tp, sequence_parallel, recompute, expected) -> None:
    """Bytes per layer in units of s b h. Full recomputation here keeps the layer's input whole on every rank."""
    runtime = Runtime(name="megatron-lm", version="2022-05", param_dtype="float16", compute_dtype="float16")
    plan = Plan(tp=tp, sequence_parallel=sequence_parallel, recompute=recompute)
    workload = Workload(seq_len=2048, global_batch_size=1)
    few, many = (categories(megatron_gpt(n), plan, runtime, workload)["activations"] for n in (4, 5))

    unit = 2048 * 1 * 1024
    assert (many - few) / unit == pytest.approx(expected(16 * 2048 / 1024))


def test_activations_grow_with_micro_batches_in_flight() -> None:
    """Four stages: the first holds four micro batches, the third two, of equally many layers."""
    model = megatron_gpt(16)
    runtime = Runtime(name="megatron-lm", version="2022-05", param_dtype="float16", compute_dtype="float16")
    workload = Workload(seq_len=2048, global_batch_size=16)
    plan = Plan(pp=4, schedule="1F1B")

    second, third = (categories(model, plan, runtime, workload, rank=r)["activations"] for r in (1, 2))
    assert second / third == pytest.approx(3 / 2)


def test_float32_attention_stores_the_square() -> None:
    """Fused attention needs 16-bit operands: in float32 the scores are materialised and saved."""
    model = load_model("llama3-8b")
    assert any(op.attention for op in operators_for(model, Runtime()).dense_layer)

    wide = operators_for(model, Runtime(compute_dtype="float32")).dense_layer
    assert not any(op.attention for op in wide)
    assert any("b a s S" in op.saves for op in wide)


def test_worst_rank_is_named_in_ranks() -> None:
    """Of eight ranks in four stages the first stage is worst here, the second starts at rank 2."""
    table = estimate_plans(
        Scenario(
            model=load_model("llama3-8b"),
            cluster=cluster("dgx-h100"),
            workload=Workload(seq_len=8192, global_batch_size=16),
            runtime=Runtime(),
        ),
        [Plan(pp=4, dp_shard=2, schedule="1F1B")],
    )
    memory = table.estimate(0).memory

    assert memory.worst_rank in {0, 6}
    assert len(memory.by_stage) == 4
    assert memory.by_category == memory.by_stage[memory.worst_rank // 2]


def test_placeholders_of_weight_gradients_count_each_shape_once() -> None:
    """TransformerEngine keeps one unfilled gradient per shape of weight: four a rank, however many layers it has."""
    model, plan = load_model("llama3-70b"), Plan(tp=8, sequence_parallel=True)
    workload = Workload(seq_len=4096, global_batch_size=1)
    today = categories(model, plan, Runtime(name="megatron-lm", param_dtype="bfloat16"), workload)
    early = Runtime(name="megatron-lm", version="2022-05", param_dtype="float16", compute_dtype="float16")
    h, kv, ffn = 8192, 2 * 1024, 28672
    expected = 2 * (h * (h + kv) + h * h + h * 2 * ffn + ffn * h) / 8

    assert today["gradient_buffers"] == pytest.approx(expected)
    assert categories(model, plan, early, workload)["gradient_buffers"] == 0


def test_the_loss_holds_logits_twice_or_their_gradient_and_the_weights() -> None:
    """Megatron, vocabulary 128256 on one GPU: 6 bytes a logit, or 2 and 2 for each output weight, whichever is more."""
    model, runtime = load_model("llama3-70b"), Runtime(name="megatron-lm", param_dtype="bfloat16")
    for tokens in (2048, 65536):
        context = plan_context(
            Scenario(
                model=model,
                cluster=cluster("dgx-h100"),
                workload=Workload(seq_len=tokens, global_batch_size=1),
                runtime=runtime,
            ),
            Plan(),
        )
        logits, weights = tokens * model.vocab, model.hidden * model.vocab
        assert head_peak_bytes(context)[0] == max(6 * logits, 2 * logits + 2 * weights)


def test_the_executors_eager_loss_holds_logits_and_gradient_and_torchtitans_three_copies_in_float32() -> None:
    """Two columns of bfloat16 and two pieces of 2^23 float32 numbers; nothing of it changes what torchtitan holds."""
    model, workload = load_model("llama3-8b"), Workload(seq_len=8192, global_batch_size=1)
    held = {
        name: head_peak_bytes(
            plan_context(
                Scenario(model=model, cluster=cluster("dgx-h100"), workload=workload, runtime=Runtime(name=name)),
                Plan(),
            )
        )[0]
        for name in ("meshwright", "torchtitan")
    }

    assert held["meshwright"] == 2 * 2 * 8192 * model.vocab + 512 * 2**20
    assert held["torchtitan"] == 3 * 4 * 8192 * model.vocab


def test_torch_stages_hold_a_buffer_for_every_message_and_once_kept_their_outputs() -> None:
    """Four stages, eight micro batches: stage 1 receives 8 activations, 3 of which backward needs anyway, and 8
    gradients; stage 3 receives no gradients. Early versions kept 8 outputs of each stage too, logits on the last.
    """
    model, workload = load_model("llama3-8b"), Workload(seq_len=8192, global_batch_size=8)
    message, logits = 8192 * model.hidden * 2, 8192 * model.vocab * 2
    context = plan_context(
        Scenario(model=model, cluster=cluster("dgx-h100"), workload=workload, runtime=Runtime()), Plan(pp=4)
    )
    early = plan_context(
        Scenario(model=model, cluster=cluster("dgx-h100"), workload=workload, runtime=Runtime(version="0.1")),
        Plan(pp=4),
    )
    megatron = plan_context(
        Scenario(model=model, cluster=cluster("dgx-h100"), workload=workload, runtime=Runtime(name="megatron-lm")),
        Plan(pp=4),
    )
    ends = np.array([[1.0, 0, 0, 0]]), np.array([[0, 0, 0, 1.0]])
    in_flight = np.array([[4.0, 3, 2, 1]])

    held = np.array([0 + 8, 5 + 8, 6 + 8, 7 + 0]) * message
    assert sum(between_stages_bytes(context, *ends, in_flight))[0].tolist() == held.tolist()
    kept = np.array([8 * message, 8 * message, 8 * message, 8 * logits])
    assert sum(between_stages_bytes(early, *ends, in_flight))[0].tolist() == (held + kept).tolist()
    assert not np.any(between_stages_bytes(megatron, *ends, in_flight))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_categories_of_deepspeed_are_what_a_replay_allocates(zero: int) -> None:
    """With accumulation, its fullest moment has gradients, both buckets and activations at once."""
    workload = Workload(seq_len=2048, global_batch_size=32)
    runtime = Runtime(name="deepspeed", param_dtype="bfloat16", reduce_dtype="bfloat16")
    plan = Plan(dp_replicate=8, zero_stage=zero, recompute="full")
    scenario = Scenario(model=load_model("llama3-8b"), cluster=cluster("dgx-h100"), workload=workload, runtime=runtime)
    replayed = PlanMemory(scenario, plan).ranks[0].allocated_bytes

    assert sum(categories(scenario.model, plan, runtime, workload).values()) == pytest.approx(replayed, rel=0.01)
