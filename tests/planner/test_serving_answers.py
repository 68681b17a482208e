"""One serving question through every command: the same answer, parts that add up, files read back, flags refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.serving.answer import answer_deployment
from planner.serving.crossings import break_even, over_clients
from planner.serving.explain import compare_answers
from planner.serving.question.from_flags import ServingFlags, serving_question
from planner.serving.question.trace_file import read_trace
from planner.serving.search import TIE, search_serving
from planner.serving.stated import pool_word, problems_of, read_pool, stated_deployment
from simulator.serving.deployment import Pool
from tests.planner.conftest import Finished
from topology import codec
from topology.errors import BadInput, BadPlan


def test_requests_that_pile_up_are_said_to(planner: Callable[..., Finished]) -> None:
    """One H100 writes some thousands of tokens a second: five requests of 256 are kept up with, sixty are not."""
    asked = ("suggest", "--task", "serve", "--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "1")
    for rate, behind in (("5", False), ("60", True)):
        words = planner(*asked, "--isl", "1024", "--osl", "256", "--request-rate", rate).stdout.split()
        assert ("come faster than they are answered" in " ".join(words)) is behind


QUICK = (
    "--model",
    "llama3-8b",
    "--cluster",
    "dgx-h100",
    "--gpus",
    "4",
    "--isl",
    "256",
    "--osl",
    "32",
    "--concurrency",
    "8",
)


def flags(**changed: Any) -> ServingFlags:
    return ServingFlags(**({"model": "llama3-8b", "cluster": "dgx-h100", "isl": 256, "osl": 32} | changed))


def test_every_command_gives_the_same_figures(planner: Callable[..., Finished], tmp_path: Path) -> None:
    saved = str(tmp_path / "plan.json")
    best = planner("suggest", "--task", "serve", *QUICK, "--json", "--out", saved).document["plans"][0]
    degrees = ("--tp", str(best["plan"]["tp"]), "--pp", str(best["plan"]["pp"]))
    spelled = planner("estimate", "--task", "serve", *QUICK, *degrees, "--json").document
    from_file = planner("estimate", "--plan", saved, "--json").document
    explained = planner("explain", saved, "--json").document
    compared = planner("compare", saved, saved, "--json").document
    for found in (spelled, from_file, explained, compared["first"]):
        assert found["schema_version"] == 1
        assert found["legal"]
        assert found["plan"] == best["plan"]
        parts = found["estimate"].pop("breakdown_s")
        assert found["estimate"] == best["estimate"]
        assert sum(parts["token"].values()) == pytest.approx(found["estimate"]["tpot_s"]["value"])
        assert sum(parts["first_token"].values()) == pytest.approx(found["estimate"]["ttft_s"]["value"])
        assert sum(parts["reading"].values()) == pytest.approx(parts["first_token"]["reading"])
    assert all(term["delta"] == 0 for term in compared["terms"])


def test_terms_of_a_comparison_add_up_to_the_difference(planner: Callable[..., Finished], tmp_path: Path) -> None:
    one, other = str(tmp_path / "one.json"), str(tmp_path / "other.json")
    for path, tp in ((one, "1"), (other, "4")):
        assert planner("estimate", "--task", "serve", *QUICK, "--tp", tp, "--out", path).returncode == 0
    found = planner("compare", one, other, "--json").document
    for of, key in (("token", "tpot_s"), ("first_token", "ttft_s")):
        difference = found["second"]["estimate"][key]["value"] - found["first"]["estimate"][key]["value"]
        assert sum(term["delta"] for term in found["terms"] if term["of"] == of) == pytest.approx(difference)
    assert "pool.tp: 1, then 4" in found["settings"]
    said = planner("compare", one, other)
    assert "all-reduces" in said.stdout
    assert max(map(len, said.stdout.splitlines())) <= 80 + len(one) + len(other)


def test_a_comparison_is_of_one_task(planner: Callable[..., Finished], tmp_path: Path) -> None:
    serving, training = str(tmp_path / "serving.json"), str(tmp_path / "training.json")
    assert planner("estimate", "--task", "serve", *QUICK, "--out", serving).returncode == 0
    trained = ("--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "8", "--global-batch", "8")
    assert planner("estimate", *trained, "--out", training).returncode == 0
    for pair in ((serving, training), (training, serving)):
        done = planner("compare", *pair)
        assert done.returncode == 2
        assert "two plans of one task" in done.output
    assert planner("compare", training, training, "--task", "serve").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("estimate", "--isl", "100"), "--isl: an option of serving"),
        (("explain", "--replicas", "2"), "No such option"),
        (("explain", "--ttft", "1"), "--ttft: an option of serving"),
        (("estimate", "--task", "serve", "--schedule", "1F1B"), "--schedule: an option of training"),
        (("estimate", "--task", "serve", "--zero", "2"), "--zero: an option of training"),
        (("explain", "--task", "serve", "--memory"), "--memory: an option of training"),
        (("explain", "--task", "serve", "--global-batch", "4"), "--global-batch: an option of training"),
        (("estimate", "--task", "serve", "--prefill", "2xqq4"), "does not describe engines"),
        (("estimate", "--task", "serve", "--ep", "3"), "does not divide"),
    ],
)
def test_a_flag_of_another_task_is_refused(
    planner: Callable[..., Finished], arguments: tuple[str, ...], words: str
) -> None:
    done = planner(*arguments)
    assert done.returncode == 2
    assert words in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--tp", "3", "--replicas", "1"), "tp 3 does not divide 32 attention heads"),
        (("--tp", "4", "--replicas", "2"), "the degrees take 8 GPUs"),
        (("--model", "llama3-70b", "--tp", "1"), "no room for a KV cache"),
    ],
)
def test_an_illegal_deployment_ends_with_3_and_the_rule(
    planner: Callable[..., Finished], options: tuple[str, ...], reason: str
) -> None:
    done = planner("estimate", "--task", "serve", *QUICK, *options, "--json")
    assert done.returncode == 3
    found = done.document
    assert not found["legal"]
    assert found["estimate"] is None
    assert reason in found["problems"][0]["message"]


def test_flags_beside_a_saved_plan_change_it_and_say_so(planner: Callable[..., Finished], tmp_path: Path) -> None:
    saved = str(tmp_path / "plan.json")
    assert planner("estimate", "--task", "serve", *QUICK, "--tp", "4", "--out", saved).returncode == 0
    changed = planner(
        "estimate", "--plan", saved, "--concurrency", "64", "--tp", "2", "--replicas", "2", "--json"
    ).document
    asked = flags(gpus=4, concurrency=64, tp=2)
    question = serving_question(asked)
    expected = answer_deployment(question, stated_deployment(question, asked)[0]).estimate
    assert expected is not None
    assert changed["estimate"]["ttft_s"]["value"] == pytest.approx(expected.ttft_s.value)
    assert "changed pool.tp: 4, then 2" in changed["assumed"]
    refused = planner("estimate", "--plan", saved, "--gpus", "8")
    assert refused.returncode == 2
    assert "cannot be combined with a saved plan" in refused.output


def test_an_edited_plan_is_refused(planner: Callable[..., Finished], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert planner("estimate", "--task", "serve", *QUICK, "--tp", "4", "--out", str(path)).returncode == 0
    data = json.loads(path.read_text())
    data["deployment"]["pool"]["tp"] = 2
    path.write_text(json.dumps(data))
    done = planner("estimate", "--plan", str(path))
    assert done.returncode == 2
    assert "was edited" in done.output


def test_a_plan_of_a_release_with_fewer_fields_is_read(planner: Callable[..., Finished], tmp_path: Path) -> None:
    """Its fingerprints are of what it wrote; what it does not say has the value that it had then."""
    path = tmp_path / "plan.json"
    assert planner("estimate", "--task", "serve", *QUICK, "--tp", "4", "--out", str(path)).returncode == 0
    data = json.loads(path.read_text())
    assert data["deployment"].pop("eager") is False
    data["fingerprints"]["deployment"] = codec.fingerprint(data["deployment"])
    path.write_text(json.dumps(data))

    assert planner("estimate", "--plan", str(path)).returncode == 0


def test_where_the_answer_changes_lies_between_rows_that_differ() -> None:
    result = search_serving(serving_question(flags(gpus=4, concurrency=64)))
    sweep = over_clients(result, cross=True)
    changes = [(a, b) for a, b in zip(sweep.rows, sweep.rows[1:], strict=False) if a.deployment != b.deployment]
    assert len(changes) == len(sweep.crossings) > 0
    for (low, high), crossing in zip(changes, sweep.crossings, strict=True):
        assert low.value <= crossing.at <= high.value
        assert crossing.below == low.deployment


def test_requests_of_a_file_are_those_that_are_served(planner: Callable[..., Finished], tmp_path: Path) -> None:
    rows = [(0.5 * i, 100 + i, 10 + i % 3) for i in range(30)]
    lines = tmp_path / "requests.jsonl"
    lines.write_text("".join(json.dumps({"arrival_s": a, "prompt": p, "output": o}) + "\n" for a, p, o in rows))
    table = tmp_path / "requests.csv"
    table.write_text("arrival_s,prompt,output\n" + "".join(f"{a},{p},{o}\n" for a, p, o in rows))
    machine = ("--cluster", "dgx-h100", "--gpus", "1")
    found = [
        planner("estimate", "--task", "serve", *machine, "--requests", str(path), "--json").document["estimate"]
        for path in (lines, table)
    ]
    assert found[0] == found[1]
    assert found[0]["requests_per_s"] == pytest.approx(2.0, rel=0.1)
    both = planner("estimate", "--task", "serve", "--requests", str(lines), "--isl", "5")
    assert "exclude each other" in both.output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no requests"),
        ("{}", "no arrival_s and no prompt and no output"),
        ('{"at": 0, "prompt": 9, "output": 1}', "no arrival_s\n  why: it has at, prompt, output"),
        ('{"arrival_s": 0, "prompt": 0, "output": 1}', "prompt is 0"),
        ("[1]", "not an object"),
        ('{"arrival_s": 1e999, "prompt": 1, "output": 1}', "line 1"),
        ('{"arrival_s": 0, "prompt": true, "output": 1}', "prompt is True"),
    ],
)
def test_a_file_without_requests_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(text)
    with pytest.raises(BadInput, match=re.escape(said)):
        read_trace(str(path))


DEGREES = st.sampled_from([1, 2, 3, 4, 8, 16])


@given(st.integers(1, 99), DEGREES, DEGREES, DEGREES, DEGREES)
def test_a_pool_is_read_as_it_is_written(engines: int, tp: int, pp: int, ep: int, dp: int) -> None:
    pool = Pool(engines=engines, tp=tp, pp=pp, ep=ep, dp_attention=dp)
    if pool.ranks % ep:
        with pytest.raises(BadPlan):
            read_pool(pool_word(pool), "--prefill")
    else:
        assert read_pool(pool_word(pool), "--prefill") == pool


@given(st.text(max_size=30))
def test_any_text_is_a_pool_or_refused(text: str) -> None:
    try:
        pool = read_pool(text, "--prefill")
    except BadPlan:
        return
    assert pool.gpus >= 1


# --- what users ask ---------------------------------------------------------------------------------------------------


def test_odd_counts_name_the_rule_and_the_neighbours(planner: Callable[..., Finished]) -> None:
    """vllm-project/vllm#596: 6 GPUs and 64 heads: tp 3 and 6 break a rule; tp 2 with stages or replicas do not."""
    found = search_serving(serving_question(flags(model="llama3-70b", gpus=6)))
    assert {"tp 3 does not divide 64 attention heads", "tp 6 does not divide 64 attention heads"} <= set(found.rejected)
    shapes = {(p.deployment.pool.engines, p.deployment.pool.tp, p.deployment.pool.pp) for p in found.plans}
    assert {(1, 2, 3), (3, 2, 1)} & shapes
    assert {engines * tp * pp for engines, tp, pp in shapes} == {4, 6}  # an engine of four leaves two idle
    done = planner("estimate", "--task", "serve", "--model", "llama3-70b", "--gpus", "6", "--tp", "3")
    assert done.returncode == 3


