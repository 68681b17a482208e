"""One question, however it is put: by flags, as a case, as a saved plan, by the explorer's sidebar."""

from dataclasses import replace

import pytest

from planner.export.schema import schema
from planner.question.cases import case_from_flags, case_of_plan_file, load_case
from planner.question.flags import Flags, flags_of_search
from planner.question.plan_file import plan_file, save_plan
from planner.question.question import Question, question_of
from planner.requests.training import Suggest
from planner.search.answer import search_question
from simulator.analytical.estimates import estimate_plans
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.fitting.calibrations import Calibrations
from simulator.legality.rules import is_legal, problems
from simulator.lowering.simulation import simulate_plan
from tests.planner.conftest import ROOT
from topology.catalog.cluster_file import load_cluster
from topology.catalog.gpus import gpu_kinds
from topology.errors import BadPlan, UserError
from topology.profile.profile import Profile, read_profile

PLAN = {"dp_shard": 4, "tp": 2, "micro_batch_size": 1, "recompute": "full"}


@pytest.fixture(scope="module")
def measured() -> Calibrations:
    known = read_profile(ROOT / "examples" / "profiles" / "h200x2_next.json")
    return Calibrations(replace(known, layers=known.layers[::4]))  # ten runs take seconds less to fit than forty


def parts(question: Question) -> tuple[object, ...]:
    """Return what a question is about, without how many GPUs of the cluster it names."""
    return question.model, question.cluster, question.workload, question.runtime, question.framework


def test_flags_a_case_and_a_saved_plan_are_one_question(tmp_path) -> None:
    flags = Flags(
        model="llama3-8b", cluster="dgx-h100", gpus=(8,), seq_len=4096, global_batch=32, plan=PLAN,
        runtime={"name": "torchtitan"},
    )  # fmt: skip
    by_flags = case_from_flags(flags)
    by_case = load_case(
        {
            "model": "llama3-8b",
            "cluster": "dgx-h100",
            "workload": {"seq_len": 4096, "global_batch_size": 32},
            "plan": PLAN,
            "runtime": {"name": "torchtitan", "param_dtype": "fp32", "compute_dtype": "BF16"},
        }
    )
    estimate = by_flags.question.estimate([by_flags.plan]).estimate(0)
    save_plan(plan_file(by_flags.question, by_flags.plan, estimate), tmp_path / "plan.json")
    saved = case_of_plan_file(tmp_path / "plan.json")
    searched, _ = search_question(flags, "torchtitan")

    assert flags_of_search(Suggest(compute_dtype="bf16")).runtime["compute_dtype"] == "bfloat16"
    assert by_flags.plan == by_case.plan == saved.plan
    assert parts(by_flags.question) == parts(by_case.question) == parts(saved.question) == parts(searched)
    assert by_flags.question.count == by_case.question.count == saved.question.count == searched.count == 8
    assert saved.question.estimate([saved.plan]).estimate(0) == estimate


@pytest.mark.parametrize(("cluster", "name"), [("dgx-h100", "megatron-lm"), ("4xT4", None)])
def test_the_explorer_asks_what_its_command_line_asks(cluster, name) -> None:
    """With a framework and without: T4 have no bfloat16, so that what runs there is not the usual framework."""
    pytest.importorskip("streamlit", reason="the explorer is not installed")
    from ui.question.state import of_link

    inputs = of_link(
        {"model": "llama3.2-1b", "cluster": cluster, "seq": "2048"} | ({"framework": name} if name else {})
    )
    typed = Suggest(model="llama3.2-1b", cluster=cluster, seq_len=2048, framework=name)

    assert search_question(inputs.flags(), inputs.framework) == search_question(flags_of_search(typed), name)
    assert ("--framework" in inputs.command()) == (name is not None)
    assert search_question(inputs.flags(), inputs.framework)[0].framework.name == "megatron-lm"


def test_a_question_answers_as_the_rules_the_closed_form_and_the_simulation_do(llama8b, measured) -> None:
    cluster = load_cluster("h200x4")
    question = question_of(
        replace(llama8b, layers=4),
        cluster,
        Workload(seq_len=4096, global_batch_size=8),
        framework="meshwright",
        calibration=measured.on(cluster),
    )
    good, bad = Plan(dp_shard=4, micro_batch_size=2), Plan(dp_shard=3)

    assert question.legal(good)
    assert not question.legal(bad)
    assert question.problems(bad) == problems(bad, question.facts())
    assert is_legal(question.problems(good))
    assert question.estimate([good]).step_s == pytest.approx(estimate_plans(question, [good]).step_s)
    alone = simulate_plan(question, good, spans=False).run.step_s
    assert question.simulate(good, spans=False).run.step_s == alone
    assert question.estimate([good]).estimate(0) != replace(question, calibration=None).estimate([good]).estimate(0)


def test_what_a_profile_says_of_a_machine_does_not_depend_on_who_asked_first(measured) -> None:
    one, other = load_cluster("h200x4"), load_cluster("dgx-h200", gpus=2)
    model, load, plan = load_model("llama3.2-1b"), Workload(seq_len=2048, global_batch_size=2), Plan(dp_shard=2)

    def step_s(known: Calibrations) -> float:
        question = question_of(model, other, load, framework="meshwright", calibration=known.on(other), gpus=2)
        return float(question.estimate([plan]).step_s[0])

    late = Calibrations(measured.profile)
    late.on(one)

    assert step_s(late) == step_s(Calibrations(measured.profile))
    assert late.on(one) is late.on(load_cluster("h200x4"))
    assert late.on(load_cluster("dgx-h100")) is None, "a profile of other GPUs says nothing"
    assert Calibrations(None).on(one) is None


