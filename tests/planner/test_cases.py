"""Cases: what a source says, what it leaves unsaid, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.explain.tables import cluster_line
from planner.question.cases import case_from_flags, load_case, read_cases
from planner.question.flags import Flags
from tests.planner.conftest import CASES
from tests.planner.stated_case import BASE, changed
from topology.catalog.cluster_file import load_cluster, save_cluster
from topology.cluster import LinkKind
from topology.errors import BadCluster, BadInput, BadModel, BadPlan, UserError
from topology.rates.reach import mixed_gpus

ALL = [(path.name, case) for path in sorted(CASES.glob("*.json")) for case in json.loads(path.read_text())]


@pytest.mark.parametrize(("file", "data"), ALL, ids=[case["id"] for _, case in ALL])
def test_every_case_of_the_fixtures_loads_as_stated(file, data):
    """Whatever the source states reaches the plan unchanged; the GPU count is the product of the degrees."""
    case = load_case(data)

    for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "virtual_stages", "zero_stage"):
        if data["plan"].get(name) is not None:
            assert getattr(case.plan, name) == data["plan"][name]
    if data["plan"]["micro_batch_size"] is not None:
        assert case.plan.micro_batch_size == data["plan"]["micro_batch_size"]
    assert (
        case.plan.gpus == case.question.cluster.gpu_count == data["cluster"]["nodes"] * data["cluster"]["gpus_per_node"]
    )
    assert case.question.runtime.name == data["runtime"]["name"]


def test_unstated_fields_are_listed():
    """null, absent and "unknown" all mean that the source does not say, and each leaves a line."""
    case = load_case(changed(plan={"micro_batch_size": None, "recompute": "unknown"}))

    assert case.plan.micro_batch_size == 8  # 64 sequences over 8 ranks, in one piece
    assert case.plan.recompute == "selective"
    assert any("micro batch 8" in line for line in case.assumed)
    assert any(line.startswith("recompute selective") for line in case.assumed)
    assert any("compile" in line for line in case.assumed)


def test_a_pipelines_unstated_micro_batch_is_one():
    case = load_case(changed(plan={"dp_shard": 4, "pp": 2, "micro_batch_size": None}))

    assert case.plan.micro_batch_size == 1
    assert case.plan.schedule == "1F1B"


@pytest.mark.parametrize(
    ("word", "meaning"),
    [
        ("per-op selective", "selective-op"),
        ("selective", "selective"),
        ("full", "full"),
        ("memory-budget", "memory-budget"),
    ],
)
def test_recompute_words(word, meaning):
    """Synonyms of ours are translated; a runtime's own word is kept."""
    assert load_case(changed(plan={"recompute": word})).plan.recompute == meaning


def test_overlap_implies_a_compiled_model():
    case = load_case(changed(plan={"dp_shard": 4, "tp": 2, "tp_overlap": "async"}))

    assert case.question.runtime.compile
    assert any("compile true" in line for line in case.assumed)


def test_overlap_by_site_is_read_in_any_order_and_written_in_one():
    said = "mlp_out=copy_engine, attention_in=copy_engine,attention_out=copy_engine ,mlp_in=none"
    case = load_case(changed(plan={"dp_shard": 4, "tp": 2, "tp_overlap": said}))

    assert case.plan.tp_overlap == (
        "attention_in=copy_engine,attention_out=copy_engine,mlp_in=none,mlp_out=copy_engine"
    )
    assert case.question.runtime.compile


