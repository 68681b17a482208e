"""A whole machine from stand-ins: commands, NVML and a sysfs tree, each of them present, absent, slow or broken."""

import sys

import pytest

from planner.runs.planned_run import require_healthy
from tests.topology.captures import found, text
from tests.topology.test_nvml import FakeNvml
from topology.cluster import LinkKind, LinkState, Severity
from topology.errors import PlannerError, ProbeError
from topology.health.diagnose import diagnose
from topology.probe.from_machine import CommandOutput, probe_machine, run_command
from topology.readers.nvml import NvmlSnapshot, read_nvml
from topology.readers.smi_query import parse_query

LISTING = "".join(f"GPU {gpu}: NVIDIA H200 (UUID: GPU-{gpu:08d})\n" for gpu in range(4))
TOPO = text("h200x4/nvidia_smi_topo_m.txt")
P2P = text("h200x4/nvidia_smi_topo_p2p.txt").split("\n \t\x1b[4m")[0]
ANSWERS = {"-L": LISTING, "topo -m": TOPO, "topo -p2p": P2P}


def smi(**changes):
    """Return a runner that answers like nvidia-smi; `changes` replace answers by their words."""

    def run(arguments, timeout_s):
        said = " ".join(arguments[1:])
        for words, answer in {**ANSWERS, **changes}.items():
            if said.startswith(words.replace("_", " ")):
                return answer if isinstance(answer, CommandOutput) else CommandOutput(text=answer)
        return CommandOutput(failure="not supported")

    return run


def missing(arguments, timeout_s):
    return CommandOutput(failure="missing")


def probe(tmp_path, *, run=None, nvml=None, environment=None, **options):
    nvml = FakeNvml() if nvml is None else nvml
    read = nvml if callable(nvml) and not isinstance(nvml, FakeNvml) else lambda: read_nvml(nvml)
    return probe_machine(
        run=run or smi(),
        nvml=read,
        root=tmp_path,
        environment=environment or {},
        timeout_s=2.0,
        **options,
    )


def node(cluster):
    return cluster.groups[0].node


def test_sources_are_fused(tmp_path):
    cluster = probe(tmp_path)
    gpu = node(cluster).gpus[2]
    assert (gpu.kind, gpu.uuid, gpu.pci_bus_id) == ("h200-sxm", "GPU-00000002", "0000:0a:00.0")
    assert gpu.memory_bytes == 150_754_820_096
    assert gpu.cpu_affinity == "0-63"
    assert all(link.bytes_per_s == 450e9 for link in node(cluster).links if link.kind is LinkKind.NVSWITCH)
    assert found(cluster, Severity.WARNING, "busy", 1)
    assert found(cluster, Severity.WARNING, "throttled", 0)
    assert not found(cluster, Severity.ERROR)


def test_no_driver_is_an_answer_not_an_error(tmp_path):
    cluster = probe(tmp_path, run=missing, nvml=lambda: NvmlSnapshot(failure="no library"))
    assert cluster.gpu_count == 0
    (item,) = cluster.findings
    assert item.what == "no NVIDIA driver found"
    assert "--from" in item.remedy


def test_gpus_on_the_bus_without_a_driver(tmp_path):
    from tests.topology.test_sysfs import machine

    machine(tmp_path)
    cluster = probe(tmp_path, run=missing, nvml=lambda: NvmlSnapshot(failure="no driver"))
    assert cluster.gpu_count == 0
    assert found(cluster, Severity.ERROR, "no_gpu")


@pytest.mark.parametrize("through", ["nvidia-smi", "NVML"])
def test_version_mismatch_is_one_clear_error(tmp_path, through):
    words = CommandOutput(failure="Failed to initialize NVML: Driver/library version mismatch")
    options = {"run": smi(**{"-L": words})} if through == "nvidia-smi" else {"nvml": FakeNvml(init_error=18)}
    with pytest.raises(ProbeError) as caught:
        probe(tmp_path, **options)
    assert caught.value.exit_code == 1
    assert "reboot" in caught.value.remedy


def test_nvml_alone(tmp_path):
    cluster = probe(tmp_path, run=missing)
    assert len(node(cluster).gpus) == 4
    assert len([link for link in node(cluster).links if link.kind is LinkKind.NVSWITCH]) == 4
    assert node(cluster).pairs["0-1"] == "NV18"
    assert found(cluster, Severity.INFO, "silent")


