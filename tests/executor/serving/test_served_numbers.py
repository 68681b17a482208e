"""The decoder that serves: its scores are the training decoder's, and its scheduler's loop answers every request."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from executor.launch.records import Deadline  # noqa: E402 - after the check for torch
from executor.serving.cache import PAGE, PagedCache, pages_of  # noqa: E402 - as above
from executor.serving.check import check  # noqa: E402 - as above
from executor.serving.decoder import ServedDecoder, Spread  # noqa: E402 - as above
from executor.serving.engine import ENGINE, Engine, graph_sizes  # noqa: E402 - as above
from executor.serving.load import Server  # noqa: E402 - as above
from executor.serving.mixed_step import StepSize, captured_sizes, holds, size_of, written_inputs  # noqa: E402 - as above
from executor.serving.operators import splits_for  # noqa: E402 - as above
from executor.serving.request import Load, ServeRequest, StepShape, require_served  # noqa: E402 - as above
from executor.serving.steps import StepTime, time_step  # noqa: E402 - as above
from simulator.config.hf_config import load_model  # noqa: E402 - as above
from simulator.serving.engine import engine_of  # noqa: E402 - as above
from simulator.serving.traffic import Lengths, Request, Traffic  # noqa: E402 - as above
from topology.errors import BadModel, BadPlan, Infeasible  # noqa: E402 - as above

CPU = torch.device("cpu")


def small_engine(pages: int = 30, sequences: int = 3) -> Engine:
    model = load_model("tiny-llama")
    served = ServedDecoder(model, Spread(), device=CPU, dtype=torch.float32, positions=400, seed=1)
    cache = PagedCache(model.layers, pages, served.heads, device=CPU, dtype=torch.float32)
    return Engine(served, cache, max_sequences=sequences, max_tokens=400)


def test_scores_of_prompts_and_answers_are_those_of_the_training_decoder() -> None:
    """Pages, positions and joined projections change nothing but the order of sums."""
    verdict = check(load_model("tiny-llama"), Spread(), all_reduce="nccl", device=CPU, dtype=torch.float32, seed=3)

    assert verdict.ok, verdict
    assert verdict.difference > 0  # two ways of summing, not one result compared with itself


def test_a_sequence_answers_the_same_alone_and_beside_others_that_come_and_go() -> None:
    """No sequence sees another's pages, though slots and pages change hands."""
    engine = small_engine()
    text = torch.arange(PAGE + 7) % 50
    alone = engine.hold(200)
    engine.read([(alone, text)])
    wanted = [engine.go_on([alone])[0].clone() for _ in range(3)]
    engine.release(alone)

    first = engine.hold(130)
    engine.read([(first, torch.arange(70) % 30)])
    again = engine.hold(200)
    engine.read([(again, text)])
    found = [engine.go_on([first, again])[1].clone()]
    engine.release(first)
    other = engine.hold(60)
    engine.read([(other, torch.arange(9))])
    found += [engine.go_on([again, other])[0].clone() for _ in range(2)]

    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_step_that_reads_is_the_same_with_the_padding_of_a_captured_one() -> None:
    """A prompt next to an answer, in rows for four prompts and three answers: scores, tokens and positions stay."""
    found = []
    for size in (StepSize(rows=1 + PAGE + 9, prompts=2, answers=1), StepSize(rows=160, prompts=4, answers=3)):
        engine = small_engine()
        going, first, second = (engine.hold(PAGE + 40) for _ in range(3))
        engine.read([(going, torch.arange(9))])
        parts = [(first, torch.arange(PAGE) % 50, 0), (second, torch.arange(9), 0)]
        inputs = torch.from_numpy(written_inputs(size, parts, [going.slot], engine.max_sequences))
        scores = engine._mixed(inputs, size, (size.rows, size.rows))[:3]
        found.append((scores, engine.tokens[:3].tolist(), engine.positions.tolist()))
        following = engine.go_on([going, first, second])
        found[-1] += (following, engine.positions.tolist())

    for exact, padded in zip(*found, strict=True):
        torch.testing.assert_close(padded, exact, rtol=1e-4, atol=1e-4)
    assert found[0][2] == [10, PAGE, 9, 0]


