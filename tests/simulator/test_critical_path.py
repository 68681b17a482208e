"""The critical path against what it means: exactly its spans, made longer, make the step longer."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.engine.simulate import simulate
from simulator.program.critical_path import critical_path, path_parts_s
from simulator.program.program import CodeWriter, Collective, Program, Recv, Send
from simulator.program.trace import COMPUTE, HOST, Span, Trace
from tests.simulator.engine_toys import SimpleCosts

STREAMS = ("compute", "comm", "copy")
MORE = 0.001


def written(rank, steps):
    """Return code whose kernels have names of their own: (stream, stream it waits for first or None)."""
    code = CodeWriter()
    for number, (stream, after) in enumerate(steps):
        if after is not None and after != stream:
            code.after(stream, after)
        code.launch(f"r{rank}k{number}", stream=stream)
        if number % 3 == 2:
            code.collective("all_reduce", "world", 100 + number, stream="comm")
    return code.code(f"code {rank}", [rank])


def costs(lengths, slower=None):
    def duration(instruction):
        if isinstance(instruction, Collective | Send | Recv):
            return 0.5
        return lengths[instruction.name] + (MORE if instruction.name == slower else 0.0)

    return SimpleCosts(duration)


@st.composite
def programs(draw):
    """Two ranks that meet now and then, each with kernels on three streams; the sums of no two sets of times are
    equal.
    """
    count = draw(st.integers(3, 8))
    steps = [
        draw(
            st.lists(
                st.tuples(st.sampled_from(STREAMS), st.sampled_from([*STREAMS, None])), min_size=count, max_size=count
            )
        )
        for _ in range(2)
    ]
    names = [f"r{rank}k{number}" for rank in range(2) for number in range(count)]
    drawn = draw(st.lists(st.integers(1, 50), min_size=len(names), max_size=len(names)))
    lengths = {name: value + 2.0**-i * 0.4 for i, (name, value) in enumerate(zip(names, drawn, strict=True))}
    codes = tuple(written(rank, own) for rank, own in enumerate(steps))
    return Program(codes=codes, groups={"world": ((0, 1),)}), lengths


@given(programs())
def test_only_kernels_on_the_path_make_the_step_longer(made):
    program, lengths = made
    run = simulate(program, costs(lengths), folded=False)
    path = [run.trace.spans[i] for i in critical_path(run.trace)]
    named = {span.name for span in path}

    assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(path))
    assert sum(span.duration_s for span in path) == pytest.approx(run.step_s)
    for name in lengths:
        longer = simulate(program, costs(lengths, slower=name), folded=False).step_s - run.step_s
        assert longer == pytest.approx(MORE if name in named else 0.0, abs=MORE / 100)


def test_the_path_goes_through_the_rank_that_others_wait_for():
    """Rank 1 computes longer before the all-reduce, rank 0 after it: the path changes rank there."""
    codes = []
    for rank, (before, after) in enumerate([("short", "long"), ("long", "short")]):
        code = CodeWriter()
        code.launch(before)
        code.after("comm", "compute")
        code.collective("all_reduce", "world", 8, stream="comm")
        code.after("compute", "comm")
        code.launch(after)
        codes.append(code.code(f"code {rank}", [rank]))
    lengths = {"short": 1.0, "long": 5.0}
    run = simulate(Program(codes=tuple(codes), groups={"world": ((0, 1),)}), costs(lengths), folded=False)
    path = [run.trace.spans[i] for i in critical_path(run.trace)]

    assert run.step_s == 10.5
    assert [(span.rank, span.name) for span in path if span.category == COMPUTE] == [(1, "long"), (0, "long")]


def test_a_measured_trace_with_gaps_is_followed_over_them():
    spans = (
        Span(0, "host", "launch", 0.0, 1.0, HOST),
        Span(0, "compute", "k", 1.2, 2.0),
        Span(0, "compute", "l", 2.5, 4.0),
    )
    path = critical_path(Trace(spans=spans))

    assert path == (0, 1, 2)
    assert path_parts_s([spans[i] for i in path], 4.0) == pytest.approx({"host": 1.0, "compute": 2.3, "gaps": 0.7})


def test_an_empty_trace_has_no_path():
    assert critical_path(Trace(spans=())) == ()