@pytest.mark.parametrize(
    ("sections", "error", "names"),
    [
        ({"plan": {"tp": 2, "tp_overlap": "mlp_in=soon"}}, BadPlan, "soon"),
        ({"plan": {"tp": 2, "tp_overlap": "head=chunked"}}, BadPlan, "head=chunked"),
        ({"plan": {"tensor_parallel": 2}}, BadPlan, "tensor_parallel"),
        ({"plan": {"tp": 0}}, BadPlan, "plan.tp"),
        ({"plan": {"tp": 2.0}}, BadPlan, "plan.tp"),
        ({"plan": {"tp": True}}, BadPlan, "plan.tp"),
        ({"plan": {"tp": 10**30}}, BadPlan, "plan.tp"),
        ({"plan": {"dp_shard": 10**18}}, BadPlan, "plan.dp_shard"),
        ({"plan": {"dp_shard": 1 << 21}}, BadPlan, "plan.dp_shard"),
        ({"plan": {"dp_shard": 1 << 11, "tp": 1 << 11}}, BadPlan, "multiply to"),
        ({"plan": {"dp_shard": 2, "placement": [0, 999]}}, BadPlan, "plan.placement"),
        ({"plan": {"pp": 2, "layers_per_stage": [1, 1]}}, BadPlan, "plan.layers_per_stage"),
        ({"cluster": {"gpu": "h100-sxm", "gpus_per_node": 10**400}}, BadCluster, "gpus_per_node is larger"),
        ({"plan": {"pp": 0}}, BadPlan, "plan.pp"),
        ({"plan": {"micro_batch_size": 10**12}}, BadPlan, "plan.micro_batch_size"),
        ({"workload": {"seq_len": 4096, "global_batch_size": -64}}, BadPlan, "workload.global_batch_size"),
        ({"runtime": {"param_dtype": "float64"}}, BadPlan, "runtime.param_dtype"),
        ({"plan": {"zero_stage": 4}}, BadPlan, "zero_stage"),
        ({"plan": {"sequence_parallel": "yes"}}, BadPlan, "sequence_parallel"),
        ({"plan": {"recompute": "x" * 100}}, BadPlan, "recompute"),
        ({"plan": {"recompute": "a\nb"}}, BadPlan, "recompute"),
        ({"plan": {"placement": [0, -1]}}, BadPlan, r"placement\[1\]"),
        ({"workload": {"seq_len": "8k"}}, BadPlan, "seq_len"),
        ({"workload": {"task": "serve"}}, UserError, "not covered yet"),
        ({"workload": None}, BadInput, "workload"),
        ({"model": 7}, BadModel, "model"),
        ({"model": "llama9-9z"}, BadModel, "llama9"),
        ({"runtime": {"compile": "yes"}}, BadPlan, "compile"),
        ({"runtime": {"compiled": True}}, BadPlan, "compile"),
        ({"workload": {"seqlen": 4096}}, BadPlan, "seq_len"),
    ],
)
def test_refusals_name_the_field(sections, error, names):
    with pytest.raises(error, match=names) as caught:
        load_case(changed(**sections))

    assert caught.value.exit_code == 2


def test_flags_describe_the_same_case():
    """The flag form and the case form of one question give the same plan, workload and runtime."""
    flags = case_from_flags(
        Flags(
            model="llama3-8b",
            cluster="dgx-h100",
            gpus=(16,),
            seq_len=4096,
            global_batch=32,
            plan={"tp": 2, "pp": 2, "micro_batch_size": 1, "recompute": "full", "dp_shard": None},
            runtime={"name": "torchtitan", "compile": True, "param_dtype": None},
        )
    )
    case = load_case(
        changed(
            cluster={
                "gpu": "h100-sxm",
                "gpus_per_node": 8,
                "nodes": 2,
                "interconnect": "nvswitch",
                "nic_gbit_per_gpu": 400,
            },
            workload={"seq_len": 4096, "global_batch_size": 32},
            plan={"tp": 2, "pp": 2, "dp_shard": 4, "recompute": "full"},
            runtime={"compile": True},
        )
    )

    assert flags.plan == case.plan
    assert flags.plan.dp_shard == 4
    assert flags.question.workload == case.question.workload
    assert flags.question.runtime == case.question.runtime


@pytest.mark.parametrize(
    ("runtime", "gpus", "plan", "degrees"),
    [
        ("torchtitan", None, {"tp": 2}, (8, 1, 4)),  # a DGX has 8: dp_shard 4 fills it
        ("torchtitan", None, {"tp": 2, "dp_shard": 2}, (4, 1, 2)),  # the degrees say 4
        ("torchtitan", None, {"tp": 8, "pp": 4}, (32, 1, 1)),  # more than one node has
        ("torchtitan", 16, {"dp_replicate": 2}, (16, 2, 8)),
        ("torchtitan", 8, {"tp": 3}, (8, 1, 1)),  # does not divide: left to the world-size rule
        ("megatron-lm", 16, {"tp": 2}, (16, 8, 1)),  # Megatron replicates by default
        ("megatron-lm", 16, {"dp_replicate": 16, "zero_stage": 1}, (16, 16, 1)),
        ("megatron-lm", 16, {"dp_shard": 4, "tp": 4}, (16, 1, 4)),
        ("deepspeed", 16, {"zero_stage": 1, "tp": 2}, (16, 8, 1)),
        ("llm-foundry", 8, {}, (8, 1, 8)),
    ],
)
def test_degrees_and_gpu_counts_complete_each_other(runtime, gpus, plan, degrees):
    case = case_from_flags(Flags(gpus=None if gpus is None else (gpus,), plan=plan, runtime={"name": runtime}))

    assert (case.question.gpus, case.plan.dp_replicate, case.plan.dp_shard) == degrees


