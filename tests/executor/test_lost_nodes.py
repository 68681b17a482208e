"""What is made of a run whose nodes do not all leave a result, or leave it late."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Thread

import pytest

from executor.launch import roll_call
from executor.launch.local_ranks import Failure, Rendezvous
from executor.launch.nodes import combine_agent_results, connect, wait_for_file, write_agent_result, write_agent_start
from executor.launch.roll_call import why_no_meeting
from executor.run.apply import collect, run_node
from tests.executor.test_apply_run import DONE, REQUEST, step, write
from topology.errors import BadInput
from topology.versions import differences

LOST_PEER = replace(
    DONE, outcome="failed", exit_code=1, failure=Failure(rank=0, exit_code=1, signal=None, message="closed by peer")
)


def records(folder, rank: int, steps: int, *ends: dict) -> None:
    (folder / "records").mkdir(exist_ok=True)
    write(folder / "records", rank, *(step(index, 1.0) for index in range(steps)), *ends)


def beat(folder, rank: int) -> None:
    (folder / "records" / f"rank{rank}.beat").write_text("{}")


def test_a_node_that_was_lost_is_named_and_what_was_measured_is_kept(tmp_path) -> None:
    """Its neighbour's complaint is not the cause."""
    for rank in range(2):
        records(tmp_path, rank, 3 - rank)
        beat(tmp_path, rank)
    for node in ("here-1", "there-2"):
        write_agent_start(tmp_path, node)
    write_agent_result(tmp_path, "here-1", LOST_PEER)

    found = collect(REQUEST, "request.json", tmp_path, 2, patience_s=0.3)

    assert (found["status"], found["exit_code"], found["complete"]) == ("failed", 1, False)
    assert found["failure"]["message"].startswith("there-2 began and left no result: the node was lost")
    assert "closed by peer" in found["failure"]["message"]
    assert found["measured"]["steps"] == 2
    assert json.loads((tmp_path / "run.json").read_text())["failure"] == found["failure"]


