"""Adapters and frozen weights: counts, bytes and seconds against what libraries print and papers say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.question.question import Question, question_of
from simulator.analytical.estimates import (
    calibrated_operators,
    cost_context,
    estimate_plans,
    plan_table,
    with_canonical_recompute,
)
from simulator.bounds.screening import Screening
from simulator.columns.plan_columns import plan_columns
from simulator.config.adapter import Adapter
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.engine.simulate import simulate
from simulator.legality.rule import Grade
from simulator.lowering.block_code import Detail
from simulator.lowering.training import lower_training
from simulator.memory.plan_memory import PlanMemory
from simulator.runtimes.model_operators import operators_for
from simulator.runtimes.stated import resolve_adapter
from simulator.step.frozen import local_parameters
from simulator.step.held import PARTS
from topology.catalog.clusters import cluster
from topology.errors import BadPlan

LORA = Adapter(rank=16, target_modules=("all-linear",))
QLORA = replace(LORA, base_weights="nf4")
DROPPED = Adapter(rank=8, target_modules=("q_proj", "v_proj"), dropout=0.1)
ALONE = Plan()
EMBEDDING = Adapter(kind="frozen", target_modules=("embed_tokens",))


def question(
    adapter: Adapter | None, *, plan: Plan = ALONE, micro_batches: int = 1, model: str = "llama3-8b", **runtime: object
) -> Question:
    stated = {"name": "pytorch", "param_dtype": "bfloat16", **runtime}
    return question_of(
        replace(load_model(model), layers=4),
        cluster("dgx-h100", gpus=max(8, plan.gpus)),
        Workload(seq_len=2048, global_batch_size=micro_batches * plan.data_parallel),
        framework=str(stated["name"]),
        runtime=Runtime(**stated, adapter=adapter),  # type: ignore[arg-type]
        gpus=plan.gpus,
    )


def parameters(asked: Question, plan: Plan = ALONE) -> dict[str, float]:
    """Return parameters of one rank, in numbers: all that are gathered, stored and trained."""
    table = plan_table([with_canonical_recompute(plan, asked.runtime)], asked.workload)
    held = local_parameters(asked.model, cost_context(asked, table, calibrated_operators(asked)))

    def total(of) -> float:
        layers = {"dense_layer": asked.model.dense_layers, "moe_layer": asked.model.moe_layers}
        layers["experts"] = asked.model.moe_layers
        return float(sum(layers.get(part, 1) * np.ravel(getattr(of, part))[0] for part in PARTS))

    return {"used": total(held), "stored": total(held.of("parameters")), "trained": total(held.of("gradients"))}


@pytest.mark.parametrize(
    ("modules", "rank", "trained"),
    [
        # What peft's print_trainable_parameters() says of Llama-3-8B with LoraConfig's defaults, and of its widespread
        # recipe of rank 16 on all linear layers.
        (("q_proj", "v_proj"), 8, 3_407_872),
        (("all-linear",), 16, 41_943_040),
        (("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), 16, 41_943_040),
    ],
)
@pytest.mark.parametrize("runtime", ["pytorch", "transformers", "torchtitan", "megatron-lm"])
def test_trained_parameters_are_those_that_peft_counts(runtime, modules, rank, trained) -> None:
    asked = question(Adapter(rank=rank, target_modules=modules), name=runtime)
    whole = replace(asked, model=load_model("llama3-8b"))

    assert parameters(whole)["trained"] == trained


def test_fused_modules_have_one_adapter() -> None:
    """Megatron's linear_qkv: one matrix down to the rank, one up to queries, keys and values together."""
    asked = question(Adapter(rank=4, target_modules=("linear_qkv", "linear_fc1")), name="megatron-lm")
    h, m = asked.model.hidden, asked.model
    qkv = (m.heads + 2 * m.kv_heads) * m.head_dim

    assert parameters(asked)["trained"] == m.layers * 4 * ((h + qkv) + (h + 2 * m.ffn))


