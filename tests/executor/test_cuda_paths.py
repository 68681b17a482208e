"""What CUDA measurements say of a machine whose times are known: a stand-in for torch.cuda with a clock."""

import sys

import pytest

from executor.launch.records import Deadline, Recorder, read_records
from executor.measure import probe_collectives
from executor.measure.measurement import timed_calls
from executor.measure.probe_collectives import ITERATIONS, PER_GRAPH, Rank
from executor.measure.probe_compute import MATMUL, measure_cuda
from executor.measure.probe_flows import CudaCopies, flow_sets, measure
from tests.executor.fake_cuda import WORK_MS, Fake
from topology.profile.measurement import GpuState, measurement_from_records

HEADER = {"kind": "header", "machine": "m", "device": "cuda", "taken_at": "2026-01-01T00:00:00+00:00"}


@pytest.fixture
def torch(monkeypatch):
    fake = Fake(4)
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


@pytest.mark.parametrize("issue_ms", [0.1, 10.0, 50.0])
def test_flows_take_as_long_as_their_copies_however_slowly_they_are_issued(torch, issue_ms: float) -> None:
    """All start at once and none waits for another: neither a slow host nor a shared end shows in what is measured."""
    torch.issue_ms = issue_ms
    copies = CudaCopies(1024)
    flows = ((0, 1), (0, 2), ("host", 1), (3, "host"))
    copies.prepare(flows)

    assert copies.timed(flows, 3) == pytest.approx([3 * WORK_MS / 1e3] * 4)


def test_every_flow_is_checked_on_the_device_where_it_arrived(torch, tmp_path) -> None:
    recorder = Recorder(tmp_path / "r")
    measure(CudaCopies(1024), [f"gpu{i}" for i in range(4)], recorder, Deadline(60))
    recorder.close()

    measured = measurement_from_records([HEADER, *read_records(tmp_path / "r")])

    assert len(measured.flows) == len(list(flow_sets(4)))
    assert measured.complete, measured.missing
    checked = [flow for each in measured.flows for flow in each.flows if "host" not in {flow.src, flow.dst}]
    assert all(flow.correct and flow.peer for flow in checked)


def test_a_copy_that_moves_nothing_is_found_out(torch) -> None:
    copies = CudaCopies(1024)
    copies.prepare([(0, 1)])

    assert copies.correct((0, 1)) is False, "the sink was cleared and nothing has been copied"
    copies.timed([(0, 1)], 1)
    assert copies.correct((0, 1)) is True


def test_compute_has_every_rate_of_every_gpu(torch, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        "executor.measure.probe_compute.read_states", lambda: {6: GpuState(gpu=6, throttle=("software power cap",))}
    )
    recorder = Recorder(tmp_path / "r")

    measure_cuda([4, 5, 6, 7], recorder, Deadline(60), 0.05)
    recorder.close()

    samples = measurement_from_records([HEADER, *read_records(tmp_path / "r")]).compute
    assert [sample.gpu for sample in samples] == [4, 5, 6, 7]
    for sample in samples:
        assert sample.memory_bytes_per_s == pytest.approx(2 * 2**18 / (WORK_MS / 1e3))  # a quarter of what is free
        assert sample.burst_flops == pytest.approx(2 * MATMUL**3 / (WORK_MS / 1e3))
        assert sample.sustained_flops == pytest.approx(sample.burst_flops, rel=0.01)
    assert samples[2].throttle == ("software power cap",)


class Vote(Rank):
    """A rank whose peers vote as given: what `reduce_over_ranks` returns is what it is given, or failure where they
    failed.
    """

    peers_failed = False

    def reduce_over_ranks(self, values, *, minimum=False):
        return [1.0] if self.peers_failed and len(values) == 1 else [float(value) for value in values]


def graph_point(torch, monkeypatch, tmp_path, call, *, peers_failed: bool):
    me = Vote(torch, None, 0, 2, True, Element(), None)
    me.peers_failed = peers_failed
    monkeypatch.setattr(probe_collectives, "collective_call", lambda *_: call)
    recorder = Recorder(tmp_path / "r")
    took = probe_collectives._time_size(me, "all_reduce", ((0, 1),), 1024, "graph", [0, 1], recorder)
    recorder.close()
    return me, took, list(read_records(tmp_path / "r"))


class Element:
    def element_size(self) -> int:
        return 2


def test_a_graph_is_timed_without_the_host_and_given_back(torch, monkeypatch, tmp_path) -> None:
    torch.issue_ms = WORK_MS  # an eager call could not be distinguished from its launch

    _, took, (record,) = graph_point(
        torch, monkeypatch, tmp_path, lambda: torch.work([torch.current_stream(0)]), peers_failed=False
    )

    assert took == record["sample"]["time_s"] == pytest.approx(WORK_MS / 1e3, rel=0.05)
    (graph,) = torch.graphs
    assert len(graph.work) == PER_GRAPH
    assert graph.replays >= ITERATIONS
    assert not graph.held, "a communicator cannot be destroyed while a graph holds it"


def test_no_rank_replays_what_another_could_not_capture(torch, monkeypatch, tmp_path) -> None:
    me, took, (record,) = graph_point(torch, monkeypatch, tmp_path, lambda: None, peers_failed=True)

    assert took is None
    (graph,) = torch.graphs
    assert graph.replays == 0, "the other ranks would never join the collective"
    assert not graph.held
    assert record == {"kind": "missing", "what": "all_reduce (graph) from 1024 bytes on: another rank failed"}
    assert me.no_graph == {"all_reduce"}, "other ops may still be captured"


def test_a_failure_is_missing_and_never_a_time(torch, monkeypatch, tmp_path) -> None:
    def refuse() -> None:
        raise RuntimeError("")  # an error without a word

    _, took, records = graph_point(torch, monkeypatch, tmp_path, refuse, peers_failed=False)

    assert took is None
    assert [record["kind"] for record in records] == ["missing"]
    assert "RuntimeError" in records[0]["what"]


def test_calls_are_timed_one_by_one_and_not_their_launches(torch) -> None:
    seconds = timed_calls(lambda: torch.work([torch.current_stream(0)]), 20, cuda=True)

    assert len(seconds) == 20
    assert seconds[1:] == pytest.approx([WORK_MS / 1e3] * 19)
