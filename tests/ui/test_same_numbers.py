"""The explorer shows the numbers of the command line: it asks the same functions, and this holds it to that."""

from __future__ import annotations

import json

import pytest

from planner import cli
from planner.io.plan_words import plan_name
from planner.question.question import question_of
from planner.search.search import SearchOptions
from simulator.config.plan import Plan
from tests.planner.conftest import searched_once
from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.conftest import metrics, table
from ui.question.state import LISTED

QUESTION = {"model": "llama3.2-1b", "cluster": "dgx-h100", "gpus": "4", "seq": "4096", "batch": "8"}
FLAGS = ["--model", "llama3.2-1b", "--cluster", "dgx-h100", "--gpus", "4", "--seq-len", "4096", "--global-batch", "8"]


SEARCHED = {}  # what these tests asked on the command line, and the answers


def answer(capsys, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        searched_once(patch, SEARCHED)
        assert cli.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plans_are_those_of_suggest(explorer, capsys):
    """Their numbers, and which of them the model cannot tell apart; of names that are typed, as on the command line."""
    asked = {"model": "Qwen/Qwen2.5-0.5B", "cluster": "2xH100"}
    flags = ["--model", asked["model"], "--cluster", asked["cluster"], "--seq-len", "4096", "--global-batch", "8"]
    document = answer(capsys, "suggest", *flags, "--top", str(LISTED))
    shown = table(explorer("plans", **{**QUESTION, "gpus": "2", **asked}), "plan")

    assert len(shown) == len(document["plans"])
    # A column has one last digit: that of the step that is known best.
    steps = [plan["estimate"]["step_s"] for plan in document["plans"]]
    narrowest_s, to_digit_s = min(step["high"] - step["low"] for step in steps), place(shown["step"][0])
    for row, reported in zip(shown.to_dict("records"), document["plans"], strict=True):
        estimate = reported["estimate"]
        step = estimate["step_s"]
        assert row["rank"] == reported["rank"]
        assert row["plan"] == plan_name(plan_of(reported["plan"]))
        assert row["step_s"] == pytest.approx(step["value"], rel=1e-12)
        assert row["peak_gib"] * 2**30 == pytest.approx(estimate["memory"]["reserved_bytes"], rel=1e-12)
        assert (reported["lost_because"] or "the first") in row["why"]
        assert seconds(row["step"]) == pytest.approx(step["value"], abs=0.51 * place(row["step"]))
        assert place(row["step"]) == to_digit_s >= 0.01 * narrowest_s
        known = (step["high"] - step["low"]) / 2 / step["value"]
        assert float(row["tokens"].replace(",", "")) == pytest.approx(estimate["tokens_per_s_per_gpu"], rel=known)
        assert float(row["mfu"].rstrip("%")) / 100 == pytest.approx(estimate["mfu"], abs=0.006)
        low, _, high = row["range"].partition(" to ")
        assert seconds(high) == pytest.approx(step["high"], abs=0.51 * place(high))
        assert float(low) < float(high.split()[0])
    ties = [plan["tie"] for plan in document["plans"]]
    tied = [before == tie for before, tie in zip([None, *ties], ties, strict=False)]  # with the plan before it
    assert [place.endswith("=") for place in shown["place"]] == tied


UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def seconds(text):
    value, unit = text.split()
    return float(value) * UNITS[unit]


def place(text):
    """Return the place of the last digit of a time, in seconds."""
    value, unit = text.split()
    return 10.0 ** -len(value.partition(".")[2]) * UNITS[unit]


def plan_of(reported):
    names = set(Plan.__dataclass_fields__)
    values = {
        key: tuple(value) if isinstance(value, list) else value for key, value in reported.items() if key in names
    }
    return Plan(**values)


def test_a_changed_plan_is_that_of_estimate(explorer, capsys, tmp_path):
    test = explorer("detail", tab="Edit", **QUESTION)
    name = test.selectbox(key="plan").value
    test.number_input(key=f"x_tp_{name}").set_value(2).run()
    test.selectbox(key=f"x_recompute_{name}").set_value("full").run()
    test.number_input(key=f"x_micro_batch_size_{name}").set_value(1).run()
    fields = ("pp", "cp", "ep", "virtual_stages", "dp_replicate")
    flags = {field: test.number_input(key=f"x_{field}_{name}").value for field in fields}
    plan = next(r.plan for r in test.session_state["_results"]["answer"].result.plans if plan_name(r.plan) == name)
    flags |= {"tp": 2, "recompute": "full", "micro_batch_size": 1, "reshard_after_forward": plan.reshard_after_forward}
    case = {
        "id": "changed",
        "model": "llama3.2-1b",
        "cluster": {"gpu": "h100-sxm", "gpus_per_node": 4, "nodes": 1},
        "workload": {"seq_len": 4096, "global_batch_size": 8},
        "plan": {**flags, "dp_shard": 4 // (2 * flags["pp"] * flags["cp"] * flags["dp_replicate"])},
        "runtime": {"name": "torchtitan"},
    }
    path = tmp_path / "case.json"
    path.write_text(json.dumps(case))
    estimate = answer(capsys, "estimate", "--case", str(path))["estimate"]

    shown = metrics(test)
    step = estimate["step_s"]["value"]
    assert seconds(shown["Changed step"]) == pytest.approx(step, abs=0.51 * place(shown["Changed step"]))
    assert shown["Changed MFU"] == f"{estimate['mfu']:.0%}"
    reserved = estimate["memory"]["reserved_bytes"] / 2**30
    assert float(shown["Changed memory"].split()[0]) == pytest.approx(reserved, abs=0.51 if reserved >= 10 else 0.051)


@pytest.mark.parametrize(
    "framework",
    [
        "torchtitan",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("megatron-lm", "deepspeed", "llm-foundry")),
    ],
)
def test_a_plan_that_is_not_changed_stays_the_same(framework):
    """The form starts at the plan itself: every listed plan of every framework comes back as it was."""
    from planner.io.inputs import read_cluster
    from planner.search.search import suggest
    from simulator.config.hf_config import load_model
    from simulator.config.workload import Workload
    from simulator.legality.frameworks import framework_named
    from ui import data
    from ui.question.state import Inputs
    from ui.rows import changed_flags, degrees_of

    rules = framework_named(framework)
    asked = Inputs(model="llama3.2-1b", gpus=4, seq_len=2048, global_batch=8, framework=framework)
    found = suggest(
        question_of(
            load_model("llama3.2-1b"),
            read_cluster("dgx-h100", 4),
            Workload(seq_len=2048, global_batch_size=8),
            framework=rules,
        ),
        SearchOptions(top=4),
    )
    for ranked in found.plans:
        plan = ranked.plan
        again = data.what_if(asked, changed_flags(plan, degrees_of(plan), plan.recompute), rules, gpus=4)

        assert again.case.plan == plan
        assert again.estimate.step_s.value == pytest.approx(ranked.estimate.step_s.value, rel=1e-12)


def test_the_plan_file_is_the_one_that_suggest_saves(explorer, capsys, tmp_path):
    from planner.question.plan_file import load_plan
    from ui import data
    from ui.question.state import Inputs

    out = tmp_path / "plan.json"
    answer(capsys, "suggest", *FLAGS, "--top", str(LISTED), "--out", str(out))
    test = explorer("exports", **QUESTION)
    result = test.session_state["_results"]["answer"].result
    ranked = data.chosen(result, test.session_state["plan"])

    assert data.plan_file_text(result, ranked) == out.read_text()
    assert load_plan(out).plan == ranked.plan
    assert Inputs(cluster="dgx-h100", gpus=16).command().startswith("planner suggest --model llama3-8b")


def test_the_machine_is_that_of_probe(explorer, capsys):
    document = answer(capsys, "probe", "--from", "h200x4")
    test = explorer("cluster", cluster="h200x4")

    assert metrics(test)["GPUs"] == str(len(document["gpus"]))
    assert sum(table(test, "count")["count"]) == len(document["links"])


@pytest.mark.parametrize("model", ["gpt2", "llama2-7b", "llama3-8b"])
def test_a_length_left_open_is_that_of_suggest(model):
    """GPT-2 has 1,024 positions: the command line asks for that many, and so does the page."""
    from planner.question.flags import Flags
    from planner.search.answer import search_question
    from ui.question.state import of_link

    question, _ = search_question(Flags(model=model, cluster="dgx-h100"), None)

    assert of_link({"model": model}).seq_len == question.workload.seq_len


def test_compilation_is_asked_only_of_frameworks_that_have_it(explorer):
    """The command line refuses --compile of Megatron-LM, so a link that has both is without."""
    from ui.question.state import Inputs

    test = explorer("model", **QUESTION, framework="megatron-lm", compile="true")

    assert test.toggle(key="compile").disabled
    assert "compile" not in test.session_state["_results"]["link"]
    assert "--compile" not in Inputs(framework="megatron-lm", compile=True).command()
    assert "--compile" in Inputs(framework="torchtitan", compile=True).command()
