"""Two elastic agents as two nodes: over loopback, and where it is allowed in network namespaces joined by a cable."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.executor.test_apply_faults import left, pid_when, request
from tests.waiting import wait_until
from topology import codec

pytest.importorskip("torch", reason="torch is not installed: plans cannot be run")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return asked.getsockname()[1]


def command(folder: Path, *more: str) -> list[str]:
    arguments = [f"--request={folder / 'request.json'}", f"--out={folder}", "--budget=200", "--nodes=2"]
    return [sys.executable, "-m", "executor.run.apply", *arguments, *more]


def start(folder: Path, endpoint: str, *more: str, inside: tuple[str, ...] = (), environment=None) -> subprocess.Popen:
    return subprocess.Popen(
        [*inside, *command(folder, f"--endpoint={endpoint}", "--meeting=a-meeting", *more)],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def collected(folder: Path) -> dict:
    subprocess.run(command(folder, "--collect"), cwd=ROOT, check=False, timeout=120)
    return json.loads((folder / "run.json").read_text())


@pytest.mark.nightly  # a node that is lost, and a rank that is killed on one node, are in the gate
def test_a_node_whose_rank_is_killed_is_named_by_the_run(tmp_path) -> None:
    codec.write_text(tmp_path / "request.json", codec.to_json(request()))
    endpoint = f"127.0.0.1:{free_port()}"
    agents = [start(tmp_path, endpoint) for _ in range(2)]
    pid = pid_when(tmp_path, 1, "step 3")

    os.kill(pid, signal.SIGKILL)

    assert [agent.wait(220) for agent in agents] == [1, 1]
    report = collected(tmp_path)
    assert (report["status"], report["complete"]) == ("failed", False)
    assert (report["failure"]["rank"], report["failure"]["signal"]) == (1, "SIGKILL"), report["failure"]
    assert report["measured"]["steps"] >= 2
    assert left(tmp_path) == []


@pytest.mark.nightly  # a node whose rank is killed is in the gate
def test_a_node_that_is_lost_is_named_and_its_neighbour_ends(tmp_path) -> None:
    """Its agent and all its processes are gone at once, as with a node that loses power."""
    codec.write_text(tmp_path / "request.json", codec.to_json(request()))
    endpoint = f"127.0.0.1:{free_port()}"
    agents = [start(tmp_path, endpoint) for _ in range(2)]
    pid_when(tmp_path, 1, "step 3")

    agents[1].kill()

    assert agents[0].wait(220) == 1
    subprocess.run(command(tmp_path, "--collect", "--patience=1"), cwd=ROOT, check=False, timeout=120)
    report = json.loads((tmp_path / "run.json").read_text())
    assert (report["status"], report["exit_code"]) == ("failed", 1)
    assert f"-{agents[1].pid} began and left no result: the node was lost" in report["failure"]["message"]
    assert report["measured"]["steps"] >= 2
    wait_until(lambda: left(tmp_path) == [], 30)


@contextmanager
def two_namespaces():
    """Yield the names of two network namespaces joined by a cable, 10.77.0.1 and 10.77.0.2; none where not allowed."""
    tag = uuid.uuid4().hex[:6]
    names = (f"mw{tag}a", f"mw{tag}b")
    steps = [("netns", "add", name) for name in names]
    steps.append(("link", "add", f"v{tag}a", "type", "veth", "peer", "name", f"v{tag}b"))
    for place, name in enumerate(names):
        link = f"v{tag}{'ab'[place]}"
        steps.append(("link", "set", link, "netns", name))
        steps.append(("-n", name, "addr", "add", f"10.77.0.{place + 1}/24", "dev", link))
        steps += [("-n", name, "link", "set", which, "up") for which in (link, "lo")]
    try:
        made = shutil.which("ip") is not None and all(
            not subprocess.run(["ip", *step], capture_output=True, check=False, timeout=20).returncode for step in steps
        )
        yield names if made else ()
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=20)


def test_two_agents_run_one_plan(tmp_path) -> None:
    """Nothing is shared but the directory, and, where namespaces are not allowed, the host's loopback."""
    codec.write_text(tmp_path / "request.json", codec.to_json(request(steps=3)))
    with two_namespaces() as names:
        if names:
            agents = [
                start(
                    tmp_path,
                    "10.77.0.1:29400",
                    f"--address=10.77.0.{place + 1}",
                    inside=("ip", "netns", "exec", name),
                    environment={"GLOO_SOCKET_IFNAME": "v" + name.removeprefix("mw")},
                )
                for place, name in enumerate(names)
            ]
        else:
            endpoint = f"127.0.0.1:{free_port()}"
            agents = [start(tmp_path, endpoint) for _ in range(2)]
        codes = [agent.wait(240) for agent in agents]

    said = "\n".join(path.read_text()[-1500:] for path in tmp_path.glob("logs/*/stderr.txt"))
    assert codes == [0, 0], said
    assert len(list(tmp_path.glob("agents/*.json"))) == 2
    report = collected(tmp_path)
    assert (report["status"], report["complete"]) == ("finished", True), report["failure"]
    assert report["measured"]["steps"] == 3
    assert report["verified"]["ok"]
    assert left(tmp_path) == []