def test_a_node_that_never_came_is_counted(tmp_path) -> None:
    write_agent_start(tmp_path, "here-1")
    write_agent_result(tmp_path, "here-1", LOST_PEER)

    assert "1 of 2 nodes began" in combine_agent_results(tmp_path, 2, 0.1).failure.message


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def met(meeting: Rendezvous, nodes: list[str], patience_s: float) -> list[str]:
    """Return what each of the nodes, which begin together, says of their meeting."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        return [*pool.map(lambda node: why_no_meeting(meeting, f"{node}-1", patience_s), nodes)]


def test_nodes_meet_whatever_else_comes_to_the_port(monkeypatch) -> None:
    monkeypatch.setattr(roll_call, "CONNECT_S", 0.1)
    meeting = Rendezvous(count=3, endpoint=f"127.0.0.1:{free_port()}", run_id="m", names=("a", "b", "c"))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(why_no_meeting, meeting, "a-1", 20.0)
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"another 9\n", b"", b"m b-1\n"):
            stranger = connect(meeting.endpoint, 10.0)
            stranger.sendall(said)
            stranger.close()

        assert met(meeting, ["b", "c"], 20.0) == ["", ""]
        assert first.result() == ""


def test_nodes_that_do_not_meet_say_who_is_missing(tmp_path, monkeypatch, capsys) -> None:
    """Neither they nor who collects wait for more than that."""
    monkeypatch.setattr(roll_call, "HOST_S", 0.1)
    monkeypatch.setenv("MESHWRIGHT_NODE", "a")
    meeting = Rendezvous(count=2, endpoint=f"127.0.0.1:{free_port()}", run_id="m", names=("a", "b"), join_s=0.2)

    assert run_node(REQUEST, "request.json", tmp_path, 60.0, meeting) == 1

    assert "1 of 2 nodes began within 0 s (a); b did not" in capsys.readouterr().err
    found = collect(REQUEST, "request.json", tmp_path, 2, patience_s=60.0)
    assert (found["status"], found["exit_code"]) == ("failed", 1)
    assert "b did not" in found["failure"]["message"]
    three = replace(meeting, count=3, names=("a", "b", "c"))
    assert all("c did not" in one for one in met(three, ["a", "b"], 0.2))


def test_a_port_that_another_program_has_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        Thread(target=lambda: [server.accept()[0].close() for _ in range(9)], daemon=True).start()
        found = why_no_meeting(Rendezvous(count=2, endpoint=endpoint, run_id="m"), "a-1", 0.3)

    assert found == f"a had no answer at {endpoint}, where nodes meet: another program has the port"


def test_a_run_that_is_not_over_is_not_collected(tmp_path) -> None:
    (tmp_path / "records").mkdir()
    with pytest.raises(BadInput, match="0 of 2 agents"):
        combine_agent_results(tmp_path, 2, 0.1)

    write_agent_result(tmp_path, "here-1", DONE)
    later(lambda: beat(tmp_path, 1))  # ranks of the other node still say that they live
    with pytest.raises(BadInput, match="the others still run"):
        combine_agent_results(tmp_path, 2, 1.0)


def later(work) -> None:
    Thread(target=lambda: (time.sleep(0.3), work()), daemon=True).start()


def test_files_that_a_shared_file_system_shows_late_are_waited_for(tmp_path) -> None:
    """The second node's result appears late, and the end of its rank's records later still."""
    ends = ({"kind": "timed"}, {"kind": "done"})
    for rank in range(2):
        records(tmp_path, rank, 3, *ends)
    whole = (tmp_path / "records" / "rank1.jsonl").read_bytes()
    for node in ("here-1", "there-2"):
        write_agent_result(tmp_path, node, DONE)
    result = (tmp_path / "agents" / "there-2.json").rename(tmp_path / "hidden")
    (tmp_path / "records" / "rank1.jsonl").write_bytes(whole[:40])

    def appear() -> None:
        result.rename(tmp_path / "agents" / "there-2.json")
        time.sleep(0.3)
        (tmp_path / "records" / "rank1.jsonl").write_bytes(whole)

    later(appear)
    found = collect(REQUEST, "request.json", tmp_path, 2, patience_s=10.0)

    assert (found["status"], found["measured"]["steps"]) == ("finished", 3)


def test_records_that_never_appear_whole_are_told(tmp_path) -> None:
    ends = ({"kind": "timed"}, {"kind": "done"})
    for rank in range(2):
        records(tmp_path, rank, 3, *ends)
    write_agent_result(tmp_path, "here-1", DONE)
    write_agent_result(tmp_path, "there-2", DONE)
    path = tmp_path / "records" / "rank1.jsonl"
    path.write_bytes(path.read_bytes()[:150])  # one step and a half

    found = collect(REQUEST, "request.json", tmp_path, 2, patience_s=0.3)

    assert (found["status"], found["exit_code"], found["measured"]["steps"]) == ("failed", 1, 1)
    assert "does not show all of rank1.jsonl" in found["failure"]["message"]


def test_a_request_that_appears_late_is_waited_for(tmp_path) -> None:
    path = tmp_path / "request.json"
    later(lambda: path.write_text("{}"))

    wait_for_file(path, 10.0)

    assert path.is_file()


@pytest.mark.parametrize(
    ("device", "value", "why"),
    [
        ("cpu", "", ""),
        ("cpu", "eth0", ""),
        ("cpu", "eth", "there are ib0, eth0, lo"),
        ("cpu", "lo", "no other node reaches"),
        ("cuda", "eth,ib", ""),
        ("cuda", "=eth", "there are ib0, eth0, lo"),
        ("cuda", "^docker", ""),
        ("cuda", "bond0", "NCCL_SOCKET_IFNAME is bond0"),
    ],
)
def test_interfaces_by_which_ranks_cannot_meet_are_named(monkeypatch, device, value, why) -> None:
    monkeypatch.setattr(roll_call, "interfaces", lambda: ["ib0", "eth0", "lo"])
    monkeypatch.setenv(roll_call.VARIABLES[device], value)

    found = roll_call.why_no_interface(device)

    assert (why in found) if why else found == ""


def test_versions_that_differ_are_listed_with_their_nodes() -> None:
    same = {"torch": "2.11", "driver": "570.1"}

    assert differences({"a": same, "b": dict(same)}) == []
    assert differences({"a": same, "b": {"torch": "2.10", "driver": "570.1"}, "c": {"driver": "570.1"}}) == [
        "torch 2.11 on a, 2.10 on b, absent on c"
    ]
