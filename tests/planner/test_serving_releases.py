"""What releases of engines can do: facts with sources, errors that name the release, searches that leave out what it
lacks.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from planner.configs.formats.configuration import CheckFlags
from planner.configs.serving import VERSIONS, check_serving, release_in
from planner.export.serving.commands import command
from planner.serving.candidates import deployments
from planner.serving.question.from_flags import ServingFlags, serving_question
from planner.serving.question.releases import WORDS, facts, parse_release, split_engine, too_old
from planner.serving.stated import problems_of, stated_deployment
from planner.validate.serving_points import engine_named
from simulator.config.hf_config import load_model
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.engine import as_started, engine_of
from simulator.serving.forward_pass import ForwardPass
from topology.catalog.clusters import cluster
from topology.errors import BadInput

DEEPSEEK = ServingFlags(model="deepseek-v3", cluster="dgx-h200", isl=100, osl=10, concurrency=4, weights="float8")


def test_releases_sort_as_they_appeared() -> None:
    releases = ["0.3.6", "0.4.6rc1", "0.4.6", "0.4.6.post2", "0.4.10", "0.5.0rc0", "0.5", "0.10.1"]
    parsed = [parse_release(text) for text in releases]
    assert all(before < after for before, after in pairwise(parsed))
    assert parse_release("v0.5.0") == parse_release("0.5")


@pytest.mark.parametrize("text", ["latest", "", "0.4.x", "1" * 40, "0.4.6.post2.3"])
def test_what_is_no_release_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="not a release"):
        parse_release(text)


def test_every_fact_has_a_source_and_an_order_and_what_is_described_has_everything() -> None:
    for engine, table in facts().items():
        for name, fact in table.items():
            assert fact.source, name
            assert name in WORDS or name.startswith("model_"), name
            assert not fact.absent or parse_release(fact.absent) < parse_release(fact.since)
            assert parse_release(fact.since) <= parse_release(VERSIONS[engine])


@pytest.mark.parametrize(
    ("engine", "pool", "says"),
    [
        ("vllm==0.7.3", Pool(tp=8, ep=8), "vLLM 0.7.3 does not have experts spread over GPUs: 0.8.0 has it"),
        ("vllm==0.8.0", Pool(dp_attention=8, ep=8), "vLLM 0.8.0 does not have attention with requests of its own"),
        (
            "vllm==0.8.2",
            Pool(dp_attention=8, ep=8),
            "vLLM 0.8.2 is not known to have attention with requests of its own",
        ),
        ("sglang==0.4.6", Pool(tp=4, pp=2), "SGLang 0.4.6 does not have pipeline parallelism: 0.4.6.post2 has it"),
        ("sglang==0.2.10", Pool(tp=8), "is not known to have latent attention"),
    ],
)
def test_a_release_that_lacks_something_is_named_with_the_one_that_has_it(engine: str, pool: Pool, says: str) -> None:
    name, release = split_engine(engine)
    question = serving_question(ServingFlags(model="deepseek-v3", cluster="dgx-h200", engine=name))
    assert any(says in line for line in too_old(question.model, question.deployment(pool), release))
    assert too_old(question.model, question.deployment(pool), VERSIONS[engine_of(name).program]) == ()


def test_separated_pools_need_a_release_that_moves_the_cache() -> None:
    flags = ServingFlags(model="llama3-8b", cluster="dgx-h200", engine="sglang==0.4.4", prefill="4xtp1", replicas=4)
    question = serving_question(flags)
    deployment, _ = stated_deployment(question, flags)
    assert any("SGLang 0.4.4 does not have reading and writing" in line for line in problems_of(question, deployment))


def test_a_search_leaves_out_what_the_release_lacks_and_counts_it() -> None:
    old, new = (deployments(serving_question(replace(DEEPSEEK, engine=engine))) for engine in ("vllm==0.8.0", "vllm"))
    assert any(one.pool.dp_attention > 1 for one in new[0])
    assert [one.pool for one in new[0] if one.pool.dp_attention == 1] == [one.pool for one in old[0]]
    assert sum(count for reason, count in old[1].items() if "vLLM 0.8.0" in reason) == len(new[0]) - len(old[0])


def test_an_older_release_schedules_while_the_gpu_waits() -> None:
    """From 0.14 on a step takes the longer of GPU and host, before it the sum: small steps are quicker by the host's
    time.
    """
    old, new = (
        serving_question(replace(DEEPSEEK, model="llama3-8b", engine=engine))
        for engine in ("vllm==0.13.0", "vllm==0.14.0")
    )
    times = []
    for question in (old, new):
        deployment = question.deployment(Pool())
        costs = ForwardPass(question.model, question.cluster, deployment, deployment.pool)
        times.append([costs.seconds(prompt_tokens=0, pairs=0.0, sequences=n, keys=500.0 * n) for n in (1, 256)])
        assert command(deployment, Pool(), "m", longest=100)[0] == "vllm"
    host = [engine_of("vllm013").step_s(0.0, n) for n in (1, 256)]
    assert times[0][0] - times[1][0] == pytest.approx(host[0] - engine_of("vllm").host_exposed_s)
    assert times[1][1] >= host[1]


def test_releases_of_tensorrt_llm_have_hosts_of_their_own() -> None:
    """Dynamo counts its own releases 0.x.post, and a release that nobody states is the older one."""
    named = {
        "TensorRT-LLM 0.17": "tensorrt", "trtllm 1.0.0rc3": "trtllm11", "trt 1.1.0rc2.post2": "trtllm11",
        "trtllm 1.2.0rc6.post2": "trtllm12", "trtllm 1.3.0rc5": "trtllm", "trtllm 0.8.1.post2": "trtllm12",
        "dynamo-trt": "trtllm12", "trt": "trtllm11", "TensorRT-LLM (2024)": "tensorrt", "vLLM (2024)": "vllm07",
        "vllm 0.7.3": "vllm07", "vllm 0.8.0": "vllm013", "vllm": "vllm013", "vllm 0.15.1": "vllm016",
        "vllm 0.17.0": "vllm",
        "sglang v0.5.9-cu130": "sglang059",
        "sglang v0.5.10.post1-cu130": "sglang", "sglang": "sglang", "sglang nightly-dev": "sglang059",
    }  # fmt: skip
    assert {name: engine_named(name) for name in named} == named


def test_hybrid_networks_wait_for_the_host_in_older_releases_of_sglang() -> None:
    """Where nothing overlaps, a step of 20 ms on the GPU takes the host's time longer; else what is left between."""
    engines = [
        as_started(split_engine(f"sglang=={release}")[0], eager=False, hybrid=hybrid)
        for release, hybrid in (("0.5.9", True), ("0.5.9", False), ("0.5.10", True))
    ]
    waits, *overlapped = (engine.step_s(0.02, 64) - 0.02 for engine in engines)

    assert waits == pytest.approx(engines[0].host_step_s + 64 * engines[0].host_sequence_s)
    assert overlapped == pytest.approx([engines[1].host_exposed_s] * 2)