def test_a_step_that_reads_is_replayed_from_the_smallest_graph_that_holds_it() -> None:
    """Prompts with earlier tokens attend to pages, which no graph does."""
    sizes = captured_sizes(engine_of(ENGINE), 10**6, 64)
    engine = small_engine()
    held = engine.hold(300)

    def chosen(*parts: tuple[int, int], going: int = 5) -> int:
        step = size_of([(held, torch.zeros(length), before) for length, before in parts], going)
        return next((size.rows for size in sizes if holds(size, step)), 0)

    assert [chosen((length, 0)) for length in (1, 123, 124, 2043, 2044, 4091, 4092)] == [
        128, 128, 256, 2048, 2304, 4096, 0
    ]  # fmt: skip
    assert chosen(*[(10, 0)] * 8) == 128
    assert chosen(*[(10, 0)] * 9) == 0
    assert chosen((10, 0), (10, 50)) == 0
    assert [size.rows for size in captured_sizes(engine_of(ENGINE), 130, 3)] == [128, 256]


def test_pages_are_given_back_and_never_promised_twice() -> None:
    cache = small_engine(pages=6).cache
    first, second = cache.take(2 * PAGE), cache.take(PAGE + 1)
    assert len({*first, *second}) == 4
    assert 0 not in {*first, *second}
    with pytest.raises(Infeasible):
        cache.take(2 * PAGE)
    cache.give_back(first)
    assert cache.free_pages == 3


TRAFFICS = {
    "closed loop": Traffic(
        prompt=Lengths(mean=40, low=0.5, high=1.5), output=Lengths(mean=5), concurrency=2, requests=6
    ),
    "poisson": Traffic(prompt=Lengths(mean=30), output=Lengths(mean=4), request_rate=400.0, requests=6),
    "trace": Traffic(
        prompt=Lengths(mean=20),
        output=Lengths(mean=3),
        trace=(Request(0.0, 20, 3), Request(0.01, 5, 1), Request(0.02, 90, 4)),
    ),
}


@pytest.mark.parametrize("name", TRAFFICS)
def test_every_request_is_answered_with_all_its_tokens(name: str) -> None:
    """More requests than slots: the rest waits. What is held is free at the end."""
    engine, traffic = small_engine(), TRAFFICS[name]
    free = engine.cache.free_pages

    seen = Server(engine, traffic, 256, None, Deadline(60)).run()

    asked = sorted((request.prompt, request.output) for request in traffic.draw())
    assert seen.complete
    assert sorted((one.prompt, one.tokens) for one in seen.answers) == asked
    assert all(one.arrival_s <= one.first_s <= one.done_s for one in seen.answers)
    assert engine.cache.free_pages == free


def test_a_run_without_time_left_ends_and_says_so() -> None:
    seen = Server(small_engine(), TRAFFICS["closed loop"], 256, None, Deadline(-1)).run()
    assert not seen.complete
    assert seen.asked == 6


@pytest.mark.parametrize(("phase", "batch", "context"), [("decode", 2, 100), ("prefill", 1, 40)])
def test_steps_are_timed_or_refused_in_words(phase: str, batch: int, context: int) -> None:
    engine = small_engine()
    found = time_step(engine, StepShape(phase=phase, batch=batch, context=context))
    assert isinstance(found, StepTime)
    assert found.seconds > 0
    assert "beyond the limits" in str(time_step(engine, StepShape(phase=phase, batch=4, context=context)))
    assert "are free" in str(time_step(small_engine(pages=3), StepShape(phase=phase, batch=2, context=80)))


def test_what_cannot_be_served_is_refused_with_its_name() -> None:
    with pytest.raises(BadModel, match="experts"):
        require_served(ServeRequest(model=load_model("mixtral-8x7b")))
    with pytest.raises(BadPlan, match="key/value heads"):
        require_served(ServeRequest(model=load_model("tiny-llama"), tp=8))
    long = Traffic(prompt=Lengths(mean=4000), output=Lengths(mean=200), concurrency=1)
    with pytest.raises(BadPlan, match="4200 tokens"):
        require_served(
            ServeRequest(model=load_model("tiny-llama"), max_model_len=4096, loads=(Load(name="long", traffic=long),))
        )


def test_shapes_that_are_captured_and_how_keys_are_split() -> None:
    """Every count of sequences has a graph that holds it, at most eight rows too large; shares fill 132 SMs."""
    sizes = graph_sizes(20)
    assert sizes == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(1) == (1,)
    assert splits_for(8, 132) == 64
    assert splits_for(64 * 8, 132) == 4
    assert splits_for(10**6, 132) == 1
    assert pages_of(PAGE) == 1
    assert pages_of(PAGE + 1) == 2
