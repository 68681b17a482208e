"""Folding is exact: ranks that are not simulated have the timeline of the one that is."""

import random
from dataclasses import dataclass

import pytest
from engine_toys import ToyMachine, training_step
from hypothesis import given
from hypothesis import strategies as st

from simulator.config.plan import Plan
from simulator.engine.simulate import simulate
from simulator.program.cost_model import Cost, LinkUse
from simulator.program.fold import fold
from simulator.program.program import CodeWriter, Launch, Program
from tests.examples import examples
from tests.simulator.engine_toys import SimpleCosts, mesh_groups
from tests.simulator.program_check import check

PLANS = {
    "dp": Plan(dp_replicate=4),
    "fsdp": Plan(dp_shard=8),
    "tp": Plan(tp=4),
    "cp ring": Plan(cp=4),
    "pp": Plan(pp=4),
    "pp tp": Plan(pp=2, tp=2),
    "pp dp": Plan(pp=2, dp_replicate=4),
    "pp interleaved": Plan(pp=2, dp_shard=2, schedule="Interleaved1F1B", virtual_stages=2),
    "pp v": Plan(pp=2, tp=2, schedule="DualPipeV", virtual_stages=2),
    "hsdp cp": Plan(dp_replicate=2, dp_shard=2, cp=2),
    "all": Plan(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2),
}


def timelines(run):
    """Every rank's spans, as the run implies them."""
    spans, classes = {}, run.folding.classes
    for span in run.trace.spans:
        spans.setdefault(span.rank, []).append((span.stream, span.name, span.start_s, span.end_s))
    return {rank: sorted(spans[one.representative]) for one in classes for rank in one.ranks}


def assert_same(program, machine):
    """Run folded and unfolded; compare all spans of all ranks to the nanosecond. Return the number of classes."""
    folded, full = simulate(program, machine), simulate(program, machine, folded=False)
    assert folded.step_s == pytest.approx(full.step_s, abs=1e-9)
    left, right = timelines(folded), timelines(full)
    assert left.keys() == right.keys()
    for rank, mine in left.items():
        assert [span[:2] for span in mine] == [span[:2] for span in right[rank]]
        for a, b in zip(mine, right[rank], strict=True):
            assert a[2:] == pytest.approx(b[2:], abs=1e-9)
    return len(folded.folding.classes)


@pytest.mark.parametrize("name", PLANS)
def test_folded_equals_unfolded(name):
    plan = PLANS[name]
    program = training_step(plan)
    assert check(program) == []

    assert assert_same(program, ToyMachine(launch_s=0.01)) <= plan.gpus


@pytest.mark.parametrize(("name", "classes"), [("dp", 1), ("fsdp", 1), ("tp", 1), ("pp tp", 2), ("pp dp", 2)])
def test_symmetric_ranks_are_one_class(name, classes):
    assert len(fold(training_step(PLANS[name]), ToyMachine()).classes) == classes


def test_a_ring_of_relative_neighbours_is_one_class():
    assert len(fold(training_step(Plan(cp=8)), ToyMachine(per_node=8)).classes) == 1


@examples(15)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(["pp tp", "hsdp cp", "pp dp"]))
def test_folded_equals_unfolded_on_irregular_placements(seed, name):
    plan = PLANS[name]
    placement = list(range(plan.gpus))
    random.Random(seed).shuffle(placement)
    machine = ToyMachine(per_node=3, placement=tuple(placement), slow_gpus=frozenset({seed % plan.gpus}))

    assert_same(training_step(plan, micro_batches=2), machine)


@dataclass(frozen=True)
class RandomLinks(ToyMachine):
    """Each rank hangs on a random hub of its own capacity; transfers cross the hubs of their ranks."""

    hubs: tuple[int, ...] = ()
    capacities: tuple[float, ...] = ()

    def cost(self, instruction, ranks):
        if isinstance(instruction, Launch):
            return Cost(seconds=instruction.shape[0] / 4, sms=100, hbm_bytes_per_s=60.0)
        return Cost(seconds=1.5, sms=20, hbm_bytes_per_s=20.0, link_bytes_per_s=10.0)

    def routes(self, ranks):
        return tuple(LinkUse(link=self.hubs[rank]) for rank in ranks)

    def link_bytes_per_s(self, link):
        return self.capacities[link]

    def kind(self, ranks):
        return len(ranks)


