"""Plans that a person keeps are used like those that were found; two questions are compared by their answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.question.flags import Flags
from planner.search.answer import answer
from planner.search.result import MayFit
from planner.search.search import SearchOptions
from simulator.config.plan import PLAN_FIELDS
from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.conftest import metrics, said, table
from topology import codec
from topology.errors import BadInput
from ui import saved_plans
from ui.question.state import Inputs

ASKED = {"model": "llama3.2-1b", "cluster": "h200x4"}


def test_an_edited_plan_is_kept_listed_simulated_and_left_out_again(explorer):
    test = explorer("detail", **ASKED, tab="Edit")
    listed = test.selectbox(key="plan").options
    tensor = next(field for field in test.number_input if field.label == PLAN_FIELDS["tp"].title)
    wanted = 2 if tensor.value != 2 else 4
    tensor.set_value(wanted).run()
    changed = metrics(test)["Changed step"]
    test.button(key="keep_plan").click().run()

    options = test.selectbox(key="plan").options
    assert len(options) == len(listed) + 1
    assert f"TP {wanted}" in options[-1]
    assert metrics(test)["Step"] == changed
    test.switch_page("views/plans.py").run()
    assert len(table(test, "chips")) == len(listed) + 1

    test.switch_page("views/detail.py").run()
    test.button(key="leave_out").click().run()
    assert test.selectbox(key="plan").options == listed


def test_saved_plans_are_those_of_their_question_and_damaged_files_are_passed_over():
    from simulator.config.plan import Plan

    first, second = Inputs(), Inputs(seq_len=4096)
    saved_plans.save(first, Plan(dp_shard=4, tp=2))
    (saved_plans.folder(first) / "broken.json").write_text('{"tp": "many"}')

    assert saved_plans.plans(first) == (Plan(dp_shard=4, tp=2),)
    assert saved_plans.plans(second) == ()
    for size in range(saved_plans.MOST):
        if len(saved_plans.plans(first)) < saved_plans.MOST:
            saved_plans.save(first, Plan(dp_shard=size + 1, cp=1, pp=2))
    with pytest.raises(BadInput, match="saved for this question"):
        saved_plans.save(first, Plan(tp=8))


def test_a_faster_plan_that_may_fit_is_a_row_of_its_own():
    flags = Flags(model="tiny-llama", cluster="h200x4", gpus=(2,), global_batch=8)
    found = answer(flags, "torchtitan", SearchOptions(top=2, simulate=False, reasons=False))
    other = found.plans[1]

    def of(faster):
        one = MayFit(plan=other.plan, estimate=other.estimate, method=other.method, fit_probability=0.85, faster=faster)
        return saved_plans.with_likely(replace(found, plans=found.plans[:1], likely=(one,)))

    first, row = of(0.08).plans
    assert first == found.plans[0]
    assert (row.rank, row.plan, row.lost_because) == (2, other.plan, "8% less time, but 85% likely to fit")
    assert len(of(0.001).plans) == 1  # nobody would choose it


def test_two_questions_are_compared_for_the_same_batch(explorer):
    test = explorer("compare", **ASKED, what="questions")
    assert "Change something" in said(test)
    test.selectbox(key="b_cluster").set_value("l40s-x8").run()
    shown = table(test, " ").set_index(" ")
    first, second = shown.columns

    assert shown.loc["GPUs", first] == "4"
    assert "the GPU time there" in said(test)
    alone = explorer("plans", model="llama3.2-1b", cluster="l40s-x8")
    assert shown.loc["step", second] == metrics(alone)["Best step"]


def test_a_second_question_in_another_precision_has_other_memory(explorer):
    test = explorer("compare", **ASKED, what="questions")
    test.selectbox(key="b_precision").set_value("parameters in bfloat16").run()
    shown = table(test, " ").set_index(" ")
    first, second = shown.columns

    assert shown.loc["memory", first] != shown.loc["memory", second]
    assert codec.fingerprint(Inputs()) != codec.fingerprint(Inputs(param_dtype="bfloat16"))
