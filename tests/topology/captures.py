"""Paths of the public captures under tests/data, the answer keys alongside them, and what was found in them."""

import json
from pathlib import Path

from topology.cluster import Cluster, Finding, Severity

DATA = Path(__file__).parent.parent / "data"
TOPO = DATA / "topo"
NCCL = DATA / "nccl_xml"
MATRICES = json.loads((TOPO / "index.json").read_text())["matrices"]
NCCL_FILES = json.loads((NCCL / "index.json").read_text())["files"]


def text(path: str) -> str:
    return (DATA / path).read_text(encoding="utf-8")


def matrix(prefix: str) -> str:
    """The capture whose file name begins with `prefix`, such as `64_`."""
    (path,) = TOPO.glob(f"{prefix}*.txt")
    return path.read_text(encoding="utf-8")


def found(cluster: Cluster, severity: Severity, code: str | None = None, *gpus: int) -> list[Finding]:
    """Findings of a severity, about these GPUs if any are named; each must say why, what it costs and what to do."""
    hits = [
        item
        for item in cluster.findings
        if item.severity is severity and code in {None, item.code} and (not gpus or item.gpus == gpus)
    ]
    assert all(item.why and item.consequence and item.remedy for item in hits)
    return hits