def test_more_requests_than_anything_answers_are_best_served_by_what_answers_most() -> None:
    plans = search_serving(serving_question(flags(model="llama3-70b", gpus=8, request_rate=200.0))).plans
    answered = [plan.estimate.latency.output_tokens_per_s for plan in plans]

    assert not any(plan.estimate.latency.keeps_up for plan in plans)
    assert answered[0] >= max(answered) / (1 + TIE)
    assert answered[1:] == sorted(answered[1:], reverse=True)


def test_replicas_without_nvlink_tensor_parallelism_with_it() -> None:
    """Qwen3-30B-A3B on four GPUs without NVLink served slower with tp 4 than as copies (tilcodes.fly.dev)."""
    slow = search_serving(
        serving_question(flags(model="qwen3-30b-a3b", cluster="l40s-x8", gpus=4, concurrency=32, weights="float8"))
    )
    by_shape = {
        (p.deployment.pool.engines, p.deployment.pool.tp): p.estimate
        for p in slow.plans
        if p.deployment.pool.pp == p.deployment.pool.ep == 1
    }
    replicas, whole = by_shape[4, 1], by_shape[1, 4]
    assert replicas.output_tokens_per_s_per_gpu.value > whole.output_tokens_per_s_per_gpu.value
    fast = serving_question(flags(cluster="dgx-h100", gpus=4, concurrency=1))
    assert break_even(fast, 4, 1).pays


