"""Every page in every state that a person can get into, as Streamlit runs it."""

from __future__ import annotations

import html
import json
import re

import msgspec
import pytest

from planner.io import plan_words
from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.conftest import ROOT, metrics, said, table
from topology.units import two_digits

PAGES = ("home", "cluster", "model", "plans", "curves", "serving", "run", "detail", "compare", "measured", "exports")
TABS = ("Memory", "Step", "Placement", "Timeline", "Sensitivity", "Edit")
TOPO = ROOT / "tests" / "data" / "topo" / "47_3x_a6000_one_pair.txt"


@pytest.mark.parametrize("page", PAGES)
def test_every_page_opens_without_a_gpu_or_a_file(explorer, page):
    test = explorer(page)

    assert len(test.title) == 1
    assert not test.error


@pytest.mark.parametrize("tab", TABS)
def test_every_tab_of_a_plan_draws_or_says_why_not(explorer, tab):
    test = explorer("detail", tab=tab, model="tiny-llama")

    assert not test.error
    assert len(said(test)) > 100


def test_only_the_open_tab_is_worked_out(explorer):
    """The timeline needs a simulation; nobody pays for it on the memory tab."""
    memory, timeline = explorer("detail", model="tiny-llama"), explorer("detail", model="tiny-llama", tab="Timeline")

    assert "simulated step" not in said(memory)
    assert "simulated step" in said(timeline)


def test_a_link_reproduces_the_page(explorer):
    test = explorer("plans", model="llama3.2-1b", cluster="h200x4", framework="megatron-lm", objective="memory")

    assert test.sidebar.selectbox(key="model").value == "llama3.2-1b"
    assert test.sidebar.selectbox(key="cluster").value == "h200x4"
    assert "Megatron" in said(test)


def linked(test, key):
    """Return a query parameter, which the page test has as a string or a list of one."""
    found = test.query_params[key]
    return found if isinstance(found, str) else found[0]


@pytest.mark.parametrize(
    ("key", "word", "label"),
    [
        ("cluster", "/etc/passwd", "cluster"),
        ("cluster", "rig.txt (0123abcd)", "cluster"),
        ("model", "../../secret", "model"),
        ("gpus", "-3", "number of GPUs"),
        ("gpus", "9" * 30, "number of GPUs"),
        ("batch", "many", "global batch"),
        ("seq", "0", "sequence length"),
        ("framework", "none-such", "framework"),
        ("compile", "perhaps", "torch.compile"),
    ],
)
def test_a_link_that_names_what_is_not_here_says_so_and_stays_as_it_is(explorer, key, word, label):
    test = explorer("cluster", **{key: word})

    named = key in {"cluster", "model"}
    assert (f"names a {label} that is not here" if named else f"This link's {label} cannot be used") in said(test)
    assert word in said(test).replace("\\", "")
    assert linked(test, key) == word
    assert not test.metric
    test.button(key=f"without_{key}").click().run()
    assert key not in test.query_params
    assert "GPUs" in metrics(test)


@pytest.mark.parametrize(
    ("key", "word", "known"), [("cluster", "/etc/passwd", "2x8xH100"), ("model", "Qwen/none-such", "Qwen/Qwen3-0.6B")]
)
def test_typed_words_are_those_of_the_command_line_and_never_a_path(explorer, key, word, known):
    test = explorer(key)

    def typed(what):
        box = test.sidebar.selectbox(key=key)
        box.options.append(what)  # as the browser does
        box.set_value(what).run()

    typed(word)
    assert word in said(test)
    assert not test.metric
    assert key not in test.query_params or linked(test, key) != word
    typed(known)
    assert test.metric
    assert linked(test, key) == known


def test_a_link_to_a_file_of_another_computer_works_once_the_file_is_here(explorer):
    from ui.question import uploads

    kept = uploads.store("cluster", "rig.txt", TOPO.read_bytes())
    kept.path.unlink()
    test = explorer("cluster", cluster=kept.choice, gpus="3")
    test.file_uploader(key="missing_cluster").set_value(("other.txt", b"{}", "text/plain")).run()
    assert linked(test, "cluster") == kept.choice
    assert not test.metric

    test.file_uploader(key="missing_cluster").set_value(("copy.txt", TOPO.read_bytes(), "text/plain")).run()

    assert metrics(test)["GPUs"] == "3"


