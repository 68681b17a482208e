"""Targets of serving: the most load that holds them is held, and a little more is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.serving.answer import estimate_of, meets
from planner.serving.question.from_flags import ServingFlags, serving_question
from planner.serving.targets.most_load import at_load, most_load
from planner.serving.targets.ways import _other_engines
from simulator.serving.deployment import Pool
from simulator.serving.traffic import with_clients


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
    ("said", "engines"),
    [({}, ["vllm", "trtllm"]), ({"two_batch_overlap": True}, ["vllm"]), ({"receive_every": 30}, [])],
)
def test_an_engine_is_offered_where_its_command_takes_what_was_asked(said, engines) -> None:
    asked = ServingFlags(model="llama3-8b", cluster="dgx-h100", gpus=1, isl=64, osl=8, concurrency=1, **said)
    offered = [what for what, _ in _other_engines(serving_question(replace(asked, engine="sglang")))]

    assert offered == [f"--engine {name}" for name in engines]
    for name in engines:
        serving_question(replace(asked, engine=name))  # it is not refused
