"""Requests that keep coming, at a rate or from a closed loop, against what long runs of the same server show."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.io.inputs import read_cluster
from simulator.config.hf_config import load_model
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.estimate import ServingEstimate, estimate_serving
from simulator.serving.server import serve
from simulator.serving.steady import most_answered
from simulator.serving.traffic import Lengths, Traffic, with_clients

LOAD = Traffic(
    prompt=Lengths(mean=512, low=0.8, high=1.2),
    output=Lengths(mean=128, low=0.8, high=1.2),
    request_rate=1.0,
    steady=True,
)
CLUSTER = read_cluster("dgx-h100", 1)
MODEL = load_model("llama3-8b")


def seen_at(rate: float, deployment: Deployment) -> ServingEstimate:
    return estimate_serving(MODEL, CLUSTER, deployment, replace(LOAD, request_rate=rate))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_times_are_those_of_the_middle_of_a_long_run(engine: str) -> None:
    """From an idle server, so few requests as are in progress at a time would be answered much sooner."""
    deployment, rate = Deployment(engine=engine), 30.0
    long = serve(MODEL, CLUSTER, deployment, replace(LOAD, request_rate=rate, requests=4000))
    middle = sorted(long.answers, key=lambda answer: answer.arrival_s)[1000:3000]
    first = np.mean([answer.first_s - answer.arrival_s for answer in middle])
    whole = np.mean([answer.done_s - answer.arrival_s for answer in middle])

    seen = seen_at(rate, deployment)

    assert seen.latency.keeps_up
    assert seen.ttft_s.value == pytest.approx(first, rel=0.1)
    assert seen.e2e_s.value == pytest.approx(whole, rel=0.1)
    assert seen.output_tokens_per_s_per_gpu.value == pytest.approx(rate * 128)  # all that come are answered


def test_a_lower_rate_never_waits_longer() -> None:
    times = [seen_at(rate, Deployment()).e2e_s.value for rate in (1.0, 10.0, 30.0, 60.0, 200.0)]

    assert times == sorted(times)


@pytest.mark.parametrize("engine", ["vllm", "trtllm"])
def test_a_server_keeps_up_with_what_a_full_one_answers(engine: str) -> None:
    deployment = Deployment(engine=engine, max_num_seqs=64)
    full = serve(MODEL, CLUSTER, deployment, replace(with_clients(LOAD, 128), requests=1000))
    answered = len(full.answers) / full.seconds

    more = seen_at(1.3 * answered, deployment)

    assert seen_at(0.8 * answered, deployment).latency.keeps_up
    assert not more.latency.keeps_up
    assert more.latency.requests_per_s == pytest.approx(answered, rel=0.1)


@pytest.mark.parametrize(
    "deployment",
    [
        Deployment(max_num_seqs=64),
        Deployment(engine="sglang", max_num_seqs=64),
        Deployment(engine="trtllm", max_num_seqs=64),
        Deployment(pool=Pool(tp=2, pp=2), max_num_seqs=64),
        Deployment(pool=Pool(engines=2), prefill=Pool(), max_num_seqs=64),
        Deployment(pool=Pool(), prefill=Pool(engines=2), max_num_seqs=16),
    ],
    ids=["vllm", "sglang", "trtllm", "stages", "reading is scarce", "writing is scarce"],
)
def test_the_most_that_is_answered_is_what_full_batches_answer(deployment: Deployment) -> None:
    cluster = read_cluster("dgx-h100", 4)
    run = serve(MODEL, cluster, deployment, replace(LOAD, request_rate=1e4, requests=2000))

    most = most_answered(MODEL, cluster, deployment, LOAD)

    assert most == pytest.approx(len(run.answers) / run.seconds, rel=0.2)


@pytest.mark.parametrize(
    ("clients", "deployment"),
    [
        (64, Deployment()),
        (96, Deployment(engine="trtllm", max_num_seqs=32)),
        (32, Deployment(pool=Pool(tp=2, pp=2))),
        (16, Deployment(engine="sglang", pool=Pool(engines=2), prefill=Pool())),
    ],
    ids=["batches", "more clients than places", "stages", "separated"],
)
def test_a_closed_loop_is_that_of_the_middle_of_a_long_run(clients: int, deployment: Deployment) -> None:
    """When all clients ask an idle server at once, prompts wait for each other as they never do again."""
    cluster = read_cluster("dgx-h100", 4)
    long = serve(MODEL, cluster, deployment, replace(with_clients(LOAD, clients), requests=40 * clients))
    middle = sorted(long.answers, key=lambda answer: answer.arrival_s)[10 * clients : -clients]

    seen = estimate_serving(MODEL, cluster, deployment, with_clients(LOAD, clients)).latency

    assert seen.ttft_s.mean == pytest.approx(np.mean([one.first_s - one.arrival_s for one in middle]), rel=0.1)
    assert seen.e2e_s.mean == pytest.approx(np.mean([one.done_s - one.arrival_s for one in middle]), rel=0.03)
    assert seen.requests_per_s * seen.e2e_s.mean == pytest.approx(clients)  # Little's law
