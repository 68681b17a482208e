"""Explanations against the estimates they are about, and flips against asking the question again by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from planner.explain.explain import STATE, answer_flips, best_plan, degrees, explain, memory_account
from planner.question.case_runtime import resolve_runtime
from planner.question.question import question_of
from planner.search.plan_space.candidates import Bounds
from planner.search.search import SearchOptions, suggest
from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.legality.frameworks import TORCHTITAN
from tests.planner.conftest import LLAMA8B, TINY, make_cluster
from tests.planner.every_plan import enumerate_candidates
from topology.rates.scaling import network_bytes_per_s, scale_network

RUNTIME = resolve_runtime({"name": "torchtitan"})[0]


@pytest.fixture(scope="module")
def result():
    return suggest(
        question_of(replace(LLAMA8B, layers=8), make_cluster(2, 2), Workload(seq_len=4096, global_batch_size=16)),
        SearchOptions(top=4, simulate=False, bounds=Bounds(max_micro_batch=2)),
    )


def test_a_plan_is_explained_where_no_plan_fits(planner, tmp_path, monkeypatch):
    """Where its time and memory go does not depend on others; that none fits is said."""
    case = {
        "id": "large",
        "model": "llama3-8b",
        "cluster": {"gpu": "rtx-4090", "gpus_per_node": 1, "nodes": 1},
        "workload": {"task": "train", "seq_len": 512, "global_batch_size": 1},
        "plan": {"dp_shard": 1, "micro_batch_size": 1, "recompute": "full"},
        "runtime": {"name": "torchtitan"},
    }
    (tmp_path / "case.json").write_text(json.dumps(case))
    monkeypatch.setattr("planner.search.infeasible.relaxations", lambda *_: [])  # seconds for other words
    done = planner("explain", tmp_path / "case.json", "--json")
    found = json.loads(done.stdout)

    assert done.returncode == 0, done.stderr
    assert "does not fit on 1 GPU" in found["none_fits"]
    assert found["behind_s"] is None
    assert found["memory"]["reserved_bytes"] > found["memory"]["capacity_bytes"]
    parts = sum(term["seconds"] for term in found["waterfall"]["terms"])
    assert found["waterfall"]["peak_s"] + parts == pytest.approx(found["waterfall"]["step_s"])


def test_runners_up_lost_by_the_sum_of_their_terms(result):
    found = explain(result.plans[0].plan, result, with_flips=False)

    assert [runner.plan for runner in found.runners] == [ranked.plan for ranked in result.plans[1:]]
    assert found.behind_s == 0.0
    for runner in found.runners:
        delta = runner.estimate.step_s.value - found.estimate.step_s.value
        assert sum(term.delta for term in runner.terms if term.unit == "s") == pytest.approx(delta)
        assert delta >= 0


def test_another_plan_is_explained_against_the_best(result):
    plan = Plan(dp_shard=2, tp=2, sequence_parallel=True, recompute="full")
    found = explain(plan, result, with_flips=False)

    assert found.plan == plan
    assert found.behind_s == pytest.approx(found.estimate.step_s.value - result.plans[0].estimate.step_s.value)
    assert len(found.runners) == len(result.plans)


def test_memory_names_the_worst_stage_and_what_state_alone_leaves_out():
    """Story S3, with a pipeline of four stages: 23.3 GB were estimated, the run went out of memory on 32 GB."""
    plan = Plan(pp=4, dp_shard=2, schedule="1F1B")
    table = estimate_plans(
        Scenario(
            model=LLAMA8B,
            cluster=make_cluster(1, 8),
            workload=Workload(seq_len=4096, global_batch_size=64),
            runtime=RUNTIME,
        ),
        [plan],
    )
    estimate = table.estimate(0)
    account = memory_account(estimate, 32e9)
    stages = estimate.memory.by_stage

    assert account.worst_stage == max(range(4), key=lambda s: estimate.memory.reserved_by_stage[s])
    assert account.state_bytes == pytest.approx(sum(stages[account.worst_stage][name] for name in STATE))
    assert {"activations", "gathered_parameters"} <= {name for name, _ in account.omitted}
    total = account.state_bytes + sum(nbytes for _, nbytes in account.omitted)
    assert total == pytest.approx(sum(stages[account.worst_stage].values()))
    assert account.observed_bytes == 32e9


def best_by_hand(cluster, workload, gpus):
    """Return the degrees of the best plan, every legal one costed."""
    found = enumerate_candidates(
        question_of(TINY, cluster, workload, framework="torchtitan", runtime=RUNTIME, gpus=gpus)
    ).plans()
    table = estimate_plans(Scenario(model=TINY, cluster=cluster, workload=workload, runtime=RUNTIME), found)
    rows = [i for i in range(len(found)) if table.fits[i]]
    return degrees(found[min(rows, key=lambda i: table.step_s[i])])


@pytest.mark.nightly  # flips of simulated plans are in test_flips.py
def test_the_answer_is_another_past_a_flip_and_the_same_before():
    """On either side of the network rate that is named, all legal plans are costed one by one."""
    workload = Workload(seq_len=4096, global_batch_size=64)
    model, gpus = replace(TINY, hidden=2048, ffn=8192, head_dim=256), 8
    cluster = make_cluster(2, 4, network=10e9)
    asked = question_of(model, cluster, workload, runtime=RUNTIME, framework=TORCHTITAN, gpus=gpus)
    flips = [flip for flip in answer_flips(asked) if flip.unit == "bytes_per_s" and flip.quantity.startswith("network")]
    now = degrees(best_plan(asked))
    assert flips
    for flip in flips:
        inward = 0.9 if flip.wins == "above" else 1.1
        past, before = (
            best_plan(replace(asked, cluster=scale_network(cluster, rate / network_bytes_per_s(cluster))))
            for rate in (flip.at, flip.at * inward)
        )

        assert degrees(past) == degrees(flip.becomes) != now
        assert degrees(before) == now


def test_asking_again_finds_what_brute_force_finds():
    workload = Workload(seq_len=4096, global_batch_size=8)
    cluster = make_cluster(1, 4)
    asked = question_of(TINY, cluster, workload, runtime=RUNTIME, framework=TORCHTITAN, gpus=4)

    assert degrees(best_plan(asked)) == best_by_hand(cluster, workload, 4)
    assert best_plan(replace(asked, gpus=1 << 30)) is None


def test_explain_and_compare_as_commands(planner, tmp_path):
    plans = [tmp_path / name for name in ("a.json", "b.json")]
    question = ("--gpus", "2", "--seq-len", "4096", "--global-batch", "4", "--model", "llama3.2-1b", "--pp", "1")
    assert planner("suggest", *question, "--out", plans[0], "--no-simulate").returncode == 0
    assert planner("suggest", *question, "--objective", "memory", "--out", plans[1]).returncode == 0

    reported = planner("explain", plans[1], "--no-flips")
    assert reported.returncode == 0
    assert "from peak to achieved" in reported.stdout
    assert "against the best plan" in reported.stdout
    document = json.loads(planner("explain", plans[0], "--no-flips", "--json").stdout)
    assert document["schema_version"] == 1
    fall = document["waterfall"]
    assert fall["peak_s"] + sum(term["seconds"] for term in fall["terms"]) == pytest.approx(fall["step_s"])
    assert set(document["rejected"]) >= {"memory"}

    compared = json.loads(planner("compare", *plans, "--json").stdout)
    assert sum(term["delta"] for term in compared["terms"] if term["unit"] == "s") == pytest.approx(compared["step_s"])
    assert compared["question"] == []
    assert compared["settings"]
    text = planner("compare", *plans).stdout
    assert "difference" in text
    assert "reserved" in text
    memory = planner("explain", plans[0], "--memory", "--observed-peak", "32GB").stdout
    assert "29.8 GiB" in memory
    assert planner("explain", plans[0], "--memory", "--observed-peak", "a lot").returncode == 2


def test_plans_of_an_answer_are_plans_of_a_case(planner, tmp_path):
    """What suggest prints as a plan, a case accepts: the same step comes out."""
    question = (
        "--gpus",
        "8",
        "--seq-len",
        "4096",
        "--global-batch",
        "32",
        "--model",
        "llama3.2-1b",
        "--pp",
        "1,2",
        "--cp",
        "1",
    )
    few = ("--micro-batch", "1", "--tp", "1,8", "--top", "3")
    answer = json.loads(planner("suggest", *question, *few, "--json").stdout)
    for ranked in answer["plans"]:
        case = {
            "id": "again",
            "model": "llama3.2-1b",
            "cluster": {
                "gpu": "h100-sxm",
                "gpus_per_node": 8,
                "nodes": 1,
                "interconnect": "nvswitch",
                "nic_gbit_per_gpu": 400,
            },
            "workload": {"seq_len": 4096, "global_batch_size": 32},
            "plan": ranked["plan"],
            "runtime": {"name": "torchtitan"},
        }
        path = tmp_path / "case.json"
        path.write_text(json.dumps(case))
        estimate = json.loads(planner("estimate", "--case", path, "--json").stdout)["estimate"]
        assert estimate["step_s"]["value"] == pytest.approx(ranked["estimate"]["step_s"]["value"], rel=0.05)


def test_text_is_no_more_precise_than_it_can_be_read(planner, tmp_path):
    """Terms stand under each other with the step's decimals; what neither plan has is left out; both say if they
    fit.
    """
    leaner = ("--recompute", "full", "--micro-batch", 1)
    question = ("--model", "llama3.2-1b", "--cluster", "dgx-h100", "--gpus", 2, "--global-batch", 16, "--pp", 1)
    plans = [tmp_path / "a.json", tmp_path / "b.json"]
    assert planner("suggest", *question, "--out", plans[0], "--no-simulate").returncode == 0
    assert planner("suggest", *question, "--out", plans[1], "--no-simulate", *leaner).returncode == 0
    text = planner("compare", *plans, env={"COLUMNS": "160"}).stdout
    seconds = re.findall(r"(?<![+\-.\d])([\d.]+) s\b", text)
    document = json.loads(planner("compare", *plans, "--json").stdout)
    memory = planner("explain", plans[0], "--memory").stdout

    assert len({len(word.partition(".")[2]) for word in seconds}) == 1
    assert "0.00 GiB   0.00 GiB" not in text
    assert re.search(r"^step .*\([+-]\d+%\)$", text, re.MULTILINE)
    assert re.search(r"^fits +yes +yes", text, re.MULTILINE)
    assert (document["first"]["fit"], document["second"]["fit"]) == ("yes", "yes")
    assert "memory    fits: " in memory
