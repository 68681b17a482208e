"""Aggregation loses nothing: busy time stays, wide spans stay themselves, and the number of bars is bounded."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.analytical.scenario import Scenario
from simulator.program.trace import COMMUNICATION, COMPUTE, HOST, Counter, Span, Trace
from ui.charts.timeline import LANES, bars, samples, timeline


@st.composite
def traces(draw):
    """Spans of a few ranks, disjoint on each stream, of very different lengths."""
    spans = []
    for rank in range(draw(st.integers(1, 3))):
        for stream, category in (("compute", COMPUTE), ("comm", COMMUNICATION), ("host", HOST)):
            at = 0.0
            for gap, length in draw(st.lists(st.tuples(st.floats(0, 0.1), st.floats(1e-6, 2)), max_size=40)):
                at += gap
                spans.append(
                    Span(rank, stream, draw(st.sampled_from(["forward.0", "backward.0"])), at, at + length, category)
                )
                at += length
    return Trace(spans=tuple(sorted(spans, key=lambda span: span.start_s)))


@given(traces())
def test_busy_time_is_kept_whole(trace):
    line = timeline(trace)
    if not trace.spans:
        assert bars(line, window=(0, 1), lanes=set(LANES), ranks={0}) == []
        return
    drawn = bars(line, window=(0.0, trace.end_s), lanes=set(LANES), ranks=set(line.ranks), most=60)

    for rank in line.ranks:
        for lane, category in (("compute", COMPUTE), ("communication", COMMUNICATION), ("host", HOST)):
            shown = sum(bar.busy_s for bar in drawn if (bar.rank, bar.lane) == (rank, lane))
            assert shown == pytest.approx(sum(span.duration_s for span in trace.of(rank, category=category)), abs=1e-9)
    assert sum(bar.spans for bar in drawn) == len(trace.spans)


@given(traces(), st.floats(0, 3), st.floats(0.01, 3))
def test_a_window_shows_what_lies_in_it(trace, begin, length):
    line = timeline(trace)
    window = (begin, begin + length)
    drawn = bars(line, window=window, lanes=set(LANES), ranks=set(line.ranks))

    inside = sum(max(0.0, min(s.end_s, window[1]) - max(s.start_s, window[0])) for s in trace.spans)
    assert sum(bar.busy_s for bar in drawn) == pytest.approx(inside, abs=1e-9)
    for bar in drawn:
        assert window[0] - 1e-12 <= bar.start_s <= bar.end_s <= window[1] + 1e-12


@pytest.mark.parametrize("most", [500, 4000])
def test_the_number_of_bars_is_bounded(most):
    """64 ranks of 4,000 short spans each."""
    spans = tuple(
        Span(rank, "compute", f"{way}.0", i * 1e-3, i * 1e-3 + 9e-4)
        for rank in range(64)
        for i, way in enumerate(["forward", "backward"] * 2000)
    )
    line = timeline(Trace(spans=spans))
    drawn = bars(line, window=(0.0, 4.0), lanes={"compute"}, ranks=set(range(64)), most=most)

    assert len(drawn) <= 2 * most + 64 * 8
    assert sum(bar.spans for bar in drawn) == len(spans)


def test_spans_wider_than_a_cell_keep_their_names():
    spans = (Span(0, "compute", "optimizer", 0.0, 1.0), Span(0, "compute", "stage forward.0", 1.0, 2.0))
    drawn = bars(timeline(Trace(spans=spans)), window=(0.0, 2.0), lanes={"compute"}, ranks={0})

    assert [(bar.name, bar.kind) for bar in drawn] == [("optimizer", "optimizer"), ("stage forward.0", "forward")]


def test_merged_bars_keep_the_time_of_every_kind():
    """Short forward and longer backward spans in turn: both are seen, in the share of their time."""
    spans = tuple(
        Span(0, "compute", f"{way}.0", i * 1e-3 + at, i * 1e-3 + end)
        for i in range(8000)
        for way, at, end in (("forward", 0.0, 3e-4), ("backward", 3e-4, 9e-4))
    )
    line = timeline(Trace(spans=spans))
    drawn = bars(line, window=(0.0, 8.0), lanes={"compute"}, ranks={0}, most=400)

    busy = {kind: sum(bar.busy_s for bar in drawn if bar.kind == kind) for kind in ("forward", "backward")}
    width = {kind: sum(bar.end_s - bar.start_s for bar in drawn if bar.kind == kind) for kind in busy}
    assert busy == pytest.approx({"forward": 2.4, "backward": 4.8})
    assert width["backward"] / width["forward"] == pytest.approx(2.0)
    assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(drawn))


def test_an_empty_window_is_a_fault():
    with pytest.raises(ValueError, match="no length"):
        bars(timeline(Trace(spans=())), window=(1.0, 1.0), lanes={"compute"}, ranks={0})


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1e9)), min_size=1, max_size=2000))
def test_the_peak_of_a_counter_survives(points):
    ordered = tuple(sorted(points))
    counter = Counter(0, "memory", "bytes", ordered)
    shown = samples(counter, end_s=10.0, most=50)

    assert len(shown) <= max(len(ordered), 50) + 1
    assert max(value for _, value in shown) == max(value for _, value in ordered)
    assert [time for time, _ in shown] == sorted(time for time, _ in shown)


@pytest.mark.nightly
def test_32_stages_of_128_micro_batches_become_few_bars():
    """The size that a browser must not be given whole; what it takes is printed, not asserted."""
    from planner.io.inputs import read_cluster
    from planner.question.question import default_runtime
    from simulator.config.hf_config import load_model
    from simulator.config.plan import Plan
    from simulator.config.workload import Workload
    from simulator.legality.frameworks import framework_named
    from simulator.lowering.simulation import simulate_plan

    plan = Plan(pp=32, schedule="1F1B", recompute="full")
    found = simulate_plan(
        Scenario(
            model=load_model("llama3-70b"),
            cluster=read_cluster("gb200-nvl72", 32),
            workload=Workload(seq_len=1024, global_batch_size=128),
            runtime=default_runtime(framework_named("torchtitan")),
        ),
        plan,
    )
    began = time.perf_counter()
    line = timeline(found.run.trace)
    read = time.perf_counter()
    drawn = bars(line, window=(0.0, line.length_s), lanes={"compute"}, ranks=set(line.ranks))
    print(f"{len(line):,} spans: columns {read - began:.2f} s, {len(drawn)} bars {time.perf_counter() - read:.2f} s")

    assert len(line) > 25_000
    assert len(drawn) < 9000
