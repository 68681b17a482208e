"""Memory savers: bytes and seconds by hand and as they were published, and the account against the simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.question.cases import load_case
from planner.question.question import Question, question_of
from planner.search.fixes import find_fixes
from simulator.analytical.estimates import estimate_plans
from simulator.bounds.screening import Screening
from simulator.columns.plan_columns import plan_columns
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.savers import SAVERS, canonical_savers, optimizer_said, savers_said
from simulator.config.workload import Workload
from simulator.engine.simulate import simulate
from simulator.legality.frameworks import framework_of_runtime
from simulator.legality.rules import is_legal
from simulator.lowering.training import lower_training
from simulator.memory.estimate import with_replay
from simulator.memory.plan_memory import PlanMemory
from simulator.runtimes.library import runtime_spec
from simulator.runtimes.stated import resolve
from simulator.step import walk
from simulator.step.host import UPDATE_LAUNCHES
from simulator.step.update import CLIP_BYTES
from topology.catalog.clusters import cluster
from topology.errors import BadPlan
from topology.rates.host import host_rates
from topology.units import GIB

FULL = Plan(recompute="full", micro_batch_size=2)


def asked(name: str, *savers: str, gpus: int = 1, seq: int = 4096, batch: int = 2, **runtime: object) -> Question:
    said = Runtime(name=name, param_dtype="bfloat16", reduce_dtype="bfloat16", **runtime)  # type: ignore[arg-type]
    return question_of(
        load_model("llama3-8b"),
        cluster("dgx-h100", gpus=gpus),
        Workload(seq_len=seq, global_batch_size=batch),
        framework=framework_of_runtime(name),
        runtime=said.with_savers(savers),
        gpus=gpus,
    )


def step_s(question: Question, plan: Plan) -> float:
    return float(estimate_plans(question, [plan]).estimate(0).step_s.value)


def held(question: Question, plan: Plan) -> float:
    return float(PlanMemory(question, plan).peak_bytes)


@pytest.mark.parametrize(
    ("name", "savers", "plan", "gpus"),
    [
        ("transformers", ("activation_offload",), FULL, 1),
        ("pytorch", ("activation_offload",), FULL.with_(dp_shard=8), 8),
        ("pytorch", ("activation_offload", "chunked_loss", "optimizer_in_backward"), FULL, 1),
        ("pytorch", ("optimizer_in_backward",), FULL.with_(dp_shard=8), 8),
        ("trl", ("chunked_loss",), FULL.with_(dp_shard=8), 8),
        ("trl", ("chunked_loss", "tiled_mlp"), FULL.with_(dp_shard=8), 8),
        ("megatron-lm", (), Plan(dp_shard=8, micro_batch_size=2, offload_layers=20), 8),
    ],
)
def test_the_account_takes_as_long_as_the_simulation(name, savers, plan, gpus):
    question = asked(name, *savers, gpus=gpus, batch=2 * gpus)

    table = estimate_plans(question, [plan])
    lowered = lower_training(question, plan)
    account_s = float(table.step_s[0] - table.breakdown_s["allocator"][0])

    assert account_s == pytest.approx(simulate(lowered.program, lowered.costs, spans=False).step_s, rel=0.01)


@pytest.mark.parametrize("name", ["pytorch", "transformers"])
def test_checkpoints_in_host_memory_are_layers_by_tokens_by_width_by_two_bytes(name):
    """Pull request 48444 of transformers measured what leaves the GPU: layers x sequence x hidden x 2, exactly. Those
    of the last five layers are still there under torchtune's hooks.
    """
    one = asked(name, "activation_offload", "optimizer_in_backward", seq=32768) if name == "pytorch" else None
    without = asked(name, "optimizer_in_backward", seq=32768) if name == "pytorch" else asked(name, seq=32768)
    one = one or asked(name, "activation_offload", seq=32768)
    layer = 2 * 32768 * 4096 * 2.0
    kept = runtime_spec(name).away_layers

    estimate = estimate_plans(one, [FULL]).estimate(0)

    assert estimate.memory.host_bytes == pytest.approx(32 * layer)
    # The fullest moment is the loss: all layers have run, and one is fetched ahead where copies have a stream.
    assert held(without, FULL) - held(one, FULL) == pytest.approx((32 - kept) * layer, rel=0.04)


def test_layers_in_host_memory_leave_the_activations_of_the_others():
    """Transformer Engine's own account (cpu_offload.py: DefaultOffloadSynchronizer): a model of 32 layers of which 12
    are offloaded has the activations of one of 20. Most of the copies hide behind compute.
    """
    plan = Plan(dp_replicate=8, zero_stage=1)
    whole, less = asked("megatron-lm", gpus=8, batch=8), asked("megatron-lm", gpus=8, batch=8)
    less = replace(less, model=replace(less.model, layers=20))
    away = plan.with_(offload_layers=12)

    def activations(question: Question, plan: Plan) -> float:
        return estimate_plans(question, [plan]).estimate(0).memory.by_category["activations"]

    replayed = [held(question, plan) - held(question, plan.with_(recompute="full")) for question in (whole, less)]

    assert activations(whole, away) == pytest.approx(activations(less, plan), rel=0.01)
    assert held(whole, plan) - held(whole, away) == pytest.approx(replayed[0] - replayed[1], rel=0.1)
    moved = estimate_plans(whole, [away]).estimate(0).memory.host_bytes
    copies = 2 * moved / host_rates(cluster("dgx-h100", gpus=8), 8).copy_bytes_per_s
    assert 0 <= step_s(whole, away) - step_s(whole, plan) < 0.3 * copies
    for wrong in (away.with_(recompute="full"), away.with_(offload_layers=32), away.with_(pp=2, dp_replicate=4)):
        assert "offload-layers" in {problem.rule for problem in whole.problems(wrong)}
    assert "offload-layers" in {one.rule for one in asked("torchtitan").problems(Plan(offload_layers=2))}


def test_copies_hide_behind_compute_or_stop_it():
    """With a stream, copies cost nothing where layers take longer than they do; without, all of them are waited for,
    after each of the forward pass by the host too, which then has a launch to make before the device goes on.
    """
    layer = 2 * 4096 * 4096 * 2.0
    copies = 2 * 32 * layer / host_rates(cluster("dgx-h100", gpus=1), 1).copy_bytes_per_s

    hidden = step_s(asked("pytorch", "activation_offload"), FULL) - step_s(asked("pytorch"), FULL)
    waited = step_s(asked("transformers", "activation_offload"), FULL) - step_s(asked("transformers"), FULL)

    assert 0 <= hidden < 0.1 * copies
    launch_s = runtime_spec("transformers").host.launch_s
    assert copies + 32 * launch_s <= waited < copies + 32 * 10 * launch_s


def test_an_optimizer_in_backward_holds_no_gradients_and_does_not_clip():
    """Recipes of torchtune do not clip anyway."""
    gradients, head = load_model("llama3-8b").parameters * 2.0, 128256 * 4096 * 2.0
    saved = {}
    for name in ("pytorch", "torchtune"):
        plain, question = (asked(name, "chunked_loss", *more, seq=512) for more in ((), ("optimizer_in_backward",)))
        freed = held(plain, FULL) - held(question, FULL)
        spent = [estimate_plans(one, [FULL]).estimate(0).breakdown_s["optimizer"] for one in (plain, question)]
        saved[name] = spent[0] - spent[1]

        # What is fullest afterwards is the loss, with the gradient of the head.
        assert gradients - 2.1 * head < freed
        assert freed <= gradients * (1 if name == "torchtune" else 2)  # of torch's own optimizer also a copy
    assert saved["pytorch"] == pytest.approx(gradients / 2 * CLIP_BYTES / 2 / 2.4e12, rel=0.25)
    assert saved["torchtune"] == pytest.approx(0.0, abs=1e-12)


def test_the_host_updates_one_parameter_after_the_other_in_backward():
    """Nine parameters a layer, the embedding, a norm and the head, each with an optimizer's step of its own instead of
    a share of one; kernels of 64 tokens hide none.
    """
    whole = asked("meshwright", seq=64, batch=1)
    model = replace(whole.model, hidden=256, heads=4, kv_heads=4, head_dim=64, ffn=512, vocab=1024, name="")
    narrow, in_backward = (
        replace(whole, model=model, runtime=whole.runtime.with_savers(savers)) for savers in ((), SAVERS[3:4])
    )
    added = step_s(in_backward, Plan()) - step_s(narrow, Plan())

    host = runtime_spec("meshwright").host
    launches = (UPDATE_LAUNCHES - host.update_launches) * (9 * model.layers + 3)
    assert added == pytest.approx(launches * host.backward_launch_s, rel=0.05)


@pytest.mark.parametrize("gpus", [1, 8])
def test_updates_between_backward_passes_are_the_same_kernels_and_never_take_longer(gpus, monkeypatch):
    """A busy GPU runs the same kernels in another order; one that waits for its host runs updates meanwhile, all but
    that of the embedding, whose gradients come last.
    """
    for seq, tokens in ((4096, "many"), (64, "few")):
        question = asked("meshwright", "optimizer_in_backward", gpus=gpus, seq=seq, batch=gpus)
        plan = Plan(dp_shard=gpus)
        columns, screening = plan_columns([plan]), Screening(question)
        bound = screening.plans(columns, screening.blocks(columns, ("none",)), np.arange(1)).at_least_s()[0]
        early = estimate_plans(question, [plan])
        with monkeypatch.context() as patch:
            patch.setattr(walk, "updates_units", lambda _: False)
            late = estimate_plans(question, [plan])

        assert early.breakdown_s["optimizer"][0] == pytest.approx(late.breakdown_s["optimizer"][0])
        assert bound <= early.step_s[0] <= late.step_s[0] * 1.0001
        saved, embedding = late.step_s[0] - early.step_s[0], 128256 / (2 * 128256 + 32 * 53248)
        hidden = late.breakdown_s["optimizer"][0] * (1 - embedding) if tokens == "few" else 0.0
        assert saved == pytest.approx(hidden, rel=0.1, abs=3e-3 * late.step_s[0])


def test_bounds_of_memory_stay_below_what_is_held():
    for savers in (("activation_offload",), ("optimizer_in_backward",), ("chunked_loss",), SAVERS[2:4]):
        for plan in (FULL, FULL.with_(dp_shard=8)):
            question = asked("pytorch", *savers, gpus=plan.gpus, batch=2 * plan.gpus)
            bound = estimate_plans(question, [plan]).estimate(0)
            assert bound.memory.reserved_bytes <= with_replay(question, plan, bound).memory.reserved_bytes * 1.0001


def test_no_logits_are_whole_where_the_loss_is_in_pieces():
    """TRL runs 256 tokens at a time and again in backward: 16 times the tokens take no more for the loss."""
    logits = 2 * 32768 * load_model("llama3-8b").vocab * 4.0
    peaks = {word: held(asked("trl", *word, seq=32768), FULL) for word in ((), ("chunked_loss",))}

    assert peaks[()] - peaks["chunked_loss",] > 2 * logits


@pytest.mark.parametrize("name", ["deepspeed", "trl"])
def test_feed_forward_networks_in_tiles_run_once_more_and_hold_one_tile(name):
    """TiledMLP: forward thrice with checkpoints, which by itself stops before the last product. What is freed is four
    tensors of all tokens, less four of a tile as long as the network is wide.
    """
    model, seq = load_model("llama3-8b"), 131072
    loss = ("chunked_loss",) if name == "trl" else ("fused_linear_loss",)
    plain, tiled = asked(name, *loss, seq=seq, batch=1), asked(name, *loss, "tiled_mlp", seq=seq, batch=1)
    plan = FULL.with_(micro_batch_size=1)
    freed, longer = held(plain, plan) - held(tiled, plan), step_s(tiled, plan) - step_s(plain, plan)

    wide = 2.0 * (seq - model.hidden) * model.ffn
    assert wide < freed <= 5 * wide
    again_s = model.layers * 2 * seq * 3 * model.hidden * model.ffn / 989e12
    assert again_s < longer < 2 * again_s


def test_software_that_lacks_a_saver_refuses_it_by_name():
    for name in ("torchtitan", "megatron-lm", "transformers", "meshwright", "nemo-automodel"):
        for saver in SAVERS:
            if saver in runtime_spec(name).savers:
                continue
            found = asked(name, saver).problems(FULL)
            assert not is_legal(found), (name, saver)
            assert any(saver in one.message for one in found if one.rule == "saver"), (name, saver)


@pytest.mark.parametrize(
    ("saver", "plan", "batch", "rule"),
    [
        ("activation_offload", Plan(), 1, "activation-offload"),
        ("optimizer_in_backward", Plan(), 8, "optimizer-in-backward"),
        ("optimizer_in_backward", Plan(dp_replicate=8), 8, "optimizer-in-backward"),
        ("chunked_loss", Plan(pp=8), 8, "saver-pipeline"),
    ],
)
def test_what_a_saver_cannot_be_combined_with_is_refused(saver, plan, batch, rule):
    found = asked("pytorch", saver, gpus=plan.gpus, batch=batch).problems(plan)

    assert rule in {one.rule for one in found}


def test_a_plan_that_does_not_fit_is_offered_what_its_software_has():
    question = asked("pytorch", seq=65536, batch=1)
    plan = Plan(recompute="full")
    estimate = estimate_plans(question, [plan]).estimate(0)
    assert estimate.memory.reserved_bytes > 80 * GIB

    found = find_fixes(question, plan, with_replay(question, plan, estimate))

    assert any({"fused_linear_loss"} <= {*one.savers} for one in found), [one.change for one in found]
    assert all(one.reserved_bytes < estimate.memory.reserved_bytes for one in found)


def test_defaults_words_and_notes():
    assert resolve({"name": "trl"})[0].savers == ("chunked_loss",)
    assert resolve({"name": "trl", "release": "TRL 2026-05"})[0].savers == ()
    assert resolve({"name": "trl", "savers": []})[0].savers == ()
    assert resolve({"name": "pytorch", "savers": ["fused-linear-loss"]})[0].fused == ("linear_loss",)
    assert resolve({"name": "megatron-lm", "savers": ["bf16_gradients"]})[0].reduce_dtype == "bfloat16"
    with pytest.raises(BadPlan, match="known: chunked_loss"):
        canonical_savers(["tiling"])
    assert savers_said("+chunked ce; batch 2 (LoRA without optimizer-in-backward)") == ("chunked_loss",)
    assert savers_said("activations offloaded to the host, optimizer in backward") == SAVERS[2:4]
    assert savers_said("no activation offload, parameters offloaded") == ()
    assert optimizer_said("LoRA; steps with an 8-bit paged optimizer (batch 2)") == "pagedadamw8bit"
    assert optimizer_said("weights in 8 bit, not the optimizer; no paged AdamW") == ""


def test_what_a_note_says_is_assumed_and_said():
    case = load_case(
        {
            "id": "one",
            "model": "llama3-8b",
            "cluster": {"gpu": "h100-sxm", "gpus_per_node": 8, "nodes": 1},
            "workload": {"seq_len": 4096, "global_batch_size": 8},
            "plan": {"dp_shard": 8, "recompute": "full"},
            "runtime": {"name": "pytorch", "release": "TRL 2026-08"},
            "note": "checkpoints offloaded to host, 32B with MLP tiling",
        }
    )

    assert case.question.runtime.savers == ("chunked_loss", "activation_offload")
    assert any("the note says so" in line for line in case.assumed)
    assert any("without tiled_mlp" in line for line in case.assumed)


def test_a_release_is_answered_as_the_software_that_it_names():
    """EasyContext's ring is its own, around DeepSpeed's ZeRO-3."""
    case = load_case(
        {
            "id": "one",
            "model": "llama2-7b",
            "cluster": {"gpu": "a100-sxm-80gb", "gpus_per_node": 8, "nodes": 1},
            "workload": {"seq_len": 65536, "global_batch_size": 1},
            "plan": {"zero_stage": 3, "cp": 8, "cp_method": "ring", "recompute": "full", "offload": "parameters"},
            "runtime": {"name": "deepspeed", "release": "EasyContext 2024-04"},
        }
    )

    assert case.question.runtime.name == "easycontext"
    assert is_legal(case.question.problems(case.plan))
