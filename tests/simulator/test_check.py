"""Broken programs of every kind are reported, sound ones are not accused."""

from dataclasses import replace

import networkx as nx
import pytest
from engine_toys import ToyMachine, training_step
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.config.plan import Plan
from simulator.engine.simulate import simulate
from simulator.program.program import CodeWriter, Collective, Program, RecordEvent, WaitEvent
from tests.simulator import program_check as ck
from tests.simulator.engine_toys import SimpleCosts
from tests.simulator.program_check import check


def kinds(*codes: CodeWriter, groups=None) -> list[str]:
    everyone = tuple(range(len(codes)))
    program = Program(
        codes=tuple(code.code(f"r{rank}", [rank]) for rank, code in enumerate(codes)),
        groups={"world": (everyone,), "other": (everyone,)} if groups is None else groups,
    )
    return [problem.kind for problem in check(program)]


def test_reading_what_nobody_wrote():
    code = CodeWriter()
    code.launch("a", reads=("x",))

    assert kinds(code) == [ck.UNDEFINED]


def test_parameters_are_filled_from_the_start():
    code = CodeWriter()
    code.launch("a", reads=("w",))

    assert check(Program(codes=(code.code("r0", [0]),)), given=["w"]) == []


def test_a_missing_event_is_a_race():
    code = CodeWriter()
    code.launch("a", writes=("x",))
    code.copy(8, "d2h", reads=("x",))

    assert kinds(code) == [ck.UNORDERED]


def test_overwriting_what_another_stream_reads_is_a_race():
    code = CodeWriter()
    code.launch("a", writes=("x",))
    code.after("copy", "compute")
    code.copy(8, "d2h", reads=("x",))
    code.launch("a", writes=("x",))

    assert kinds(code) == [ck.UNORDERED]


def test_order_goes_through_other_streams_and_the_host():
    code = CodeWriter()
    code.launch("a", writes=("x",))
    code.after("comm", "compute")
    code.synchronize("comm")
    code.copy(8, "d2h", reads=("x",))  # issued after the host waited for comm, which waited for compute

    assert kinds(code) == []


def test_events_are_recorded_once_and_before_they_are_waited_for():
    code = CodeWriter()
    code.wait("compute", "e")
    code.record("comm", "e")
    code.record("comm", "e")

    assert set(kinds(code)) == {ck.EVENT}


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ([("all_reduce", 8)], [("all_gather", 8)]),
        ([("all_reduce", 8)], [("all_reduce", 16)]),
        ([("all_reduce", 8), ("all_gather", 4)], [("all_gather", 4), ("all_reduce", 8)]),
    ],
)
def test_ranks_of_a_group_must_agree(mine, theirs):
    a, b = CodeWriter(), CodeWriter()
    for code, calls in ((a, mine), (b, theirs)):
        for op, nbytes in calls:
            code.collective(op, "world", nbytes)

    assert kinds(a, b) == [ck.COLLECTIVE]


def test_a_rank_that_stays_away_is_a_mismatch_and_a_deadlock():
    a, b = CodeWriter(), CodeWriter()
    a.collective("all_reduce", "world", 8)
    b.launch("a")

    assert kinds(a, b) == [ck.COLLECTIVE, ck.DEADLOCK]


def test_ranks_in_different_groups_owe_each_other_nothing():
    a, b = CodeWriter(), CodeWriter()
    a.collective("all_reduce", "own", 8)
    b.collective("all_gather", "own", 4)

    assert kinds(a, b, groups={"own": ((0,), (1,))}) == []


def test_a_message_without_its_other_end():
    a, b = CodeWriter(), CodeWriter()
    a.send("world", 1, 8)
    a.send("world", 1, 8)
    b.recv("world", 0, 8)

    assert kinds(a, b) == [ck.MESSAGE, ck.DEADLOCK]


def test_a_message_of_two_sizes_and_of_two_tags():
    a, b = CodeWriter(), CodeWriter()
    a.send("world", 1, 8)
    b.recv("world", 0, 16)
    assert kinds(a, b) == [ck.MESSAGE]

    a, b = CodeWriter(), CodeWriter()
    a.send("world", 1, 8, tag="x")
    b.recv("world", 0, 8, tag="y")
    assert kinds(a, b) == [ck.MESSAGE, ck.MESSAGE, ck.DEADLOCK]


def test_crossed_groups_deadlock_and_the_cycle_is_named():
    a, b = CodeWriter(), CodeWriter()
    for code, families in ((a, ("world", "other")), (b, ("other", "world"))):
        for family in families:
            code.collective("all_reduce", family, 8)
    program = Program(codes=(a.code("a", [0]), b.code("b", [1])), groups={"world": ((0, 1),), "other": ((0, 1),)})

    (problem,) = check(program)

    assert problem.kind == ck.DEADLOCK
    assert problem.what == (
        "rank 0 comm (all_reduce world) waits for rank 1 comm (all_reduce other) waits for "
        "rank 0 comm (all_reduce world)"
    )


def test_two_blocking_sends_facing_each_other_deadlock():
    """The classic: both send first on one stream. On streams of their own, the same messages go through."""
    for streams, expected in (("comm", "comm"), [ck.DEADLOCK]), (("out", "in"), []):
        codes = []
        for rank in range(2):
            code = CodeWriter()
            code.send("world", 1 - rank, 8, stream=streams[0])
            code.recv("world", 1 - rank, 8, stream=streams[1])
            codes.append(code)
        assert kinds(*codes) == expected