def test_nf4_weights_take_4127_thousandths_of_a_bit() -> None:
    """Dettmers et al., arXiv 2305.14314, section 3: double quantisation takes 0.127 bits of scales a parameter in the
    place of 0.5; embedding, head and norms stay as they were.
    """
    asked = question(QLORA)
    model = asked.model
    wide = model.embedding_parameters + model.head_parameters + (2 * model.layers + 1) * model.hidden
    packed = model.parameters - wide

    stored_bytes = 2 * (parameters(asked)["stored"] - parameters(asked)["trained"])
    assert stored_bytes == pytest.approx(2 * wide + packed * (4 + 0.127) / 8, rel=1e-4)


def test_only_what_is_trained_has_gradients_and_an_optimizer() -> None:
    plan = Plan(dp_shard=8)
    held = {}
    for name, adapter in (("whole", None), ("lora", LORA)):
        asked = question(adapter, plan=plan)
        held[name] = estimate_plans(asked, [plan]).memory.categories
    trained = parameters(question(LORA))["trained"]

    assert held["lora"]["optimizer"][0, 0] == pytest.approx(2 * 2 * trained / 8)  # two moments in 16 bits
    assert held["lora"]["gradients"][0, 0] == pytest.approx(2 * trained / 8)
    assert held["lora"]["parameters"][0, 0] == pytest.approx(held["whole"]["parameters"][0, 0] + 2 * trained / 8)


def test_frozen_products_keep_no_input_and_have_no_weight_gradient() -> None:
    """The products of a layer with frozen weights alone: two thirds of what training all of it takes."""
    asked = question(DROPPED)
    layer = operators_for(asked.model, asked.runtime).dense_layer
    products = {o.name: o for o in layer if o.matmul}

    own = [o for o in products.values() if not o.adapter]
    assert own
    assert not any(o.weight_gradient or o.saves for o in own)
    adapters = [o for o in products.values() if o.adapter]
    assert len(adapters) == 4  # down and up, of queries and of values
    assert all(o.weight_gradient for o in adapters)
    # Dropout keeps what it left of the input, and which numbers those are.
    assert sum(o.saves == ("t h", "t h:mask") for o in layer if o.adapter) == 2


def test_ia3_scales_keys_values_and_what_the_second_product_of_the_feed_forward_reads() -> None:
    """Liu et al., arXiv 2205.05638, section 3.3: three vectors a layer; all else is frozen."""
    asked = question(Adapter(kind="ia3", target_modules=("k_proj", "v_proj", "down_proj")))
    layer = operators_for(asked.model, asked.runtime).dense_layer
    vectors = [o for o in layer if o.adapter]

    assert [(o.reads, o.saves) for o in vectors] == [(("t kv",),) * 2, (("t kv",),) * 2, (("t f",),) * 2]
    assert [o.name for o in layer].index(vectors[2].name) < [o.name for o in layer].index("w2")
    assert not any(o.weight_gradient for o in layer if o.matmul)
    rank = estimate_plans(question(replace(LORA, target_modules=("k_proj", "v_proj", "down_proj"))), [ALONE])
    assert estimate_plans(asked, [ALONE]).step_s < rank.step_s < estimate_plans(question(None), [ALONE]).step_s


def test_without_dropout_adapters_of_one_input_keep_it_once() -> None:
    asked = question(replace(DROPPED, dropout=0.0, target_modules=("q_proj", "v_proj", "down_proj")), name="torchtitan")
    saved = {
        o.name: o.saves for o in operators_for(asked.model, asked.runtime).dense_layer if o.matmul and not o.adapter
    }

    assert saved["wq"] == ("t h",)  # for queries and values
    assert saved["w2"] == ("t f",)
    assert saved["w1"] == ()


def test_a_frozen_norm_of_several_kernels_keeps_its_input_alone() -> None:
    """Its last product keeps the normalised tokens for the gradient of the weight (torch's `MulBackward0`)."""
    saved = {
        name: next(
            o.saves
            for o in operators_for(load_model("llama3-8b"), question(of, name="transformers").runtime).dense_layer
            if o.name == "ffn_norm"
        )
        for name, of in (("trained", None), ("frozen", LORA))
    }

    assert saved == {"trained": ("u h:f32", "u h"), "frozen": ("u h:f32",)}


def test_model_flops_leave_out_weight_gradients_of_frozen_matrices() -> None:
    """Of 6 FLOPs for a matrix's number and token, 4 are left: forward, and the gradient of the input."""
    plan = Plan()
    flops = {name: estimate_plans(question(of), [plan]).model_flops for name, of in (("all", None), ("lora", LORA))}
    model = question(None).model

    assert flops["all"] - flops["lora"] == pytest.approx(2 * model.matmul_parameters() * 2048)


