"""A configuration dropped into the explorer: the answer and the diffs are those of planner check."""

from __future__ import annotations

import json

import pytest

import planner as package
from planner.cli import main
from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.conftest import ROOT, metrics, said

from ui.charts.look import seconds  # isort: skip

CHECKED = ROOT / "examples" / "check"


def checked(explorer, text, **parameters):
    test = explorer("check", **parameters)
    test.text_area(key="check_text").set_value(text).run()
    test.button(key="check").click().run()
    assert [error.message for error in test.exception] == []
    return test


def test_the_answer_is_that_of_the_command(explorer, tmp_path, monkeypatch, capsys):
    """Fields that are not understood are listed as well."""
    text = (CHECKED / "torchtitan_llama3_8b.toml").read_text() + "\n[wormhole]\nwarp_factor = 9\n"
    test = checked(explorer, text, cluster="dgx-h100", gpus="8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pasted.toml").write_text(text)
    assert main(["check", "pasted.toml", "--cluster", "dgx-h100", "--gpus", "8", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)

    assert "torchtitan" in said(test)
    assert float(metrics(test)["Step as it is"].split()[0]) == pytest.approx(
        document["estimate"]["step_s"]["value"], rel=0.01
    )
    shown = [block.value.strip() for block in test.code]
    assert document["changes"][0]["diff"].strip() in shown
    assert document["best"]["diff"].strip() in shown
    assert document["changes"][0]["diff"].startswith("---")
    assert document["unknown"]
    assert all(name in said(test).replace("\\", "") for name in document["unknown"])


def test_a_command_that_serves_is_judged_for_its_own_model(explorer, tmp_path):
    text = "vllm serve Qwen/Qwen3-8B --max-model-len 4096"
    test = checked(explorer, text, model="llama3-8b", cluster="dgx-h100", gpus="1")
    file = tmp_path / "serve.sh"
    file.write_text(text)
    found = package.check(file, cluster="dgx-h100", gpus=1, search=False)

    assert "vllm" in said(test)
    assert metrics(test)["A token"] == seconds(found.answer.estimate.tpot_s.value)
    assert found.answer.question.model.name == "qwen3-8b"


def test_a_configuration_that_names_its_model_is_judged_for_that(explorer):
    text = (CHECKED / "bridge_llama32_1b.yaml").read_text()

    shown = said(checked(explorer, text, model="llama3-8b", cluster="h200x4", gpus="1"))

    assert "llama3.2-1b on" in shown.replace("\\", "")


def test_what_is_no_configuration_says_so(explorer):
    assert "configuration" in said(checked(explorer, "Dear diary,"))
