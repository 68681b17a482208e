"""What is advised where no plan is legal: each way, taken, leads to an answer."""

from __future__ import annotations

import json

import pytest

from planner.question.recipes import RECIPES, default_batch
from simulator.config.hf_config import load_model

BRIEF = ("--no-simulate", "--top", "1", "--json")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"--model": "gpt2", "--gpus": "2", "--seq-len": "4096", "--global-batch": "8"}, {"--seq-len": "1024"}),
        (
            {"--model": "llama3-8b", "--cluster": "dgx-a100", "--gpus": "8", "--compute-dtype": "float8", "--pp": "1"},
            {"--compute-dtype": "bfloat16"},
        ),
        (
            {"--model": "llama3.2-1b", "--gpus": "7", "--global-batch": "3", "--seq-len": "4096"}
            | {"--framework": "llm-foundry"},
            {"--global-batch": "7"},
        ),
    ],
)
def test_every_way_leads_to_an_answer(planner, asked, expected):
    def ask(flags):
        return planner("suggest", *[word for pair in flags.items() for word in pair], *BRIEF)

    refused = ask(asked)
    remedy = next(line for line in refused.stderr.splitlines() if line.strip().startswith("do: "))
    ways = [way.split() for way in remedy.strip().removeprefix("do: ").split("; or ")]
    changes = [dict(zip(way[::2], way[1::2], strict=True)) for way in ways]

    assert refused.returncode == 3
    assert expected in changes
    for change in changes:
        answered = ask(asked | change)
        assert answered.returncode == 0, answered.stderr
        assert json.loads(answered.stdout)["plans"]


def test_a_model_is_asked_about_at_a_length_that_it_has(planner):
    document = json.loads(planner("suggest", "--model", "gpt2", "--gpus", "1", *BRIEF).stdout)

    assert document["question"]["workload"]["seq_len"] == 1024
    assert "sequence length 1,024 tokens" in document["assumed"]


@pytest.mark.parametrize(("name", "seq_len", "gpus"), [("gpt3-175b", 8192, 512), ("gpt3-175b", 2048, 64)])
def test_a_batch_is_said_to_be_as_a_recipe_only_where_it_is(name, seq_len, gpus):
    recipe = next(one for one in RECIPES if one.name == "GPT-3 175B")
    batch, said = default_batch(load_model(name), seq_len, gpus)
    alike = f"{batch * seq_len / 1e6:.2g}" == f"{recipe.tokens / 1e6:.2g}"

    assert ("tokens a step, as GPT-3 175B" in said) == alike
    assert ("near the 3.2M of GPT-3 175B" in said) != alike
