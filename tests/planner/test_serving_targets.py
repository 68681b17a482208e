"""Targets of serving: the most load that holds them is held, and a little more is not."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import pytest

from planner.serving.answer import estimate_of, meets
from planner.serving.candidates import deployments
from planner.serving.question.from_flags import ServingFlags, machine_of, serving_question, target_s
from planner.serving.search import search_serving
from planner.serving.stated import problems_of
from planner.serving.targets.most_load import at_load, most_load, on_fewest_gpus
from planner.serving.targets.ways import _narrower, _other_engines, _searched, way_out
from simulator.serving.deployment import Pool
from simulator.serving.traffic import with_clients
from topology.errors import Infeasible, UserError


def test_the_most_load_holds_the_targets_and_more_does_not() -> None:
    question = serving_question(
        ServingFlags(model="llama3-8b", cluster="dgx-h100", gpus=2, isl=1024, osl=64, concurrency=4, tpot=0.01)
    )
    deployment = question.deployment(Pool(tp=2))

    most = most_load(question, [deployment])

    assert most is not None
    assert not most.more
    assert meets(question, estimate_of(at_load(question, most.load), deployment))
    assert not meets(question, estimate_of(at_load(question, most.load * 1.1), deployment))


def test_a_load_that_holds_is_not_more_than_the_most_load() -> None:
    """Few requests, which decide about other loads, can miss by chance a target that the answer holds."""
    asked = ServingFlags(model="llama3-8b", cluster="dgx-h100", gpus=1, isl=1024, osl=512, request_rate=12.0)
    found = search_serving(serving_question(replace(asked, ttft=1.0)))
    tight = serving_question(replace(asked, ttft=1.000001 * found.plans[0].estimate.ttft_s.value))

    way = way_out(search_serving(tight), lambda gpus: machine_of(asked, gpus))

    assert way.most is not None
    assert way.most.load >= 12.0


def test_a_target_below_a_step_of_one_answer_is_held_by_no_load_and_simulated_at_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    question = serving_question(ServingFlags(model="llama3-8b", cluster="dgx-h100", gpus=1, concurrency=4, tpot=1e-4))
    tried: list[float] = []
    monkeypatch.setattr("planner.serving.targets.most_load.estimate_of", lambda *_, **__: tried.append(1.0))
    assert most_load(question, [plan.deployment for plan in search_serving(question).plans]) is None
    assert tried == []


def test_a_format_that_an_engine_lacks_on_a_gpu_is_refused() -> None:
    """TensorRT-LLM's support matrix: 4-bit products on Blackwell, 8-bit ones from Ada on."""
    for cluster, weights, runs in (
        ("1xH100", "float4", False), ("dgx-b200", "float4", True),
        ("1xA100", "float8", False), ("1xL40S", "float8", True),
    ):  # fmt: skip
        flags = ServingFlags(model="llama3-8b", cluster=cluster, gpus=1, engine="trtllm", weights=weights)
        question = serving_question(flags)
        assert bool(deployments(question)[0]) is runs
        assert (not problems_of(question, question.deployment(Pool()))) is runs
        assert deployments(replace(question, engine="vllm"))[0]


def test_more_requests_than_can_be_answered_are_not_held() -> None:
    question = serving_question(
        ServingFlags(model="llama3-8b", cluster="dgx-h100", gpus=1, isl=1024, osl=64, request_rate=5.0, tpot=10.0)
    )
    deployment = question.deployment(Pool())
    answered = estimate_of(replace(question, traffic=with_clients(question.traffic, 256)), deployment)

    most = most_load(question, [deployment])

    assert most is not None
    assert most.load <= 1.1 * answered.latency.requests_per_s


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("500ms", 0.5), ("0.5s", 0.5), ("2S", 2.0), (".5", 0.5), ("1500 us", 0.0015), ("1e-3", 1e-3), ("0", 0.0)],
)
def test_targets_are_read_as_people_write_them(said: str, seconds: float) -> None:
    assert target_s(said, "--ttft") == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("flag", "said", "remedies"),
    [("--ttft", "500", ["500ms", "500s"]), ("--tpot", "20", ["20ms", "20s"]), ("--tpot", "fast", ["0.02", "20ms"])],
)
def test_a_target_that_may_be_meant_otherwise_is_asked_back(flag: str, said: str, remedies: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        target_s(said, flag)

    for word in remedies:
        assert f"{flag} {word}" in raised.value.remedy
        assert target_s(word, flag) is not None


def test_formats_are_offered_that_leave_room() -> None:
    """Llama 3 70B has 66 GiB in 8 bits, which two cards of 24 GB do not hold."""
    with pytest.raises(Infeasible) as raised:
        search_serving(serving_question(ServingFlags(model="llama3-70b", cluster="2xRTX4090")))

    assert raised.value.remedy.endswith("--weights int4")
    assert search_serving(serving_question(ServingFlags(model="llama3-70b", cluster="2xRTX4090", weights="int4"))).plans


def test_a_change_that_does_not_fit_is_no_way_out() -> None:
    """gpt-oss-120b has its experts in 4 bits: in 8 it needs 109 GiB, more than one H100 has."""
    question = serving_question(ServingFlags(model="gpt-oss-120b", cluster="1xH100", isl=64, osl=8, concurrency=1))
    assert not list(_narrower(question))
    assert _searched(replace(question, weights="float8"), math.inf) is None


@pytest.mark.parametrize(
    ("said", "engines"),
    [({}, ["vllm", "trtllm"]), ({"two_batch_overlap": True}, ["vllm"]), ({"receive_every": 30}, [])],
)
def test_an_engine_is_offered_where_its_command_takes_what_was_asked(said, engines) -> None:
    asked = ServingFlags(model="llama3-8b", cluster="dgx-h100", gpus=1, isl=64, osl=8, concurrency=1, **said)
    offered = [what for what, _ in _other_engines(serving_question(replace(asked, engine="sglang")))]

    assert offered == [f"--engine {name}" for name in engines]
    for name in engines:
        serving_question(replace(asked, engine=name))  # it is not refused


@pytest.mark.parametrize("load", [{"request_rate": 8.0}, {"concurrency": 64}])
def test_the_fewest_gpus_serve_the_load_and_fewer_do_not(load) -> None:
    flags = ServingFlags(model="llama3-70b", cluster="dgx-h100", isl=512, osl=128, tpot=0.03, **load)

    found, said = on_fewest_gpus(flags)

    assert f"{found.gpus} GPUs" in said
    assert search_serving(serving_question(found)).plans[0].meets
    for gpus in (1, 2, 4, 8):
        if gpus < found.gpus:
            with contextlib.suppress(Infeasible):
                assert not search_serving(serving_question(replace(flags, gpus=gpus))).plans[0].meets


def test_no_number_of_gpus_is_named_where_none_is_enough_or_no_load_is_given() -> None:
    asked = ServingFlags(model="llama3-8b", cluster="l40s-x8", isl=512, osl=128)

    with pytest.raises(UserError, match="needs a load"):
        on_fewest_gpus(asked)
    with pytest.raises(Infeasible, match="no number of GPUs"):
        on_fewest_gpus(replace(asked, concurrency=1, tpot=1e-5))
    with pytest.raises(Infeasible) as raised:
        on_fewest_gpus(replace(asked, model="deepseek-v3", concurrency=1, cluster="8xH100"))
    assert "8: weights leave no room" in raised.value.why, "sizes that the machine does not have are no reasons"
