"""Nothing depends on what a schedule is called: one registered under another name is predicted the same."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from planner.question.prediction import predict
from planner.question.question import question_of
from simulator.analytical.estimates import estimate_plans
from simulator.bounds.screening import Screening
from simulator.columns.plan_columns import plan_columns
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.legality.frameworks import framework_named
from simulator.pipeline.schedules.registry import SCHEDULES
from tests.planner.conftest import make_cluster
from topology.errors import BadPlan

MODEL = replace(load_model("llama3-8b"), layers=8)
WORKLOAD = Workload(seq_len=2048, global_batch_size=16)
KNOWN = tuple(SCHEDULES)


@pytest.fixture
def question(monkeypatch):
    for name in KNOWN:
        monkeypatch.setitem(SCHEDULES, f"other {name}", replace(SCHEDULES[name], name=f"other {name}"))
    framework = replace(framework_named("meshwright"), schedules=tuple(SCHEDULES))
    return question_of(MODEL, make_cluster(1, 4), WORKLOAD, framework=framework)


@pytest.mark.parametrize("name", KNOWN)
def test_a_schedule_of_another_name_is_predicted_the_same(question, name) -> None:
    stages = SCHEDULES[name].least_stages
    plans = [Plan(pp=2, dp_shard=2, virtual_stages=stages, schedule=word) for word in (name, f"other {name}")]
    screening = Screening(question)
    columns = plan_columns(plans)
    screened = screening.plans(columns, screening.blocks(columns, ["none"]), np.zeros(2, dtype=np.intp))
    found = [asdict(predict(question, plan)) for plan in plans]

    assert [question.problems(plan) for plan in plans] == [(), ()]
    assert found[0] == found[1]
    for bounds in (
        screened.at_least_s(),
        screened.at_least_by_schedule_s(),
        *screened.allocated_and_reserved_bytes().T,
        screened.step_s(),
    ):
        assert bounds[0] == bounds[1]


def test_a_schedule_that_nobody_registered_is_refused(question) -> None:
    with pytest.raises(BadPlan, match="unknown pipeline schedule 'Foo'"):
        estimate_plans(question, [Plan(pp=2, dp_shard=2, schedule="Foo")])