@pytest.fixture
def back(monkeypatch):
    """Return a function that runs a page again as Back does."""
    from ui.question import state

    def pressed(test):
        with monkeypatch.context() as while_it_runs:
            while_it_runs.setattr(state, "_from_history", lambda: True)
            test.run()

    return pressed


def test_back_brings_the_last_question_back(explorer, back):
    """The URL of the step before is the question again."""
    test = explorer("cluster", cluster="dgx-h100")
    test.sidebar.selectbox(key="cluster").set_value("h200x4").run()
    test.sidebar.number_input(key="batch").set_value(64).run()
    assert linked(test, "cluster") == "h200x4"

    del test.query_params["cluster"]
    test.query_params["batch"] = "8"
    back(test)

    assert test.sidebar.selectbox(key="cluster").value == "dgx-h100"
    assert test.sidebar.number_input(key="batch").value == 8


def test_what_a_person_changes_wins_over_the_url_that_the_browser_still_has(explorer):
    """A second change, and what runs by itself, may come before the browser has the URL of the first."""
    test = explorer("cluster", cluster="dgx-h100", batch="8")
    test.sidebar.number_input(key="batch").set_value(64).run()
    test.query_params["batch"] = "8"
    test.sidebar.selectbox(key="cluster").set_value("h200x4").run()
    assert (linked(test, "batch"), linked(test, "cluster")) == ("64", "h200x4")

    test.query_params["batch"] = "8"
    del test.query_params["cluster"]
    test.run()
    assert (linked(test, "batch"), linked(test, "cluster")) == ("64", "h200x4")
    assert test.sidebar.number_input(key="batch").value == 64


def test_a_plan_that_is_not_listed_is_said(explorer):
    test = explorer("plans", model="llama3.2-1b", plan="tp64 mb1 none")

    assert "tp64 mb1 none is not among the plans listed" in said(test)
    assert linked(test, "plan") == "tp64 mb1 none"


def test_a_plan_that_nobody_chose_gives_way_to_the_best(explorer):
    """The best plan by the analytical model may not be the best once plans are simulated."""
    test = explorer("detail", model="llama3.2-1b")
    listed = test.session_state["_results"]["answer"].result.plans
    test.session_state["plan"] = plan_words.plan_name(listed[2].plan)
    test.run()

    assert test.selectbox(key="plan").value == plan_words.plan_name(listed[0].plan)
    assert "#1 · " in said(test)


def test_choosing_another_plan_changes_the_detail(explorer):
    test = explorer("detail", model="llama3.2-1b")
    plans = test.selectbox(key="plan").options
    before = metrics(test)["Step"]

    test.selectbox(key="plan").set_value(plans[-1]).run()

    assert f"#{len(plans)} " in said(test)
    assert metrics(test)["Step"] != before


def test_least_memory_says_what_it_costs_in_time(explorer):
    test = explorer("plans", model="llama3.2-1b", objective="memory", gpus="2")

    (warned,) = test.warning
    assert "Least memory costs time" in warned.value
    assert "times the" in warned.value


def test_the_first_page_says_what_this_is_asks_and_answers(explorer):
    test = explorer(model="llama3.2-1b")
    text = said(test)

    assert "finds the fastest way to train a model on your GPUs" in text
    assert "Use " in text
    assert {"Step", "Memory"} <= set(metrics(test))
    assert not any(box.key == "cluster" for box in test.sidebar.selectbox)
    assert sum("-badge[" in str(one.value) for one in test.markdown) == len(test.metric)


def test_an_answered_question_is_in_the_page_that_a_browser_gets_first(explorer):
    from ui import at_once

    words = {"model": "llama3.2-1b", "gpus": "4", "batch": "8", "seq": "4096"}
    page = explorer(**words)
    (answer,) = (one.value for one in page.markdown if one.value.startswith("#### "))
    found = at_once.block(words)

    assert f"<h4>{html.escape(answer.removeprefix('#### ').replace(chr(92), ''))}</h4>" in found
    assert at_once.block({**words, "batch": "9"}) == ""
    assert at_once.block({**words, "model": "<script>"}) == ""


