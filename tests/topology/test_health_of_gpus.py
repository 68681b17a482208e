"""Health of GPUs and slots, of tools that fail, and of machines that are not the one that was expected."""

from __future__ import annotations

import pytest

from tests.topology.captures import NCCL
from tests.topology.machines import item, nvswitch_matrix, probe, with_nvml
from topology.catalog.clusters import cluster as catalogue
from topology.cluster import Severity
from topology.health.diagnose import ADVICE, diagnose
from topology.probe.from_machine import CommandOutput, probe_machine
from topology.readers.nvml import NvmlSnapshot


def test_a_narrow_slot() -> None:
    narrow = (
        "index, uuid, name, pci.bus_id, memory.total [MiB], pcie.link.width.current, pcie.link.width.max\n"
        "0, GPU-0, NVIDIA L40S, 00000000:01:00.0, 46068, 8, 16\n"
        "1, GPU-1, NVIDIA L40S, 00000000:02:00.0, 46068, 16, 16\n"
    )

    health = diagnose(probe(narrow))

    slot = item(health, "pcie_width")
    assert slot.gpus == (0,)
    assert slot.cost is not None
    assert slot.cost.now_s == pytest.approx(2 * slot.cost.expected_s)
    assert not health.healthy


def test_hidden_switches_matter_where_gpus_talk_over_pcie() -> None:
    health = diagnose(probe((NCCL / "h200_vm_numa_minus1_fragment.xml").read_text()))

    assert item(health, "hidden").severity is Severity.WARNING
    assert not health.healthy


def test_mig() -> None:
    health = diagnose(with_nvml(mig=True))

    assert item(health, "mig").gpus == (1,)
    assert not health.healthy


def test_throttling() -> None:
    health = diagnose(with_nvml(throttle=("hardware thermal slowdown",)))

    assert "thermal" in item(health, "throttled").why
    assert not health.healthy


def test_busy_gpu() -> None:
    health = diagnose(with_nvml(processes=((4242, 3 * 2**30),)))

    assert item(health, "busy").gpus == (1,)
    assert "pid 4242 (3.0 GiB)" in item(health, "busy").why
    assert not health.healthy


def test_mixed_models() -> None:
    health = diagnose(with_nvml(name="NVIDIA H100 80GB HBM3"))

    assert item(health, "mixed").severity is Severity.WARNING
    assert not health.healthy


def test_seven_of_eight() -> None:
    """NVIDIA/gpu-operator#2511: 7 of 8 GPUs."""
    alone = diagnose(probe(nvswitch_matrix(7), gpu="h200-sxm"))
    against = diagnose(probe(nvswitch_matrix(7), gpu="h200-sxm"), expected=catalogue("dgx-h200"))

    assert not alone.healthy
    errors = [one for one in against.items if one.severity is Severity.ERROR]
    assert [one.code for one in errors] == ["missing_gpu"]
    assert "1.14x" in errors[0].consequence


def test_the_machine_that_was_expected() -> None:
    found = probe(nvswitch_matrix(8), gpu="h200-sxm")

    assert diagnose(found, expected=catalogue("dgx-h200")).healthy
    assert not diagnose(found, expected=catalogue("dgx-b200")).healthy


def test_a_warning_about_a_text_is_not_a_fault_of_the_machine() -> None:
    health = diagnose(probe(nvswitch_matrix(8), "what is this", gpu="h200-sxm"))

    assert [one.code for one in health.items] == ["reading"]
    assert item(health, "reading").code in ADVICE
    assert health.healthy


@pytest.mark.parametrize(
    ("failure", "healthy"), [("Field 'x' is not a valid field to query.", True), ("timeout", False)]
)
def test_a_tool_that_says_no_is_no_fault_and_one_that_hangs_is(failure: str, healthy: bool, tmp_path) -> None:
    """Partly seated bridges made `topo -m` take 112 s (NVIDIA/nccl#557)."""

    def run(command, timeout_s):
        return (
            CommandOutput(text=nvswitch_matrix(4)) if command[1:] == ("topo", "-m") else CommandOutput(failure=failure)
        )

    found = probe_machine(run=run, environment={}, nvml=lambda: NvmlSnapshot(failure="no library"), root=tmp_path)

    assert diagnose(found).healthy is healthy
    assert any(one.code == "stuck" for one in diagnose(found).items) is not healthy