def test_lists_and_single_cases_are_told_apart(tmp_path):
    one, many, wrong = tmp_path / "one.json", tmp_path / "many.json", tmp_path / "wrong.json"
    one.write_text(json.dumps(BASE))
    many.write_text(json.dumps([BASE, BASE]))
    wrong.write_text('[{"id": "x"}, 3]')

    assert read_cases(one) == ([BASE], False)
    assert read_cases(many) == ([BASE, BASE], True)
    with pytest.raises(BadInput, match=r"\[1\] is a number"):
        read_cases(wrong)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(
    section=st.sampled_from(["model", "cluster", "workload", "plan", "runtime", "measured"]),
    key=st.sampled_from(["tp", "pp", "schedule", "seq_len", "gpu", "nodes", "name", "compile", "placement", "x"]),
    value=json_values,
    whole=st.booleans(),
)
def test_no_case_crashes_the_reader(section, key, value, whole):
    """Any JSON in any place gives a case or an error of exit code 2, never a traceback."""
    case = copy.deepcopy(BASE)
    if whole or not isinstance(case.get(section), dict):
        case[section] = value
    else:
        case[section][key] = value
    with contextlib.suppress(UserError):
        load_case(case)


@pytest.mark.parametrize(
    ("case", "key"),
    [
        (changed(runtime={"colour": "red"}), "'colour'"),
        (changed(plan={"tensor_parallel": 4}), "'tensor_parallel'"),
        (changed(cluster={"gpu": "h100-sxm", "racks": 4}), "racks"),
        (changed(workload={"warmup": 100}), "'warmup'"),
        ({**changed(), "reviewed_by": "somebody"}, "'reviewed_by'"),
    ],
)
def test_keys_that_nothing_reads_are_refused_by_name(case, key):
    with pytest.raises(UserError, match=key.strip("'")):
        load_case(case)


def test_a_cluster_in_a_case_may_say_what_a_cluster_file_may():
    """Bridges between pairs were listed in the case: they are in the graph, not dropped."""
    pairs = {"gpu": "rtx-a6000", "gpus_per_node": 4, "interconnect": "pcie", "bridges": [[0, 2], [1, 3]]}
    joined = load_case(changed(cluster=pairs, plan={"dp_shard": 4})).question.cluster
    plain = load_case(changed(cluster={**pairs, "bridges": None}, plan={"dp_shard": 4})).question.cluster

    assert sorted(
        tuple(sorted((link.a, link.b))) for link in joined.groups[0].node.links if link.kind is LinkKind.NVLINK
    ) == [("gpu0", "gpu2"), ("gpu1", "gpu3")]
    assert not any(link.kind is LinkKind.NVLINK for link in plain.groups[0].node.links)


def test_what_is_said_about_a_case_is_no_setting():
    """Where a case is from, and what runs of it became, may be said in words."""
    load_case(
        {**changed(), "source": "a paper", "notes": "two nodes were slow", "url": "https://example.org", "peers": {}}
    )


@pytest.mark.parametrize("arguments", [(), ("--case",)])
def test_a_schedule_flag_needs_a_pipeline(planner, tmp_path, arguments):
    path = tmp_path / "case.json"
    path.write_text(json.dumps(BASE))
    done = planner("estimate", *(arguments and (*arguments, path)), "--schedule", "1F1B")

    assert done.returncode == 2
    assert "--pp" in done.stderr


def test_a_schedule_without_a_pipeline_is_said_to_change_nothing():
    case = load_case(changed(plan={"schedule": "1F1B"}))

    assert case.plan.schedule is None
    assert "schedule 1F1B changes nothing: there is no pipeline (pp 1)" in case.assumed


def test_positions_beyond_the_model_are_said():
    case = load_case(changed())
    short = replace(case.question, model=replace(case.question.model, max_positions=4096))

    assert any(one.rule == "positions" and "4096" in one.message for one in short.problems(case.plan))
    assert short.legal(case.plan)
    assert not any(one.rule == "positions" for one in case.question.problems(case.plan))


