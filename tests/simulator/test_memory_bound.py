"""What searches prune by lies below what they judge by: every rank of plans drawn from every runtime and schedule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from planner.question.question import Question, question_of
from simulator.analytical.estimates import estimate_plans
from simulator.bounds.screening import Screening
from simulator.columns.plan_columns import plan_columns
from simulator.config.hf_config import load_model
from simulator.config.plan import COPY_ENGINE, Plan
from simulator.config.workload import Workload
from simulator.legality.frameworks import FRAMEWORKS
from simulator.memory.plan_memory import PlanMemory
from simulator.memory.replay import MemoryReplay
from simulator.pipeline.schedules.registry import SCHEDULES
from simulator.runtimes.stated import resolve
from tests.examples import examples
from topology.catalog.clusters import cluster

RUNTIMES = ("torchtitan", "megatron-lm", "megatron-deepspeed", "pytorch", "deepspeed", "llm-foundry", "meshwright")
MODELS = ("llama3.2-1b", "llama3-8b", "gemma2-9b", "qwen3-30b-a3b", "deepseek-v2-lite", "mixtral-8x7b")


@st.composite
def plans(draw, runtime: str):
    """Draw a legal plan of a model cut to a few layers, and its question; None where what was drawn is not legal."""
    model = load_model(draw(st.sampled_from(MODELS)))
    model = replace(model, layers=draw(st.integers(2, 17)), name="")
    degree = st.sampled_from((1, 1, 2, 4))
    schedule = draw(st.sampled_from(("", *SCHEDULES)))
    pp = draw(st.sampled_from((2, 4))) if schedule else 1
    kind = SCHEDULES.get(schedule)
    stages = draw(st.integers(kind.least_stages, kind.most_stages or 3)) if kind else 1
    framework = FRAMEWORKS["any" if runtime == "meshwright" else runtime]
    zero = draw(st.sampled_from((0, 1, 2, 3))) if framework.zero_stages else None
    plan = Plan(
        pp=pp,
        virtual_stages=stages,
        schedule=schedule or None,
        tp=draw(degree),
        cp=draw(degree),
        dp_shard=1 if zero is not None else draw(degree),
        dp_replicate=draw(degree),
        zero_stage=zero,
        ep=draw(degree) if model.moe else 1,
        micro_batch_size=draw(st.sampled_from((1, 2))),
        recompute=draw(st.sampled_from(framework.recomputes)),
        reshard_after_forward=draw(st.sampled_from((None, True, False))) if zero is None else None,
    )
    plan = replace(plan, sequence_parallel=plan.tp > 1 and draw(st.booleans()))
    if runtime == "meshwright" and pp == 1 and plan.dp_shard * plan.cp > 1 and draw(st.booleans()):
        plan = replace(plan, fsdp_exchange=COPY_ENGINE, tp=1, ep=1, dp_replicate=1, sequence_parallel=False)
    stated = resolve({"name": runtime, "param_dtype": draw(st.sampled_from(("bfloat16", "float32")))})[0]
    question = question_of(
        model,
        cluster("dgx-h100", gpus=max(8, plan.gpus)),
        Workload(
            seq_len=draw(st.sampled_from((1024, 4096))),
            global_batch_size=plan.data_parallel
            * plan.micro_batch_size
            * draw(st.sampled_from((1, 2, pp, pp + 1, 2 * pp, 2 * pp * stages, 12))),
        ),
        runtime=replace(stated, compile=draw(st.booleans())),
        framework=framework.name,
        gpus=plan.gpus,
    )
    return (question, plan) if question.legal(plan) else None


@pytest.mark.parametrize("runtime", RUNTIMES)
@examples(30)
@given(st.data())
def test_the_bound_lies_below_what_the_allocator_holds(runtime: str, data) -> None:
    drawn = data.draw(plans(runtime))
    if drawn is not None:
        event(drawn[1].schedule or "no pipeline")
        _check(*drawn)


@pytest.mark.parametrize(
    ("runtime", "model", "layers", "plan", "batch"),
    [
        # Gathered weights are given up as the last of two micro batches goes back alongside gradients.
        ("pytorch", "qwen3-30b-a3b", 2, Plan(dp_shard=2, reshard_after_forward=False), 4),
        # Weights gathered for the first backward pass serve the second, for which nothing is gathered.
        (
            "pytorch",
            "mixtral-8x7b",
            2,
            Plan(pp=2, dp_shard=2, schedule="1F1B", recompute="full", reshard_after_forward=True),
            4,
        ),
        # Of two stages one has no layer, and a mode wraps every other.
        (
            "torchtitan",
            "qwen3-30b-a3b",
            2,
            Plan(pp=2, virtual_stages=2, schedule="Interleaved1F1B", recompute="selective"),
            2,
        ),
        # Segments do not grow, and the optimizer's state is there before the first step.
        (
            "megatron-deepspeed@2022-02",
            "llama3-8b",
            8,
            Plan(dp_replicate=2, zero_stage=1, tp=2, pp=2, schedule="1F1B", recompute="full"),
            8,
        ),
        # The only layer with experts is its stage's last and stays gathered, so that no later pass copies it.
        ("pytorch", "deepseek-v2-lite", 3, Plan(dp_shard=2, pp=2, schedule="1F1B", reshard_after_forward=True), 6),
        # Of a long step another moment is the fullest than of the shorter ones that are replayed.
        (
            "meshwright",
            "gemma2-9b",
            12,
            Plan(pp=4, cp=2, virtual_stages=3, schedule="LoopedBFS", micro_batch_size=2, zero_stage=0),
            48,
        ),
    ],
)
def test_the_bound_lies_below_in_plans_that_were_drawn_once(
    runtime: str, model: str, layers: int, plan: Plan, batch: int
) -> None:
    name, _, version = runtime.partition("@")
    question = question_of(
        replace(load_model(model), layers=layers, name=""),
        cluster("dgx-h100", gpus=8),
        Workload(seq_len=1024, global_batch_size=batch),
        runtime=resolve({"name": name, "version": version, "param_dtype": "bfloat16"})[0],
        framework="any" if name == "meshwright" else name,
        gpus=plan.gpus,
    )
    _check(question, plan)


def _check(question: Question, plan: Plan) -> None:
    columns, held = estimate_plans(question, [plan]).memory, PlanMemory(question, plan)

    for rank, found in enumerate(held.ranks):
        assert columns.peak_bytes[0, rank] <= found.allocated_bytes
        assert columns.reserved_bytes[0, rank] <= found.reserved_bytes
    replay = MemoryReplay(question, plan)
    for rank in {0, plan.pp - 1}:  # what is replayed of a rank shows what every step and event does
        found = replay.rank(rank)
        assert found == replay.rank(rank, every_event=True)
        assert replay.rank_within(rank, found.reserved_bytes) == found
        assert replay.rank_within(rank, found.reserved_bytes - 1) is None

    by_one_rank = PlanMemory(question, plan)
    by_one_rank.left_bytes = held.left_bytes = held.reserved_bytes  # a flush is neither sure nor unlikely
    assert 0 < by_one_rank.least_flush_s <= held.flush_s

    screening, row = Screening(question), np.zeros(1, dtype=np.intp)
    screened = plan_columns([plan])
    shared = screening.blocks(screened, question.framework.recomputes)
    bound = screening.plans(screened, shared, row).allocated_and_reserved_bytes()[0]
    for mode in question.framework.recomputes:
        alone = screening.plans(replace(screened, recompute=np.array([mode])), shared, row)
        assert np.array_equal(screening.plans(screened, shared, row).under(mode), alone.allocated_and_reserved_bytes())
    lean = shared.keeping_least(screening.operators.spec.recompute)
    leanest = screening.plans(replace(screened, recompute=np.array(["none"])), lean, row)
    assert bound[0] <= max(rank.allocated_bytes for rank in held.ranks)
    assert bound[1] <= held.reserved_bytes
    assert np.all(leanest.allocated_and_reserved_bytes()[0] <= bound)
