"""Machines for tests of health: matrices of switched ones, NVML's view of four H200, the one item of a code."""

from __future__ import annotations

from tests.topology.captures import TOPO
from topology.cluster import Cluster
from topology.health.diagnose import Health, HealthItem
from topology.probe.from_text import build, probe_text
from topology.probe.machine import Evidence
from topology.readers.nvml import NvmlGpu, NvmlLink, NvmlSnapshot
from topology.readers.smi_topo import parse_topo

H200X4 = TOPO.parent / "h200x4"


def probe(*texts: str, gpu: str | None = None) -> Cluster:
    return probe_text([(f"text {at}", content) for at, content in enumerate(texts)], gpu=gpu)


def nvswitch_matrix(count: int, *, links: int = 18, lost: int | None = None, weak: tuple[int, int] = (-1, 0)) -> str:
    """Return `nvidia-smi topo -m` of a switched machine, one GPU of it off the fabric or with fewer links."""

    def cell(a: int, b: int) -> str:
        if a == b:
            return " X "
        return "SYS" if lost in {a, b} else f"NV{weak[1]}" if weak[0] in {a, b} else f"NV{links}"

    head = "\t" + "\t".join(f"GPU{i}" for i in range(count)) + "\tCPU Affinity\tNUMA Affinity"
    rows = [
        f"GPU{a}\t" + "\t".join(cell(a, b) for b in range(count)) + f"\t{32 * (a // 4)}-{32 * (a // 4) + 31}\t{a // 4}"
        for a in range(count)
    ]
    return "\n".join([head, *rows]) + "\n"


def matrix(rows: list[list[str]]) -> str:
    """Return `nvidia-smi topo -m` with the given classes."""
    head = "\t" + "\t".join(f"GPU{i}" for i in range(len(rows)))
    return "\n".join([head, *(f"GPU{i}\t" + "\t".join(row) for i, row in enumerate(rows))]) + "\n"


def with_nvml(count: int = 4, **of_gpu_1) -> Cluster:
    """Return an H200 machine whose NVML reports are normal but for what is given for GPU 1."""
    normal = {
        "name": "NVIDIA H200",
        "links": tuple(NvmlLink(index=i, active=True, remote_type="switch") for i in range(18)),
        "fabric_state": "completed",
        "fabric_status": 0,
        "fabric_clique": 0,
        "fabric_cluster": "0" * 32,
        "mig": False,
        "throttle": (),
        "processes": (),
    }
    gpus = [NvmlGpu(index=i, uuid=f"GPU-{i}", **{**normal, **(of_gpu_1 if i == 1 else {})}) for i in range(count)]
    evidence = Evidence(topo=parse_topo(nvswitch_matrix(count)), nvml=NvmlSnapshot(driver="580.1", gpus=tuple(gpus)))
    return build(evidence, gpu=None, name="test")


def item(health: Health, code: str) -> HealthItem:
    hits = [one for one in health.items if one.code == code]
    assert len(hits) == 1, [(one.code, one.what) for one in health.items]
    assert hits[0].why
    assert hits[0].consequence
    assert hits[0].remedy
    return hits[0]