def test_custom_all_reduce_is_off_without_nvlink_between_all_gpus() -> None:
    """Four PCIe GPUs: the reason, NCCL's time and how often it is taken are said; with NVSwitch nothing is."""
    said = {}
    for cluster in ("l40s-x8", "dgx-h100"):
        question = serving_question(ServingFlags(model="llama3-8b", cluster=cluster, gpus=4, isl=100, osl=10))
        said[cluster] = " ".join(answer_deployment(question, question.deployment(Pool(tp=4))).assumed)
    assert "custom all-reduce is off, as NVLink does not connect all" in said["l40s-x8"]
    assert "64 times a step" in said["l40s-x8"]
    assert "all-reduce" not in said["dgx-h100"]


def test_the_cache_in_words_that_vllm_prints(planner: Callable[..., Finished]) -> None:
    """The log of vLLM for Llama 3 8B on an 80 GB H100 at 0.9 has about 440 thousand tokens; asked of 131,072 a
    request.
    """
    done = planner(
        "estimate",
        "--task",
        "serve",
        "--gpus",
        "1",
        "--model",
        "llama3-8b",
        "--gpu-memory-utilization",
        "0.9",
        "--isl",
        "130816",
        "--vary",
        "0",
        "--concurrency",
        "1",
    )
    words = " ".join(done.stdout.split())
    assert "GPU KV cache size:" in words
    tokens = int(words.split("GPU KV cache size: ")[1].split(" ")[0].replace(",", ""))
    assert f"Maximum concurrency for 131,072 tokens per request: {tokens / 131072:.2f}x" in words


