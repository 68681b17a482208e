"""FSDP's exchanges by copy engines: where they are legal, chosen and written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.export.job import ExportJob
from planner.export.targets.registry import export, find_target
from planner.question.question import Question, question_of
from planner.search.finalists import EXCHANGE_MARGIN
from planner.search.plan_space.candidates import Bounds
from planner.search.search import SearchOptions, suggest
from simulator.calibration.calibration import Calibration, Contention
from simulator.config.adapter import Adapter
from simulator.config.plan import COPY_ENGINE, FSDP_EXCHANGES, NCCL, Plan
from simulator.config.workload import Workload
from tests.short_models import shortened
from topology.catalog.cluster_file import load_cluster
from topology.catalog.platform import take_gpus

# As measured on two H200 (examples/profiles/h200x2_fresh.json): a gather takes 47 of 132 SMs from kernels, a reduction
# 31.
CONTENTION = {
    "all_gather": Contention(compute=132 / (132 - 47)),
    "reduce_scatter": Contention(compute=132 / (132 - 31)),
}
FSDP = Plan(dp_shard=2, fsdp_exchange=COPY_ENGINE)


def asked(
    plan: Plan = FSDP,
    *,
    machine: str = "h200x4",
    framework: str = "meshwright",
    measured: bool = False,
    rounds: int = 1,
) -> Question:
    cluster = load_cluster(machine)
    cluster = take_gpus(cluster, plan.gpus) if plan.gpus <= cluster.gpu_count else load_cluster(machine, plan.gpus)
    return question_of(
        shortened("llama3-8b", 6),
        cluster,
        Workload(seq_len=2048, global_batch_size=plan.data_parallel * rounds),
        framework=framework,
        calibration=Calibration(gpu=cluster.slowest_kind, contention=CONTENTION) if measured else None,
    )


@pytest.mark.parametrize(
    ("changes", "where", "rule"),
    [
        ({}, {}, None),
        ({"dp_shard": 1, "cp": 2}, {}, None),
        ({}, {"framework": "torchtitan"}, "fsdp-exchange"),
        ({"dp_shard": 1}, {}, "fsdp-exchange-sharding"),
        ({"tp": 2, "sequence_parallel": True}, {}, "fsdp-exchange-degrees"),
        ({"dp_replicate": 2}, {}, "fsdp-exchange-degrees"),
        ({"pp": 2, "schedule": "1F1B"}, {"rounds": 2}, "fsdp-exchange-degrees"),
        ({"dp_shard": 16}, {"machine": "dgx-h100"}, "fsdp-exchange-peers"),
        ({}, {"machine": "l40s-x8"}, "fsdp-exchange-peers"),
    ],
)
def test_copies_need_fsdp_alone_between_peers(changes: dict, where: dict, rule: str | None) -> None:
    plan = FSDP.with_(**changes)
    question = asked(plan, **where)

    assert question.legal(plan.with_(fsdp_exchange=NCCL))
    assert [problem.rule for problem in question.problems(plan)] == ([] if rule is None else [rule])


def test_frozen_weights_were_not_tried() -> None:
    question = asked()
    question = replace(
        question, runtime=replace(question.runtime, adapter=Adapter(rank=8, target_modules=("all-linear",)))
    )

    assert [problem.rule for problem in question.problems(FSDP)] == ["fsdp-exchange-adapter"]


@pytest.mark.parametrize("measured", [True, False])
def test_a_search_exchanges_as_is_faster(measured: bool) -> None:
    """Measured contention of NCCL makes copies worth their memory; what datasheets say saves less than the margin."""
    question = asked(measured=measured)
    options = SearchOptions(bounds=Bounds().fixing(recompute=("none",), dp_shard=((2, 2),)), flips=False)
    best = suggest(question, options).plans[0].plan
    nccl, copies = (question.estimate([best.with_(fsdp_exchange=word)]).step_s[0] for word in FSDP_EXCHANGES)

    assert (best.fsdp_exchange == COPY_ENGINE) == measured
    assert (copies * (1 + EXCHANGE_MARGIN) < nccl) == measured


@pytest.mark.parametrize("word", FSDP_EXCHANGES)
def test_a_stated_exchange_is_kept(word: str) -> None:
    bounds = Bounds().fixing(fsdp_exchange=(word,), recompute=("none",))
    found = suggest(
        asked(measured=word == NCCL), SearchOptions(bounds=bounds, simulate=False, flips=False, reasons=False)
    )

    assert {one.plan.fsdp_exchange for one in found.plans} == {word}


def test_other_frameworks_are_written_with_nccl_and_a_note() -> None:
    job = ExportJob(name="copies", plan=FSDP, question=asked())
    note = "FSDP's exchanges by copy_engine: torchtitan exchanges by NCCL"
    other, own = (export(job, find_target(name)) for name in ("torchtitan", "torchrun"))

    assert any(line.startswith(note[:35]) for line in other.not_expressed)
    assert not any("exchanges" in line for line in own.not_expressed)
    assert f'"fsdp_exchange":"{COPY_ENGINE}"' in own.text
    assert COPY_ENGINE not in other.text.replace(note, "")