@pytest.mark.parametrize(
    ("gpus", "adapter", "framework"),
    [
        ("8xV100", None, "megatron-lm"),
        ("8xP100", {"kind": "qlora", "rank": 8}, "deepspeed"),
        ("8xA100", None, "torchtitan"),
    ],
)
def test_where_no_framework_is_named_it_is_one_that_runs_on_the_gpus(gpus, adapter, framework) -> None:
    flags = Flags(model="llama3.2-1b", cluster=gpus, seq_len=1024, global_batch=8, runtime={"adapter": adapter})
    question, assumed = search_question(flags, None)

    assert question.framework.name == case_from_flags(flags).question.framework.name == framework
    assert any(line.startswith("framework") for line in assumed) == (framework != "torchtitan")
    assert question.legal(Plan(dp_replicate=8, zero_stage=0))


@pytest.mark.parametrize("framework", ["torchtitan", "deepspeed"])
def test_a_module_that_the_model_lacks_is_named_before_any_framework_refuses_it(framework) -> None:
    frozen = {"adapter": {"kind": "frozen", "target_modules": ["embed_tokens", "nothing"]}}
    with pytest.raises(BadPlan, match="'nothing' matches no module"):
        search_question(Flags(model="llama3.2-1b", runtime=frozen), framework)


@pytest.mark.parametrize("framework", ["torchtitan", "megatron-lm", "deepspeed", "pytorch"])
def test_products_are_in_types_that_the_tensor_cores_and_the_framework_have(framework) -> None:
    """By default, on every GPU of the catalogue: torchtitan has no float16 to choose, V100 and P100 no bfloat16."""
    for gpu in gpu_kinds():
        flags = Flags(model="llama3.2-1b", cluster=f"2x{gpu.name}", seq_len=1024, global_batch=8)
        question, assumed = search_question(flags, framework)
        stated, _ = search_question(replace(flags, runtime={"compute_dtype": "bfloat16"}), framework)
        plan, has_bfloat16 = Plan(dp_replicate=2, zero_stage=0), "bfloat16" in gpu.peak_flops

        assert question.runtime.compute_dtype in gpu.peak_flops
        assert question.runtime.compute_dtype == question.runtime.activation_dtype
        assert question.legal(plan) == (has_bfloat16 or framework != "torchtitan")
        assert stated.legal(plan) == has_bfloat16
        assert any("no tensor cores" in line for line in assumed) == (not has_bfloat16)
    choices = schema("torchtitan", "0.3.0")["keys"]["training.mixed_precision_param"]["choices"]
    for dtype in ("float16", "bfloat16", "float32"):
        runtime = replace(question_of(question.model, question.cluster, question.workload).runtime, compute_dtype=dtype)
        asked = question_of(question.model, question.cluster, question.workload, runtime=runtime)
        assert asked.legal(Plan(dp_replicate=2)) == (dtype in choices)


@pytest.mark.parametrize(
    ("plan", "stated", "with_use"),
    [
        ({"schedule": "1F1B"}, {}, {"pp": 2}),
        ({"cp_method": "ring"}, {}, {"cp": 2}),
        ({"sequence_parallel": True}, {}, {"tp": 2}),
        ({}, {"routing": "balanced"}, None),
        ({}, {"runtime": {"moe_dispatcher": "alltoall"}}, None),
        ({}, {"runtime": {"expert_products": "loop"}}, None),
    ],
)
def test_a_flag_without_a_use_is_refused_with_what_to_leave_out(plan, stated, with_use) -> None:
    flags = Flags(model="llama3.2-1b", cluster="8xH100", seq_len=1024, global_batch=16, plan=plan, **stated)
    name = next(iter({**plan, **stated.get("runtime", {}), **{k: v for k, v in stated.items() if k != "runtime"}}))
    with pytest.raises(UserError) as refused:
        case_from_flags(flags)

    assert f"leave --{name.replace('_', '-')} out" in refused.value.remedy
    if with_use is None:
        with pytest.raises(UserError, match="has none"):
            search_question(flags, "torchtitan")
        flags = replace(flags, model="qwen3-30b-a3b")
    case = case_from_flags(replace(flags, plan={**plan, **(with_use or {})}))
    assert case.question.legal(case.plan)


def test_collectives_alone_calibrate_nothing_but_collectives() -> None:
    """A profile of another day's links leaves kernels, hosts and the width of the interval to the datasheet."""
    shipped = read_profile(ROOT / "examples" / "profiles" / "h200x4.json")
    links = Profile(machine=shipped.machine, gpu=shipped.gpu, collectives=shipped.collectives)
    cluster = load_cluster("h200x4")
    plain = question_of(load_model("llama3-8b"), cluster, Workload(seq_len=4096, global_batch_size=8), gpus=4)
    bent = replace(plain, calibration=Calibrations(links).on(cluster))
    split, alone = Plan(tp=4, sequence_parallel=True, recompute="full"), Plan(dp_shard=4, recompute="full")

    for plan in (split, alone):
        a, b = (question.estimate([plan]) for question in (plain, bent))
        # Kernels are the same but for their clocks, which follow the power that collectives between them leave.
        assert a.breakdown_s["compute"] == pytest.approx(b.breakdown_s["compute"], rel=1e-3)
        first, second = a.estimate(0).step_s, b.estimate(0).step_s
        assert first.high / first.value == pytest.approx(second.high / second.value, rel=0.05)
    assert plain.estimate([split]).exposed_by_axis_s["tp"] != pytest.approx(
        bent.estimate([split]).exposed_by_axis_s["tp"], rel=1e-3
    )
