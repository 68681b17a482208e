"""Ranks that are killed or stopped, for real, on gloo: who is named, what is kept, and that nothing is left behind."""

import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from executor.gpu.monitor import GpuMonitor
from executor.gpu.state import Nvml
from executor.launch.local_ranks import TAG, Failure, LaunchResult
from executor.launch.records import WRONG_NUMBERS
from executor.launch.request import Request
from executor.run.apply import MODULE, report, run
from planner.runs import apply_process
from planner.runs.apply_report import lines
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from tests.executor.fake_gpus import FailingNvml
from tests.executor.forked_ranks import launch, run_module
from tests.waiting import wait_until
from topology import codec

pytest.importorskip("torch", reason="torch is not installed: plans cannot be run")

from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TINY = Model(
    name="tiny",
    family="llama",
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=64,
    vocab=128,
)


def request(*, steps: int = 100_000, start_s: float = 40.0, collective_s: float = 8.0, model: Model = TINY) -> Request:
    """Two ranks that share a model."""
    return Request(
        plan=Plan(dp_shard=2, micro_batch_size=1),
        model=model,
        workload=Workload(seq_len=32, global_batch_size=2),
        runtime=Runtime(param_dtype="float32", compute_dtype="float32"),
        device="cpu",
        steps=steps,
        warm_up=1,
        start_timeout_s=start_s,
        collective_timeout_s=collective_s,
    )


def start(folder: Path, *, budget_s: float = 240.0, limit_bytes: int | None = None, **asked):
    """Start a run of two ranks; its report is to be `folder/run.json`. `limit_bytes`: no file may be larger."""
    codec.write_text(folder / "request.json", codec.to_json(request(**asked)))
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "executor.run.apply",
            f"--request={folder / 'request.json'}",
            f"--out={folder}",
            f"--budget={budget_s}",
        ],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    if limit_bytes is not None:  # before it starts anything: Python takes longer to begin than this line
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    return process


def pid_when(folder: Path, rank: int, phase: str) -> int:
    """Return a rank's pid as soon as it is in a phase."""
    path = folder / "records" / f"rank{rank}.beat"
    end = time.monotonic() + 150  # starting torch three times over takes a minute on a loaded machine
    while time.monotonic() < end:
        try:
            beat = json.loads(path.read_text())
        except (OSError, ValueError):
            beat = {"phase": ""}
        if "pid" in beat and beat["phase"].startswith(phase):
            return int(beat["pid"])
        time.sleep(0.02)
    raise AssertionError(f"rank {rank} never came to {phase!r}")


