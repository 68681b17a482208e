"""The planner lists for the executor's runtime what the executor accepts, and nothing else."""

import itertools
import random
from dataclasses import replace

import pytest

from executor.launch import legal
from planner.question.question import question_of
from simulator.config.hf_config import load_model
from simulator.config.model import LatentAttention, MixtureOfExperts, Model
from simulator.config.overlap_sites import executor_name
from simulator.config.plan import COPY_ENGINE, NCCL, Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.legality.frameworks import MESHWRIGHT
from simulator.legality.rule import Grade
from simulator.legality.rules import is_legal
from simulator.pipeline.schedules.registry import SCHEDULES, schedule_of_plan
from simulator.runtimes.library import runtime_spec
from tests.planner.conftest import make_cluster
from tests.planner.every_plan import UNBOUNDED, enumerate_candidates, grids
from topology.errors import PlannerError

SIZES = {"family": "llama", "hidden": 64, "heads": 8, "kv_heads": 4, "head_dim": 8, "ffn": 96, "vocab": 100}
EXPERTS = MixtureOfExperts(experts=8, experts_per_token=2, ffn=52, dense_layers=1)
LATENT = LatentAttention(q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
MODELS = {
    "dense": Model(name="dense", layers=8, **SIZES),
    "moe": Model(name="moe", layers=8, moe=EXPERTS, **SIZES),
    "latent": Model(name="latent", layers=8, moe=EXPERTS, latent=LATENT, **{**SIZES, "kv_heads": 8}),
    "tied": Model(name="tied", layers=8, tied_embeddings=True, **SIZES),
    "window": Model(name="window", layers=6, sliding_window=32, sliding_layers=3, **SIZES),
    "odd": Model(name="odd", layers=5, **{**SIZES, "ffn": 97, "vocab": 101}),
}
EIGHT = [
    axes for axes in itertools.product((1, 2, 4, 8), repeat=5) if axes[0] * axes[1] * axes[2] * axes[3] * axes[4] == 8
]


def drawn(rng: random.Random, model: Model) -> tuple[Plan, Workload, Runtime]:
    """Return a plan for 8 GPUs, most of whose choices fit together: what is refused is refused for few reasons."""
    pp, tp, cp, dp_shard, dp_replicate = rng.choice(EIGHT)
    schedule = rng.choice([None, *SCHEDULES]) if pp > 1 else rng.choice([None, "1F1B"])
    kind = SCHEDULES.get(schedule or "")
    virtual = rng.choice([1, 1, 2, 4]) if kind is None else max(kind.least_stages, rng.choice([1, 1, 2, 4]))
    plan = Plan(
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        tp=tp,
        cp=cp,
        pp=pp,
        ep=rng.choice([1, 1, 2, 4, 8]) if model.moe else 1,
        virtual_stages=virtual if pp > 1 or rng.random() < 0.1 else 1,
        schedule=schedule,
        micro_batch_size=rng.choice([1, 1, 2, 4]),
        sequence_parallel=rng.random() < 0.8,
        recompute=rng.choice(["none", "selective", "selective-op", "full", "block"]),
        tp_overlap=rng.choice(
            ["none", "none", "chunked", "fused", "async", "mlp_in=copy_engine", "attention_out=chunked", "mlp=no"]
        ),
        cp_method=rng.choice([None, "ring", "all_gather", "all_to_all", "by hand"]) if cp > 1 else None,
        zero_stage=rng.choice([None, None, None, None, 0, 1, 3]),
        capacity_factor=rng.choice([None, None, None, 1.25]),
        fsdp_exchange=rng.choice([NCCL, NCCL, COPY_ENGINE]),
    )
    workload = Workload(seq_len=rng.choice([64, 64, 96, 36]), global_batch_size=rng.choice([8, 16, 32]))
    runtime = Runtime(
        name="meshwright",
        compile=rng.random() < 0.3,
        compute_dtype=rng.choice(["bfloat16", "bfloat16", "float32", "float8"]),
    )
    return plan, workload, runtime


def accepted(plan: Plan, model: Model, workload: Workload, runtime: Runtime) -> bool:
    try:
        legal.check(plan, model, workload, runtime)
    except PlannerError:
        return False
    return True


@pytest.mark.parametrize("name", MODELS)
def test_planner_and_executor_say_the_same_of_every_plan(name: str) -> None:
    rng, model, cluster = random.Random(name), MODELS[name], make_cluster(1, 8)
    both = 0
    for _ in range(600):
        plan, workload, runtime = drawn(rng, model)
        problems = question_of(model, cluster, workload, framework=MESHWRIGHT, runtime=runtime).problems(plan)
        runs = accepted(plan, model, workload, runtime)

        assert is_legal(problems) == runs, (plan, problems)
        both += runs
        if runs and plan.pp > 1:
            layers_lie_on_stages_once(plan, model, workload)
    assert both > 5  # else the draw says nothing


def layers_lie_on_stages_once(plan: Plan, model: Model, workload: Workload) -> None:
    """What was accepted can be laid out: a table for the schedule, and stages that hold every layer once."""
    table = schedule_of_plan(plan, plan.micro_batches(workload.global_batch_size))
    parts = [p for rank in range(plan.pp) for p in legal.split(model, plan, table, rank, runtime="meshwright")]

    assert sorted(layer for part in parts for layer in part.layers) == list(range(model.layers))


ALL = UNBOUNDED.fixing(recompute=("none", "selective"))


def candidates(model: Model, gpus: int, batch: int) -> list[Plan]:
    """Return every plan for so many GPUs that a search could list, legal or not."""
    found = {}
    for tp, cp, pp, dr, ds in grids(gpus):
        orders = [(name, v) for name in SCHEDULES for v in range(1, model.layers + 3)] if pp > 1 else [(None, 1)]
        for ep, b, sp, (schedule, v) in itertools.product(
            (1, 2, 4, 8) if model.moe else (1,), range(1, batch + 1), {False, tp > 1}, orders
        ):
            plan = Plan(
                dp_replicate=dr, dp_shard=ds, tp=tp, cp=cp, pp=pp, ep=ep, virtual_stages=v, schedule=schedule,
                micro_batch_size=b, sequence_parallel=sp,
            )  # fmt: skip
            for recompute, overlap, method, reshard in itertools.product(
                ALL.words("recompute") or (),
                ("none", *MESHWRIGHT.overlaps) if tp > 1 and sp else ("none",),
                (None, "ring", "all_to_all") if cp > 1 else (None,),
                (True, False) if ds * cp > 1 else (None,),
            ):
                policies = {"recompute": recompute, "tp_overlap": overlap, "reshard_after_forward": reshard}
                found[replace(plan, **policies, cp_method=method)] = None
    return list(found)


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        ("dense", True),
        pytest.param("moe", False, marks=pytest.mark.nightly),
        pytest.param("latent", False, marks=pytest.mark.nightly),
        ("odd", False),
    ],
)
def test_a_search_lists_what_the_executor_accepts(name: str, compiled: bool) -> None:
    model = replace(MODELS[name], layers=3)
    workload, runtime = Workload(seq_len=64, global_batch_size=2), Runtime(name="meshwright", compile=compiled)
    listed = enumerate_candidates(
        question_of(model, make_cluster(1, 4), workload, framework=MESHWRIGHT, runtime=runtime), bounds=ALL
    ).plans()

    assert runtime_spec("meshwright").context_parallel == "all_gather"  # the method that is listed as None
    assert len(set(listed)) == len(listed) > 100
    assert all(accepted(plan, model, workload, runtime) for plan in listed)
    known, rng = set(listed), random.Random(1)
    others = [plan for plan in candidates(model, 4, 2) if plan not in known]
    # Of what is not listed a third is asked: a rule that refuses too much, or lets too much pass, does so for many.
    assert not [p for p in rng.sample(others, len(others) // 3) if accepted(p, model, workload, runtime)]


@pytest.mark.parametrize(
    ("plan", "model", "words"),
    [
        (Plan(tp=4, ep=2, sequence_parallel=True, dp_shard=2), "moe", "ep 2 is not divisible by tp 4"),
        (Plan(tp=2, ep=2, dp_shard=4), "moe", "set sequence_parallel, or ep 1"),
        (Plan(cp=8, cp_method="ring"), "latent", "cp_method all_to_all can"),
        (Plan(cp=8, cp_method="ring"), "window", "cp_method all_to_all can"),
        (Plan(pp=2, dp_shard=4), "tied", "nearest legal pp: 1"),
        (Plan(pp=8, micro_batch_size=8), "dense", "needs at least one for each stage"),
        (Plan(dp_shard=8, zero_stage=3), "dense", "say dp_shard alone"),
        (Plan(tp=2, dp_shard=4, sequence_parallel=True, tp_overlap="mlp_out=fused"), "odd", "none, chunked can"),
        (Plan(pp=4, dp_shard=2, layers_per_stage=(4, 0, 2, 2)), "dense", "leaves pipeline rank 1 nothing"),
    ],
)
def test_a_refusal_says_what_would_do(plan: Plan, model: str, words: str) -> None:
    workload, runtime = Workload(seq_len=64, global_batch_size=32), Runtime(name="meshwright")
    found = question_of(MODELS[model], make_cluster(1, 8), workload, framework=MESHWRIGHT, runtime=runtime).problems(
        plan
    )

    assert any(words in problem.message for problem in found if problem.grade is Grade.ILLEGAL), found


def test_networks_that_the_executor_cannot_build_are_listed_by_nobody() -> None:
    for name in ("gpt2", "gemma2-9b", "gpt-neox-20b"):
        model, workload = load_model(name), Workload(seq_len=64, global_batch_size=8)
        problems = question_of(
            model, make_cluster(1, 1), workload, framework=MESHWRIGHT, runtime=Runtime(name="meshwright")
        ).problems(Plan())

        assert not is_legal(problems)
        assert not accepted(Plan(), model, workload, Runtime(name="meshwright"))


def test_what_the_framework_lists_is_what_the_executor_has() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from executor.overlap import MODES
    from executor.parallel.parallelize import DTYPES

    # Tensors of products that round to TF32 are float32.
    assert tuple(DTYPES) == tuple(dtype for dtype in MESHWRIGHT.dtypes if dtype != "tf32")
    assert {executor_name(mode) for mode in MESHWRIGHT.overlaps} <= set(MODES)