def test_a_ring_needs_send_and_receive_at_once():
    one_by_one, grouped = CodeWriter(), CodeWriter()
    one_by_one.send("ring", 1, 8, relative=True)
    one_by_one.recv("ring", -1, 8, relative=True)
    grouped.exchange("ring", 1, 8)

    for code, expected in ((one_by_one, [ck.DEADLOCK]), (grouped, [])):
        program = Program(codes=(code.code("all", range(4)),), groups={"ring": ((0, 1, 2, 3),)})
        assert [problem.kind for problem in check(program)] == expected


def test_a_rank_in_two_groups_of_a_family_is_a_structure_problem():
    code = CodeWriter()
    code.collective("all_reduce", "world", 8)

    assert kinds(code, groups={"world": ((0,), (0,))}) == [ck.STRUCTURE]


# --- random programs --------------------------------------------------------------------------------------------------


@st.composite
def dags(draw):
    """A program from a random DAG: each node runs on some stream, reads its parents, waits for those elsewhere."""
    code = CodeWriter()
    streams: list[str] = []
    for node in range(draw(st.integers(2, 12))):
        stream = draw(st.sampled_from(["compute", "comm", "copy"]))
        parents = draw(st.sets(st.integers(0, node - 1), max_size=3)) if node else set()
        for parent in sorted(parents):
            if streams[parent] != stream:
                code.wait(stream, f"done {parent}")
        reads, writes = tuple(f"buffer {parent}" for parent in sorted(parents)), (f"buffer {node}",)
        if draw(st.booleans()):
            code.launch("kernel", stream=stream, reads=reads, writes=writes)
        else:
            code.collective("all_reduce", "world", 8, stream=stream, reads=reads, writes=writes)
        code.record(stream, f"done {node}")
        streams.append(stream)
    return code


@settings(max_examples=60, deadline=None)
@given(dags(), st.integers(1, 4))
def test_programs_from_dags_are_sound_and_finish(code, ranks):
    program = Program(codes=(code.code("all", range(ranks)),), groups={"world": (tuple(range(ranks)),)})

    assert check(program) == []
    assert simulate(program, SimpleCosts(lambda _: 1.0)).step_s >= 1.0


def _racy(instructions) -> bool:
    """By brute force: does some kernel read a buffer whose writer is not an ancestor by streams and events?"""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(instructions)))
    last: dict[str, int] = {}
    recorded: dict[str, int] = {}
    written: dict[str, int] = {}
    reads = []
    for k, instruction in enumerate(instructions):
        if instruction.stream in last:
            graph.add_edge(last[instruction.stream], k)
        last[instruction.stream] = k
        if isinstance(instruction, RecordEvent):
            recorded[instruction.event] = k
        elif isinstance(instruction, WaitEvent):
            graph.add_edge(recorded[instruction.event], k)
        else:
            reads += [(written[name], k) for name in instruction.reads]
            written.update(dict.fromkeys(instruction.writes, k))
    return not all(nx.has_path(graph, writer, reader) for writer, reader in reads)


@settings(max_examples=100, deadline=None)
@given(dags(), st.data())
def test_a_dropped_wait_is_told_exactly_when_it_was_needed(code, data):
    full = code.code("all", [0])
    waits = [k for k, i in enumerate(full.instructions) if isinstance(i, WaitEvent)]
    if not waits:
        return
    dropped = data.draw(st.sampled_from(waits))
    less = replace(full, instructions=full.instructions[:dropped] + full.instructions[dropped + 1 :])

    reported = {problem.kind for problem in check(Program(codes=(less,), groups={"world": ((0,),)}))}

    assert reported == ({ck.UNORDERED} if _racy(less.instructions) else set())


@st.composite
def two_ranks_with_a_swap(draw):
    calls = draw(
        st.lists(
            st.tuples(st.sampled_from(["all_reduce", "all_gather"]), st.integers(1, 4)), min_size=2, max_size=8
        ).filter(lambda calls: len(set(calls)) > 1)
    )
    pairs = [(i, j) for i in range(len(calls)) for j in range(i) if calls[i] != calls[j]]
    i, j = draw(st.sampled_from(pairs))
    swapped = list(calls)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    return calls, swapped


@settings(max_examples=60, deadline=None)
@given(two_ranks_with_a_swap())
def test_a_swap_of_two_collectives_on_one_rank_is_found(calls):
    codes = []
    for sequence in calls:
        code = CodeWriter()
        for op, nbytes in sequence:
            code.collective(op, "world", nbytes)
        codes.append(code)

    assert kinds(*codes) == [ck.COLLECTIVE]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_swap_inside_a_training_step_is_found(data):
    """Rank 3 of 8 exchanges two collectives that differ: a mismatch if on one group, and never silence."""
    program = training_step(Plan(dp_shard=2, dp_replicate=2, tp=2), micro_batches=2)
    (code,) = program.codes
    calls = [k for k, i in enumerate(code.instructions) if isinstance(i, Collective)]
    a = data.draw(st.sampled_from(calls))
    b = data.draw(st.sampled_from(calls))
    first, second = code.instructions[a], code.instructions[b]
    if (first.group, first.op, first.nbytes) == (second.group, second.op, second.nbytes):
        return
    swapped = list(code.instructions)
    swapped[a], swapped[b] = second, first
    broken = replace(
        program,
        codes=(
            replace(code, ranks=tuple(r for r in code.ranks if r != 3)),
            replace(code, name="rank 3", ranks=(3,), instructions=tuple(swapped)),
        ),
    )

    problems = check(broken)

    assert problems or simulate(broken, ToyMachine()).step_s > 0


def test_a_training_step_is_sound():
    assert check(training_step(Plan(pp=2, dp_shard=2, tp=2, cp=2))) == []
