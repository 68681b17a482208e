"""Traces: unions of intervals by brute force, Chrome files by their rules, Kineto files by example."""

import json
from itertools import pairwise

import pytest
from engine_toys import ToyMachine, training_step
from hypothesis import given
from hypothesis import strategies as st

from simulator.config.plan import Plan
from simulator.engine.simulate import simulate
from simulator.program.chrome_trace import from_kineto, to_chrome
from simulator.program.trace import Counter, Flow, Span, Trace, crossing, difference, length_s, union
from topology.errors import BadInput

_intervals = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=8
)


def _ticks(intervals):
    return {tick for start, end in intervals for tick in range(start, end)}


@given(_intervals, _intervals)
def test_unions_and_differences_by_counting_ticks(left, right):
    a, b = union(left), union(right)

    assert all(x[1] < y[0] for x, y in pairwise(a))
    assert _ticks(a) == _ticks(left)
    assert _ticks(difference(a, b)) == _ticks(left) - _ticks(right)
    assert length_s(difference(a, b)) == len(_ticks(left) - _ticks(right))


def test_exposed_communication_is_what_no_compute_covers():
    trace = Trace(
        spans=(
            Span(0, "compute", "gemm", 0.0, 4.0),
            Span(0, "fsdp", "all_gather", 1.0, 6.0, "communication"),
            Span(0, "tp", "all_reduce", 5.0, 7.0, "communication"),
            Span(0, "compute", "gemm", 6.5, 9.0),
            Span(1, "compute", "gemm", 0.0, 10.0),
        )
    )

    assert trace.exposed_s(0) == pytest.approx(2.5)  # from 4 to 6.5
    assert trace.busy_s(0, "communication") == pytest.approx(6.0)
    assert trace.busy_s(0) == pytest.approx(9.0)
    assert trace.exposed_s(1) == 0.0
    assert (trace.ranks, trace.end_s) == ((0, 1), 10.0)


def test_a_breakdown_counts_every_moment_once():
    trace = Trace(
        spans=(
            Span(0, "host", "launch", 0.0, 1.0, "host"),
            Span(0, "compute", "gemm", 0.5, 4.0),
            Span(0, "comm", "recv", 2.0, 6.0, "wait"),
            Span(0, "comm", "recv", 6.0, 7.0, "communication"),
            Span(0, "copy", "d2h", 5.0, 8.0, "copy"),
            Span(1, "compute", "gemm", 0.0, 10.0),
        )
    )

    parts = trace.breakdown_s(0)

    assert parts == {"compute": 3.5, "communication": 1.0, "copy": 2.0, "wait": 1.0, "host": 0.5, "idle": 2.0}
    assert sum(parts.values()) == trace.end_s


_spans = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 6)).map(lambda p: Span(0, "s", "x", float(p[0]), float(p[0] + p[1]))),
    max_size=7,
)


@given(_spans)
def test_crossing_spans_are_found(spans):
    """Against the definition, pair by pair: they overlap, and neither holds the other."""

    def cross(a, b):
        overlap = max(a.start_s, b.start_s) < min(a.end_s, b.end_s)
        holds = (a.start_s <= b.start_s and b.end_s <= a.end_s) or (b.start_s <= a.start_s and a.end_s <= b.end_s)
        return overlap and not holds

    expected = any(cross(a, b) for a in spans for b in spans)

    found = crossing(spans)

    assert (found is not None) == expected
    assert found is None or cross(*found)


# --- Chrome -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan", [Plan(tp=2, dp_shard=2), Plan(pp=2, cp=2), Plan(pp=2, tp=2, schedule="DualPipeV", virtual_stages=2)]
)
def test_a_simulated_step_is_a_valid_chrome_trace(plan):
    trace = simulate(training_step(plan), ToyMachine(per_node=2, launch_s=0.01), folded=False).trace
    data = json.loads(json.dumps(to_chrome(trace)))
    events = data["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]

    assert len(slices) == len(trace.spans)
    assert {names[e["pid"], e["tid"]] for e in slices} == {span.stream for span in trace.spans}
    lanes = [
        Span(e["pid"], str(e["tid"]), e["name"], round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3))
        for e in slices
    ]
    assert crossing(lanes) is None  # in whole nanoseconds, as a viewer reads them
    starts = {e["id"] for e in events if e["ph"] == "s"}
    ends = {e["id"] for e in events if e["ph"] == "f"}
    assert starts == ends == set(range(len(trace.flows)))
    for arrow in (e for e in events if e["ph"] in "sf"):
        assert any(
            e["pid"] == arrow["pid"] and e["tid"] == arrow["tid"] and e["ts"] <= arrow["ts"] <= e["ts"] + e["dur"]
            for e in slices
        )