def test_releases_are_told_apart_of_two_engines_only() -> None:
    with pytest.raises(BadInput, match="not distinguished"):
        split_engine("trtllm==1.0")


def test_a_command_is_judged_by_the_release_of_its_image_or_the_one_stated() -> None:
    text = "docker run vllm/vllm-openai:v0.7.3\nvllm serve deepseek-ai/DeepSeek-V3 -tp 8 --enable-expert-parallel\n"
    assert release_in(text, "vllm") == "0.7.3"
    assert release_in("pip install 'sglang[all]==0.4.6.post2'", "sglang") == "0.4.6.post2"
    found = check_serving(text, "run.sh", CheckFlags(cluster="dgx-h200"), ServingFlags(isl=100, osl=10), search=False)
    assert any("vLLM 0.7.3 does not have experts spread over GPUs" in line for line in found.problems)
    assert any("features those of 0.7.3" in line for line in found.assumed)
    newer = check_serving(
        text, "run.sh", CheckFlags(cluster="dgx-h200", release="0.9.0"), ServingFlags(isl=100, osl=10), search=False
    )
    assert not any("does not have" in line for line in newer.problems)


def test_a_context_beyond_the_models_positions_does_not_start() -> None:
    """Only of the model itself: others of its shapes may have been trained on longer texts."""

    def problems(model: str) -> str:
        text = f"vllm serve {model} -tp 4 --max-model-len 50000\n"
        return " ".join(
            check_serving(text, "run.sh", CheckFlags(), ServingFlags(isl=100, osl=10), search=False).problems
        )

    said = problems("Qwen/Qwen3-30B-A3B")
    assert "50000 tokens is beyond the 40960 positions" in said
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN" in said
    assert "positions" not in problems("Qwen/Qwen3-30B-A3B-Instruct-2507")


def test_a_release_that_is_not_stated_is_the_one_of_the_date() -> None:
    assert [engine_named("sglang", date) for date in ("2025-12-12", "2026-05-22", "")] == [
        "sglang059", "sglang", "sglang",
    ]  # fmt: skip


@pytest.mark.parametrize(("engine", "machine", "tokens", "measured_ms"), [
    ("sglang059", "dgx-h200", 1, 82.6),  # a whole prefill, sgl-project/sglang pull request 12160
    ("sglang", "dgx-b300", 1024, 71.0),  # 0.5.12, the first token of one client (InferenceX, 2026-05-22)
])  # fmt: skip
def test_prompts_wait_for_launches_as_long_as_published(
    engine: str, machine: str, tokens: int, measured_ms: float
) -> None:
    pool = Pool(tp=8)
    costs = ForwardPass(
        load_model("deepseek-v3"), cluster(machine, 8), Deployment(engine=engine, pool=pool, weights="float8"), pool
    )
    read_s = costs.seconds(prompt_tokens=tokens, pairs=tokens**2 / 2, sequences=0, keys=0.0)
    asked_s = costs.engine.host_request_s if tokens > 1 else 0.0
    assert 1e3 * (read_s + asked_s) == pytest.approx(measured_ms, rel=0.13)  # norms in sums are not launched