@pytest.mark.parametrize("adapter", [LORA, QLORA, DROPPED, EMBEDDING], ids=lambda a: a.title)
@pytest.mark.parametrize(
    ("runtime", "plan", "micro_batches"),
    [
        ("pytorch", Plan(dp_shard=8, recompute="full"), 2),
        ("pytorch", Plan(dp_replicate=8), 2),
        ("transformers", Plan(dp_shard=4), 1),
        ("transformers@4.48", Plan(dp_shard=4, recompute="full"), 2),
        ("pytorch", Plan(dp_shard=2, pp=2, schedule="1F1B"), 4),
        ("megatron-lm", Plan(dp_replicate=4, zero_stage=1), 2),
    ],
)
def test_levels_of_detail_agree_and_bounds_lie_below(adapter, runtime, plan, micro_batches) -> None:
    name, _, version = runtime.partition("@")
    asked = question(adapter, plan=plan, micro_batches=micro_batches, name=name, version=version or None)
    table = estimate_plans(asked, [plan])
    account_s = float(table.step_s[0] - table.breakdown_s["allocator"][0])
    lowered = lower_training(asked, plan, detail=Detail.KERNEL)
    columns, screening = plan_columns([plan]), Screening(asked)
    some = screening.plans(columns, screening.blocks(columns, (plan.recompute,)), np.arange(1))

    assert account_s == pytest.approx(simulate(lowered.program, lowered.costs, spans=False).step_s, rel=0.01)
    assert some.at_least_s()[0] <= account_s
    for rank, held in enumerate(PlanMemory(asked, plan).ranks):
        assert table.memory.peak_bytes[0, rank] <= held.allocated_bytes
        assert table.memory.reserved_bytes[0, rank] <= held.reserved_bytes


def test_adapters_in_float32_cast_what_they_read_unless_a_kernel_of_others_multiplies() -> None:
    """Peft's, and foak's over packed weights alone; VectorLM has them in 16 bits."""
    wide = {
        (name, fused, adapter.packed): any(
            o.name.endswith("_narrow") for o in operators_for(load_model("llama3-8b"), asked.runtime).dense_layer
        )
        for adapter in (LORA, QLORA)
        for name, fused in (("transformers", ()), ("transformers", ("packed_adapters",)), ("vectorlm", ()))
        for asked in (question(adapter, name=name, fused=fused),)
    }

    assert [key for key, cast in wide.items() if cast] == [
        ("transformers", (), False),
        ("transformers", ("packed_adapters",), False),
        ("transformers", (), True),
    ]


def allocated_by_lora(gpus: int, version: str, *, layers: int, size: int, vocab: int = 1024) -> int:
    plan = Plan(dp_shard=gpus, recompute="full", micro_batch_size=size)
    asked = question(LORA, plan=plan, micro_batches=size, name="transformers", version=version)
    asked = replace(asked, model=replace(asked.model, layers=layers, vocab=vocab))
    return PlanMemory(asked, plan).ranks[0].allocated_bytes


def test_the_root_of_fsdp1_stays_gathered_while_layers_go_back() -> None:
    """torch/distributed/fsdp/_runtime_utils.py, `_post_forward_reshard`: embedding and head are there whole, besides
    the quarter of them that a rank has.
    """
    small, large = (allocated_by_lora(4, "4.48", layers=10, size=4, vocab=vocab) for vocab in (1024, 4096))

    assert large - small == pytest.approx(2 * (4096 - 1024) * 4096 * 2 * (1 + 1 / 4), rel=1e-3)


def test_frozen_layers_under_fsdp1_keep_inputs_and_their_gradients() -> None:
    """Four A100 hold (32 - 2) x 4,096 x 2 = 245,760 B a token more than one, with either of two vocabularies, of a
    model of 32 layers (foundation-model-stack/fms-acceleration @876e2ed, scripts/benchmarks/refs/a100_80gb_liger.csv).
    Where the same blocks keep nothing, as today, four hold no more of a token than one.
    """
    layers, tokens = 10, 2048

    def of_tokens(gpus: int, version: str) -> int:
        """Return the bytes of 2,048 tokens more."""
        one, two = (allocated_by_lora(gpus, version, layers=layers, size=size) for size in (1, 2))
        return two - one

    more = {version: of_tokens(4, version) - of_tokens(1, version) for version in ("4.48", "5.3")}

    assert more["4.48"] == pytest.approx((layers - 2) * 4096 * 2 * tokens, rel=1e-3)
    assert more["5.3"] <= 0


