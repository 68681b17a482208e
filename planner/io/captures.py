"""Read clusters from captures (`nvidia-smi topo -m`, NCCL's XML) and from this machine."""

from __future__ import annotations

from topology import codec
from topology.cluster import Cluster
from topology.errors import BadCluster
from topology.probe.from_machine import probe_machine
from topology.probe.from_text import probe_text


def read_capture(name: str, gpu: str | None) -> Cluster | None:
    """Return the cluster of a captured text, or of this machine (`local`); None for JSON."""
    if name == "local":
        found = probe_machine()
    else:
        text = codec.read_text(name)
        if text.lstrip().startswith(("{", "[")):
            return None
        found = probe_text([(name, text)], gpu=gpu)
    if not found.gpu_count:
        raise BadCluster(
            "this machine has no GPU to plan for" if name == "local" else f"{name} shows no GPU",
            why="; ".join(finding.what for finding in found.findings),
            remedy="say the machine with --cluster: GPUs (8xH100), a name (dgx-h100), or a file with what"
            " `nvidia-smi topo -m` prints there",
        )
    return found
