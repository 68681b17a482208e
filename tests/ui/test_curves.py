"""What if: the same numbers as the command line, and a machine that is changed in the direction that is said."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.conftest import metrics, said

from planner.question.flags import Flags  # isort: skip
from planner.question.goal import Goal
from planner.search.whole_run import runs_of_counts

from planner.search.answer import answer  # isort: skip
from topology.rates.scaling import scale_flops, scale_network, scale_nvlink  # isort: skip
from planner.search.flips import OCTAVES  # isort: skip
from planner.search.plan_space.candidates import Bounds  # isort: skip
from planner.search.search import SearchOptions  # isort: skip
from ui import other_machines  # isort: skip
from ui.background import work  # isort: skip
from ui.question.state import Inputs  # isort: skip


@pytest.fixture(scope="module")
def result():
    flags = Flags(model="llama3.2-1b", cluster="dgx-h100", gpus=(16,), global_batch=64)
    return answer(flags, "torchtitan", SearchOptions())


def steps(rows, name="after_s"):
    return [row[name] for row in rows]


def test_a_machine_that_is_not_changed_has_the_listed_steps(result):
    rows = other_machines.changed_machine(Inputs(), result, {"network": 1.0, "FLOP/s": 1.0})

    assert steps(rows) == pytest.approx(steps(rows, "before_s"))
    assert steps(rows) == pytest.approx([ranked.estimate.step_s.value for ranked in result.plans])


@pytest.mark.parametrize(
    ("name", "scale"), [("network", scale_network), ("NVLink", scale_nvlink), ("FLOP/s", scale_flops)]
)
def test_a_slower_machine_is_not_faster(result, name, scale):
    """But for SMs and buffers that NCCL takes, of which it takes more for quicker links; where these make a step
    longer, its host waits less.
    """
    plans, machine, factors = [ranked.plan for ranked in result.plans], result.question.cluster, (0.25, 1.0, 4.0)
    tables = [replace(result.question, cluster=scale(machine, factor)).estimate(plans) for factor in factors]
    whole = [table.step_s for table in tables]
    bare = [table.step_s - table.breakdown_s["contention"] - table.breakdown_s["allocator"] for table in tables]
    slow, fast = (steps(other_machines.changed_machine(Inputs(), result, {name: factor})) for factor in (0.25, 4.0))

    for slower, quicker in pairwise(range(3)):
        held = (bare[slower] >= bare[quicker] * 0.999) | (whole[slower] >= whole[quicker] * 0.999)
        assert held.all()
    assert max(s / f for s, f in zip(slow, fast, strict=True)) > 1.01


def test_less_memory_holds_fewer_plans(result):
    machines = [other_machines.changed_machine(Inputs(), result, {"memory": factor}) for factor in (0.25, 1.0, 4.0)]
    kept = [sum(row["fits"] for row in rows) for rows in machines]

    assert kept == sorted(kept)
    assert kept[0] < kept[-1]


def test_arithmetic_is_scaled_and_nothing_else(result):
    machine = result.question.cluster
    changed = scale_flops(machine, 2.0)

    assert changed.gpu_kinds[0].peak_flops["bfloat16"] == 2 * machine.gpu_kinds[0].peak_flops["bfloat16"]
    assert scale_flops(changed, 0.5) == machine
    assert replace(changed, gpu_kinds=machine.gpu_kinds) == machine


def test_other_numbers_of_gpus_have_the_same_batch():
    flags = Flags(model="tiny-llama", cluster="h200x4", gpus=(1, 2, 4))
    found = work.numbers(lambda _: None, flags, "torchtitan", SearchOptions(top=1, gpu_price_per_hour=3.6))

    assert [row.gpus for row in found.by_gpus] == [1, 2, 4]
    for row in found.by_gpus:
        alone = answer(
            replace(flags, gpus=(row.gpus,), global_batch=found.question.workload.global_batch_size),
            "torchtitan",
            SearchOptions(top=1),
        )
        assert row.step_s == pytest.approx(alone.plans[0].estimate.step_s.value)
        assert row.cost_per_million_tokens == pytest.approx(1000 / row.tokens_per_s_per_gpu)
    runs = runs_of_counts(found, Goal(tokens=1e9, gpu_price_per_hour=3.6))
    steps = 1e9 / found.question.workload.tokens_per_step
    assert [run.gpus for run in runs] == [1, 2, 4]
    assert [run.steps_s.value for run in runs if run.steps_s] == [
        pytest.approx(steps * r.step_s) for r in found.by_gpus
    ]


def test_a_whole_run_takes_its_tokens_at_the_rate_of_the_plan(explorer):
    test = explorer("curves", model="llama3.2-1b", tokens="100", price="2")
    found = metrics(test)

    assert {"Days", "GPU hours", "Cost", "Energy"} <= set(found)
    hours = float(found["GPU hours"].replace(",", ""))
    assert float(found["Cost"].replace(",", "")) == pytest.approx(2 * hours, rel=0.06)  # both to two digits
    assert float(found["Days"]) * 24 * 4 == pytest.approx(hours, rel=0.06)
    assert "Memory side by side" in said(test)
    assert "Highest throughput that surely fits" in said(test)


def test_curves_fall_with_the_rate_and_cross_where_flips_are_said_and_nowhere_else():
    """Plans that are simulated, of which some do not win where the analytical model says so."""
    flags = Flags(model="llama3-8b", cluster="dgx-h200", gpus=(16,), seq_len=1024, global_batch=16)
    bounds = Bounds(max_virtual_stages=1).fixing(pp=((1, 1),))
    result = answer(flags, "torchtitan", SearchOptions(top=5, bounds=bounds))
    first, checked = result.plans[0], 0
    assert any(curve.simulated for one in result.plans for curve in one.rate_curves)
    assert any(curve.end < OCTAVES for one in result.plans for curve in one.rate_curves)
    for quantity, now in other_machines.knobs(result):
        for other in result.plans[1:]:
            rows = other_machines.rate_curves(result, (first.plan, other.plan), quantity)
            mine, theirs = (
                {row["rate"]: row["step_s"] for row in rows if row["plan"] == other_machines.plan_chips(plan)}
                for plan in (first.plan, other.plan)
            )
            for curve in (mine, theirs):
                assert all(curve[low] >= curve[high] for low, high in pairwise(sorted(curve)))
            if theirs[now] < mine[now]:
                continue  # quicker as it is, and less sure to fit
            flips = {flip.wins: flip.at for flip in other.flips if flip.quantity == quantity}
            checked += len(flips)
            for rate in theirs:
                side = "below" if rate < now else "above"
                nearer = side not in flips or abs(math.log(rate / now)) < abs(math.log(flips[side] / now)) - 0.03
                assert not nearer or theirs[rate] >= mine[rate] * 0.999, (rate, side, flips)
                assert rate != flips.get(side) or theirs[rate] <= mine[rate] * 1.001
    assert checked >= 1