def test_a_gather_of_packed_weights_carries_their_bytes() -> None:
    """FSDP over 8 ranks: what a rank gathers is the base as it is packed, and the adapters in 16 bits."""
    bf16, nf4 = parameters(question(LORA)), parameters(question(QLORA))
    model = question(LORA).model
    layers = model.layers * (model.dense_layer_parameters - 2 * model.hidden)

    assert bf16["used"] == model.parameters + bf16["trained"]
    assert bf16["used"] - nf4["used"] == pytest.approx(layers * (1 - 4.127 / 16), rel=1e-4)


@pytest.mark.parametrize(
    ("framework", "adapter", "plan", "rule"),
    [
        ("megatron-lm", QLORA, Plan(dp_replicate=8), "packed-base"),
        ("megatron-deepspeed", LORA, Plan(dp_replicate=8), "adapter"),
        ("torchtitan", DROPPED, Plan(dp_shard=8), "adapter-dropout"),
        ("pytorch", QLORA, Plan(tp=8), "packed-cut"),
        ("pytorch", replace(LORA, base_weights="int4"), Plan(dp_shard=8), "packed-sharded"),
        ("deepspeed", replace(LORA, base_weights="gptq"), Plan(dp_replicate=8, zero_stage=3), "packed-sharded"),
    ],
)
def test_what_frameworks_do_not_run_is_refused_by_name(framework, adapter, plan, rule) -> None:
    found = question(adapter, plan=plan, name=framework).problems(plan)

    assert rule in {problem.rule for problem in found if problem.grade is Grade.ILLEGAL}


@pytest.mark.parametrize(
    ("framework", "adapter", "plan"),
    [
        ("pytorch", QLORA, Plan(dp_shard=8)),
        ("deepspeed", QLORA, Plan(dp_replicate=8, zero_stage=3)),
        ("megatron-lm", LORA, Plan(tp=2, dp_replicate=4)),
        ("torchtitan", LORA, Plan(dp_shard=8)),
    ],
)
def test_what_they_run_is_not(framework, adapter, plan) -> None:
    assert question(adapter, plan=plan, name=framework).legal(plan)


def test_adapters_need_a_matrix_of_the_model() -> None:
    """PEFT: "Target modules ... not found in the base model". Of DeepSeek-V3 only o_proj has a name of Llama."""
    plan = Plan(dp_replicate=8, ep=8)

    def legal(model: str, *names: str) -> bool:
        return question(replace(LORA, target_modules=names), plan=plan, model=model, name="megatron-lm").legal(plan)

    assert not legal("deepseek-v3", "q_proj", "v_proj")
    assert all(legal("deepseek-v3", "q_proj", one) for one in ("o_proj", "q_b_proj", "up_proj", "all-linear"))
    assert legal("deepseek-v2-lite", "q_proj", "v_proj")  # whose queries have one matrix
    assert legal("qwen3-30b-a3b", "q_proj", "v_proj")


def test_words_of_sources_are_understood() -> None:
    adapter, assumed = resolve_adapter({"kind": "qlora", "rank": 16, "target_modules": "all linear", "dropout": 0.1})

    assert (adapter.kind, adapter.base_weights, adapter.target_modules) == ("lora", "nf4", ("all-linear",))
    assert assumed == []
    assert resolve_adapter({"kind": "lora", "rank": None})[1] != []
    for wrong in ({"kind": "prefix"}, {"kind": "lora", "rank": 0}, {"kind": "lora", "target_modules": ["conv1"]}):
        with pytest.raises(BadPlan):
            resolve_adapter(wrong)


def test_freezing_some_layers_is_refused_with_their_number() -> None:
    asked = question(Adapter(kind="frozen", target_modules=("layers.0",)))

    with pytest.raises(BadPlan, match="1 of 4 layers"):
        estimate_plans(asked, [Plan()])
