"""Makespans against closed forms and against the simulated machine."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.columns.plan_table import plan_table
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.engine.simulate import simulate
from simulator.memory.replay import replayed_micro_batches
from simulator.pipeline.schedule_program import TURNS, last_backwards, pipeline_program
from simulator.pipeline.schedules.registry import SCHEDULES, build_schedule, schedules_that
from simulator.pipeline.schedules.table import Kind
from simulator.pipeline.stages import beside_gradients, in_flight
from simulator.program.program import Launch
from tests.examples import examples
from tests.simulator.engine_toys import SimpleCosts
from tests.simulator.makespan import peak_in_flight, peak_on_stage, pipeline_makespan
from tests.simulator.program_check import check
from tests.simulator.published_bubbles import bubble_fraction
from tests.simulator.schedule_checks import schedule_from_rows
from topology.errors import BadPlan


def _longest_rank_fraction(schedule, forward, input_grad, weight_grad):
    """Idle over total time of the rank that takes longest from its first action to its last."""
    n = schedule.stages
    timing = pipeline_makespan(schedule, [forward] * n, input_grad_s=[input_grad] * n, weight_grad_s=[weight_grad] * n)
    spans = [end - start for start, end in zip(timing.start_s, timing.end_s, strict=True)]
    return 1 - timing.busy_s[0] / max(spans)


CLOSED = [
    *((name, 1, p, m) for name in ("GPipe", "1F1B", "ZBH1") for p, m in ((1, 3), (2, 2), (4, 8), (8, 8), (8, 20))),
    *(
        (name, v, p, m)
        for name in ("LoopedBFS", "Interleaved1F1B")
        for v in (1, 2, 4)
        for p, m in ((2, 4), (4, 8), (8, 24))
    ),
    *(("InterleavedZeroBubble", v, p, m) for v in (2, 3) for p, m in ((2, 4), (4, 8), (8, 24))),
    *(
        (name, 2, p, m)
        for name in ("ZBVZeroBubble", "DualPipeV")
        for p, m in ((1, 2), (2, 4), (4, 8), (4, 20), (8, 17))
    ),
]


@pytest.mark.parametrize(("name", "v", "p", "m"), CLOSED)
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.25, 0.5)])
def test_bubbles_equal_their_closed_forms(name, v, p, m, times):
    schedule = build_schedule(name, ranks=p, micro_batches=m, stages_per_rank=v)
    keywords = dict(zip(("forward_s", "input_grad_s", "weight_grad_s"), times, strict=True))
    if name in {"ZBVZeroBubble", "DualPipeV"} and len(set(times)) > 1:
        with pytest.raises(ValueError, match="no formula"):
            bubble_fraction(name, ranks=p, micro_batches=m, stages_per_rank=v, **keywords)
        return

    expected = bubble_fraction(name, ranks=p, micro_batches=m, stages_per_rank=v, **keywords)

    assert _longest_rank_fraction(schedule, *times) == pytest.approx(expected, abs=1e-12)


def test_the_textbook_numbers():
    """p=4, m=8: 3/11 for 1F1B, 3/19 with two stages per rank; ZB-V with F=I=W leaves nothing idle."""
    assert bubble_fraction("1F1B", ranks=4, micro_batches=8) == pytest.approx(3 / 11)
    assert bubble_fraction("Interleaved1F1B", ranks=4, micro_batches=8, stages_per_rank=2) == pytest.approx(3 / 19)
    zbv = build_schedule("ZBVZeroBubble", ranks=4, micro_batches=8, stages_per_rank=2)
    ones = [1.0] * 8
    timing = pipeline_makespan(zbv, ones, input_grad_s=ones, weight_grad_s=ones)
    assert [e - s for s, e in zip(timing.start_s, timing.end_s, strict=True)] == [48.0] * 4
    assert timing.busy_s == (48.0,) * 4


def test_the_slowest_stage_sets_the_pace_of_an_uneven_pipeline():
    """1F1B with one slow stage: warm-up keeps it fed, so m slow turns, plus the stages before it, there and back."""
    schedule = build_schedule("1F1B", ranks=4, micro_batches=16)
    forward = [1.0, 3.0, 1.0, 1.0]
    timing = pipeline_makespan(schedule, forward, [2 * f for f in forward])

    assert timing.step_s == 16 * (3.0 + 6.0) + (1.0 + 2.0)


@pytest.mark.parametrize(
    ("name", "v", "expected"),
    [
        ("GPipe", 1, (16,) * 4),
        ("1F1B", 1, (4, 3, 2, 1)),
        ("ZBH1", 1, (4, 4, 4, 4)),  # as much as 1F1B's first rank: arXiv 2401.10241, table 2
        ("Interleaved1F1B", 2, (11, 9, 7, 5)),  # (v-1)p + 2(p-1-r) warm-up forwards and the one of the turn
        ("LoopedBFS", 2, (32,) * 4),
        ("ZBVZeroBubble", 2, (8,) * 4),  # 2p half-size stages: the paper's p
        ("DualPipeV", 2, (9,) * 4),  # 2p+1 half-size stages: DeepSeek's PP+1
    ],
)
def test_micro_batches_in_flight(name, v, expected):
    schedule = build_schedule(name, ranks=4, micro_batches=16, stages_per_rank=v)

    assert peak_in_flight(schedule) == expected


def test_an_input_gradient_frees_nothing():
    schedule = schedule_from_rows(["0F0 0F1 0I0 0F2 0I1 0I2 0W0 0W1 0W2"], name="x", stages_per_rank=1, micro_batches=3)

    assert peak_in_flight(schedule) == (3,)
    assert peak_on_stage(schedule, 0) == 3


# --- against the machine ----------------------------------------------------------------------------------------------


def _simulated(schedule, forward, input_grad, weight_grad, wire):
    """Run the schedule on the engine; a full backward is the sum of its halves, a pair of its parts."""
    tables = {
        "F": forward,
        "I": input_grad,
        "W": weight_grad,
        "B": [a + b for a, b in zip(input_grad, weight_grad, strict=True)],
    }

    def body(code, action, rank):
        for leaf in action.leaves:
            code.launch(leaf.kind, [leaf.stage])

    ranks = schedule.ranks
    program = pipeline_program(
        schedule, body, message_bytes=1, groups={"pp": (tuple(range(ranks)),)}, ranks_of=lambda rank: [rank]
    )
    assert check(program) == []
    costs = SimpleCosts(lambda i: tables[i.name][i.shape[0]] if isinstance(i, Launch) else wire)
    return simulate(program, costs)


_time = st.integers(1, 40).map(lambda tenths: tenths / 8)  # exact in binary: both ways add without rounding


@examples(80)
@given(st.data())
def test_makespan_equals_the_simulation(data):
    name = data.draw(st.sampled_from(sorted(SCHEDULES)))
    ranks = data.draw(st.integers(1, 4))
    v = SCHEDULES[name].least_stages
    schedule = build_schedule(name, ranks=ranks, micro_batches=2 * ranks, stages_per_rank=v)
    stages = schedule.stages
    forward, input_grad, weight_grad = (data.draw(st.lists(_time, min_size=stages, max_size=stages)) for _ in range(3))
    wire = data.draw(st.sampled_from([0.0, 0.125, 1.0, 6.0]))

    timing = pipeline_makespan(schedule, forward, input_grad_s=input_grad, weight_grad_s=weight_grad, transfer_s=wire)
    run = _simulated(schedule, forward, input_grad, weight_grad, wire)

    assert timing.step_s == pytest.approx(max(s.end_s for s in run.trace.of(category="compute")), abs=1e-12)
    for rank in range(ranks):
        assert timing.busy_s[rank] == pytest.approx(run.trace.busy_s(rank, "compute"), abs=1e-9)
        spans = list(run.trace.of(rank, category="compute"))
        assert (timing.start_s[rank], timing.end_s[rank]) == (spans[0].start_s, spans[-1].end_s)


def test_a_pair_may_be_shorter_than_its_parts():
    schedule = build_schedule("DualPipeV", ranks=2, micro_batches=8, stages_per_rank=2)
    ones = [1.0] * 4
    apart = pipeline_makespan(schedule, ones, input_grad_s=ones, weight_grad_s=ones)
    hidden = pipeline_makespan(schedule, ones, input_grad_s=ones, weight_grad_s=ones, pair_s=lambda _f, _b: 2.25)
    pairs = [sum(bool(action.parts) for action in row) for row in schedule.table]

    assert [a - b for a, b in zip(apart.busy_s, hidden.busy_s, strict=True)] == [0.75 * n for n in pairs]
    assert hidden.step_s < apart.step_s


def test_a_boundary_may_have_its_own_wire():
    schedule = build_schedule("GPipe", ranks=3, micro_batches=1)
    timing = pipeline_makespan(schedule, [1.0] * 3, [1.0] * 3, transfer_s=[0.5, 4.0])

    assert timing.step_s == 6 + 2 * (0.5 + 4.0)
    assert timing.bubble_s == (13.0, 13.0, 13.0)


@pytest.mark.parametrize(
    ("name", "keywords"), [("1F1B", {"backward_s": [1.0]}), ("1F1B", {}), ("ZBH1", {"backward_s": [1.0, 1.0]})]
)
def test_missing_times_are_named(name, keywords):
    schedule = build_schedule(name, ranks=2, micro_batches=4)

    with pytest.raises(ValueError, match="times of"):
        pipeline_makespan(schedule, [1.0, 1.0], **keywords)


def held_as_they_go_back(schedule, rank):
    """Return the most (stage, micro batch) pairs that a rank holds as one of them goes back: at all, and while every
    stage of its has gradients and none has had its last, in whole passes of the rank.
    """
    held, most, later, begun, done = 0, 0, 0, set(), set()
    last, mine = last_backwards(schedule), schedule.stages_of(rank)
    for leaf in (leaf for action in schedule.table[rank] for leaf in action.leaves):
        if leaf.kind in {Kind.BACKWARD, Kind.INPUT_GRAD}:
            most = max(most, held)
            later = max(later, held) if len(begun) == len(mine) and not done else later
        held += leaf.kind is Kind.FORWARD
        if leaf.kind in TURNS:
            held -= 1
            begun.add(leaf.stage)
            done |= {leaf.stage} if leaf.micro_batch == last[leaf.stage] else set()
    return most / len(mine), later / len(mine)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_rank_holds_less_than_is_said_of_its_schedule(name):
    """Every rank of tables up to 8 ranks: most of what is said is exact."""
    kind, exact, said = SCHEDULES[name], [], []
    for p, v, m in itertools.product((2, 3, 4, 8), (1, 2, 3), (1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 40)):
        plan = Plan(pp=p, virtual_stages=v, schedule=name)
        try:
            schedule = build_schedule(name, ranks=p, micro_batches=m, stages_per_rank=v) if kind.has_stages(v) else None
        except BadPlan:
            continue
        if schedule is not None:
            table = plan_table([plan], Workload(seq_len=8, global_batch_size=m))
            exact += [held_as_they_go_back(schedule, rank) for rank in range(p)]
            said += zip(in_flight(table)[0], beside_gradients(table)[0], strict=True)

    exact, said = np.array(exact), np.array(said)
    assert len(exact) > 30
    assert np.all(said <= np.maximum(exact, [1.0, 0.0]))
    assert np.mean(said >= exact) > 0.85


@pytest.mark.parametrize("name", schedules_that(lambda kind: not kind.forwards_first))
def test_a_few_rounds_show_the_most_that_a_longer_step_holds(name):
    kind = SCHEDULES[name]
    for p, v, m in itertools.product((2, 4, 8), (1, 2, 3), (24, 40, 50, 64, 81)):
        try:
            longer = build_schedule(name, ranks=p, micro_batches=m, stages_per_rank=v) if kind.has_stages(v) else None
        except BadPlan:
            continue
        if longer is not None:
            few = replayed_micro_batches(Plan(pp=p, virtual_stages=v, schedule=name), m)
            shorter = build_schedule(name, ranks=p, micro_batches=few, stages_per_rank=v)
            assert few <= 3 * p
            for rank in range(p):
                assert held_as_they_go_back(shorter, rank) == held_as_they_go_back(longer, rank)