def test_prefill_engines_count_among_the_gpus() -> None:
    question = serving_question(flags(gpus=4, prefill="1xtp2", tp=1))
    deployment, _ = stated_deployment(question, flags(gpus=4, prefill="1xtp2", tp=1))
    assert (deployment.pool.engines, deployment.gpus) == (2, 4)
    assert not problems_of(question, deployment)
    answer = answer_deployment(question, deployment)
    assert answer.account is not None
    assert answer.account.first_s["moving"] > 0, "the first token comes from where the answer is written"
    same = compare_answers(answer, answer)
    assert same.token_s == 0


def test_llama2_70b_on_four_gpus_with_bridges_between_pairs(tmp_path: Path) -> None:
    """vllm-project/vllm#2280: 16-bit weights need all four; the cache of TP 4 holds 148 thousand tokens less what
    runs.
    """
    machine = tmp_path / "pairs.json"
    machine.write_text('{"gpu": "a6000", "gpus_per_node": 4, "interconnect": "pcie", "bridges": [[0, 1], [2, 3]]}')
    found = search_serving(serving_question(flags(model="llama2-70b", cluster=str(machine), concurrency=8)))
    listed = {(plan.deployment.pool.tp, plan.deployment.pool.pp): plan for plan in found.plans}
    assert set(listed) == {(4, 1), (2, 2), (1, 4)}
    assert 0.85 * 148_000 < listed[4, 1].estimate.room.tokens < 148_000
    assert listed[4, 1].estimate.room.by_category["weights"] == pytest.approx(32.9 * 2**30, rel=0.03)
    sizes = {reason for reason in found.rejected if "KV cache" in reason}
    assert sizes, "fewer GPUs are refused with the reason"


