"""What no machine can do, no prediction may say: more bytes in less time, a slower step on faster links, and their
like.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.question.prediction import predict
from planner.question.question import question_of
from planner.search.infeasible import ConstrainedQuestion, least_memory_plan
from planner.search.plan_space.candidates import Bounds
from simulator.bounds.screening import Screening
from simulator.calibration.calibration import Calibration, Contention
from simulator.collectives.cost import CollectiveModel
from simulator.config.estimate import Estimate
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from tests.examples import examples
from tests.fuzz.formats import wrong_numbers
from topology import codec
from topology.catalog.clusters import PROBED, catalog_names, cluster
from topology.rates.groups import GroupShape
from topology.rates.reach import reach
from topology.rates.scaling import scale_memory, scale_network, scale_nvlink

# Sends and receives, of which all-to-alls are made, have a measured staircase: NCCL gives a message more channels in
# steps.
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
MACHINES = tuple(name for name in catalog_names() if reach(cluster(name)).gpus > 1)
SIZES = np.unique(np.round(2 ** np.linspace(6, 33, 400)))
PLANS = (
    Plan(dp_shard=16),
    Plan(dp_shard=8, tp=2, sequence_parallel=True),
    Plan(dp_replicate=2, dp_shard=4, pp=2, schedule="1F1B"),
    Plan(dp_shard=4, cp=4),
    Plan(tp=8, pp=2, schedule="1F1B", sequence_parallel=True),
)


@cache
def model_of(name: str, gpus: int) -> CollectiveModel:
    return CollectiveModel(cluster(name, gpus))


@examples(120)
@given(st.sampled_from(MACHINES), st.sampled_from(OPS), st.integers(2, 32), st.integers(1, 3))
def test_more_bytes_never_take_less_time(name: str, op: str, ranks: int, nodes: int) -> None:
    whole = cluster(name).gpus_per_node
    several = nodes > 1 and name not in PROBED and reach(cluster(name, nodes * whole)).gpus == nodes * whole
    shape = (
        GroupShape(ranks=nodes * whole, ranks_per_node=whole)
        if several
        else GroupShape(ranks=min(ranks, whole), ranks_per_node=min(ranks, whole))
    )

    seconds = model_of(name, shape.ranks).time_s(op, SIZES, shape)

    assert np.isfinite(seconds).all()
    assert (seconds > 0).all()
    worst = int(np.argmin(np.diff(seconds) / seconds[:-1]))
    assert seconds[worst + 1] >= seconds[worst] * (1 - 1e-9), (SIZES[worst : worst + 2], seconds[worst : worst + 2])


def test_a_rack_gathers_more_in_no_less_time() -> None:
    """NCCL's choices between 8 and 32 MiB on 16 of 72 GPUs rest on curves that do not meet."""
    shape = GroupShape(ranks=16, ranks_per_node=16)

    small, large = model_of("gb200-nvl72", 16).time_s("all_gather", [16 << 20, 32 << 20], shape)

    assert small <= large


def question(machine, *, batch: int = 64, calibration: Calibration | None = None):
    workload = Workload(seq_len=4096, global_batch_size=batch)
    return question_of(load_model("llama3-8b"), machine, workload, gpus=machine.gpu_count, calibration=calibration)


@examples(6)
@given(
    st.sampled_from(("dgx-h100", "dgx-a100", "l40s-x8", "dgx-b200")),
    st.sampled_from((scale_network, scale_nvlink)),
    st.floats(1.0, 1.1),
    st.floats(1.0, 16.0),
)
def test_more_bandwidth_never_slows_a_step(name, scale, first, second) -> None:
    """But for SMs and memory that NCCL takes: for quicker links it opens more channels, and with them larger buffers.
    That kernels last longer then also hides more, to less than a thousandth of a step.
    """
    machine = cluster(name, 16)
    alone = Calibration(gpu=machine.slowest_kind, contention={"all_reduce": Contention()})
    slower = []
    for calibration in (None, alone):
        asked = (question(scale(machine, factor), calibration=calibration) for factor in (first, first * second))
        before, after = (one.estimate(PLANS) for one in asked)
        slow, fast = (table.step_s - table.breakdown_s["allocator"] for table in (before, after))
        slower.append(fast > slow * 1.001)

    assert not np.all(slower, axis=0).any(), slower


def reported(asked, plan) -> list[Estimate]:
    """Return a plan's step by the account, and as it is shown: simulated, its memory replayed."""
    return [asked.estimate([plan]).estimate(0), predict(asked, plan).estimate]


@examples(4)
@given(
    st.sampled_from(("dgx-h100", "dgx-a100", "l40s-x8", "dgx-b200")),
    st.sampled_from(PLANS),
    st.floats(0.3, 1.1),
    st.floats(1.05, 16.0),
)
def test_more_network_or_memory_is_never_worse_nor_a_larger_batch_quicker(name, plan, first, more) -> None:
    machine, model = cluster(name, 16), replace(load_model("llama3-8b"), layers=4)

    def ask(on, batch: int = 32) -> list[Estimate]:
        workload = Workload(seq_len=2048, global_batch_size=batch)
        return reported(question_of(model, on, workload, gpus=16), plan)

    usual = ask(machine)
    slow, fast = (ask(scale_network(machine, factor)) for factor in (first, first * more))
    small, large = (ask(scale_memory(machine, factor)) for factor in (first, first * more))
    twice = ask(machine, 64)

    for answers in (usual, slow, fast, small, large, twice):
        assert [wrong for one in answers for wrong in wrong_numbers(codec.to_builtins(one))] == []
    for quick, slower in (*zip(fast, slow, strict=True), *zip(usual, twice, strict=True)):
        assert quick.step_s.value <= slower.step_s.value * (1 + 1e-9)
    for tight, roomy in zip(small, large, strict=True):
        assert roomy.memory.fits or not tight.memory.fits
        assert roomy.memory.fit_probability >= tight.memory.fit_probability - 1e-9


@pytest.mark.parametrize("name", ["dgx-h100", "l40s-x8"])
def test_more_gpus_never_raise_the_least_memory(name) -> None:
    least = []
    for gpus in (8, 16, 32):
        asked = question(cluster(name, gpus))
        constrained = ConstrainedQuestion(question=asked, bounds=Bounds())
        least.append(least_memory_plan(Screening(asked), constrained.nodes(), constrained.recomputes)[1].reserved_bytes)

    assert least == sorted(least, reverse=True)


@examples(40)
@given(
    st.sampled_from(MACHINES),
    st.sampled_from(("llama3-8b", "qwen3-30b-a3b", "deepseek-v3", "tiny-llama")),
    st.integers(9, 20),
)
def test_every_number_of_an_estimate_is_sound(name, model, length) -> None:
    machine = cluster(name)
    count = reach(machine).gpus
    workload = Workload(seq_len=1 << length, global_batch_size=count)
    asked = question_of(load_model(model), machine, workload, gpus=count)

    found = asked.estimate(
        [Plan(dp_shard=count), Plan(tp=2, dp_shard=count // 2)] if count % 2 == 0 else [Plan(dp_shard=count)]
    )

    for index in range(len(found.plans)):
        estimate = codec.to_builtins(found.estimate(index))
        assert list(wrong_numbers(estimate)) == []
        assert sum(estimate["breakdown_s"].values()) == pytest.approx(estimate["step_s"]["value"], rel=1e-6)
