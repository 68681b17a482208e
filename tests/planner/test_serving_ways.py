"""What an error of a serving question says to do works when it is done, and what a plan costs is in its document."""

from __future__ import annotations

import random
import re

import pytest

from planner.export.serving.commands import command
from planner.export.serving.files import serving_files
from planner.serving.candidates import deployments
from planner.serving.pareto import pareto
from planner.serving.question.from_flags import ServingFlags, serving_question
from planner.serving.reports.documents import serving_document
from planner.serving.reports.text import print_serving
from planner.serving.search import search_serving
from simulator.serving.deployment import Deployment, Pool
from topology.errors import Infeasible, UserError

LACKS = "a100-pcie-x4"  # TensorRT-LLM has no 8-bit formats on its GPUs
OLD = "8xV100"  # no bfloat16


@pytest.mark.parametrize(
    ("asked", "ways"),
    [
        ({"model": "llama3-70b", "cluster": "dgx-a100", "gpus": 1}, {"--weights float8", "--weights int4"}),
        (
            {"model": "llama3-8b", "cluster": LACKS, "engine": "trtllm", "weights": "float8"},
            {"--weights bfloat16", "--weights int4", "--engine vllm", "--engine sglang"},
        ),
        (
            {"model": "llama3-8b", "cluster": LACKS, "engine": "trtllm", "kv_cache": "float8"},
            {"--kv-cache bfloat16", "--engine vllm", "--engine sglang"},
        ),
        (
            {"model": "llama3-8b", "cluster": OLD, "gpus": 1, "weights": "bfloat16"},
            {"--weights float16", "--weights float8", "--weights int4"},
        ),
    ],
)
def test_each_way_out_of_what_does_not_fit_fits(asked: dict[str, object], ways: set[str]) -> None:
    with pytest.raises(Infeasible) as refused:
        search_serving(serving_question(ServingFlags(**asked)))
    machine, *given = refused.value.remedy.split(", or ")

    assert machine == f"a --cluster with {'newer' if asked['cluster'] in (LACKS, OLD) else 'more or larger'} GPUs"
    assert set(given) == ways
    for way in given:
        flag, word = way.removeprefix("--").split()
        changed = ServingFlags(**asked | {flag.replace("-", "_"): word})
        assert deployments(serving_question(changed))[0], way


def test_a_comparison_of_what_does_not_fit_tells_the_same_ways() -> None:
    question = serving_question(ServingFlags(model="llama3-70b", cluster="dgx-a100", gpus=1))
    with pytest.raises(Infeasible) as refused:
        pareto(question)
    assert refused.value.remedy.endswith("--weights float8, or --weights int4")
    assert "time" not in str(refused.value)


def test_the_prompt_to_ask_for_instead_of_one_that_is_too_long_is_accepted() -> None:
    chance, fitting = random.Random("prompts"), 0
    for _ in range(60):
        asked = {
            "model": chance.choice(("gpt2", "llama2-7b", "gemma2-9b")),
            "isl": chance.choice((700, 1000, 4000, 9000)),
            "osl": chance.choice((1, 50, 300, 3000, 5000)),
            "vary": chance.choice((0.0, 0.2, 0.5, 1.0)),
            "concurrency": chance.choice((1, 10, 300)),
        }
        try:
            serving_question(ServingFlags(**asked))
        except UserError as refused:
            if shorter := re.search(r"--isl (\d+)", refused.remedy):
                serving_question(ServingFlags(**asked | {"isl": int(shorter[1])}))
                fitting += 1
    assert fitting > 10


def test_the_price_is_that_of_all_gpus_over_all_tokens() -> None:
    question = serving_question(ServingFlags(model="llama3.2-1b", cluster="h200x4", osl=16, gpu_price=2.5))
    for plan in serving_document(search_serving(question), (), top=3)["plans"]:
        estimate = plan["estimate"]
        a_second = 4 * 2.5 / 3600
        assert estimate["price_per_million_tokens"] == pytest.approx(1e6 * a_second / estimate["output_tokens_per_s"])