def test_counters_flows_and_names():
    trace = Trace(
        spans=(Span(0, "host", "launch", 0.0, 1e-6, "host"), Span(0, "comm", "send", 1e-6, 3e-6, "communication")),
        flows=(Flow("send", 0, "comm", 1e-6, 0, "comm", 3e-6),),
        counters=(Counter(0, "memory", "bytes", ((0.0, 8.0),)), Counter(-1, "link a", "bytes/s", ((0.0, 1.0),))),
    )

    events = to_chrome(trace)["traceEvents"]

    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0", "links"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["host", "comm"]
    assert [(e["pid"], e["args"]) for e in events if e["ph"] == "C"] == [(0, {"bytes": 8.0}), (1, {"bytes/s": 1.0})]
    assert [(e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [(0.0, 1.0), (1.0, 2.0)]


def test_crossing_spans_are_not_written():
    spans = (Span(0, "s", "a", 0.0, 2.0), Span(0, "s", "b", 1.0, 3.0))

    with pytest.raises(ValueError, match="nested or disjoint"):
        to_chrome(Trace(spans=spans))


# --- Kineto -----------------------------------------------------------------------------------------------------------

KINETO = {
    "schemaVersion": 1,
    "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 4},
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 9, "tid": 9, "ts": 1000.0, "dur": 30.0, "args": {}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9, "ts": 1010.0, "dur": 5.0},
        {
            "ph": "X",
            "cat": "kernel",
            "name": "sm90_xmma_gemm_bf16",
            "pid": 0,
            "tid": 7,
            "ts": 1020.0,
            "dur": 100.0,
            "args": {"stream": 7, "device": 0},
        },
        {
            "ph": "X",
            "cat": "kernel",
            "name": "ncclDevKernel_AllGather_RING_LL",
            "pid": 0,
            "tid": 20,
            "ts": 1080.0,
            "dur": 90.0,
            "args": {"stream": 20, "device": 0},
        },
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "pid": 0, "tid": 7, "ts": 1130.0, "dur": 4.0},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "step", "pid": 0, "tid": 7, "ts": 1020.0, "dur": 300.0},
        {
            "ph": "X",
            "cat": "Trace",
            "name": "PyTorch Profiler (0)",
            "pid": "Spans",
            "tid": "PyTorch Profiler",
            "ts": 1,
            "dur": 9,
        },
        {
            "ph": "i",
            "s": "t",
            "name": "[memory]",
            "pid": 0,
            "tid": 0,
            "ts": 1005.0,
            "args": {"Device Type": 1, "Total Allocated": 4096},
        },
        {
            "ph": "i",
            "s": "t",
            "name": "[memory]",
            "pid": 0,
            "tid": 0,
            "ts": 1006.0,
            "args": {"Device Type": 0, "Total Allocated": 1},
        },
        {"ph": "s", "id": 5, "pid": 9, "tid": 9, "ts": 1010.0, "cat": "ac2g", "name": "ac2g"},
    ],
}


def test_a_profiler_trace_becomes_a_trace():
    trace = from_kineto(KINETO)

    assert trace.source == "measured"
    assert [(s.rank, s.stream, s.category) for s in trace.spans] == [
        (3, "host 9", "host"),
        (3, "host 9", "host"),
        (3, "stream 7", "compute"),
        (3, "stream 20", "communication"),
        (3, "stream 7", "copy"),
    ]
    assert trace.spans[2].start_s == pytest.approx(20e-6)
    assert trace.spans[2].duration_s == pytest.approx(100e-6)
    assert trace.exposed_s(3) == pytest.approx(50e-6)  # the all-gather outlasts the matmul from 1120 to 1170
    (memory,) = trace.counters
    assert memory.samples[0] == pytest.approx((5e-6, 4096.0))
    assert len(memory.samples) == 1  # host memory is left out


@given(st.lists(st.integers(0, 10**7), min_size=2, max_size=30), st.integers(0, 10**15))
def test_kernels_that_touch_in_the_file_do_not_overlap(durations_ns, origin_ns):
    """Microseconds with three decimals, as written, add up with float errors; the spans must not."""
    events, at = [], origin_ns
    for duration in durations_ns:
        kernel = {"ph": "X", "cat": "kernel", "name": "k", "tid": 7, "ts": at / 1000, "dur": duration / 1000}
        events.append(kernel)
        at += duration

    trace = from_kineto({"traceEvents": events})

    assert crossing(trace.spans) is None
    assert len(to_chrome(trace)["traceEvents"]) == 4 + len(events)


def test_a_rank_can_be_given():
    assert from_kineto(KINETO, rank=1).ranks == (1,)
    assert from_kineto({"traceEvents": KINETO["traceEvents"]}).ranks == (0,)


def test_a_trace_goes_out_as_it_came_in():
    trace = from_kineto(KINETO)

    assert len([e for e in to_chrome(trace)["traceEvents"] if e["ph"] == "X"]) == 5


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"traceEvents": {}},
        {"traceEvents": [3]},
        {"traceEvents": [{"ph": "X", "cat": "kernel", "ts": "1", "dur": 2}]},
        {"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1}]},
        {"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": 1, "dur": -2}]},
        {"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": 1e308, "dur": 2}]},
        {"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": 1, "dur": float("nan")}]},
    ],
)
def test_anything_else_is_refused(data):
    with pytest.raises(BadInput, match="not a profiler trace"):
        from_kineto(data)


_json = st.recursive(
    st.none() | st.booleans() | st.floats() | st.sampled_from(["X", "kernel", "ts", "7"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["ph", "cat", "ts", "dur", "args", "traceEvents", "stream", "name"]), inner)
    ),
    max_leaves=12,
)


@given(st.lists(_json, max_size=4))
def test_no_json_crashes_the_reader(events):
    try:
        trace = from_kineto({"traceEvents": events})
    except BadInput:
        return
    assert all(span.end_s >= span.start_s >= 0 for span in trace.spans)


@pytest.mark.parametrize("category", [[], {}, 3])
def test_a_category_that_is_no_word_is_refused(category):
    with pytest.raises(BadInput, match="cat of event 0"):
        from_kineto({"traceEvents": [{"ph": "X", "cat": category}]})