def test_two_ticked_plans_are_compared(explorer, back):
    test = explorer(model="llama3.2-1b")
    listed = table(test, "chips")
    test.session_state["second"] = listed["plan"][2]
    test.query_params["plan"] = listed["plan"][1]
    back(test)

    assert "#2 compared with #3" in said(test)
    assert list(table(test, " ")) == [" ", r"\#2", r"\#3"]
    test.button(key="no_second").click().run()
    assert "#2 compared with #3" not in said(test)


def test_a_pasted_machine_and_a_pasted_model_are_asked_about(explorer):
    test = explorer(model="tiny-llama")
    test.text_area(key="pasted").set_value(TOPO.read_text())
    test.button(key="use_pasted").click().run()
    assert test.selectbox(key="cluster").value.startswith("pasted (")

    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "vocab_size": 1000}
    config |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1024}
    test.text_area(key="pasted").set_value(json.dumps(config))
    test.button(key="use_pasted").click().run()
    assert test.selectbox(key="model").value.startswith("pasted (")

    before = test.selectbox(key="cluster").value
    test.text_area(key="pasted").set_value("neither of them")
    test.button(key="use_pasted").click().run()
    assert test.selectbox(key="cluster").value == before
    assert "error" in said(test)


def test_the_answer_is_a_sentence(explorer):
    assert "Use " in said(explorer("plans", model="llama3.2-1b"))


def test_a_question_without_an_answer_is_answered_as_such(explorer):
    """8 B parameters on one GPU: what is missing, and what would be enough."""
    test = explorer("plans", model="llama3-8b", gpus="1")

    text = said(test)
    assert "does not fit on 1 GPU" in text
    assert "What to do" in text
    assert re.search(r"\d+.* GiB missing", text)


def test_filters_that_leave_nothing_say_so(explorer):
    test = explorer("plans", model="llama3.2-1b")
    test.slider(key="most").set_value(1.0).run()

    assert "No listed plan passes the filters" in said(test)


def test_a_table_is_as_long_as_the_answer(explorer):
    test = explorer("plans", model="llama3.2-1b")

    titles = test.selectbox(key="plan").options
    assert [title.split("  ")[1] for title in titles] == list(table(test, "plan")["chips"])


LONG = {"model": "deepseek-v3", "gpus": "65536", "batch": "65536", "framework": "megatron-lm"}


def test_search_can_be_stopped_and_started_again(explorer):
    test = explorer("plans", patience_s=0.1, **LONG)
    assert "Searching all legal plans" in said(test)
    (job,) = test.session_state["_results"]["search"].values()

    test.button(key="stop_search").click().run()
    assert "stopped" in said(test)
    assert job.ask(20)
    assert job._process is None

    test.button(key="again_search").click().run()
    assert "Searching all legal plans" in said(test)
    test.button(key="stop_search").click().run()


def test_another_question_ends_the_search_for_the_last_one(explorer):
    test = explorer("plans", patience_s=0.1, **LONG)
    (job,) = test.session_state["_results"]["search"].values()
    test.session_state["_patience_s"] = 100.0
    test.sidebar.number_input(key="gpus").set_value(4)
    test.sidebar.selectbox(key="model").set_value("tiny-llama").run()

    assert job.done.is_set()
    assert "Best step" in metrics(test)


def test_while_a_search_runs_the_last_answer_stays(explorer):
    test = explorer("plans", model="llama3.2-1b")
    before, step = list(table(test, "plan")["plan"]), metrics(test)["Best step"]
    test.session_state["_patience_s"] = 0.0
    test.sidebar.number_input(key="gpus").set_value(65536)
    test.sidebar.selectbox(key="model").set_value("deepseek-v3").run()

    assert "Searching all legal plans" in said(test)
    assert list(table(test, "plan")["plan"]) == before
    assert metrics(test)["Best step"] == step
    test.button(key="stop_search").click().run()