def pending(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has been sent a signal that it has not taken yet, as a stopped one takes none."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(re.search(r"^ShdPnd:\s*(\w+)", status, re.MULTILINE)[1], 16) >> (number - 1) & 1)


def let_go(pid: int) -> None:
    """Continue a stopped rank as soon as it is asked to end: the agent waits for half a minute before it kills."""
    wait_until(lambda: pending(pid, signal.SIGTERM), 150)
    os.kill(pid, signal.SIGCONT)


def finished(process: subprocess.Popen, folder: Path) -> dict:
    try:
        process.wait(200)
    finally:
        process.kill()  # a test that fails leaves nothing running, either
    report = json.loads((folder / "run.json").read_text())
    assert report["exit_code"] == process.returncode
    assert left(folder) == []
    return report


def left(folder: Path) -> list[int]:
    """Return processes that still live and were started for this folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if TAG in process.environ() and str(folder) in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


def test_a_killed_rank_is_named_and_what_was_measured_is_kept(tmp_path, monkeypatch) -> None:
    """Its GPU, of a stand-in for the driver, falls off the bus at the same time: it is named alongside the rank."""
    monkeypatch.setattr("executor.gpu.monitor.NVML_PERIOD_S", 0.05)
    library = FailingNvml()
    codec.write_text(tmp_path / "request.json", codec.to_json(request()))
    watch = GpuMonitor(open_nvml=lambda: Nvml(library))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, request(), str(tmp_path / "request.json"), tmp_path, 240.0, watch)
        pid = pid_when(tmp_path, 1, "step 5")
        library.say(1, 79)
        library.lose(1)
        os.kill(pid, signal.SIGKILL)
        report = running.result(200)

    assert (report["status"], report["complete"], report["exit_code"]) == ("failed", False, 1)
    assert report["failure"]["rank"] == 1
    assert report["failure"]["signal"] == "SIGKILL"
    assert report["failure"]["gpus"][0] == "GPU 1: Xid 79 (the GPU has fallen off the bus)"
    assert report["measured"]["steps"] >= 4
    assert report["measured"]["step_s"]["median"] > 0
    assert json.loads((tmp_path / "run.json").read_text())["failure"] == report["failure"]
    assert left(tmp_path) == []


@pytest.mark.nightly  # a killed rank is in the gate
def test_an_executor_that_is_killed_leaves_a_report_of_what_its_ranks_recorded(tmp_path) -> None:
    asked = codec.to_builtins(request())
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(apply_process.run, asked, tmp_path, 240.0, lambda _: None)
        pid_when(tmp_path, 0, "step 5")
        (executor,) = (
            process
            for process in psutil.process_iter()
            if "executor.run.apply" in (line := cmdline(process)) and f"--out={tmp_path}" in line
        )
        executor.kill()
        report = running.result(200)

    assert (report["status"], report["exit_code"]) == ("failed", 1)
    assert (report["failure"]["rank"], report["failure"]["signal"]) == (None, "SIGKILL")
    assert report["measured"]["steps"] >= 4
    wait_until(lambda: left(tmp_path) == [], 60)  # the system ends them once their parent is gone


def cmdline(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


@pytest.mark.nightly  # killed ranks and those stuck are in the gate
def test_a_stopped_rank_is_named_within_the_budget(tmp_path) -> None:
    process = start(tmp_path)
    pid = pid_when(tmp_path, 1, "step 5")

    os.kill(pid, signal.SIGSTOP)
    let_go(pid)
    report = finished(process, tmp_path)

    assert report["status"] == "failed"
    assert [line for line in report["failure"]["suspects"] if line.startswith("rank 1 ")], report["failure"]
    assert not [line for line in report["failure"]["suspects"] if line.startswith("rank 0 ")], report["failure"]
    assert report["measured"]["steps"] >= 4


@pytest.mark.nightly  # stopped later and stuck are in the gate
def test_a_rank_that_hangs_at_the_start_is_named(tmp_path) -> None:
    process = start(tmp_path, start_s=8.0)
    pid = pid_when(tmp_path, 1, "")

    os.kill(pid, signal.SIGSTOP)
    let_go(pid)
    report = finished(process, tmp_path)

    assert report["status"] in {"failed", "timeout"}
    assert report["failure"]["suspects"][0].startswith("rank 1 "), report["failure"]
    assert report["measured"]["steps"] == 0
    assert report["measured"]["step_s"] is None


def test_the_budget_ends_a_run_between_steps(tmp_path) -> None:
    """Ranks whose time is over at the fourth step of the five that they are to take."""
    codec.write_text(tmp_path / "request.json", codec.to_json(request(steps=5)))
    run_module("tests.executor.workers.out_of_time_worker", [str(tmp_path / "request.json"), str(tmp_path)], ranks=2)

    found = report(request(steps=5), ENDED, tmp_path, [])
    assert (found["status"], found["complete"]) == ("out_of_time", False)
    assert found["measured"]["steps"] == 3


@pytest.mark.nightly
def test_the_budget_of_a_command_ends_it_in_time(tmp_path) -> None:
    for budget_s in (15.0, 60.0):  # the first is enough but on a loaded machine, where torch takes long to start
        report = finished(start(tmp_path, budget_s=budget_s), tmp_path)
        if report["measured"]["steps"]:
            break

    assert (report["status"], report["complete"]) == ("out_of_time", False)
    assert 0 < report["measured"]["steps"] < 100_000
    assert report["seconds"] < budget_s


@pytest.mark.nightly  # test_apply_on_cpu.py interrupts the planner
def test_an_interrupt_ends_everything_and_keeps_the_report(tmp_path) -> None:
    process = start(tmp_path)
    pid_when(tmp_path, 0, "step 5")

    process.send_signal(signal.SIGTERM)
    report = finished(process, tmp_path)

    assert (report["status"], process.returncode) == ("interrupted", 130)
    assert report["measured"]["steps"] >= 4
    assert report["complete"] is False


def test_a_full_memory_is_told_with_the_rank_and_what_it_held(tmp_path) -> None:
    """A limit on a rank's address space, set while it takes steps, stands for a full GPU: its next allocation fails."""
    asked = request(model=replace(TINY, vocab=32768))
    codec.write_text(tmp_path / "request.json", codec.to_json(asked))
    folder = tmp_path / "records"
    folder.mkdir()
    arguments = [f"--request={tmp_path / 'request.json'}", f"--out={folder}", f"--until={time.time() + 240}"]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(launch, MODULE, arguments, ranks=2, budget_s=240.0, environment={})
        pid = pid_when(tmp_path, 1, "step 2")
        resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))
        ended = running.result(200)

    found = report(asked, ended, folder, [])
    assert (found["status"], found["exit_code"]) == ("out_of_memory", 4), found["failure"]
    assert found["failure"]["rank"] == 1
    assert found["failure"]["memory"][1]["peak_resident_bytes"] > 0
    assert found["measured"]["steps"] >= 1


