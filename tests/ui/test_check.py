"""A configuration dropped into the explorer: the answer and the diffs are those of planner check."""

from __future__ import annotations

import pytest

import planner as package
from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.conftest import ROOT, metrics, said

from ui.background import waiting, work  # isort: skip
from topology.units import in_seconds

CHECKED = ROOT / "examples" / "check"


def checked(explorer, text, **parameters):
    test = explorer("check", **parameters)
    test.text_area(key="check_text").set_value(text).run()
    test.button(key="check").click().run()
    assert [error.message for error in test.exception] == []
    return test


def asked_with(explorer, monkeypatch, text, *instead, launch="", **parameters):
    """The flags that a configuration is judged with; `instead` is what is chosen to count before the file."""
    kept = []
    monkeypatch.setattr(waiting, "ask", lambda kind, key, text, name, flags, **_: kept.append(flags))
    test = explorer("check", **parameters)
    test.text_area(key="check_text").set_value(text).run()
    test.text_input(key="check_launch").set_value(launch).run()
    test.button(key="check").click().run()
    if instead:
        test.pills(key="check_instead").set_value(list(instead)).run()
    assert [error.message for error in test.exception] == []
    return kept[-1]


SMALL = """# NOTE: this toml config is a preset for 2 A100 GPUs.
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 1024
[wormhole]
warp_factor = 9
"""


def test_the_page_shows_the_answer_of_the_command(explorer, monkeypatch):
    """For what the file names, whatever the question is. Fields that are not understood are listed as well."""
    kept = {}

    def asked(kind, key, *given, **_):
        if key not in kept:
            kept[key] = work.check(lambda _: None, *given)
        return kept[key]

    monkeypatch.setattr(waiting, "ask", asked)
    test = checked(explorer, SMALL, model="llama3-70b", cluster="h200x4", gpus="2", batch="8", seq="4096")
    (document,) = kept.values()

    assert "torchtitan" in said(test)
    assert "llama3-8b on dgx-a100" in said(test).replace("\\", "")
    assert "2 GPUs (the file's own comment)" in document["assumed"]
    assert float(metrics(test)["Step as it is"].split()[0]) == pytest.approx(
        document["estimate"]["step_s"]["value"], rel=0.02
    )
    shown = [block.value.strip() for block in test.code]
    assert document["changes"][0]["diff"].strip() in shown
    assert document["best"]["diff"].strip() in shown
    assert document["changes"][0]["diff"].startswith("---")
    assert document["unknown"] == ["wormhole.warp_factor"]
    assert "wormhole.warp_factor" in said(test).replace("\\", "")


def test_what_a_file_names_counts_before_the_question_unless_chosen_here(explorer, monkeypatch):
    question = {"model": "llama3-70b", "cluster": "h200x4", "gpus": "2"}

    kept = asked_with(explorer, monkeypatch, SMALL, **question)
    assert (kept.model, kept.cluster, kept.gpus, kept.seq_len, kept.global_batch) == (None,) * 5
    instead = asked_with(explorer, monkeypatch, SMALL, "cluster", "gpus", **question)
    assert (instead.model, instead.cluster, instead.gpus) == (None, "h200x4", 2)
    assert asked_with(explorer, monkeypatch, SMALL, "model", **question).model == "llama3-70b"


def test_what_a_file_leaves_open_is_the_question(explorer, monkeypatch):
    text = '{"train_batch_size": "auto", "zero_optimization": {"stage": 3}}'
    question = {"model": "llama3-70b", "cluster": "h200x4", "gpus": "2", "seq": "2048", "batch": "16"}
    line = "torchrun --nproc_per_node 4 train.py --per_device_train_batch_size 2 --max_seq_length 512"

    found = asked_with(explorer, monkeypatch, text, **question)
    assert (found.model, found.cluster, found.gpus) == ("llama3-70b", "h200x4", 2)
    assert (found.seq_len, found.global_batch) == (2048, 16)
    started = asked_with(explorer, monkeypatch, text, launch=line, **question)
    assert (started.model, started.gpus, started.seq_len, started.global_batch) == ("llama3-70b", None, None, None)


def test_a_command_that_serves_is_judged_for_its_own_model(explorer, tmp_path):
    text = "vllm serve Qwen/Qwen3-8B --max-model-len 4096"
    test = checked(explorer, text, model="llama3-8b", cluster="dgx-h100", gpus="1")
    file = tmp_path / "serve.sh"
    file.write_text(text)
    found = package.check(file, cluster="dgx-h100", gpus=1, search=False)

    assert "vllm" in said(test)
    assert metrics(test)["A token"] == in_seconds(found.checked.answer.estimate.tpot_s.value)
    assert found.checked.answer.question.model.name == "qwen3-8b"


def test_what_is_no_configuration_says_so(explorer):
    assert "configuration" in said(checked(explorer, "Dear diary,"))