def test_changing_a_plan_shows_the_difference_and_what_is_not_legal(explorer):
    test = explorer("detail", model="llama3.2-1b", tab="Edit")
    name = test.selectbox(key="plan").value
    assert "Changed step" not in metrics(test)
    assert "Change a value" in said(test)

    test.number_input(key=f"x_tp_{name}").set_value(2).run()
    assert "TP 2" in said(test)
    assert "Changed step" in metrics(test)

    test.number_input(key=f"x_tp_{name}").set_value(3).run()
    assert "Not legal" in said(test)


def test_no_run_yet_says_how_to_make_one(explorer):
    test = explorer("measured")
    text = said(test)

    assert list(table(test, "draw")["draw"]) == sorted(table(test, "draw")["draw"], reverse=True)
    assert "No runs yet" in text
    assert "planner apply" in text


def test_kept_runs_stand_beside_their_predictions_in_groups_and_with_their_steps(explorer, tmp_path):
    from planner.runs.runs_store import save_run
    from simulator.config.hf_config import load_model

    plan = {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 1, "ep": 1}
    plan |= {"virtual_stages": 1, "schedule": None, "recompute": "full", "tp_overlap": "none", "micro_batch_size": 2}
    document = {
        "taken_at": "2026-11-20T10:00:00+00:00",
        "status": "finished",
        "complete": True,
        "plan": plan,
        "model": msgspec.to_builtins(load_model("llama3-8b")),
        "runtime": {"name": "pytorch"},
        "workload": {"seq_len": 4096, "global_batch_size": 8},
        "device": "cuda",
        "versions": {"device": "NVIDIA H200"},
        "predicted": {"step_s": {"value": 0.9}, "memory": {"peak_bytes": {"value": 40 * 2**30}}},
        "measured": {"step_s": {"median": 1.0}, "memory_by_rank": [{"peak_allocated_bytes": 50 * 2**30}]},
    }
    (tmp_path / "records").mkdir()
    steps = [{"kind": "step", "seconds": 1.0, "loss": loss, "sm_clock_hz": 1.4e9} for loss in (3.0, 2.0)]
    (tmp_path / "records" / "rank0.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps) + '{"kind"')
    save_run(document, tmp_path)
    other = {"taken_at": "2026-11-21T10:00:00+00:00", "model": msgspec.to_builtins(load_model("llama3-70b"))}
    save_run({**document, **other}, "/somewhere")

    test = explorer("measured")
    row = table(test, "model").set_index("model").loc["llama3-8b"]
    assert row["step"] == pytest.approx(-10.0)  # percent
    assert row["memory"] == pytest.approx(-20.0)

    test.selectbox(key="runs_group").set_value("model")
    test.multiselect(key="runs_model").set_value(["llama3-8b"]).run()
    assert [*table(test, "group")["group"]] == [*table(test, "model")["model"]] == ["llama3-8b"]
    assert table(test, "group")["step, mean absolute error"].item() == "10.0%"
    test.session_state["own_runs"] = {"selection": {"rows": [0], "columns": [], "cells": []}}
    test.run()
    drawn = [json.loads(chart.proto.spec) for chart in test.get("vega_lite_chart")]
    titles = {layer["encoding"].get("y", {}).get("title") for spec in drawn for layer in spec.get("layer", ())}
    assert {"loss", "step time, s", "SM clock, MHz"} <= titles
    assert test.exception == []


def test_without_the_repository_the_published_runs_say_where_they_are(explorer, monkeypatch):
    from ui.question import state

    monkeypatch.setattr(state, "example", lambda name: None)

    assert "not part of the installed package" in said(explorer("measured"))


def test_an_uploaded_matrix_becomes_the_cluster_and_can_be_linked_to(explorer):
    test = explorer("cluster")
    test.file_uploader(key="cluster_file").set_value(("rig.txt", TOPO.read_bytes(), "text/plain")).run()
    choice = test.sidebar.selectbox(key="cluster").value

    assert choice.startswith("rig.txt (")
    assert metrics(test)["GPUs"] == "3"
    again = explorer("cluster", cluster=choice, gpus="3")
    assert again.sidebar.selectbox(key="cluster").value == choice
    assert metrics(again)["GPUs"] == "3"


def test_plans_for_an_upload_that_does_not_name_its_gpus_ask_for_them(explorer):
    test = explorer("cluster")
    test.file_uploader(key="cluster_file").set_value(("rig.txt", TOPO.read_bytes(), "text/plain")).run()
    choice = test.sidebar.selectbox(key="cluster").value

    asking = explorer("plans", cluster=choice, gpus="3", model="tiny-llama")
    assert "GPU model" in said(asking)
    answered = explorer("plans", cluster=choice, gpus="2", gpu="rtx-a6000", model="tiny-llama")
    assert "Best step" in metrics(answered)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("notes.txt", b"nothing of the kind", "notes.txt"),
        ("empty.txt", b"", "empty.txt"),
        ("picture.txt", b"\xff\xfe\x00\x01", "not text"),
        ("broken.json", b'{"gpu": ', "broken.json"),
        ("bomb.xml", b'<!DOCTYPE x [<!ENTITY a "b">]><system>&a;</system>', "bomb.xml"),
    ],
)
def test_what_is_no_machine_is_refused_by_name_and_not_kept(explorer, name, content, reason):
    from ui.question import uploads

    test = explorer("cluster")
    test.file_uploader(key="cluster_file").set_value((name, content, "text/plain")).run()

    assert reason in said(test).replace("\\", "")
    assert test.sidebar.selectbox(key="cluster").value == "dgx-h100"
    assert uploads.stored("cluster") == ()


