"""The answers as a person reads them: one figure for one plan, ties as ties, what surely fits first, on one screen."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from planner.explain import explain as explaining
from planner.question.cases import load_case, stated_workload
from planner.question.flags import Flags
from planner.question.recipes import default_batch
from planner.search.answer import answer
from planner.search.finalists import TIE, mechanisms
from planner.search.plan_space.candidates import Bounds, enumerate_nodes
from planner.search.search import SearchOptions
from simulator.config.estimate import LEVELS, SURE
from simulator.config.hf_config import load_model
from simulator.config.plan import MESH_AXES, Plan
from simulator.memory.plan_memory import PlanMemory
from tests.planner.conftest import searched_once

QUESTION = ("--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "2", "--seq-len", "4096", "--global-batch", "64")


def plan_of(reported):
    names = set(Plan.__dataclass_fields__)
    return Plan(**{k: tuple(v) if isinstance(v, list) else v for k, v in reported.items() if k in names})


@pytest.fixture(scope="module")
def planner_once(tmp_path_factory):
    """The answer to QUESTION, as JSON and as text, from one search; so are those of `run`."""
    import contextlib
    import io

    from planner.cli import main

    answers = {}

    def run(*arguments):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", "80")
            searched_once(patch, answers)
            assert main(list(map(str, arguments))) == 0
        return out.getvalue()

    saved = tmp_path_factory.mktemp("plans") / "best.json"
    return {
        "document": json.loads(run("suggest", *QUESTION, "--out", saved, "--json")),
        "text": run("suggest", *QUESTION),
        "saved": saved,
        "run": run,
    }


def test_a_plan_has_one_step_and_one_memory_wherever_it_is_shown(planner_once):
    """Listed, by itself, explained, and compared with itself."""
    run, saved = planner_once["run"], planner_once["saved"]
    listed = planner_once["document"]["plans"][0]["estimate"]
    alone = json.loads(run("estimate", "--plan", saved, "--json"))["estimate"]
    explained = json.loads(run("explain", saved, "--no-flips", "--json"))
    compared = json.loads(run("compare", saved, saved, "--json"))

    for other in (alone, explained["estimate"]):
        assert other["step_s"] == pytest.approx(listed["step_s"])
        assert other["memory"]["reserved_bytes"] == listed["memory"]["reserved_bytes"]
        assert other["breakdown_s"] == pytest.approx(listed["breakdown_s"])
    assert sum(listed["breakdown_s"].values()) == pytest.approx(listed["step_s"]["value"])
    assert explained["waterfall"]["step_s"] == pytest.approx(listed["step_s"]["value"])
    assert compared["first"]["step_s"] == pytest.approx(listed["step_s"]["value"])
    assert compared["step_s"] == 0


@pytest.mark.parametrize("larger", [False, True], ids=["small", "micro batches of 64"])
def test_the_first_plan_is_the_fastest_that_surely_fits_or_a_simpler_one_of_its_tie(planner, planner_once, larger):
    plans = planner_once["document"]["plans"]
    if larger:
        asked = (*QUESTION[:4], "--gpus", "4", "--micro-batch", "64", "--seq", "512", "--global-batch", "64")
        plans = json.loads(planner("suggest", *asked, "--json").stdout)["plans"]
    sure = [one for one in plans if one["fit_probability"] >= SURE]
    first = plans[0]
    steps = [one["estimate"]["step_s"]["value"] for one in sure]

    assert first in sure
    assert first["estimate"]["step_s"]["value"] <= min(steps) * (1 + TIE)
    for one in plans:
        tied = [other for other in plans if other["tie"] == one["tie"]]
        assert len(mechanisms(plan_of(tied[0]["plan"]))) == min(
            len(mechanisms(plan_of(other["plan"]))) for other in tied
        )
    assert [one["tie"] for one in plans] == sorted(one["tie"] for one in plans)


def test_where_no_plan_surely_fits_the_likeliest_come_first():
    """Though others are faster: of two GPUs of 12 GiB, sharding keeps full GPUs, whose
    allocations are retried, in 0.94 s, and tensor parallelism is likelier to fit, in 1.37 s.
    """
    flags = Flags(model="llama3.2-1b", cluster="2xRTX4070", seq_len=1024, global_batch=4)
    bounds = Bounds(max_virtual_stages=1, max_micro_batch=2).fixing(cp=((1, 1),), pp=((1, 1),), recompute=("full",))
    options = SearchOptions(top=2, bounds=bounds, simulate=False, flips=False, reasons=False)
    found = answer(flags, "torchtitan", options)
    listed, question = found.plans, found.question
    nodes = enumerate_nodes(question, bounds=bounds)
    variants, _ = nodes.variants(*nodes.leaves(np.arange(len(nodes))))
    likeliest = max(PlanMemory(question, variants.plan(row)).fit_probability for row in range(len(variants)))

    assert SURE > likeliest > 0
    levels = [level(one.fit_probability) for one in listed]
    assert levels[0] == level(likeliest)
    assert levels == sorted(levels, reverse=True)
    assert all("likely to fit" in str(one.lost_because) for one in listed[1:])


def level(probability: float) -> float:
    """The highest level of certainty that a probability reaches."""
    return max((one for one in LEVELS if probability >= one), default=0.0)


def test_what_the_fastest_that_may_fit_would_gain_is_said(planner_once):
    document, text = planner_once["document"], planner_once["text"]
    may_fit = document["may_fit"]

    if may_fit is not None:
        assert may_fit["fit_probability"] < SURE
        assert may_fit["estimate"]["step_s"]["value"] < document["plans"][0]["estimate"]["step_s"]["value"]
        assert (f"would take {may_fit['faster']:.0%} less time" in text.replace("\n", " ")) == (
            may_fit["faster"] >= 0.01
        )


def test_the_answer_fits_a_screen(planner_once):
    """80 columns; the sentence, the table, the reasons and how to start it before anything it rests on."""
    lines = planner_once["text"].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("start "))
    cluster = next(number for number, line in enumerate(lines) if line.startswith("cluster "))

    assert max(map(len, lines)) <= 80
    assert re.match(
        r"Use .+: about [\d.]+ m?s \([\d.]+ to [\d.]+\) a step of [\d.]+[Mk] tokens, \d+ GiB of \d+",
        " ".join(lines[:2]),
    )
    assert start < 26
    assert start < cluster
    for label in ("batch ", "order ", "start ", "assumed ", "basis ", "memory ", "searched "):
        assert sum(line.startswith(label) for line in lines) == 1, label


def test_no_figure_has_more_digits_than_are_known(planner_once):
    run, saved = planner_once["run"], planner_once["saved"]
    texts = [
        planner_once["text"],
        run("estimate", "--plan", saved),
        run("explain", saved),
        run("compare", saved, saved),
    ]

    for text in texts:
        assert not re.search(r"\de-\d", text)
        assert all(
            len(digits.replace(".", "").lstrip("0")) <= 3 for digits in re.findall(r"(?<![\d.,])([\d.]+) m?s\b", text)
        )


def test_what_does_not_fit_is_told_every_fix_cheapest_first(planner):
    reported = ("--dp-shard", "8", "--micro-batch", "4", "--recompute", "none")
    asked = (*QUESTION[:4], "--gpus", "8", *QUESTION[6:8], "--global-batch", "64", *reported)
    document = json.loads(planner("estimate", *asked, "--json").stdout)
    text = " ".join(planner("estimate", *asked).stdout.split())
    # Time on the same GPUs first, then GPUs, then precision.
    costs = [
        (fix["param_dtype"] != "float32", math.prod(fix["plan"][axis] for axis in MESH_AXES), fix["step_s"])
        for fix in document["fixes"]
    ]

    assert document["estimate"]["memory"]["fits"] is False
    assert len(costs) >= 3
    assert costs == sorted(costs)
    assert "to make it fit, cheapest first" in text


def test_what_fits_nowhere_is_told_what_to_relax_by_throughput(planner):
    done = planner("suggest", "--model", "llama3-70b", "--cluster", "dgx-h100", "--gpus", "8", "--global-batch", "64")
    rates = [float(rate.replace(",", "")) for rate in re.findall(r"about ([\d,]+) tokens/s/GPU", done.stderr)]

    assert done.returncode == 3
    assert len(rates) >= 2
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(
    ("model", "seq_len", "gpus", "batch"),
    [("llama3-405b", 8192, 16384, 2048), ("llama3-8b", 8192, 8, 512), ("llama2-70b", 4096, 512, 1024)],
)
def test_the_batch_assumed_is_that_of_a_published_recipe(model, seq_len, gpus, batch):
    """Llama 3 405B had 16M tokens a step (arXiv 2407.21783), Llama 2 of any size 4M (arXiv 2307.09288)."""
    found, sentence = default_batch(load_model(model), seq_len, gpus)

    assert found == batch
    assert "arXiv" in sentence


@pytest.mark.parametrize("gpus", [6, 24, 100])
def test_the_batch_assumed_can_be_shared_by_any_number_of_gpus(gpus):
    found, _ = default_batch(load_model("llama3-8b"), 8192, gpus)

    assert found % gpus == 0


@pytest.mark.parametrize(("gpus", "accumulated"), [(1, 8), (2, 16), (64, 512)])
def test_fine_tuning_has_the_batch_that_its_tools_start_with(gpus, accumulated):
    """LLaMA-Factory's llama3_lora_sft.yaml has 1 x 8 sequences a GPU, axolotl's lora-8b.yml 2 x 4."""
    flags = Flags(seq_len=8192, runtime={"adapter": {"kind": "lora", "rank": 16}})
    workload, assumed = stated_workload(flags, load_model("llama3-8b"), gpus)

    assert workload.global_batch_size == accumulated
    assert any("axolotl" in line for line in assumed)


@pytest.mark.parametrize("runtime", ["megatron-lm", "megatron-deepspeed", "nemo-automodel", "torchtitan"])
def test_what_is_said_of_torch_compile_is_used_or_refused(planner, runtime):
    """A step predicted with --compile differs from one without, or the flag is refused; a case says it."""
    machine, workload = ("--cluster", "dgx-h100", "--gpus", "1"), ("--seq-len", "256", "--global-batch", "1")
    same = ("--model", "tiny-llama", *machine, *workload, "--runtime", runtime, "--json")
    plain, compiled = (planner("estimate", *same, *more) for more in ((), ("--compile",)))
    case = {"model": "tiny-llama", "cluster": "dgx-h100", "workload": {"seq_len": 256, "global_batch_size": 2}}
    read = load_case({**case, "plan": {"dp_shard": 1}, "runtime": {"name": runtime, "compile": True}})

    assert plain.returncode == 0, plain.stderr
    if compiled.returncode:
        assert compiled.returncode == 2
        assert "--compile" in compiled.stderr
        assert not read.question.runtime.compile
        assert any("torch.compile" in line for line in read.assumed)
    else:
        first, second = (json.loads(one.stdout)["estimate"]["step_s"]["value"] for one in (plain, compiled))
        assert first != second
        assert read.question.runtime.compile


def test_explain_searches_once(planner, monkeypatch):
    """Searching again on changed machines is for those who ask for it."""

    def refused(*_arguments, **_options):
        raise AssertionError

    monkeypatch.setattr(explaining, "best_plan", refused)

    small = ("--model", "tiny-llama", "--cluster", "dgx-h100", "--gpus", "2", "--seq-len", "256")
    assert planner("explain", *small).returncode == 0


def test_plans_that_are_the_same_but_for_replicas_are_listed_once(planner):
    """Of splits into replicas and shards that tie, the list has one."""
    asked = (*QUESTION[:4], "--gpus", "16", *QUESTION[6:], "--pp", "1", "--no-simulate", "--json")
    plans = json.loads(planner("suggest", *asked).stdout)["plans"]
    tie_group = [replace(plan_of(one["plan"]), dp_replicate=1, dp_shard=1) for one in plans]
    degrees = [(one.tp, one.cp, one.pp, one.ep) for one in tie_group]

    assert len(set(degrees)) >= len(degrees) - 1
