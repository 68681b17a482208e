"""Which flows are tried together, what is recorded of them, and what happens when time runs out."""

import itertools
import json

import pytest

from executor.launch.records import Deadline, Recorder, read_records
from executor.measure.probe_flows import HostCopies, flow_sets, main, measure, two_disjoint
from topology.profile.measurement import FlowSet, measurement_from_records, shared_groups

HEADER = {"kind": "header", "machine": "m", "device": "cpu", "taken_at": "2026-01-01T00:00:00+00:00"}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_every_pair_and_every_host_way_is_tried_alone(count: int) -> None:
    sets = list(flow_sets(count))
    single = {flows[0] for pattern, flows in sets if pattern == "pair"}

    assert single == set(itertools.permutations(range(count), 2))
    for gpu in range(count):
        assert ("host_to_device", (("host", gpu),)) in sets
        assert ("device_to_host", ((gpu, "host"),)) in sets
    assert all(len(set(flows)) == len(flows) for _, flows in sets), "a flow runs once in a set"


@pytest.mark.parametrize(("count", "expected"), [(1, 0), (2, 0), (3, 0), (4, 12)])
def test_two_disjoint_flows_are_all_tried_on_small_machines(count: int, expected: int) -> None:
    """Four GPUs split into two pairs in 3 ways, each pair in 2 directions: 12."""
    assert len(two_disjoint(count)) == expected


@pytest.mark.parametrize("count", [4, 5, 6, 8, 16])
def test_disjoint_flows_have_no_gpu_in_common(count: int) -> None:
    found = two_disjoint(count)

    assert all(len({*one, *other}) == 4 for one, other in found)
    if count <= 8:
        sources = {frozenset((one[0], other[0])) for one, other in found}
        assert sources == {frozenset(pair) for pair in itertools.combinations(range(count), 2)}


def test_records_become_flows(tmp_path) -> None:
    out = tmp_path / "records.jsonl"
    out.write_text(json.dumps(HEADER) + "\n")

    assert main([f"--out={out}", "--seconds=20", "--device=cpu", "--indices=2,5,7", "--nbytes=4096"]) == 0

    measured = measurement_from_records(read_records(out))
    assert set(measured.pairs()) == set(itertools.permutations((2, 5, 7), 2))
    assert all(flow.correct for flow in measured.pairs().values())
    assert set(measured.host("host_to_device")) == {2, 5, 7}
    assert measured.complete


def test_out_of_time_is_recorded(tmp_path) -> None:
    recorder = Recorder(tmp_path / "r")
    measure(HostCopies(64), ["gpu0", "gpu1"], recorder, Deadline(-1.0))
    recorder.close()

    records = list(read_records(tmp_path / "r"))
    assert {record["kind"] for record in records} == {"missing"}
    assert any("pair: out of time" in record["what"] for record in records)


class Board(HostCopies):
    """GPUs 0 and 1, and 2 and 3, share an uplink of 55 GB/s to the host; pair (1, 2) delivers wrong bytes."""

    def prepare(self, flows) -> None:
        if ("host", 3) in flows and len(flows) == 1:
            raise RuntimeError("out of memory\nsecond line")

    def timed(self, flows, copies):
        ends = [next(end for end in flow if end != "host") for flow in flows]
        sharing = [sum(other // 2 == end // 2 for other in ends) for end in ends]
        return [copies * self.nbytes / (55e9 / share) for share in sharing]

    def correct(self, ends) -> bool:
        return ends != (1, 2)


def test_a_board_with_shared_uplinks_is_solved(tmp_path) -> None:
    recorder = Recorder(tmp_path / "r")
    measure(Board(2**20), [f"gpu{i}" for i in range(4)], recorder, Deadline(60.0))
    recorder.close()

    measured = measurement_from_records([HEADER, *read_records(tmp_path / "r")])

    assert shared_groups(measured) == [[0, 1], [2, 3]]
    assert measured.pairs()[1, 2].correct is False
    assert measured.pairs()[2, 1].correct is True
    assert [what for what in measured.missing if "out of memory" in what], "one failing set does not hide the others"
    together = next(each for each in measured.flows if each.pattern == "all_host_to_device")
    assert isinstance(together, FlowSet)
    assert sum(flow.bytes_per_s for flow in together.flows) == pytest.approx(2 * 55e9)
