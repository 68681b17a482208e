"""Legality against an independent reading of the frameworks' rules, and against runs that happened."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from planner.question.cases import load_case
from planner.question.question import default_runtime, question_of
from planner.search.plan_space.candidates import enumerate_nodes
from simulator.config.hf_config import load_model
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.legality.frameworks import FRAMEWORKS
from simulator.legality.rule import Grade
from simulator.legality.rules import is_legal
from simulator.pipeline.schedules.registry import build_schedule
from simulator.pipeline.schedules.table import Kind
from simulator.pipeline.stages import stage_layers
from simulator.runtimes.library import runtime_spec
from tests.planner.conftest import CASES, LLAMA8B, MIXTRAL, TINY, make_cluster
from tests.planner.every_plan import UNBOUNDED
from topology.catalog.cluster_file import load_cluster
from topology.catalog.clusters import cluster
from topology.errors import UserError


def reference(plan, model, workload, gpus, framework, *, compiled=False):
    """Return whether a plan is legal, by plain divisibility: written without looking at simulator.legality.rules."""
    p, s = plan, workload.seq_len
    if p.dp_replicate * p.dp_shard * p.cp * p.tp * p.pp != gpus:
        return False
    if model.heads % p.tp or (model.dense_layers and model.ffn % p.tp):
        return False
    if framework == "torchtitan" and model.kv_heads % p.tp:
        return False
    if framework == "megatron-lm" and model.kv_heads % p.tp and p.tp % model.kv_heads:
        return False
    if framework == "torchtitan" and p.cp * p.tp > 1 and s % (2 * p.cp * p.tp):
        return False
    if framework == "megatron-lm" and p.cp > 1 and s % (2 * p.cp):
        return False
    if p.sequence_parallel and p.tp > 1 and (s // p.cp) % p.tp:
        return False
    if framework == "deepspeed" and p.sequence_parallel and p.tp > 1:
        return False
    if framework == "deepspeed" and p.cp > 1 and (s % p.cp or model.heads % (p.tp * p.cp)):
        return False
    if p.ep > 1 and not model.moe:
        return False
    if model.moe:
        if model.moe.experts % p.ep:
            return False
        if framework == "megatron-lm":
            split = p.etp or p.tp
            together = p.dp_replicate * p.dp_shard * p.cp * p.tp
            if model.moe.ffn % split or together % (split * p.ep) or (p.tp > 1 and not p.sequence_parallel):
                return False
        elif p.ep == 1 and model.moe.ffn % p.tp:
            return False
        spread = p.tp if p.sequence_parallel else 1  # else tensor-parallel ranks have the same tokens
        inside = {
            "torchtitan": p.dp_shard * p.cp * spread,
            "megatron-lm": p.ep,
            "deepspeed": p.dp_replicate * p.dp_shard,
        }[framework]
        if inside % p.ep:
            return False
    if framework == "torchtitan" and p.dp_replicate > 1 and p.dp_shard == 1 and p.cp == 1 and p.tp * p.pp > 1:
        return False
    if framework == "deepspeed":
        if p.zero_stage in {2, 3} and p.pp > 1:
            return False
        if p.dp_shard > 1 and not p.zero_stage:
            return False
        if sum(degree > 1 for degree in (p.tp, p.cp, p.ep)) > 1 or (p.pp > 1 and p.cp * p.ep > 1):
            return False
    if framework == "torchtitan" and p.zero_stage == 1:
        return False
    if framework == "torchtitan" and p.zero_stage in {2, 3} and p.dp_shard * p.cp == 1 and p.dp_replicate > 1:
        return False
    dp = p.dp_replicate * p.dp_shard
    if workload.global_batch_size % (dp * p.micro_batch_size):
        return False
    m = workload.global_batch_size // (dp * p.micro_batch_size)
    stages = p.stages
    # torchtitan and Megatron-LM count the embedding and the head as a layer each, so that both may have a stage alone.
    ends = 0 if framework == "deepspeed" else 2
    if stages > model.layers + ends or (p.pp == 1 and p.virtual_stages > 1):
        return False
    if framework == "megatron-lm" and all((model.layers + extra) % stages for extra in (0, 1, 2)):
        return False
    if p.pp > 1:
        single = p.schedule in {"1F1B", "GPipe"}
        available = {
            "torchtitan": {
                "1F1B",
                "GPipe",
                "Interleaved1F1B",
                "LoopedBFS",
                "InterleavedZeroBubble",
                "ZBVZeroBubble",
                "DualPipeV",
            },
            "megatron-lm": {"1F1B", "Interleaved1F1B"},
            "deepspeed": {"1F1B"},
        }[framework]
        if p.schedule not in available:
            return False
        if single != (p.virtual_stages == 1):
            return False
        if p.schedule in {"ZBVZeroBubble", "DualPipeV"} and p.virtual_stages != 2:
            return False
        split = p.schedule in {"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"}
        if split and (compiled or p.recompute != "none"):
            return False
        if p.schedule == "DualPipeV" and m < stages:
            return False
        if framework == "torchtitan" and p.schedule == "1F1B" and m < p.pp:
            return False
        if p.schedule in {"Interleaved1F1B", "InterleavedZeroBubble"}:
            if framework == "megatron-lm" and m % p.pp:
                return False
            if framework == "torchtitan" and m % max(1, m // p.pp):
                return False
    return (
        p.recompute
        in {
            "torchtitan": {"none", "selective", "selective-op", "full"},
            "megatron-lm": {"none", "selective", "full"},
            "deepspeed": {"none", "full"},
        }[framework]
    )


ODD = Model(name="odd", family="llama", layers=6, hidden=384, heads=12, kv_heads=6, head_dim=32, ffn=1032, vocab=1000)
SMALL_MOE = replace(TINY, name="small-moe", moe=replace(MIXTRAL.moe, experts=6, ffn=96, dense_layers=1))
DEGREES = (1, 2, 3, 4, 6, 8)


def universe(framework):
    """Yield a few thousand plans, most of them illegal in one way or another."""
    zeros = (None, 1, 3) if framework == "torchtitan" else (0, 1, 3)
    for tp, cp, pp, dr, ds in itertools.product(DEGREES, (1, 2, 3), (1, 2, 3, 4), (1, 2), (1, 2, 4)):
        if tp * cp * pp * dr * ds not in {8, 12, 24}:
            continue
        for zero, ep, sp in itertools.product(zeros, (1, 2, 3), (False, True)):
            for (schedule, v), b, r in itertools.product(
                ((None, 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 1), ("DualPipeV", 2)),
                (1, 3),
                ("none", "selective-op"),
            ):
                if (schedule is None) != (pp == 1):
                    continue
                yield Plan(
                    dp_replicate=dr,
                    dp_shard=ds,
                    zero_stage=zero,
                    tp=tp,
                    sequence_parallel=sp,
                    cp=cp,
                    pp=pp,
                    ep=ep,
                    virtual_stages=v,
                    schedule=schedule,
                    micro_batch_size=b,
                    recompute=r,
                )


@pytest.mark.parametrize("framework", ["torchtitan", "megatron-lm", "deepspeed"])
@pytest.mark.parametrize("model", [ODD, TINY, SMALL_MOE], ids=lambda m: m.name)
def test_every_plan_is_judged_as_plain_divisibility_judges_it(framework, model):
    """All rules together agree with an independent reading, on plans that break them in every combination."""
    workload = Workload(seq_len=288, global_batch_size=24)
    clusters = {n: make_cluster(n // 4, 4) for n in (8, 12, 24)}
    legal = 0
    # Every 29th plan, from a start of its own for each model: 29 is coprime to the sizes of all the inner loops.
    for plan in itertools.islice(universe(framework), len(model.name), None, 29):
        expected = reference(plan, model, workload, plan.gpus, framework)
        problems = question_of(model, clusters[plan.gpus], workload, framework=framework).problems(plan)

        assert is_legal(problems) == expected, (plan, problems)
        legal += expected
    assert legal >= 3  # the universe is not all refusals


def test_all_runs_that_happened_are_legal():
    """Every measured case ran, so calling one illegal would be a wrong rule."""
    for path in sorted(CASES.glob("*.json")):
        for data in json.loads(path.read_text()):
            case = load_case(data)
            problems = case.question.problems(case.plan)

            assert is_legal(problems), (case.id, problems)


def rules(plan, *, framework, model=LLAMA8B, cluster=None, workload=None, runtime=None):
    problems = question_of(
        model,
        cluster or make_cluster(plan.gpus // 8 or 1, min(8, plan.gpus)),
        workload or Workload(seq_len=8192, global_batch_size=64),
        framework=framework,
        runtime=runtime,
    ).problems(plan)
    return {problem.rule: problem for problem in problems}


def test_kv_heads_have_three_grades():
    """Tensor parallelism above the KV heads: refused by torchtitan, copied by Megatron, slow in DeepSpeed."""
    plan = Plan(tp=16)
    grades = {f: rules(plan, framework=f)["kv-heads"] for f in ("torchtitan", "megatron-lm", "deepspeed")}

    assert grades["torchtitan"].grade is Grade.ILLEGAL
    assert grades["torchtitan"].nearest == (8,)
    assert "8 key/value heads are not divisible by tp 16" in grades["torchtitan"].message
    assert grades["megatron-lm"].grade is Grade.LEGAL
    assert grades["deepspeed"].grade is Grade.SLOW


def test_story_s12_six_gpus_give_different_answers():
    """64 heads and 8 KV heads on 6 GPUs: tp 3 is illegal everywhere, tp 2 x pp 3 legal, and tp 6 names 64 % 6."""
    model = replace(LLAMA8B, name="64-heads", heads=64, hidden=8192, layers=30)
    cluster = make_cluster(1, 6)
    workload = Workload(seq_len=8192, global_batch_size=48)
    for framework in ("torchtitan", "megatron-lm", "deepspeed"):
        for tp in (3, 6):
            found = rules(
                Plan(tp=tp, pp=6 // tp, schedule="1F1B" if tp == 3 else None),
                framework=framework,
                model=model,
                cluster=cluster,
                workload=workload,
            )
            assert found["heads"].grade is Grade.ILLEGAL
            assert f"64 query heads are not divisible by tp {tp}" in found["heads"].message
            assert 2 in found["heads"].nearest or 4 in found["heads"].nearest
        good = question_of(model, cluster, workload, framework=framework).problems(Plan(tp=2, pp=3, schedule="1F1B"))
        assert is_legal(good)
    # 16-way tensor parallelism is where they part: the question is the same, the answers are three.
    wide = Plan(tp=16)
    big = make_cluster(2, 8)
    verdicts = [
        (is_legal(found), found[0].grade)
        for f in ("torchtitan", "megatron-lm", "deepspeed")
        for found in [question_of(model, big, workload, framework=f).problems(wide)]
    ]
    assert verdicts == [(False, Grade.ILLEGAL), (True, Grade.SLOW), (True, Grade.SLOW)]


def test_unused_gpus_are_named():
    problem = rules(
        Plan(dp_shard=6),
        framework="torchtitan",
        cluster=make_cluster(),
        workload=Workload(seq_len=8192, global_batch_size=48),
    )["world-size"]

    assert problem.grade is Grade.ILLEGAL
    assert "2 would idle" in problem.message


@pytest.mark.parametrize(("zero", "legal"), [(0, True), (1, True), (2, False), (3, False)])
def test_deepspeed_refuses_pipelines_beyond_zero_1(zero, legal):
    plan = Plan(dp_replicate=4, pp=2, schedule="1F1B", zero_stage=zero)

    assert ("zero-pipeline" not in rules(plan, framework="deepspeed")) == legal
    assert "zero-pipeline" not in rules(plan, framework="megatron-lm")


def test_asynchronous_tensor_parallelism_has_preconditions():
    """It needs compile and sequence parallelism; on the torch that drops it silently there is a note; no NVLink is
    slow.
    """
    plan = Plan(dp_shard=4, tp=2, sequence_parallel=True, tp_overlap="async")
    eager, compiled = Runtime(compile=False), Runtime(compile=True, version="0.2.2")

    assert rules(plan, framework="torchtitan", runtime=eager)["overlap-compile"].grade is Grade.ILLEGAL
    assert "overlap-compile" not in rules(plan, framework="torchtitan", runtime=compiled)
    assert rules(plan, framework="torchtitan", runtime=compiled)["overlap-effective"].grade is Grade.LEGAL
    assert (
        rules(plan.with_(sequence_parallel=False), framework="torchtitan", runtime=compiled)["overlap"].grade
        is Grade.ILLEGAL
    )
    pcie = make_cluster(1, 8, nvlink=False)
    assert rules(plan, framework="torchtitan", runtime=compiled, cluster=pcie)["overlap-pcie"].grade is Grade.SLOW


@pytest.mark.parametrize(
    ("seq_len", "cp", "version", "legal"),
    [(4100, 1, "0.3.0", False), (4100, 1, "0.2.2", True), (4104, 1, "0.3.0", True), (4104, 2, "0.3.0", False)],
)
def test_torchtitan_0_3_cuts_a_ranks_sequence_into_8_equal_pieces(seq_len, cp, version, legal):
    """ChunkedLossWrapper (components/loss.py) checks it of the local sequence; tensor-parallel ranks gather theirs."""
    plan, runtime = Plan(dp_shard=8 // cp, cp=cp), Runtime(version=version)
    found = rules(
        plan, framework="torchtitan", runtime=runtime, workload=Workload(seq_len=seq_len, global_batch_size=8)
    )

    assert ("loss-pieces" not in found) is legal


def test_split_backward_schedules_refuse_compiled_stages():
    plan = Plan(dp_shard=4, pp=2, virtual_stages=2, schedule="ZBVZeroBubble")

    assert "schedule-compile" in rules(plan, framework="torchtitan", runtime=Runtime(compile=True))
    assert "schedule-compile" not in rules(plan, framework="torchtitan", runtime=Runtime(compile=False))


@pytest.mark.parametrize("framework", ["torchtitan", "meshwright"])
@pytest.mark.parametrize("recompute", ["full", "selective-op"])
def test_split_backward_schedules_refuse_recomputation(framework, recompute):
    """A checkpoint runs again for every weight (tests/executor/test_split_backward_memory.py)."""
    plan = Plan(dp_shard=4, pp=2, virtual_stages=2, schedule="InterleavedZeroBubble", recompute=recompute)

    assert "schedule-recompute" in rules(plan, framework=framework)
    assert "schedule-recompute" not in rules(plan.with_(schedule="Interleaved1F1B"), framework=framework)


def test_tensor_parallelism_across_nodes_is_legal_but_slow():
    assert rules(Plan(tp=16), framework="megatron-lm")["tensor-domain"].grade is Grade.SLOW
    assert "tensor-domain" not in rules(Plan(tp=8), framework="megatron-lm")


def test_megatron_spreads_126_layers_over_16_stages_by_counting_embedding_and_loss():
    """126 + 2 = 128 divides: Megatron can, if set to count embedding and loss; 125 layers need a layout."""
    workload = Workload(seq_len=8192, global_batch_size=64)
    plan = Plan(dp_replicate=1, tp=1, pp=16, schedule="1F1B")
    even = rules(plan, framework="megatron-lm", model=replace(LLAMA8B, layers=126), workload=workload)
    odd = rules(plan, framework="megatron-lm", model=replace(LLAMA8B, layers=125), workload=workload)
    reported = rules(
        plan.with_(layers_per_stage=(*[8] * 13, 7, 7, 7)),
        framework="megatron-lm",
        model=replace(LLAMA8B, layers=125),
        workload=workload,
    )

    assert even["layers-even"].grade is Grade.LEGAL
    assert odd["layers-even"].grade is Grade.LEGAL
    assert "--pipeline-model-parallel-layout: layers 7, 14 x 8, 6 by stage" in odd["layers-even"].message
    assert "layers-even" not in reported
    assert (
        rules(plan, framework="torchtitan", model=replace(LLAMA8B, layers=125), workload=workload)["layers-even"].grade
        is Grade.SLOW
    )


@pytest.mark.parametrize("field", ["tp", "dp_shard", "micro_batch_size", "virtual_stages"])
def test_meaningless_degrees_are_problems_not_crashes(field):
    found = rules(Plan(dp_shard=8).with_(**{field: 0}), framework="torchtitan", cluster=make_cluster())

    assert found["positive"].grade is Grade.ILLEGAL


def test_degrees_that_overflow_are_problems_not_wrapped_around(cluster, workload, llama8b):
    """2^31 to the fifth power wraps to zero in 64 bits."""
    huge = Plan(dp_replicate=1 << 31, dp_shard=1 << 31, tp=1 << 31, cp=1 << 31, pp=1 << 31)
    (problem,) = question_of(llama8b, cluster, workload, framework="torchtitan").problems(huge)

    assert (problem.rule, problem.grade) == ("range", Grade.ILLEGAL)


def test_torchtitan_counts_embedding_and_head_as_layers(llama8b):
    """126 layers on 8 stages are 128 units, 16 each: nothing to complain about; 125 are not even."""
    workload = Workload(seq_len=8192, global_batch_size=8)
    plan = Plan(pp=8, schedule="1F1B")

    assert "layers-even" not in rules(
        plan, framework="torchtitan", model=replace(llama8b, layers=126), workload=workload
    )
    assert "layers-even" in rules(plan, framework="torchtitan", model=replace(llama8b, layers=125), workload=workload)


def test_listed_layers_and_placement_must_add_up(cluster, workload, llama8b):
    listed = question_of(llama8b, cluster, workload, framework="torchtitan").problems(
        Plan(dp_shard=4, pp=2, schedule="1F1B", layers_per_stage=(16, 15))
    )
    placed = question_of(llama8b, cluster, workload, framework="torchtitan").problems(
        Plan(dp_shard=8, placement=(0, 0, 1, 2, 3, 4, 5, 6))
    )

    assert "layers-per-stage" in {p.rule for p in listed if p.grade is Grade.ILLEGAL}
    assert "placement" in {p.rule for p in placed if p.grade is Grade.ILLEGAL}


def test_experts_follow_each_frameworks_grid(mixtral):
    """Torchtitan folds experts into dp_shard x cp x tp, so replicas do not count; Megatron counts them."""
    plan = Plan(dp_replicate=8, ep=8, zero_stage=1)

    assert "expert-grid" not in rules(plan, framework="megatron-lm", model=mixtral)
    assert (
        rules(plan.with_(zero_stage=None), framework="torchtitan", model=mixtral)["expert-grid"].grade is Grade.ILLEGAL
    )
    assert "expert-grid" not in rules(Plan(dp_shard=8, ep=8), framework="torchtitan", model=mixtral)
    assert rules(Plan(dp_shard=8, ep=8), framework="torchtitan")["experts-dense"].grade is Grade.ILLEGAL


def test_ranks_that_split_experts_are_not_those_that_share_them(mixtral) -> None:
    """Megatron's ranks of a stage are etp x ep x the rest, and etp is tp unless said (core/model_parallel_config.py);
    others have no such degree.
    """
    plan = Plan(tp=8, dp_replicate=2, ep=4, zero_stage=1, sequence_parallel=True)

    assert rules(plan, framework="megatron-lm", model=mixtral)["expert-grid"].nearest == (2,)
    assert rules(plan.with_(etp=1), framework="megatron-lm", model=mixtral).keys().isdisjoint({"expert-grid"})
    assert rules(plan.with_(etp=3), framework="megatron-lm", model=mixtral)["expert-tensor"].grade is Grade.ILLEGAL
    assert (
        "etp 4"
        in rules(plan.with_(zero_stage=None, etp=4), framework="pytorch", model=mixtral)["expert-tensor"].message
    )
    alone = plan.with_(sequence_parallel=False, etp=1)
    assert rules(alone, framework="megatron-lm", model=mixtral)["expert-sequence"].grade is Grade.ILLEGAL


@pytest.mark.parametrize("framework", ["torchtitan", "pytorch", "megatron-lm", "meshwright"])
def test_experts_are_not_spread_over_tensor_parallel_ranks_with_the_same_tokens(framework, mixtral) -> None:
    """Without sequence parallelism they split each expert: groups of ep 2 and tp 4 would overlap on four GPUs."""
    plan = Plan(tp=4, ep=2, zero_stage=1 if framework == "megatron-lm" else None)

    assert rules(plan, framework=framework, model=mixtral)["expert-grid"].grade is Grade.ILLEGAL
    own = {"etp": 1} if framework == "megatron-lm" else {}
    spread = rules(plan.with_(sequence_parallel=True, ep=4, **own), framework=framework, model=mixtral)
    assert "expert-grid" not in spread


def test_frameworks_without_an_axis_say_so():
    found = rules(Plan(dp_shard=4, tp=2), framework="llm-foundry")

    assert "tensor parallelism" in found["tp-supported"].message
    assert found["tp-supported"].nearest == (1,)


def test_unknown_frameworks_get_near_names(cluster, workload, llama8b):
    with pytest.raises(UserError, match="unknown framework") as caught:
        question_of(llama8b, cluster, workload, framework="torchtitn").problems(Plan(dp_shard=8))

    assert "torchtitan" in caught.value.remedy


def test_the_nearest_degrees_divide_the_gpus():
    """Eleven stages for seven layers on 22 GPUs: of the degrees that leave no stage bare, 1 and 2 fill the GPUs."""
    model = replace(LLAMA8B, layers=7)
    found = rules(
        Plan(pp=11, dp_shard=2, schedule="1F1B"),
        framework="torchtitan",
        model=model,
        cluster=make_cluster(1, 22),
        workload=Workload(seq_len=8192, global_batch_size=44),
    )

    assert found["layers"].nearest == (2,)
    assert "nearest legal pp: 2" in found["layers"].message


def test_a_pipeline_too_long_to_be_followed_is_a_problem():
    deep = replace(LLAMA8B, layers=100_000)
    batch = Workload(seq_len=8192, global_batch_size=65536)
    long, followed = (
        rules(Plan(pp=pp), framework="torchtitan", model=deep, cluster=make_cluster(8192, 8), workload=batch)
        for pp in (65536, 256)
    )

    assert long["pipeline-length"].nearest == (256,)
    assert "pipeline-length" not in followed


@pytest.mark.parametrize("framework", ["torchtitan", "megatron-lm", "pytorch", "meshwright"])
def test_embedding_and_head_may_have_a_stage_of_their_own(framework):
    """Llama 3 405B has 126 layers for 128 stages: the first held the embedding alone, the last the head alone (Meta,
    arXiv 2407.21783, section 3.3.2). torchtitan's splitter and Megatron-LM's flags count both as layers.
    """
    model = load_model("llama3-405b")
    plans = {pp: Plan(pp=pp, tp=8, sequence_parallel=True, schedule="1F1B") for pp in (128, 129)}
    found = {
        pp: question_of(
            model, cluster("dgx-h100", gpus=8 * pp), Workload(seq_len=8192, global_batch_size=256), framework=framework
        ).problems(plan)
        for pp, plan in plans.items()
    }

    assert is_legal(found[128])
    assert not is_legal(found[129])
    layers = stage_layers(126, plans[128], runtime_spec(framework).pipeline)
    assert layers == (0, *[1] * 126, 0)


def test_megatron_counts_its_ends_only_where_layers_do_not_divide():
    """126 layers on 16 stages: 7 on the first and the last, 8 on the others, as Meta did; on 14 stages 9 each."""
    spec = runtime_spec("megatron-lm").pipeline

    assert stage_layers(126, Plan(pp=16), spec) == (7, *[8] * 14, 7)
    assert stage_layers(31, Plan(pp=4), spec) == (8, 8, 8, 7)
    assert stage_layers(126, Plan(pp=14), spec) == (9,) * 14


@pytest.mark.parametrize("framework", ["any", "torchtitan", "megatron-lm", "meshwright"])
def test_every_legal_pipeline_can_be_laid_out(framework):
    """Batches that divide into rounds and such that do not; the tables raise where a schedule has none."""
    laid_out = set()
    for gpus, batch in itertools.product((4, 8, 12), (6, 10, 12, 24)):
        asked = question_of(
            TINY, make_cluster(gpus // 4, 4), Workload(seq_len=288, global_batch_size=batch), framework=framework
        )
        columns = enumerate_nodes(asked, bounds=UNBOUNDED).columns
        columns = columns.take(columns.pp > 1)
        counts = columns.rounds(batch)
        for name, pp, m, v in zip(columns.schedule, columns.pp, counts, columns.virtual_stages, strict=True):
            laid_out.add((str(name), int(pp), int(m), int(v)))

    for name, pp, m, v in laid_out:
        table = build_schedule(name, ranks=pp, micro_batches=m, stages_per_rank=v)
        forwards = sum(leaf.kind is Kind.FORWARD for row in table.table for action in row for leaf in action.leaves)

        assert forwards == pp * m * v
    assert len(laid_out) > 20


@pytest.mark.parametrize(
    ("name", "changes", "legal"),
    [
        ("qwen3-8b", {}, False),  # observed: torch 2.11 stops at aten._unsafe_view
        ("qwen3-8b", {"recompute": "full"}, True),  # ran: examples/validation/fresh.md
        ("qwen3-8b", {"dp_shard": 2}, True),
        ("qwen3-8b", {"tp": 1, "dp_shard": 2}, True),
        ("llama3-8b", {}, True),
    ],
)
def test_what_a_release_of_torch_cannot_run_is_not_legal(name, changes, legal):
    plan = replace(Plan(tp=2, sequence_parallel=True, recompute="selective-op"), **changes)
    workload = Workload(seq_len=4096, global_batch_size=4)
    question = question_of(load_model(name), make_cluster(1, plan.gpus), workload, framework="torchtitan")
    said = [problem.message for problem in question.problems(plan) if problem.rule == "recompute-sharded-norm"]

    assert question.legal(plan) is legal
    assert bool(said) is not legal
    assert all("_unsafe_view" in message for message in said)


@pytest.mark.parametrize(("gpus", "legal"), [("8xV100", False), ("8xA100", True), ("8xH100", True), ("8xMI300X", True)])
def test_deepep_has_no_kernels_before_ampere(gpus, legal):
    """deepseek-ai/DeepEP README.md and setup.py; whether AMD's port is there is not known."""
    workload = Workload(seq_len=4096, global_batch_size=8)
    runtime = replace(default_runtime(FRAMEWORKS["megatron-lm"]), moe_dispatcher="deepep", compute_dtype="float16")
    question = question_of(
        load_model("mixtral-8x7b"), load_cluster(gpus), workload, framework="megatron-lm", runtime=runtime
    )

    said = [
        p.message for p in question.problems(Plan(dp_replicate=8, ep=8, zero_stage=1)) if p.rule == "expert-dispatcher"
    ]
    assert (not said) is legal
    assert all("compute capability 7.0" in message for message in said)
    assert not any(p.rule == "expert-dispatcher" for p in question.problems(Plan(dp_replicate=8, zero_stage=1)))
