"""Requests through a simulated server: against a step-by-step reference, and what must hold whatever arrives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.config.hf_config import load_model
from simulator.serving.batch import Answer, Batch
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.engine import engine_of, engines
from simulator.serving.estimate import MANY, equal_parts, estimate_serving
from simulator.serving.forward_pass import ForwardPass
from simulator.serving.kv_cache import cache_capacity
from simulator.serving.latency import latency
from simulator.serving.server import serve
from simulator.serving.traffic import Lengths, Request, Traffic
from topology.catalog.clusters import cluster
from topology.errors import Infeasible

LLAMA = load_model("llama3-8b")
H100 = cluster("dgx-h100", 1)


def one_by_one(requests: list[Request], deployment: Deployment) -> dict[int, tuple[float, float]]:
    """Return (first token, last token) of each request by taking every step for itself: no stretch is summed up."""
    costs = ForwardPass(LLAMA, H100, deployment, deployment.pool)
    room = cache_capacity(LLAMA, H100, deployment, deployment.pool)
    batch = Batch(
        engine=costs.engine,
        capacity=room.tokens,
        max_sequences=costs.max_sequences,
        max_tokens=costs.max_batched_tokens,
        receive_every=deployment.receive_every,
    )
    outside_s = costs.engine.outside_s  # before a scheduler sees a request
    coming = [Answer(arrival_s=r.arrival_s + outside_s(r.prompt), prompt=r.prompt, output=r.output) for r in requests]
    left, now, seen = sorted(coming, key=lambda answer: answer.arrival_s), 0.0, {}
    read_s = -np.inf  # when a step last read
    while len(seen) < len(coming):
        if batch.idle:
            now = max(now, left[0].arrival_s)
            batch.seen_s = now
        while left and left[0].arrival_s <= now:
            left[0].queued_s = left[0].arrival_s
            batch.add(left.pop(0))
        step = batch.next_step()
        batch.seen_s = now if costs.engine.runs_ahead else np.inf  # the next step is put together while this one runs
        now += costs.seconds(
            prompt_tokens=step.prompt_tokens,
            pairs=step.pairs,
            sequences=step.sequences,
            keys=step.keys,
            readers=len(step.readers),
            resumes=step.resumes,
            rested_s=now - read_s,
        )
        read_s = now if step.prompt_tokens else read_s
        for answer in batch.finish_step(step, now):
            seen[coming.index(answer)] = (answer.first_s, answer.done_s)
    return seen


@pytest.mark.parametrize(("engine", "every"), [*((name, 1) for name in sorted(engines())), ("sglang", 9)])
def test_stretches_of_steps_take_what_their_steps_take(engine: str, every: int) -> None:
    requests = [Request(0.013 * i, 40 + 300 * (i % 3), 5 + 7 * (i % 4)) for i in range(12)]
    deployment = Deployment(engine=engine, receive_every=every)
    expected = one_by_one(requests, deployment)

    served = serve(LLAMA, H100, deployment, trace(requests))

    found = sorted((a.arrival_s, a.first_s, a.done_s) for a in served.answers)
    for (arrival, first, done), request, (first_expected, done_expected) in zip(
        found, requests, (expected[i] for i in range(len(requests))), strict=True
    ):
        assert arrival == pytest.approx(request.arrival_s)
        assert first == pytest.approx(first_expected, rel=1e-6)
        assert done == pytest.approx(done_expected, rel=1e-6)


def test_where_steps_are_put_together_ahead_a_request_joins_one_step_later() -> None:
    """The second request comes while an answer goes on: its first token waits for one more step than in an engine that
    schedules between steps.
    """
    requests = [Request(0.0, 100, 200), Request(0.1, 100, 2)]
    first_s = []
    for engine in ("vllm", "vllm013"):
        answers = sorted(
            serve(LLAMA, H100, Deployment(engine=engine), trace(requests)).answers, key=lambda a: a.arrival_s
        )
        first_s.append(answers[1].first_s - answers[1].arrival_s)
    costs = [ForwardPass(LLAMA, H100, Deployment(engine=engine), Pool()) for engine in ("vllm", "vllm013")]
    steps = [one.seconds(prompt_tokens=0, pairs=0.0, sequences=1, keys=120.0) for one in costs]
    assert steps[0] < first_s[0] - (first_s[1] - steps[1]) < 2.5 * steps[0]


@pytest.mark.parametrize(("engine", "named", "ranks"), [("sglang", "receive_every", 1), ("trtllm", "balance_every", 2)])
def test_requests_that_are_looked_for_seldom_wait_for_half_of_the_steps_between(
    engine: str, named: str, ranks: int
) -> None:
    """Those that come while answers go on, at any time between two looks, one at a time: never one for each rank."""
    pool = Pool(dp_attention=ranks)
    costs = ForwardPass(LLAMA, H100, Deployment(engine=engine, pool=pool), pool)
    step = costs.seconds(prompt_tokens=0, pairs=0.0, sequences=ranks, keys=1000.0 * ranks)
    apart = 1.618 * 40 * step  # the golden ratio of what lies between two looks: spread evenly over it
    requests = [*[Request(0.0, 100, 4000)] * ranks, *(Request(0.2 + apart * i, 100, 1) for i in range(16))]
    waits = []
    for every in (1, 40):
        deployment = replace(Deployment(engine=engine, pool=pool), **{named: every})
        answers = serve(LLAMA, H100, deployment, trace(requests)).answers
        waits.append(np.mean([a.first_s - a.arrival_s for a in answers if a.tokens == 1]))
    assert waits[1] - waits[0] == pytest.approx(40 / 2 * step, rel=0.25)


def test_ranks_that_balance_read_at_once_where_each_has_a_prompt_or_one_has_no_answer() -> None:
    """Two ranks: the first prompts go at once, and three that come together are one for each."""
    requests = [*[Request(0.0, 100, 4000)] * 2, *[Request(1.0, 100, 1)] * 3]
    deployment = Deployment(engine="trtllm", pool=Pool(dp_attention=2), balance_every=10**6)
    answers = serve(LLAMA, H100, deployment, trace(requests)).answers
    assert max(a.first_s - a.arrival_s for a in answers) < 0.5


@pytest.mark.parametrize(("engine", "waits"), [("sglang", 0.6), ("trtllm", 0.0)])
def test_the_first_requests_of_a_run_wait_for_its_server(engine: str, waits: float) -> None:
    """Four of forty: the mean grows by a tenth of what they wait, the median does not; only latent attention does in
    TensorRT-LLM.
    """
    asked = Traffic(prompt=Lengths(mean=100), output=Lengths(mean=20), concurrency=4, requests=40)
    steady, first = (
        latency(serve(LLAMA, H100, Deployment(engine=engine), replace(asked, first=said))).ttft_s
        for said in (False, True)
    )
    assert first.mean - steady.mean == pytest.approx(waits / 10, abs=1e-9)
    assert first.p50 == pytest.approx(steady.p50)


def trace(requests: list[Request]) -> Traffic:
    nothing = Lengths(mean=1)
    return Traffic(prompt=nothing, output=nothing, trace=tuple(requests))


SIZES = st.integers(1, 3000)
REQUESTS = st.lists(st.tuples(st.floats(0, 2), SIZES, st.integers(1, 400)), min_size=1, max_size=20)


@settings(max_examples=40, deadline=None)
@given(REQUESTS, st.sampled_from(sorted(engines())), st.sampled_from([1, 2]), st.integers(0, 4))
def test_every_request_is_answered_whole_and_no_faster_than_alone(
    drawn: list[tuple[float, int, int]], engine: str, replicas: int, most: int
) -> None:
    requests = [Request(*one) for one in sorted(drawn)]
    deployment = Deployment(engine=engine, pool=Pool(engines=replicas), max_num_seqs=most)
    served = serve(LLAMA, cluster("dgx-h100", replicas), deployment, trace(requests))

    assert sorted(a.tokens for a in served.answers) == sorted(r.output for r in requests)
    for answer in served.answers:
        assert answer.arrival_s < answer.first_s <= answer.done_s
    same = Deployment(engine=engine, max_num_seqs=most)
    alone = serve(LLAMA, H100, same, trace([requests[0]])).answers[0]
    assert alone.done_s - alone.arrival_s <= max(a.done_s - a.arrival_s for a in served.answers) + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(2, 200)), min_size=2, max_size=30), st.integers(520, 2000))
def test_the_cache_is_never_overfull_and_empty_at_the_end(sizes: list[tuple[int, int]], capacity: int) -> None:
    """With little room answers are stopped and read again; what is held always fits, but for a single answer."""
    batch = Batch(engine=engine_of("vllm"), capacity=capacity, max_sequences=16, max_tokens=256)
    for prompt, output in sizes:
        batch.add(Answer(arrival_s=0.0, prompt=prompt, output=output))
    done, now = 0, 0.0
    while done < len(sizes):
        now += 1.0
        done += len(batch.finish_step(batch.next_step(), now))
        assert batch.held <= capacity or batch.writing + len(batch.reading) <= 1
        assert now < 50_000
    assert (batch.held, batch.keys, batch.writing) == (0, 0, 0)


def test_a_closed_loop_keeps_all_clients_busy() -> None:
    """With c clients and N requests of time T, the last is answered after about N T / c."""
    traffic = Traffic(prompt=Lengths(mean=64), output=Lengths(mean=128, low=0.8, high=1.2), concurrency=8, requests=160)
    served = serve(LLAMA, H100, Deployment(), traffic)
    mean = sum(a.done_s - a.arrival_s for a in served.answers) / 160
    assert served.seconds == pytest.approx(160 / 8 * mean, rel=0.1)


def test_twice_the_replicas_serve_twice_the_clients_as_fast() -> None:
    def figures(replicas: int) -> tuple[float, float]:
        traffic = Traffic(prompt=Lengths(mean=256), output=Lengths(mean=64), concurrency=16 * replicas, requests=200)
        deployment = Deployment(pool=Pool(engines=replicas))
        answers = serve(LLAMA, cluster("dgx-h100", replicas), deployment, traffic).answers
        return sum(a.first_s - a.arrival_s for a in answers), sum(a.done_s - a.first_s for a in answers)

    assert figures(2) == pytest.approx(figures(1), rel=0.1)


def test_replicas_beyond_the_requests_change_nothing_but_how_busy_they_are() -> None:
    traffic = Traffic(prompt=Lengths(mean=64), output=Lengths(mean=16, low=0.5, high=1.5), request_rate=50, requests=20)
    few, many = (
        serve(LLAMA, cluster("dgx-h100", n), Deployment(pool=Pool(engines=n)), traffic) for n in (20, 1_000_000)
    )

    assert [(a.first_s, a.done_s) for a in few.answers] == [(a.first_s, a.done_s) for a in many.answers]
    assert many.busy == pytest.approx(few.busy * 20 / 1_000_000)


def test_pools_apart_never_stop_answers_to_read_prompts() -> None:
    """Reading elsewhere, answers come as fast as from a batch that only writes; the first token waits for the
    reading.
    """
    traffic = Traffic(prompt=Lengths(mean=4096), output=Lengths(mean=64), concurrency=16, requests=64)
    machine = cluster("dgx-h100", 4)
    together = serve(LLAMA, machine, Deployment(engine="sglang", pool=Pool(engines=4)), traffic).answers
    apart = serve(
        LLAMA, machine, Deployment(engine="sglang", pool=Pool(engines=1), prefill=Pool(engines=3)), traffic
    ).answers
    assert len(apart) == 64

    def between(answers: tuple[Answer, ...]) -> float:
        return max((a.done_s - a.first_s) / (a.tokens - 1) for a in answers)

    assert between(apart) < between(together)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_what_another_pool_has_read_continues_without_a_step_that_reads(engine: str) -> None:
    """With a prompt engine to spare, answers of two tokens and more take one step for each token after the first."""
    deployment = Deployment(engine=engine, pool=Pool(tp=2), prefill=Pool(tp=2, engines=4))
    model, machine = load_model("llama3-8b"), cluster("dgx-h100", 16)
    traffic = Traffic(prompt=Lengths(mean=64), output=Lengths(mean=33), concurrency=1, requests=4)
    costs = ForwardPass(model, machine, deployment, deployment.pool)
    steps = [costs.seconds(prompt_tokens=0, pairs=0.0, sequences=1, keys=65.0 + past) for past in range(32)]

    served = serve(model, machine, deployment, traffic)

    for answer in served.answers:
        assert answer.done_s - answer.first_s == pytest.approx(sum(steps[1:]), rel=1e-3)


@pytest.mark.parametrize("mean", [2, 100, 5000])
def test_few_requests_are_as_long_in_the_mean_as_many(mean: int) -> None:
    """Lengths from nothing to twice the mean: eight in a row have one of each eighth of the range."""
    lengths = Lengths(mean=mean, low=0.0, high=2.0)
    many = lengths.draw(100_000, np.random.default_rng(0))
    for seed in range(20):
        few = lengths.draw(200, np.random.default_rng(seed))
        assert few.mean() == pytest.approx(many.mean(), rel=0.02)
    if mean > 8:
        rows = np.sort(few.reshape(-1, 8), axis=1)
        parts = np.arange(8) * mean / 4
        assert (rows >= np.floor(parts)).all()
        assert (rows <= np.ceil(parts + mean / 4)).all()


def test_pools_apart_get_requests_in_turn() -> None:
    """The third request goes to the first engine again and waits for its long answer, though the second is free."""
    machine, sent = cluster("dgx-h100", 3), [Request(0.0, 64, 400), Request(0.1, 64, 2), Request(1.0, 64, 2)]
    deployment = Deployment(prefill=Pool(), pool=Pool(engines=2), max_num_seqs=1)
    long, short, third = sorted(serve(LLAMA, machine, deployment, trace(sent)).answers, key=lambda a: a.arrival_s)

    assert short.done_s < third.arrival_s < long.done_s < third.first_s


def test_a_request_that_no_cache_holds_is_refused() -> None:
    with pytest.raises(Infeasible, match="does not fit: the KV cache"):
        serve(LLAMA, H100, Deployment(), trace([Request(0.0, 10_000_000, 1)]))


def test_a_part_of_many_equal_engines_tells_of_all() -> None:
    """One that is a little too small to be divided, and one of a hundred thousand, with as many clients an engine."""
    lengths = {"prompt": Lengths(mean=1024, low=0.8, high=1.2), "output": Lengths(mean=64, low=0.8, high=1.2)}
    seen = []
    for engines_, divided in ((MANY - 1, False), (100_000, True)):
        deployment = Deployment(engine="vllm", pool=Pool(tp=1, engines=engines_))
        traffic = Traffic(**lengths, concurrency=8 * engines_, requests=32 * engines_)
        assert (equal_parts(deployment, traffic) > 1) is divided
        seen.append(estimate_serving(LLAMA, H100, deployment, traffic))

    whole, part = seen
    assert part.tpot_s.value == pytest.approx(whole.tpot_s.value, rel=0.02)
    assert part.ttft_s.value == pytest.approx(whole.ttft_s.value, rel=0.03)
    assert part.output_tokens_per_s_per_gpu.value == pytest.approx(whole.output_tokens_per_s_per_gpu.value, rel=0.03)
    assert part.latency.requests_per_s == pytest.approx(100_000 / (MANY - 1) * whole.latency.requests_per_s, rel=0.03)


def test_what_a_client_asks_when_its_answer_ends_is_read_in_the_next_step() -> None:
    """As the executor's own loop does, which has no frontend: not a step of the other answer later."""
    answers = Lengths(mean=20, low=0.5, high=1.5)
    traffic = Traffic(prompt=Lengths(mean=256), output=answers, concurrency=2, requests=8)
    deployment = Deployment(engine="meshwright")
    costs = ForwardPass(LLAMA, H100, deployment, deployment.pool)
    fastest, slowest = (
        costs.seconds(prompt_tokens=256, pairs=256 * 257 / 2, sequences=1, keys=266.0, rested_s=rested_s)
        for rested_s in (1.0, 0.0)  # since the last step that read
    )

    served = serve(LLAMA, H100, deployment, traffic)

    later = [answer.first_s - answer.arrival_s for answer in served.answers if answer.arrival_s]
    assert len(later) == 6
    assert 0.99 * fastest < min(later)
    assert max(later) < 1.01 * slowest
