"""`planner doctor` as a command: exit codes, reports, redaction, saved files, and the measuring process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from planner.calibrate.calibrate_process import measure
from planner.cli import main
from planner.commands.doctor import budget_s
from tests.waiting import wait_until
from topology.catalog.cluster_file import load_cluster, save_cluster
from topology.catalog.clusters import cluster as catalogue
from topology.codec import to_json, write_text
from topology.errors import ProbeError, UserError
from topology.processes import alive, descendants
from topology.profile.measurement import Flow, FlowSet, GroupSample, Measurement
from topology.profile.profile import CollectiveSample, read_profile
from topology.redact import redact

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
FAULTY = str(DATA / "nccl_xml" / "gb300_1tray_fault_gpu1_count0.xml")
UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"


@pytest.fixture
def no_gpu(monkeypatch, tmp_path):
    """A machine without nvidia-smi."""
    monkeypatch.setenv("PATH", str(tmp_path))


def saved_measurement(path: Path, rate: float = 390e9) -> Path:
    flows = tuple(
        FlowSet(
            pattern="pair", nbytes=2**27, flows=(Flow(src=f"gpu{a}", dst=f"gpu{b}", bytes_per_s=rate, correct=True),)
        )
        for a in range(4)
        for b in range(4)
        if a != b
    )
    sample = CollectiveSample(op="all_reduce", ranks=4, nodes=1, nbytes=2**28, time_s=1.1e-3)
    content = Measurement(
        machine="test",
        device="cuda",
        taken_at="2026-01-01T00:00:00+00:00",
        driver="580.1",
        versions={"torch": "2.11.0", "nccl": "2.28.9"},
        uuids=(UUID,) * 4,
        flows=flows,
        groups=(GroupSample(sample=sample, gpus=(0, 1, 2, 3), iterations=20),),
    )
    write_text(path, to_json(content))
    return path


def test_no_gpu_is_an_answer(no_gpu, capsys) -> None:
    assert main(["doctor"]) == 0
    assert "there is no GPU here to judge" in capsys.readouterr().out
    assert main(["doctor", "--measure"]) == 0


def test_a_fault_is_code_1_with_cause_cost_and_remedy(capsys) -> None:
    assert main(["doctor", "--from", FAULTY, "--gpu", "gb300"]) == 1

    out = capsys.readouterr().out
    assert "UNHEALTHY (1 error)" in out
    assert "ERROR [lost_gpu] GPU 1 is off the NVLink fabric" in out
    for word in ("why:", "cost:", "do:", "instead of", "without GPU 1 it takes"):
        assert word in out


def test_json_is_one_document(capsys) -> None:
    assert main(["doctor", "--from", FAULTY, "--gpu", "gb300", "--json"]) == 1

    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    assert document["healthy"] is False
    (item,) = document["items"]
    assert (item["code"], item["gpus"], item["severity"]) == ("lost_gpu", [1], "error")
    assert item["cost"]["now_s"] > 5 * item["cost"]["expected_s"]


def test_a_healthy_file_is_code_0(capsys) -> None:
    assert main(["doctor", "--cluster", "dgx-h200"]) == 0
    assert "verdict: healthy" in capsys.readouterr().out


def test_fewer_gpus_than_expected(tmp_path, capsys) -> None:
    assert main(["doctor", "--cluster", "h200x4", "--expect", "dgx-h200"]) == 1
    assert "4 GPUs found, dgx-h200 has 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--from", FAULTY, "--measure"],
        ["--cluster", "h200x4", "--measure"],
        ["--from", FAULTY, "--cluster", "h200x4"],
        ["--cluster", "no-such-machine"],
        ["--cluster", "h200x4", "--budget", "forever"],
        ["--cluster", "h200x4", "--measured", "/nonexistent"],
        ["--from", "/nonexistent"],
    ],
)
def test_questions_that_cannot_be_read_are_code_2(arguments: list[str], capsys) -> None:
    assert main(["doctor", *arguments]) == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "seconds"), [("60", 60), ("60s", 60), ("1.5m", 90), (" 5s", 5)])
def test_budgets(text: str, seconds: float) -> None:
    assert budget_s(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-5s", "4s", "61m", "1e3", "60h", "nan", "inf"])
def test_budgets_that_are_none(text: str) -> None:
    with pytest.raises(UserError):
        budget_s(text)


def test_measured_rates_go_into_the_cluster_and_the_profile(tmp_path, capsys) -> None:
    out, profile = tmp_path / "cluster.json", tmp_path / "profile.json"
    samples = saved_measurement(tmp_path / "m.json")

    code = main(
        ["doctor", "--cluster", "h200x4", "--measured", str(samples), "--out", str(out), "--save-profile", str(profile)]
    )

    assert code == 0
    text = capsys.readouterr().out
    for word in (
        "torch 2.11.0",
        "nccl 2.28.9",
        "driver 580.1",
        "390.0",
        "all_reduce on GPUs 0, 1, 2, 3",
        "256 MiB 1.1 ms",
    ):
        assert word in text
    ports = [link for link in load_cluster(str(out)).groups[0].node.links if link.b.startswith("nvswitch")]
    assert [port.measured_bytes_per_s for port in ports] == [390e9] * 4
    (sample,) = read_profile(profile, cluster=load_cluster(str(out))).collectives
    assert (sample.op, sample.ranks, sample.nbytes, sample.time_s) == ("all_reduce", 4, 2**28, 1.1e-3)


def test_a_slow_measurement_is_code_1(tmp_path, capsys) -> None:
    samples = saved_measurement(tmp_path / "m.json", rate=90e9)

    assert main(["doctor", "--cluster", "h200x4", "--measured", str(samples)]) == 1
    assert "12 of 12 GPU pairs copy slower" in capsys.readouterr().out


def test_files_are_not_overwritten_by_accident(tmp_path, capsys) -> None:
    out = tmp_path / "c.json"
    out.write_text("mine")

    assert main(["doctor", "--cluster", "h200x4", "--out", str(out)]) == 2
    assert out.read_text() == "mine"
    assert main(["doctor", "--cluster", "h200x4", "--out", str(out), "--force"]) == 0


def test_redaction(tmp_path, capsys) -> None:
    gpus = catalogue("h200x4")
    node = gpus.groups[0].node
    from dataclasses import replace

    named = tuple(replace(gpu, uuid=UUID[:-1] + str(gpu.index)) for gpu in node.gpus)
    save_cluster(replace(gpus, groups=(replace(gpus.groups[0], node=replace(node, gpus=named)),)), tmp_path / "c.json")

    for extra in ([], ["--json"]):
        main(["doctor", "--cluster", str(tmp_path / "c.json"), "--redact", *extra])
        out = capsys.readouterr().out
        assert "01234567" not in out
        main(["doctor", "--cluster", str(tmp_path / "c.json"), *extra])
        assert "01234567" in capsys.readouterr().out


def test_redaction_of_a_sentence() -> None:
    said = f"{UUID} on node-7 at 10.1.2.3: pid 42 of alice, MIG-01234567-89ab-cdef-0123-456789abcdef"

    assert redact(said, names=["node-7"]) == ("GPU-<redacted> on <host> at <address>: pid 42 of <user>, MIG-<redacted>")


# A machine that nvidia-smi describes

SMI = """#!/bin/sh
case "$*" in
  "-L") for i in 0 1 2 3; do echo "GPU $i: NVIDIA H200 (UUID: {uuid}$i)"; done ;;
  "topo -m") cat {data}/nvidia_smi_topo_m.txt ;;
  "topo -p2p r"|"topo -p2p w") cat {data}/nvidia_smi_topo_p2p.txt ;;
  *index,uuid,name\\ --format*) for i in 0 1 2 3; do echo "$i, {uuid}$i, NVIDIA H200"; done ;;
  *compute-apps*) test -n "$BUSY" && echo "{uuid}2, 42, 2048" ;;
  *) echo not supported; exit 6 ;;
