"""What is made of a GPU that fails while a run lasts: the cause is named, and what was measured is kept."""

from dataclasses import replace

import pytest

from executor.gpu.faults import NvmlFaults, SmiFaults
from executor.gpu.monitor import GpuMonitor
from executor.gpu.state import Nvml
from executor.launch.local_ranks import Failure
from executor.run.apply import report
from planner.runs.apply_report import lines
from planner.runs.run_document import verify_run
from tests.executor.fake_gpus import FailingNvml
from tests.executor.test_apply_run import DONE, REQUEST, step, write
from tests.waiting import wait_until
from topology import codec

CRASHED = replace(DONE, outcome="failed", failure=Failure(rank=0, exit_code=1, signal=None, message="CUDA error"))


@pytest.fixture
def library() -> FailingNvml:
    return FailingNvml()


def watched(library: FailingNvml, monkeypatch, happen) -> GpuMonitor:
    """Return the watch over a run in the middle of which something happens."""
    monkeypatch.setattr("executor.gpu.monitor.NVML_PERIOD_S", 0.01)
    watch = GpuMonitor(open_nvml=lambda: Nvml(library))
    watch.start()
    wait_until(lambda: watch._samples, 20)
    happen()
    watch.stop()
    return watch


def reported(folder, done, faults, *ends: dict) -> dict:
    for rank in range(2):
        write(folder, rank, step(0, 1.0), step(1, 1.5), *ends)
    document = report(replace(REQUEST, gpus=(0, 1)), done, folder, [], (), faults)
    return verify_run(codec.parse_json(codec.to_json(document), where="run"), where="run")


def test_a_gpu_off_the_bus_is_the_cause_and_the_steps_before_are_kept(tmp_path, library, monkeypatch) -> None:
    def happen() -> None:
        library.say(1, 79)
        library.lose(1)

    watch = watched(library, monkeypatch, happen)
    found = reported(tmp_path, CRASHED, watch.faults)

    assert (found["status"], found["exit_code"], found["complete"]) == ("failed", 1, False)
    assert found["measured"]["step_s"]["all"] == [1.0, 1.5]
    assert found["failure"]["gpus"] == [
        "GPU 1: Xid 79 (the GPU has fallen off the bus)",
        "GPU 1: it has fallen off the bus: the driver cannot reach it",
    ]
    assert any("GPU 1: it has fallen off the bus" in line for line in lines(found, None))


def test_memory_errors_leave_a_run_that_ended_well_in_doubt(tmp_path, library, monkeypatch) -> None:
    watch = watched(library, monkeypatch, lambda: library.spoil(0, 3))
    found = reported(tmp_path, DONE, watch.faults, {"kind": "timed"}, {"kind": "done"})

    assert (found["status"], found["exit_code"]) == ("failed", 1)
    assert found["failure"]["gpus"] == ["GPU 0: 3 memory errors that ECC could not correct"]
    assert "in doubt" in found["failure"]["message"]
    assert found["measured"]["steps"] == 2


def test_a_gpu_that_is_not_of_the_run_is_no_fault_of_it(tmp_path, library, monkeypatch) -> None:
    watch = watched(library, monkeypatch, lambda: library.lose(1))
    for rank in range(2):
        write(tmp_path, rank, step(0, 1.0), {"kind": "timed"}, {"kind": "done"})

    assert report(replace(REQUEST, gpus=(0, 3)), DONE, tmp_path, [], (), watch.faults)["status"] == "finished"


def test_what_follows_from_ending_a_process_is_not_told_and_nothing_twice(library) -> None:
    faults = NvmlFaults(library, [0, 1])
    for xid in (45, 31, 43, 31, 999):
        library.say(0, xid)

    assert faults.poll() == [(0, "Xid 31 (a kernel accessed memory that is not its own)"), (0, "Xid 999")]
    library.say(0, 31)
    assert faults.poll() == []


def test_a_library_without_events_and_ecc_has_no_faults(library) -> None:
    class Old(FailingNvml):
        nvmlEventSetCreate = nvmlDeviceGetTotalEccErrors = nvmlDeviceGetMemoryInfo = property()  # noqa: N815

    assert NvmlFaults(Old(), [0, 1]).poll() == []


def test_nvidia_smi_alone_is_quoted_once() -> None:
    words = "GPU 0: NVIDIA H200\nUnable to determine the device handle for GPU0000:0A:00.0: GPU is lost.\n"
    faults = SmiFaults(lambda: words)

    assert faults.poll() == [(None, "Unable to determine the device handle for GPU0000:0A:00.0: GPU is lost.")]
    assert faults.poll() == []
