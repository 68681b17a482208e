"""The order of CUDA calls that makes a measurement mean what it says, on a stand-in for torch.cuda."""

import sys

import pytest

from executor import probe_collectives
from executor.probe_collectives import ITERATIONS, PER_GRAPH, Rank, timed_calls
from executor.probe_compute import measure_cuda
from executor.probe_flows import CudaCopies, flow_sets, measure
from executor.records import Deadline, Recorder, read_records
from tests.executor.fake_cuda import Fake
from topology.measured import measured_from_records

HEADER = {"kind": "header", "machine": "m", "device": "cuda", "taken_at": "2026-01-01T00:00:00+00:00"}


@pytest.fixture
def torch(monkeypatch):
    fake = Fake(4)
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


def test_flows_start_behind_one_gate_each_on_its_own_streams(torch) -> None:
    copies = CudaCopies(1024)
    flows = ((0, 1), (2, 3), ("host", 1), (3, "host"))
    copies.prepare(flows)
    torch.log.clear()

    seconds = copies.timed(flows, 3)

    assert len(seconds) == 4
    assert all(each > 0 for each in seconds)
    kinds = [kind for kind, _ in torch.log]
    assert kinds[:2] == ["sleep", "record"], "the gate closes before anything is queued"
    gate = torch.log[1][1]
    first_copy = kinds.index("copy")
    assert [what for kind, what in torch.log[:first_copy] if kind == "wait"] == [
        gate
    ] * 6  # two ends of each flow, but host
    assert kinds.count("copy") == 12
    streams = {
        (src, dst): (current.get(int(src[-1])) if src else None, current.get(int(dst[-1])) if dst else None)
        for kind, what in torch.log
        if kind == "copy"
        for src, dst, current in [what]
    }
    used = [stream for pair in streams.values() for stream in pair if stream is not None]
    assert len(used) == len({id(stream) for stream in used}) == 6


def test_every_flow_is_checked_on_the_device_where_it_arrived(torch, tmp_path) -> None:
    recorder = Recorder(tmp_path / "r")
    measure(CudaCopies(1024), [f"gpu{i}" for i in range(4)], recorder, Deadline(60))
    recorder.close()

    measured = measured_from_records([HEADER, *read_records(tmp_path / "r")])

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
        "executor.probe_compute.read_states", lambda: {6: {"gpu": 6, "throttle": ["software power cap"]}}
    )
    recorder = Recorder(tmp_path / "r")

    measure_cuda([4, 5, 6, 7], recorder, Deadline(60), 0.05)
    recorder.close()

    samples = measured_from_records([HEADER, *read_records(tmp_path / "r")]).compute
    assert [sample.gpu for sample in samples] == [4, 5, 6, 7]
    for sample in samples:
        assert sample.memory_bytes_per_s
        assert sample.burst_flops
        assert sample.sustained_flops
    assert samples[2].throttle == ("software power cap",)


class Vote(Rank):
    """A rank whose peers vote as told: what `agree` returns is what it is given, or failure where they failed."""

    peers_failed = False

    def agree(self, values, *, least=False):
        return [1.0] if self.peers_failed and len(values) == 1 else [float(value) for value in values]


def graph_point(torch, monkeypatch, tmp_path, call, *, peers_failed: bool):
    me = Vote(torch, None, 0, 2, True, Element(), None)
    me.peers_failed = peers_failed
    monkeypatch.setattr(probe_collectives, "caller", lambda *_: call)
    recorder = Recorder(tmp_path / "r")
    took = probe_collectives._point(me, "all_reduce", ((0, 1),), 1024, "graph", [0, 1], recorder)
    recorder.close()
    return me, took, list(read_records(tmp_path / "r"))


class Element:
    def element_size(self) -> int:
        return 2


def test_graphs_are_captured_per_thread_and_released(torch, monkeypatch, tmp_path) -> None:
    calls = []

    _, took, (record,) = graph_point(torch, monkeypatch, tmp_path, lambda: calls.append(1), peers_failed=False)

    assert len(calls) == PER_GRAPH
    assert ("capture", "thread_local") in torch.log
    assert sum(kind == "replay" for kind, _ in torch.log) == ITERATIONS + 2
    assert torch.log[-1][0] == "reset", "a communicator cannot be destroyed while a graph holds it"
    assert took == record["sample"]["time_s"] > 0


def test_no_rank_replays_what_another_could_not_capture(torch, monkeypatch, tmp_path) -> None:
    me, took, (record,) = graph_point(torch, monkeypatch, tmp_path, lambda: None, peers_failed=True)

    kinds = [kind for kind, _ in torch.log]
    assert took is None
    assert "captured" in kinds
    assert "replay" not in kinds, "the other ranks would never join the collective"
    assert kinds[-1] == "reset"
    assert record == {"kind": "missing", "what": "all_reduce (graph) from 1024 bytes on: another rank failed"}
    assert me.no_graph == {"all_reduce"}, "other ops may still be captured"


def test_a_failure_is_missing_and_never_a_time(torch, monkeypatch, tmp_path) -> None:
    def refuse() -> None:
        raise RuntimeError("")  # an error without a word

    _, took, records = graph_point(torch, monkeypatch, tmp_path, refuse, peers_failed=False)

    assert took is None
    assert [record["kind"] for record in records] == ["missing"]
    assert "RuntimeError" in records[0]["what"]


def test_calls_are_timed_one_by_one(torch) -> None:
    me = Rank(torch, None, 0, 1, True, None, None)

    assert len(timed_calls(me, lambda: torch.log.append(("op", None)), 20)) == 20
    assert sum(kind == "synchronize" for kind, _ in torch.log) == 1, "waiting inside the loop would time the host"