def test_longer_prompts_want_more_engines_that_read() -> None:
    """sgl-project/sglang#7865: the best ratio of reading to writing engines depends on the length of prompts."""

    def reading_share(isl: int, osl: int) -> float:
        asked = flags(gpus=8, engine="sglang", isl=isl, osl=osl, concurrency=64, separate=True, objective="throughput")
        plans = [p.deployment for p in search_serving(serving_question(asked)).plans]
        prefill = next(plan.prefill for plan in plans if plan.prefill is not None)
        return prefill.engines * prefill.gpus / 8

    assert reading_share(256, 512) < reading_share(4096, 64)


ASKED = ("suggest", "--task", "serve", "--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", 2)
LOAD = {"--isl": 1024, "--osl": 64, "--concurrency": 64}


def test_one_question_has_one_answer_in_both_tables(planner: Callable[..., Finished]) -> None:
    document = json.loads(planner(*ASKED, *chain(*LOAD.items()), "--json").stdout)
    first = document["plans"][0]["estimate"]
    row = next(one for one in document["by_clients"] if one["clients"] == 64)

    assert row["ttft_s"]["value"] == first["ttft_s"]["value"]
    assert row["output_tokens_per_s_per_gpu"]["value"] == first["output_tokens_per_s_per_gpu"]["value"]


TARGETS = {"--ttft": 0.1, "--tpot": 0.006}


def test_targets_that_do_not_hold_come_with_changes_that_meet_them(planner: Callable[..., Finished]) -> None:
    document = json.loads(planner(*ASKED, *chain(*(LOAD | TARGETS).items()), "--json").stdout)
    found = {way["flags"]: way for way in document["way_estimates"]}

    assert not document["plans"][0]["meets_targets"]
    assert [*found] == document["ways"]
    assert {"--concurrency", "--gpus"} <= {flags.split()[0] for flags in found}
    for flags in list(found)[:2]:
        words = flags.split()
        changed = dict(zip(words[::2], words[1::2], strict=True))
        asked = dict(zip(ASKED[3::2], ASKED[4::2], strict=True)) | LOAD | changed
        first = json.loads(planner(*ASKED[:3], *chain(*asked.items()), "--json").stdout)["plans"][0]["estimate"]
        assert first["ttft_s"]["value"] <= 0.1
        assert first["tpot_s"]["value"] <= 0.006


def test_answers_of_one_token_have_no_time_between_tokens_to_state(planner: Callable[..., Finished]) -> None:
    one = planner("suggest", "--task", "serve", *QUICK, "--osl", "1")
    more = planner("suggest", "--task", "serve", *QUICK)

    assert "the only token after" in " ".join(one.stdout.split())
    assert "then one every" not in " ".join(one.stdout.split())
    assert "then one every" in " ".join(more.stdout.split())