def test_nvidia_smi_alone(tmp_path):
    cluster = probe(tmp_path, nvml=lambda: NvmlSnapshot(failure="no library"))
    assert [gpu.kind for gpu in node(cluster).gpus] == ["h200-sxm"] * 4
    assert found(cluster, Severity.INFO, "silent")


def test_a_slow_topo_is_a_finding(tmp_path):
    cluster = probe(tmp_path, run=smi(**{"topo -m": CommandOutput(failure="timeout")}))
    assert found(cluster, Severity.WARNING, "stuck")
    assert len(node(cluster).gpus) == 4


def test_after_two_hangs_nothing_more_is_asked(tmp_path):
    asked = []

    def run(arguments, timeout_s):
        asked.append(arguments)
        return CommandOutput(failure="timeout")

    cluster = probe(tmp_path, run=run)
    assert len(asked) == 2
    assert found(cluster, Severity.WARNING, "stuck")


def test_nvml_that_never_returns(tmp_path):
    import threading

    stuck = threading.Event()
    cluster = probe_machine(
        run=smi(), nvml=lambda: stuck.wait() and None, root=tmp_path, environment={}, timeout_s=0.05
    )
    stuck.set()
    assert found(cluster, Severity.ERROR, "stuck")
    assert len(node(cluster).gpus) == 4


UNREACHABLE = (
    "Unable to determine the device handle for GPU0000:0A:00.0: GPU is lost.  Reboot the system to recover this GPU"
)


@pytest.mark.parametrize("through", ["NVML", "nvidia-smi"])
def test_a_gpu_off_the_bus_is_named_and_left_out(tmp_path, through):
    fails = CommandOutput(failure=UNREACHABLE)
    if through == "NVML":
        cluster = probe(tmp_path, nvml=FakeNvml(lost_gpu=2))
    else:
        listing = LISTING.replace(LISTING.splitlines()[2], UNREACHABLE)
        cluster = probe(
            tmp_path,
            run=smi(**{"-L": listing, "topo -m": fails, "topo -p2p": fails}),
            nvml=lambda: NvmlSnapshot(failure="Unknown Error"),
        )

    (item,) = found(cluster, Severity.ERROR, "off_the_bus")
    assert ("GPU 2" if through == "NVML" else "0000:0a:00.0") in item.what
    assert [gpu.index for gpu in node(cluster).gpus] == [0, 1, 3]
    assert not diagnose(cluster).healthy
    with pytest.raises(PlannerError, match="fallen off the bus") as caught:
        require_healthy(diagnose(cluster), allow_busy=True)
    assert caught.value.exit_code == 1


def test_uncorrected_memory_errors_are_told_before_a_run(tmp_path):
    cluster = probe(tmp_path, nvml=FakeNvml(bad_memory=1))

    (item,) = found(cluster, Severity.WARNING, "ecc", 1)
    assert "2 uncorrected errors" in item.why
    assert "reset the GPU" in item.remedy
    with pytest.raises(PlannerError, match="the memory of GPU 1 has errors"):
        require_healthy(diagnose(cluster), allow_busy=True)


def test_links_active_but_fabric_not_ready(tmp_path):
    cluster = probe(tmp_path, nvml=FakeNvml(fabric_state=2))
    (item,) = found(cluster, Severity.ERROR, "fabric")
    assert "in progress" in item.why
    spokes = [link for link in node(cluster).links if link.kind is LinkKind.NVSWITCH]
    assert all(link.state is LinkState.UNKNOWN and link.confidence < 0.5 for link in spokes)


def test_zero_links_while_the_clique_looks_normal(tmp_path):
    """The GB300 case: fabric state completed, clique set, and no link."""
    cluster = probe(tmp_path, run=missing, nvml=FakeNvml(dead_gpu=1))
    (item,) = found(cluster, Severity.ERROR, "lost_gpu", 1)
    assert "looks normal" in item.why
    assert not node(cluster).gpus[1].healthy


def test_a_narrow_pcie_link(tmp_path):
    cluster = probe(tmp_path, nvml=FakeNvml(width=8))
    assert len(found(cluster, Severity.WARNING, "pcie_width")) == 4
    slots = [link for link in node(cluster).links if link.kind is LinkKind.PCIE]
    assert all(link.state is LinkState.DEGRADED for link in slots)


