"""The enumeration against brute force: every legal plan, none twice, and an account that adds up."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from planner.question.question import question_of
from planner.search.plan_space.candidates import Bounds, enumerate_nodes, with_stated
from simulator.columns.plan_columns import plan_columns
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.legality.frameworks import framework_named
from simulator.legality.rules import is_legal
from simulator.pipeline.schedules.registry import SCHEDULES
from simulator.runtimes.stated import resolve
from tests.planner.conftest import LLAMA8B, MIXTRAL, TINY, make_cluster
from tests.planner.every_plan import UNBOUNDED, enumerate_candidates, grids
from tests.planner.test_legality import reference
from topology.errors import UserError

# Alongside the method of the runtime that runs the framework's plans.
OTHER_METHODS = {"torchtitan": ("ring",), "megatron-lm": ("all_gather", "all_to_all"), "deepspeed": ()}
RUNTIMES = {name: resolve({"name": name})[0] for name in ("torchtitan", "megatron-lm", "pytorch")}


def brute_force(model, workload, gpus, name):
    """Return every legal plan by trying all of them, judged by the reference of test_legality."""
    framework = framework_named(name)
    experts = range(1, (model.moe.experts if model.moe else 1) + 1)
    found = set()
    for tp, cp, pp, dr, ds in grids(gpus):
        if framework.zero_stages:
            if ds > 1:
                continue
            zeros = [z for z in framework.searched_zero_stages or framework.zero_stages if z == 0 or dr > 1]
        else:
            zeros = [None]
        orders = (
            [(None, 1)]
            if pp == 1
            else [
                (name, v)
                for name in framework.schedules
                for v in range(SCHEDULES[name].least_stages, (SCHEDULES[name].most_stages or model.layers) + 1)
            ]
        )
        sequence = (False, True) if tp > 1 and framework.sequence_parallel else (False,)
        splits = {1, tp} if model.moe and tp > 1 and framework.splits_experts else {None}
        for zero, ep, etp, (schedule, v), sp in itertools.product(zeros, experts, splits, orders, sequence):
            for b in range(1, workload.global_batch_size + 1):
                plan = Plan(
                    dp_replicate=dr,
                    dp_shard=ds,
                    zero_stage=zero,
                    tp=tp,
                    sequence_parallel=sp,
                    cp=cp,
                    pp=pp,
                    ep=ep,
                    etp=etp,
                    virtual_stages=v,
                    schedule=schedule,
                    micro_batch_size=b,
                )
                if not reference(plan, model, workload, gpus, name):
                    continue
                reshards = (True, False) if zero is None and ds * cp > 1 else (None,)
                overlaps = (
                    "none",
                    *(framework.overlaps if tp > 1 and sp and not framework.overlap_needs_compile else ()),
                )
                methods = (None, *(OTHER_METHODS[name] if cp > 1 else ()))
                # torch runs a recomputed block again for each weight of a second half (test_split_backward_memory.py).
                halves = name == "torchtitan" and plan.schedule is not None and SCHEDULES[plan.schedule].splits_backward
                for recompute, reshard, overlap, method in itertools.product(
                    ("none",) if halves else framework.recomputes, reshards, overlaps, methods
                ):
                    copies = name == "deepspeed" and tp * cp % model.kv_heads == 0  # ulysses_sp.py repeats keys
                    ulysses = model.heads % (tp * cp) == 0 and (model.kv_heads % (tp * cp) == 0 or copies)
                    by_heads = method == "all_to_all" or (name == "deepspeed" and cp > 1)  # which has no other
                    if by_heads and not ulysses:
                        continue
                    policies = {"recompute": recompute, "reshard_after_forward": reshard, "tp_overlap": overlap}
                    found.add(replace(plan, **policies, cp_method=method))
    return found


@pytest.mark.parametrize("name", ["torchtitan", "megatron-lm", "deepspeed"])
@pytest.mark.parametrize("gpus", [1, 2, 6, 8, 12, 16])
def test_the_enumeration_is_complete_and_has_no_doubles(name, gpus):
    """For small clusters, the legal plans are exactly those that brute force finds."""
    model = replace(TINY, heads=12, kv_heads=6, ffn=1536, layers=6)
    workload = Workload(seq_len=192, global_batch_size=12)
    cluster = make_cluster(1, gpus)
    found = enumerate_candidates(
        question_of(model, cluster, workload, framework=name, runtime=RUNTIMES.get(name)), bounds=UNBOUNDED
    )
    plans = found.plans()

    assert len(plans) == len(set(plans))
    assert set(plans) == brute_force(model, workload, gpus, name)


@pytest.mark.parametrize("name", ["torchtitan", "megatron-lm"])
def test_expert_parallel_plans_are_complete(name):
    model = replace(MIXTRAL, layers=4, moe=replace(MIXTRAL.moe, experts=6))
    workload = Workload(seq_len=64, global_batch_size=4)
    found = enumerate_candidates(
        question_of(model, make_cluster(1, 12), workload, framework=name, runtime=RUNTIMES[name]), bounds=UNBOUNDED
    )

    assert set(found.plans()) == brute_force(model, workload, 12, name)


def test_every_candidate_passes_the_check(llama8b):
    """What the enumeration lets through, `check` lets through: they are the same rules."""
    cluster, workload = make_cluster(2, 8), Workload(seq_len=8192, global_batch_size=64)
    found = enumerate_candidates(question_of(llama8b, cluster, workload, framework="torchtitan"))
    for row in np.linspace(0, len(found) - 1, 300, dtype=int):
        assert is_legal(
            question_of(llama8b, cluster, workload, framework="torchtitan").problems(found.columns.plan(int(row)))
        )


def test_the_account_adds_up_and_bounds_are_named(llama8b):
    cluster, workload = make_cluster(2, 8), Workload(seq_len=8192, global_batch_size=64)
    found = enumerate_candidates(
        question_of(llama8b, cluster, workload, framework="megatron-lm"), bounds=Bounds(max_tp=2, max_micro_batch=2)
    )

    assert found.total == len(found) + sum(found.rejected.values()) + sum(found.pruned.values())
    assert {"tensor parallelism over 2", "micro batch over 2"} <= set(found.pruned)
    assert found.columns.tp.max() == 2
    assert found.columns.micro_batch_size.max() == 2


def test_bounds_only_prune(llama8b):
    """A bounded search is a part of the unbounded one."""
    cluster, workload = make_cluster(1, 8), Workload(seq_len=8192, global_batch_size=16)
    everything = set(
        enumerate_candidates(question_of(llama8b, cluster, workload, framework="torchtitan"), bounds=UNBOUNDED).plans()
    )
    some = set(
        enumerate_candidates(
            question_of(llama8b, cluster, workload, framework="torchtitan"), bounds=Bounds(max_virtual_stages=2)
        ).plans()
    )

    assert some < everything


def test_a_very_large_cluster_stays_enumerable():
    """16,384 GPUs: only divisors are tried, and rules cut before micro batches and policies multiply."""
    model = replace(LLAMA8B, name="405b", layers=126, heads=128, hidden=16384, ffn=53248)
    found = enumerate_nodes(
        question_of(
            model, make_cluster(2048, 8), Workload(seq_len=8192, global_batch_size=2048), framework="torchtitan"
        )
    )

    assert 10_000 < len(found) < 100_000
    assert found.leaf_counts.sum() > 300_000
    assert set(np.unique(found.columns.gpus)) == {16384}


def test_the_order_is_the_same_every_time(llama8b):
    cluster, workload = make_cluster(1, 8), Workload(seq_len=8192, global_batch_size=16)
    first, second = (
        enumerate_candidates(question_of(llama8b, cluster, workload, framework="torchtitan")) for _ in range(2)
    )

    assert first.plans() == second.plans()
    assert list(first.rejected) == list(second.rejected)


def test_a_field_that_no_search_varies_has_each_of_its_stated_numbers() -> None:
    plans = plan_columns([Plan(), Plan(tp=2)])

    found = with_stated(plans, Bounds(stated={"zero_stage": ((0, 1), (3, 3))}))

    assert found.zero_stage.tolist() == [0, 1, 3] * 2
    assert found.tp.tolist() == [1] * 3 + [2] * 3
    with pytest.raises(UserError, match="has more than 64 values"):
        with_stated(plans, Bounds(stated={"zero_stage": ((1, 100),)}))


def test_layers_that_no_stages_divide_are_spread_by_a_layout_and_others_are_not() -> None:
    """61 layers on 16 ranks need a layout whatever the stages of a rank; 64 divide, so no layout is tried of them."""
    asked = [
        question_of(
            replace(LLAMA8B, layers=layers),
            make_cluster(nodes=2),
            Workload(seq_len=4096, global_batch_size=64),
            framework="megatron-lm",
        )
        for layers in (61, 64)
    ]
    stages = [
        {(int(a), int(b)) for a, b in zip(found.columns.pp, found.columns.virtual_stages, strict=True)}
        for found in map(enumerate_nodes, asked)
    ]

    assert {(16, 1), (16, 2), (8, 4), (2, 1)} <= stages[0]
    assert all(64 % (pp * each) == 0 for pp, each in stages[1])