esac
"""


@pytest.fixture
def h200_machine(monkeypatch, tmp_path):
    """Put a `nvidia-smi` that repeats a captured machine first on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "nvidia-smi"
    script.write_text(SMI.format(uuid=UUID[:-1], data=DATA / "h200x4"))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_probe_then_doctor_on_a_machine(h200_machine, tmp_path, capsys) -> None:
    out = tmp_path / "cluster.json"

    assert main(["probe", "--out", str(out)]) == 0
    assert main(["doctor"]) == 0
    assert "GPU 3: NVIDIA H200, 18 NVLinks in use" in capsys.readouterr().out
    assert main(["doctor", "--cluster", str(out), "--expect", "h200x4"]) == 0
    assert load_cluster(str(out)).gpu_count == 4


def test_a_measurement_that_fails_leaves_the_report(h200_machine, capfd) -> None:
    """nvidia-smi lists GPUs that CUDA does not have: every part fails, and the machine is judged by what was read."""
    assert main(["doctor", "--measure", "--budget", "30s"]) == 1

    out = capfd.readouterr().out
    assert "[not_measured]" in out
    assert "GPU 3: NVIDIA H200" in out


def test_busy_gpus_are_refused_with_the_process(h200_machine, monkeypatch, capfd) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("BUSY", "1")

    assert main(["doctor", "--measure", "--budget", "30s"]) == 1
    assert "GPU 2: pid 42 of" in capfd.readouterr().err


# The measuring process


def test_the_executor_runs_as_a_process_and_answers(capfd) -> None:
    """A dry run: on buffers of the host, since a GPU is not at hand. Flows need no torch."""
    measured = measure([0, 3], budget_s=20, machine="here", device="cpu")

    assert measured.device == "cpu"
    assert set(measured.pairs()) == {(0, 3), (3, 0)}
    assert measured.machine == "here"
    assert "measuring flows" in capfd.readouterr().err


def test_nothing_measured_is_an_error(no_gpu, capfd) -> None:
    with pytest.raises(ProbeError, match="nothing could be measured"):
        measure([], budget_s=5, machine="here")


def test_a_terminated_measurement_leaves_no_process(tmp_path) -> None:
    """SIGTERM to the worker ends the piece that it runs, in its own session."""
    out = tmp_path / "m.json"
    command = [sys.executable, "-m", "executor.measure.doctor_worker", f"--out={out}", "--budget=60", "--device=cpu"]
    worker = subprocess.Popen([*command, "--indices=0,1,2,3,4,5,6,7", "--pieces=flows"], cwd=ROOT)
    wait_until(lambda: descendants(worker.pid))
    children = descendants(worker.pid)

    worker.send_signal(signal.SIGTERM)

    assert worker.wait(timeout=20) == 130
    wait_until(lambda: not any(alive(child) for child in children))


def test_a_killed_planner_leaves_no_measurement_behind() -> None:
    call = "measure(range(8), budget_s=60, machine='x', device='cpu')"
    code = f"from planner.calibrate.calibrate_process import measure\n{call}"
    planner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_until(lambda: any(child.children() for child in descendants(planner.pid)))
    family = descendants(planner.pid)

    planner.kill()
    planner.wait(timeout=10)

    wait_until(lambda: not any(alive(process) for process in family))