def test_a_node_is_used_in_part_and_no_engine_lies_across() -> None:
    """Twelve GPUs are a node of eight and four of the next: one engine of eight, three of four, none of six, and
    pipelines with a stage on the second node.
    """
    question = serving_question(ServingFlags(model="llama3-70b", cluster="dgx-h100", gpus=12))
    assert "12 GPUs of nodes of 8: the last is used in part" in question.assumed
    found = {(one.pool.engines, one.pool.tp, one.pool.pp) for one in deployments(question)[0]}
    assert {(1, 8, 1), (3, 4, 1), (6, 2, 1), (1, 4, 3)} <= found
    assert not [one for one in found if one[1] in {6, 12}]
    assert max(engines * tp * pp for engines, tp, pp in found) == 12


def test_a_script_says_how_many_engines_the_last_node_has() -> None:
    files = serving_files(Deployment(pool=Pool(engines=3, tp=4)), "m", longest=100, gpus_per_node=8)
    assert "# 2 of 3 engines: run it once on every node. The last node has the first 1 alone." in files["serve.sh"]
    files = serving_files(Deployment(pool=Pool(engines=4, tp=4)), "m", longest=100, gpus_per_node=8)
    assert "# 2 of 4 engines: run it once on every node.\n" in files["serve.sh"]


def test_separated_engines_find_nodes_with_room_for_each() -> None:
    flags = ServingFlags(model="llama3-70b", cluster="dgx-h100", gpus=12, separate=True)
    found = [one for one in deployments(serving_question(flags))[0] if one.prefill]
    sizes = {(one.pool.engines, one.pool.tp, one.prefill.engines, one.prefill.tp) for one in found if one.prefill}
    assert (1, 8, 1, 4) in sizes
    assert (2, 4, 1, 4) in sizes
    assert all(one.gpus == 12 for one in found)


def test_gpus_that_an_engine_has_no_use_for_stay_idle(capsys: pytest.CaptureFixture[str]) -> None:
    """A network of 64 heads on seven GPUs is faster with four of them than in seven stages."""
    question = serving_question(ServingFlags(model="llama3-70b", cluster="dgx-h100", gpus=7, concurrency=32))
    result = search_serving(question)
    assert result.plans[0].deployment.pool == Pool(tp=4)
    print_serving(result, (), top=1, start="")
    assert "3 of 7 GPUs are idle" in capsys.readouterr().out


def test_a_gpu_without_bfloat16_is_asked_for_float16() -> None:
    """VLLM and SGLang refuse to start a checkpoint in bfloat16 there without `--dtype` (vllm/platforms/cuda.py)."""
    question = serving_question(ServingFlags(model="llama3-8b", cluster=OLD, gpus=1))
    for engine in ("vllm", "sglang"):
        deployment = question.of_engine(engine).deployment(Pool())
        words = command(deployment, deployment.pool, "m", longest=100)
        assert words[words.index("--dtype") + 1] == "float16"


def test_a_command_serves_the_formats_that_were_asked_for() -> None:
    """trtllm-serve takes the weights' format from the checkpoint, and has no flag for the cache's."""
    asked = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 1, "weights": "float8", "kv_cache": "float8"}
    for engine, flags in (("vllm", ("--quantization", "--kv-cache-dtype")), ("sglang", ("--quantization",))):
        question = serving_question(ServingFlags(**asked, engine=engine))
        deployment = deployments(question)[0][0]
        assert {*flags} <= {*command(deployment, deployment.pool, "name", longest=100)}
        assert not any("checkpoint" in line for line in question.assumed)

    question = serving_question(ServingFlags(**asked, engine="trtllm"))
    deployment = deployments(question)[0][0]
    assert any("a checkpoint with weights in float8" in line for line in question.assumed)
    with pytest.raises(Infeasible, match="8-bit KV cache"):
        command(deployment, deployment.pool, "name", longest=100)


def test_no_deployment_is_simulated_twice_and_each_takes_all_gpus() -> None:
    for gpus in (2, 4, 8):
        flags = ServingFlags(model="qwen3-30b-a3b", cluster="dgx-h100", gpus=gpus, engine="sglang", separate=True)
        found = deployments(serving_question(flags))[0]
        assert len(found) == len(set(found))
        assert {deployment.gpus for deployment in found} == {gpus}
        readers = {one.prefill.engines * one.prefill.gpus for one in found if one.prefill}
        assert readers == set(range(1, gpus)), "each division of so few GPUs"
