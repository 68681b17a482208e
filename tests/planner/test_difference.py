"""What could account for a step that took another time than was predicted."""

import math
from dataclasses import replace

import pytest

from planner.calibrate.difference import difference_from
from planner.calibrate.planned_step import PlannedStep
from planner.calibrate.terms import KERNELS, Term, _raise_operators, effects
from planner.question.cases import case_from_flags
from planner.question.flags import Flags
from planner.question.prediction import predict
from simulator.analytical.scenario import Scenario


@pytest.fixture(scope="module")
def case():
    return case_from_flags(
        Flags(model="llama3.2-1b", cluster="dgx-h100", gpus=(2,), seq_len=4096, global_batch=4, plan={"dp_shard": 2})
    )


def difference(case, estimate, step_s):
    asked = case.question
    step = PlannedStep(
        model=asked.model, plan=case.plan, workload=asked.workload, runtime=asked.runtime, cluster=asked.cluster
    )
    return difference_from(step, asked.cluster, estimate, step_s)


def test_a_term_that_is_off_by_what_is_said_gives_the_measured_step(case) -> None:
    """Raised by its factor alone, a kind of kernel takes the step to what was measured."""
    estimate = predict(case.question, case.plan).estimate
    found = difference(case, estimate, 1.03 * estimate.step_s.value)
    asked = case.question
    scenario = Scenario(
        model=asked.model, cluster=asked.cluster, workload=asked.workload, runtime=asked.runtime, calibration=None
    )
    kernels = [one for one in found.accounts if one.name in KERNELS]

    assert kernels
    assert sum(one.share for one in found.accounts) <= 1.0
    for one in kernels:
        spread = math.log(one.times)
        term = Term(name=one.name, spread=spread, change=_raise_operators(KERNELS[one.name], spread))
        assert effects(scenario, [case.plan], [term])[0][0, 0] == pytest.approx(math.log(1.03), rel=0.1)


def test_what_is_measured_next_makes_the_step_surer(case) -> None:
    estimate = predict(case.question, case.plan).estimate
    found = difference(case, estimate, 2 * estimate.step_s.value)

    widths = [found.expected, *(one.after for one in found.next)]
    assert len(widths) > 1
    assert widths == sorted(widths, reverse=True)
    assert not found.inside
    assert replace(found, measured_s=found.predicted.value).inside


def test_explain_says_it_of_a_plan_file(planner, tmp_path) -> None:
    plan = tmp_path / "plan.json"
    flags = ("--model", "llama3.2-1b", "--cluster", "8xH100", "--gpus", "1", "--global-batch", "1")
    planner("estimate", *flags, "--micro-batch", "1", "--out", plan)

    slow = planner("explain", "--measured", "9.2s", plan).stdout
    alone = planner("explain", "--measured", "9.2s")

    assert slow.startswith(("measured  9,200 ms", "measured  9.20 s"))
    for word in ("likely    work outside the step", "could be", "measure ", "planner calibrate --for"):
        assert word in slow
    assert alone.returncode == 2
    assert planner("explain", "--measured", "soon", plan).returncode == 2