def test_mig_is_told(tmp_path):
    mig = LISTING.replace("GPU 1:", "  MIG 1g.18gb Device 0: (UUID: MIG-aa)\nGPU 1:")
    cluster = probe(tmp_path, run=smi(**{"-L": mig}), nvml=lambda: NvmlSnapshot(failure="no library"))
    assert found(cluster, Severity.WARNING, "mig", 0)


@pytest.mark.parametrize(
    ("value", "order"),
    [("3,1", [3, 1]), ("GPU-00000002,0", [2, 0]), ("1,0,3,2", [1, 0, 3, 2]), ("", []), ("0,7,1", [0])],
)
def test_the_visible_order_is_kept(tmp_path, value, order):
    cluster = probe(tmp_path, environment={"CUDA_VISIBLE_DEVICES": value})
    assert [gpu.index for gpu in node(cluster).gpus] == order
    assert found(cluster, Severity.INFO, "visible")
    shown = {f"gpu{index}" for index in order}
    assert {link.a for link in node(cluster).links if link.kind is LinkKind.NVSWITCH} == shown
    assert all(set(pair.split("-")) <= set(map(str, order)) for pair in node(cluster).pairs)


def test_all_visible_in_order_needs_no_word(tmp_path):
    cluster = probe(tmp_path, environment={"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    assert cluster == probe(tmp_path)


def test_the_pci_tree_stands_in_for_the_matrix(tmp_path):
    from tests.topology.test_sysfs import machine

    machine(tmp_path)
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1/state").write_text("1: DOWN\n")

    class Three(FakeNvml):
        def do_nvmlDeviceGetPciInfo(self, handle):  # noqa: N802
            from types import SimpleNamespace

            return SimpleNamespace(busId=f"00000000:{(3, 4, 0x81)[handle]:02X}:00.0")

        def do_nvmlDeviceGetNvLinkState(self, handle, link):  # noqa: N802
            raise self.NVMLError(3)

    cluster = probe(tmp_path, run=missing, nvml=Three(count=3))
    assert node(cluster).pairs == {"0-1": "PIX", "0-2": "SYS", "1-2": "SYS"}
    assert [gpu.numa for gpu in node(cluster).gpus] == [0, 0, 1]
    assert node(cluster).closest_nics["0"] == ("mlx5_0",)
    assert found(cluster, Severity.WARNING, "nic_down")


def test_commands_are_bounded(tmp_path):
    assert run_command([str(tmp_path / "no such program")], 1.0).failure == "missing"
    assert run_command([sys.executable, "-c", "import time; time.sleep(60)"], 0.3).failure == "timeout"
    assert run_command([sys.executable, "-c", "print('x'); raise SystemExit(3)"], 20.0) == CommandOutput(
        text="x\n", failure="x"
    )
    assert run_command([sys.executable, "-c", "print('fine')"], 20.0) == CommandOutput(text="fine\n")


@pytest.mark.parametrize("said", ["", "a banner of some other tool\n"])
def test_an_answer_nobody_understands_is_named(tmp_path, said):
    cluster = probe(tmp_path, run=smi(**{"topo -m": said}))

    assert found(cluster, Severity.WARNING, "silent")


def test_a_power_limit_below_the_datasheet_is_a_finding(tmp_path):
    class Capped(FakeNvml):
        def do_nvmlDeviceGetEnforcedPowerLimit(self, handle):  # noqa: N802
            return 500_000 if handle == 1 else 700_000

    cluster = probe_machine(run=smi(), nvml=lambda: read_nvml(Capped()), root=tmp_path, environment={})
    (item,) = found(cluster, Severity.WARNING, "power_limit")

    assert (item.gpus, item.numbers) == ((1,), {"limit_w": 500, "usual_w": 700})


def test_the_gpu_model_can_be_named(tmp_path):
    cluster = probe(tmp_path, gpu="rtx-a6000")

    assert {gpu.kind for gpu in node(cluster).gpus} == {"rtx-a6000"}


def test_endless_output_is_cut_while_it_is_read() -> None:
    assert "more than" in (run_command(["yes"], 20.0).failure or "")
    assert run_command(["echo", "GPU 0"], 20.0).text == "GPU 0\n"
    assert run_command(["sleep", "5"], 0.1).failure == "timeout"


def test_a_header_of_many_brackets_is_read() -> None:
    assert parse_query("index, uuid, " + "[" * 1_000_000 + "\n0, GPU-1, x\n")[0].uuid == "GPU-1"
    assert parse_query("index, memory.total [MiB]\n0, 80\n")[0].memory_bytes == 80 * 2**20