def test_mixed_gpus_are_said(tmp_path):
    """One node of A100 and one of H100: the answer and its header say so."""
    fast, slow = load_cluster("dgx-h100"), load_cluster("dgx-a100")
    kinds = (*slow.gpu_kinds, *fast.gpu_kinds)
    mixed = replace(slow, name="mixed", gpu_kinds=kinds, groups=(*slow.groups, *fast.groups))
    save_cluster(mixed, tmp_path / "mixed.json")
    case = load_case(changed(cluster=str(tmp_path / "mixed.json"), plan={"dp_shard": 16}))

    assert any("several kinds" in line and "A100" in line and "H100" in line for line in case.assumed)
    assert "several kinds" in cluster_line(case.question.cluster)
    assert case.question.cluster.slowest_kind.title in cluster_line(case.question.cluster)
    assert not mixed_gpus(slow)


def test_the_header_shows_the_links_that_are_there():
    """A bridge joins pairs (12 links of 25 GB/s); AMD's links are not NVLink (7 of 64 GB/s)."""
    assert "NVLink 300 GB/s/GPU to 1 of 3 other GPUs" in cluster_line(load_cluster("a100-pcie-x4"))
    assert "xGMI 448 GB/s/GPU" in cluster_line(load_cluster("mi300x-x8"))
    assert "NVLink 450 GB/s/GPU" in cluster_line(load_cluster("dgx-h100"))
    line = cluster_line(load_cluster("rtx4090-x8"))
    assert "no NVLink" in line


def test_where_a_case_is_from_changes_nothing():
    """Only what is stated counts: a source without a version is read as a question without one."""
    plain = load_case(changed())
    reported = load_case(changed() | {"source": "a table of 2024", "measured": {"step_s": 1.0}})

    assert reported.question.runtime == plain.question.runtime
    assert reported.question.runtime.version is None
    assert reported.question.model == plain.question.model


def test_zero_2_of_fsdp_is_sharding_without_reshard():
    """torch: SHARD_GRAD_OP is ZeRO-2, and `fully_shard(reshard_after_forward=False)` is the same."""
    stated = {"dp_replicate": 1, "dp_shard": 8, "micro_batch_size": 1}
    said = load_case(changed(plan={**stated, "zero_stage": 2}, runtime={"name": "torchtitan"}))
    same = load_case(changed(plan={**stated, "reshard_after_forward": False}, runtime={"name": "torchtitan"}))

    assert said.plan == same.plan
    assert any("without reshard" in line for line in said.assumed)
    with pytest.raises(BadPlan, match="reshard_after_forward"):
        load_case(changed(plan={**stated, "zero_stage": 2, "reshard_after_forward": True}))


@pytest.mark.parametrize("runtime", ["torchtitan", "megatron-lm", "deepspeed"])
def test_zero_0_is_replicas_however_it_is_said(runtime):
    def asked(**stated):
        plan = {"micro_batch_size": 1, **stated}
        case = case_from_flags(Flags(gpus=(8,), global_batch=8, plan=plan, runtime={"name": runtime}))
        return case.plan.with_(zero_stage=None), case.question.estimate([case.plan]).reserved_bytes[0]

    replicas = asked(dp_replicate=8)

    assert asked(zero_stage=0) == replicas
    assert asked(zero_stage=0, dp_shard=8) == replicas
    assert asked(zero_stage=0, dp_replicate=8) == replicas


def test_context_parallel_ranks_share_state_where_the_framework_shards():
    """FSDP of torchtitan covers them (`fsdp_enabled`); Megatron-LM's distributed optimizer is a flag of its own."""
    stated = {"micro_batch_size": 1, "cp": 8, "dp_replicate": 1, "dp_shard": 1}
    megatron = load_case(changed(plan=stated, runtime={"name": "megatron-lm"}))
    titan = load_case(changed(plan={**stated, "zero_stage": 0}, runtime={"name": "torchtitan"}))

    assert megatron.plan.zero_stage == 0
    assert not titan.question.legal(titan.plan)


@pytest.mark.parametrize(("stage", "legal"), [(1, True), (2, False)])
def test_nanotron_shards_the_optimizer_alone(stage, legal):
    """Its ZeRO stage 2 is accepted and runs as stage 1 (huggingface/nanotron, helpers.py)."""
    plan = {"dp_replicate": 8, "dp_shard": 1, "zero_stage": stage, "micro_batch_size": 1}
    case = load_case(changed(plan=plan, runtime={"name": "nanotron"}))

    assert case.question.legal(case.plan) is legal
