"""The program of a sharded graph: what waits for what, and what can hide behind what."""

import pytest

from planner.sharding.plans.lowering import lower, simulate_time, work_of
from planner.sharding.plans.plan import plan_sharding
from planner.sharding.plans.report import planned_case
from simulator.calibration.calibration import Calibration, Contention
from simulator.collectives.cost import CollectiveModel
from simulator.kernels.operators import WorkKind
from tests.planner.sharding import cases
from tests.planner.sharding.known import KNOWN
from tests.simulator.program_check import check
from topology.catalog.cluster_file import load_cluster
from topology.errors import Infeasible
from topology.rates.groups import GroupShape

BIG = {"t": 8192, "h": 4096, "f": 16384}
TP = cases.case("tp", cases.TP, cases.MLP, {"x": "t h: R", "w1": "f h: S(0)", "w2": "h f: S(1)"}, BIG, {"y": "R"})
LONG = {"b": 1, "h": 6, "s": 32768, "z": 32768, "d": 128}
RING = cases.case(
    "ring", {"cp": 4}, [cases.ATTN], dict.fromkeys("qkv", "b h s d: S(2)"), LONG, {"o": "S(2)"}, schedule={"o": "ring"}
)


@pytest.fixture(scope="module")
def machine():
    return load_cluster("h200x4")


def time_of(stated, machine):
    problem = cases.problem(stated)
    return simulate_time(problem, plan_sharding(problem), machine)


def test_a_chain_without_anything_beside_it_takes_the_sum(machine) -> None:
    found = time_of(TP, machine)
    wire = CollectiveModel(machine).choose("all_reduce", 8192 * 4096 * 2, GroupShape(ranks=4, ranks_per_node=4))

    assert found.exposed_communication_s == pytest.approx(wire.time_s.value, rel=1e-6)


def test_products_are_counted_by_their_local_shape() -> None:
    problem = cases.problem(TP)
    found = plan_sharding(problem)
    works = [work_of(o, option, problem) for o, option in zip(problem.operators, found.choice.options, strict=True)]

    assert [work.kind for work in works] == [WorkKind.MATMUL, WorkKind.MOVE, WorkKind.MATMUL]
    assert [work.flops for work in works[::2]] == [2 * 8192 * 4096 * 16384 / 4] * 2
    assert works[1].bytes == 2 * 8192 * 16384 / 4 * 2
    assert (works[2].m, works[2].n, works[2].k) == (8192, 4096, 4096)


def test_attention_is_counted_by_rows_and_keys() -> None:
    problem = cases.problem(RING)
    (option,) = plan_sharding(problem).choice.options
    work = work_of(problem.operators[0], option, problem)

    assert work.kind is WorkKind.ATTENTION
    assert work.flops == 4 * (32768 / 4) * 32768 * 128 * 6
    assert (work.m, work.n, work.k, work.batch) == (8192, 32768, 128, 6)


def test_a_ring_hides_what_a_gather_shows(machine) -> None:
    """Pieces arrive while others are attended to: only what is faster on the wire than in the kernel is hidden."""
    ring, whole = time_of(RING, machine), time_of({**RING, "schedule": {"o": "gather"}}, machine)

    assert ring.compute_s == pytest.approx(whole.compute_s)
    assert ring.seconds < whole.seconds
    assert ring.exposed_communication_s < 0.3 * whole.exposed_communication_s


def test_pieces_of_a_reduction_run_beside_the_product(machine) -> None:
    pieces = {**TP, "schedule": {"y": "chunked:4"}}

    assert time_of(pieces, machine).seconds < time_of(TP, machine).seconds


@pytest.mark.parametrize("stated", [TP, RING, *(c for c, _, _ in KNOWN)], ids=lambda c: c["id"])
def test_every_program_is_sound(stated, machine) -> None:
    """No event is waited for that nobody records, no rank waits for ever, and time is what kernels take at least."""
    problem = cases.problem(stated)
    found = plan_sharding(problem)
    cluster = load_cluster("dgx-h100") if problem.mesh.ranks > 4 else machine
    program, _ = lower(problem, found, cluster)

    assert check(program) == []
    time = simulate_time(problem, found, cluster)
    assert time.seconds >= time.compute_s * (1 - 1e-9)
    assert bool(time.exposed_communication_s > 1e-12) == bool(found.collectives)


def test_a_mesh_larger_than_the_machine_has_no_time(machine) -> None:
    stated = {**TP, "mesh": {"names": ["tp"], "shape": [8]}}

    with pytest.raises(Infeasible, match="8 ranks"):
        time_of(stated, machine)


def test_ways_of_exchanges_are_chosen_as_the_simulation_says() -> None:
    """Every way of the last result, with those chosen before it, is the time of the case that states them."""
    machine = load_cluster("dgx-h100")
    weights = {"up": ([14336, 4096], "S(0)"), "down": ([4096, 14336], "S(1)"), "x": ([8192, 4096], "S(0)")}
    case = {
        "id": "sequence parallel",
        "mesh": {"names": ["tp"], "shape": [8]},
        "inputs": {name: {"shape": shape, "placements": [at]} for name, (shape, at) in weights.items()},
        "ops": ["u = linear(x, up)", "g = gelu(u)", "y = linear(g, down)"],
        "pins": {"g": ["S(1)"], "y": ["S(0)"]},
    }
    row, _ = planned_case(case, 0, machine)
    first, last = row["schedules"]

    assert (first["result"], last["result"]) == ("u", "y")
    for way, seconds in last["program_s"].items():
        stated, _ = planned_case({**case, "schedule": {"u": first["way"], "y": way}}, 0, machine)
        assert stated["time_s"]["value"] == pytest.approx(seconds)
    assert row["time_s"]["value"] == pytest.approx(min(last["program_s"].values()), rel=0.002)
    assert row["time_s"]["value"] < first["program_s"]["whole"]


def test_collectives_take_the_measured_share_of_kernels_beside_them(machine) -> None:
    """What hides behind products costs them the SMs that were measured; a chain without anything alongside it costs the
    same.
    """
    alongside = {"all_reduce": Contention(compute=2.0, collective=1.5, samples=1)}
    plain, slower = (Calibration(gpu=machine.slowest_kind, contention=found) for found in ({}, alongside))

    def seconds(stated, calibration) -> float:
        problem = cases.problem(stated)
        return simulate_time(problem, plan_sharding(problem), machine, calibration).seconds

    pieces = {**TP, "schedule": {"y": "chunked:4"}}
    assert slower.held_sms("all_reduce") == pytest.approx(0.75 * machine.slowest_kind.sm_count)
    assert seconds(pieces, slower) > 1.02 * seconds(pieces, plain)
    assert seconds(TP, slower) == seconds(TP, plain)