@st.composite
def tangles(draw):
    """Random groups, codes and links: everything that folding has to keep apart."""
    ranks = draw(st.integers(2, 8))
    order = st.permutations(range(ranks))
    groups = {}
    for family in ("a", "b", "ring"):
        members, size = draw(order), draw(st.sampled_from([1, 2, 2, 4, ranks]))
        groups[family] = tuple(tuple(members[i : i + size]) for i in range(0, ranks, size))
    calls = draw(st.lists(st.sampled_from(["a", "b", "ring", "copy"]), min_size=1, max_size=5))
    codes, owner = [], [draw(st.integers(0, 2)) for _ in range(ranks)]
    for kind in sorted(set(owner)):
        code = CodeWriter()
        for turn, call in enumerate(calls):
            code.launch("work", [1 + (kind + turn) % 3], stream=f"compute {turn % 2}")
            code.after("comm", f"compute {turn % 2}")
            if call == "ring":
                code.after("in", "comm")
                code.send("ring", 1, 8, relative=True)
                code.recv("ring", -1, 8, relative=True, stream="in")
            elif call == "copy":
                code.copy(8, "d2h")
            else:
                code.collective("all_reduce", call, 8)
        codes.append(code.code(f"kind {kind}", [r for r in range(ranks) if owner[r] == kind]))
    hubs = tuple(draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks)))
    capacities = tuple(draw(st.lists(st.sampled_from([10.0, 15.0, 40.0]), min_size=3, max_size=3)))
    return Program(codes=tuple(codes), groups=groups), RandomLinks(hubs=hubs, capacities=capacities)


@examples(80)
@given(tangles())
def test_folded_equals_unfolded_on_anything(tangle):
    program, machine = tangle
    assert check(program) == []

    assert_same(program, machine)


def test_arrivals_that_only_rounding_tells_apart_are_no_wait():
    """Folded, two ranks are one and arrive at once; unfolded, their hub's shares add up to a last digit apart."""
    code = CodeWriter()
    code.launch("work", [1], stream="compute 0")
    code.after("comm", "compute 0")
    code.collective("all_reduce", "a", 8)
    code.launch("work", [2], stream="compute 1")
    code.after("comm", "compute 1")
    code.after("in", "comm")
    code.send("ring", 1, 8, relative=True)
    code.recv("ring", -1, 8, relative=True, stream="in")
    code.launch("work", [3], stream="compute 0")
    code.after("comm", "compute 0")
    code.collective("all_reduce", "a", 8)
    groups = {
        "a": ((0, 1, 2, 3), (4, 5, 6)),
        **{family: tuple((rank,) for rank in range(7)) for family in ("b", "ring")},
    }
    program = Program(codes=(code.code("kind 0", range(7)),), groups=groups)

    assert_same(program, RandomLinks(hubs=(0, 0, 2, 2, 0, 0, 2), capacities=(15.0, 10.0, 10.0)))


def test_rings_of_different_lengths_stay_apart():
    """Two steps round a ring of 2 is oneself, of 3 the left neighbour."""
    first, second = CodeWriter(), CodeWriter()
    for code in (first, second):
        code.launch("work")
        code.exchange("ring", 2, 8)
    groups = {"ring": ((0, 1), (2, 3, 4), (5, 6))}
    program = Program(codes=(first.code("a", [0, 1, 2, 3, 4]), second.code("b", [5, 6])), groups=groups)
    assert check(program) == []

    assert assert_same(program, ToyMachine(per_node=8)) == 3


def test_one_slow_gpu_splits_only_what_it_touches():
    """In 4 groups of 2, the slow rank and its partner differ from each other and from the other six."""
    code = CodeWriter()
    code.launch("a")
    code.after("comm", "compute")
    code.collective("all_reduce", "tp", 8)
    program = Program(codes=(code.code("all", range(8)),), groups=mesh_groups(Plan(dp_replicate=4, tp=2)))

    classes = fold(program, ToyMachine(slow_gpus=frozenset({5}))).classes

    assert [c.ranks for c in classes] == [(0, 1, 2, 3, 6, 7), (4,), (5,)]


@pytest.mark.parametrize(
    ("ranks", "groups", "message"),
    [
        ([0, 2], {"g": ((0, 2),)}, "0..n-1"),
        ([0, 1], {"g": ((0, 1), (1,))}, "overlap"),
        ([0, 1], {"g": ((0,),)}, "not all of its ranks"),
        ([0, 1], {}, "not all of its ranks"),
    ],
)
def test_nonsense_is_refused(ranks, groups, message):
    code = CodeWriter()
    code.collective("all_reduce", "g", 8)

    with pytest.raises(ValueError, match=message):
        simulate(Program(codes=(code.code("x", ranks),), groups=groups), SimpleCosts(lambda _: 1.0))