def test_an_uploaded_config_becomes_the_model(explorer):
    config = json.loads((ROOT / "examples" / "models" / "my_llama_1b_wide.json").read_text())
    test = explorer("model")
    test.file_uploader(key="model_file").set_value(("mine.json", json.dumps(config).encode(), "application/json")).run()

    assert test.sidebar.selectbox(key="model").value.startswith("mine.json (")
    assert metrics(test)["Layers"] == str(config["num_hidden_layers"])


def test_a_config_of_an_unknown_family_is_refused(explorer):
    test = explorer("model")
    config = {"model_type": "unheard-of", "auto_map": {"AutoModel": "evil.Model"}}
    test.file_uploader(key="model_file").set_value(("odd.json", json.dumps(config).encode(), "application/json")).run()

    assert test.sidebar.selectbox(key="model").value == "llama3.2-1b"
    assert "unheard" in said(test)


def test_the_serving_page_answers_as_the_command_does(explorer):
    from planner.serving.question.from_flags import ServingFlags, serving_question
    from planner.serving.reports.text import deployment_text
    from planner.serving.search import search_serving

    test = explorer("serving", model="llama3-8b", cluster="dgx-h100", isl="256", osl="32", clients="8", aim="latency")

    asked = ServingFlags(
        model="llama3-8b", cluster="dgx-h100", gpus=4, isl=256, osl=32, concurrency=8, objective="latency"
    )
    best = search_serving(serving_question(asked)).plans[0]
    assert table(test, "deployment")["deployment"][0] == deployment_text(best.deployment)
    assert f"{two_digits(1e3 * best.estimate.tpot_s.value)} ms" == metrics(test)["Each further token"]
    assert "CUDA_VISIBLE_DEVICES" in said(test)
    assert "Users against GPUs" in said(test)
    assert "tokens/s a user" in said(test)
    assert "--concurrency 8" in command(test)


def test_the_serving_page_prices_tokens_once_it_knows_what_a_gpu_costs(explorer):
    asked = {"model": "llama3-8b", "cluster": "h200x4", "isl": "64", "osl": "8", "clients": "4", "aim": "cost"}
    assert "needs a price" in said(explorer("serving", **asked))

    test = explorer("serving", **asked, price="3")

    rate = float(table(test, "deployment")["rate"][0].replace(",", ""))
    assert float(metrics(test)["A million output tokens"]) == pytest.approx(3 / 3600 / rate * 1e6, rel=0.06)
    assert "--gpu-price 3" in command(test)


def command(test):
    """Open what has the command line, and return the words of the page with it."""
    test.session_state["terminal"] = True
    return said(test.run())


def test_a_serving_question_without_an_answer_says_why(explorer):
    test = explorer("serving", model="llama3-405b")

    assert "cannot be served" in said(test)
    assert "no room for a KV cache" in said(test)