@pytest.mark.nightly
def test_a_full_disk_ends_the_run_and_is_named(tmp_path) -> None:
    """A limit on the size of files stands for a full disk: the ranks' records do not fit."""
    process = start(tmp_path, limit_bytes=20_000)

    report = finished(process, tmp_path)

    assert (report["status"], report["exit_code"]) == ("failed", 1)
    assert "File too large" in report["failure"]["message"]
    assert report["measured"]["steps"] > 0


def test_what_is_no_number_is_a_wrong_number_and_not_a_crash(tmp_path) -> None:
    assert end_of("wrong_numbers_worker", request(steps=2), tmp_path).exit_code == WRONG_NUMBERS

    found = report(request(steps=2), FAILED, tmp_path, [])
    assert (found["status"], found["exit_code"]) == ("wrong_numbers", 1)
    assert "output.weight, which is no number" in found["failure"]["message"]
    assert found["measured"]["step_s"] is None


def test_a_loss_that_is_no_number_ends_the_run_and_the_steps_before_are_kept(tmp_path) -> None:
    """One weight of one rank is enough, and every rank leaves with the same code."""
    assert end_of("not_a_number_worker", request(steps=50), tmp_path).exit_code == WRONG_NUMBERS

    found = report(request(steps=50), FAILED, tmp_path, [])
    assert (found["status"], found["exit_code"], found["complete"]) == ("wrong_numbers", 1, False)
    assert "step 3 is no number" in found["failure"]["message"]
    assert found["measured"]["steps"] == 2  # steps 1 and 2, after one of warm-up
    assert all(math.isfinite(loss) for loss in found["measured"]["losses"])
    assert "status    wrong_numbers: the loss or the gradient of step 3" in "\n".join(lines(found, None))


def test_nodes_of_two_versions_are_refused_before_anything_is_timed(tmp_path) -> None:
    said = str(end_of("other_version_worker", request(), tmp_path))

    assert "the nodes do not run the same software: meshwright 1.0.0 on" in said
    assert "(rank 0), 9.9.9 on" in said
    assert report(request(), FAILED, tmp_path, [])["measured"]["steps"] == 0


def test_a_rank_that_lives_but_is_stuck_is_named_by_what_it_has_not_entered(tmp_path) -> None:
    end_of("stuck_worker", request(), tmp_path)

    found = report(request(), FAILED, tmp_path, [])
    assert found["status"] == "failed"
    (line,) = found["failure"]["suspects"]
    assert line.startswith("rank 1 "), line
    assert "had not entered a collective" in line
    assert found["measured"]["steps"] >= 2


ENDED = LaunchResult(outcome="finished", exit_code=0, seconds=1.0, failure=None, stdout_tail="", stderr_tail="")
FAILED = replace(ENDED, outcome="failed", exit_code=1, failure=Failure(rank=0, exit_code=1, signal=None, message=""))


def end_of(worker: str, asked: Request, folder: Path) -> Exception:
    """Run two ranks of a worker without an agent; return what torch says of the first that ended badly."""
    codec.write_text(folder / "request.json", codec.to_json(asked))
    with pytest.raises((ProcessExitedException, ProcessRaisedException)) as caught:
        run_module(f"tests.executor.workers.{worker}", [str(folder / "request.json"), str(folder)], ranks=2)
    return caught.value
