"""Ask this machine: nvidia-smi, NVML and sysfs, each of them allowed to be missing, slow or broken.

Commands run as argument lists with a time limit each; a broken box takes minutes for `topo -m` (112 s in
NVIDIA/nccl#557) or hangs in `nvlink` for good (the GB300 of nccl-eBPF). A source that does not answer is a finding.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from topology.cluster import Cluster, Finding, Severity
from topology.errors import ProbeError
from topology.finding import ERROR, INFO, WARNING, finding, names
from topology.machine import Evidence
from topology.nvml import NvmlSnapshot, read_nvml
from topology.probe import Catalogue, build, restrict, shipped_catalogue
from topology.smi_nvlink import parse_nvlink
from topology.smi_p2p import parse_p2p
from topology.smi_query import FIELDS, parse_query
from topology.smi_topo import parse_topo
from topology.sysfs import read_sysfs
from topology.visible import visible_gpus

TIMEOUT_S = 20.0
MAX_OUTPUT_BYTES = 4 * 2**20
MAX_TIMEOUTS = 2

LIST = ("nvidia-smi", "-L")
QUERY = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,nounits")
TOPO = ("nvidia-smi", "topo", "-m")
P2P = (("nvidia-smi", "topo", "-p2p", "r"), ("nvidia-smi", "topo", "-p2p", "w"))
NVLINK = (("nvidia-smi", "nvlink", "-s"), ("nvidia-smi", "nvlink", "-R"), ("nvidia-smi", "nvlink", "-e"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command gave: its text, and why there is none (`missing`, `timeout`, or its own words)."""

    text: str = ""
    failure: str | None = None


Runner = Callable[[Sequence[str], float], Answer]


def run_command(arguments: Sequence[str], timeout_s: float) -> Answer:
    """Run one command without a shell and return its output. A child that ignores the kill is left behind, not waited
    for: a process stuck in the driver would take this one with it.
    """
    try:
        process = subprocess.Popen(
            list(arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C", "TERM": "dumb"},
        )
    except FileNotFoundError:
        return Answer(failure="missing")
    except OSError as error:
        return Answer(failure=error.strerror or str(error))
    try:
        raw, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1.0)
        return Answer(failure="timeout")
    text = raw[:MAX_OUTPUT_BYTES].decode("utf-8", errors="replace")
    return Answer(text=text, failure=None if process.returncode == 0 else text.strip()[:300] or "it failed silently")


def probe_machine(
    *,
    gpu: str | None = None,
    name: str = "this machine",
    environment: Mapping[str, str] | None = None,
    run: Runner = run_command,
    nvml: Callable[[], NvmlSnapshot] | None = None,
    root: str | Path = "/",
    catalogue: Catalogue | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Cluster:
    """Return this machine as a Cluster of one node: the GPUs a CUDA program would see, in the order it would see them.

    `gpu` names the GPU model in the catalogue where the driver's own name is not one it knows.
    Without a GPU or driver the cluster has no GPUs and a finding says why. Raises ProbeError if the driver and its
    library have different versions: nothing that uses CUDA works then.
    """
    environment = os.environ if environment is None else environment
    evidence = Evidence()
    answers = _ask(evidence, run, timeout_s)
    snapshot = _in_time(nvml or read_nvml, timeout_s)
    _mismatch(answers, snapshot)
    evidence.nvml = snapshot if snapshot is not None and snapshot.failure is None else None
    evidence.sysfs = read_sysfs(root)
    gpus = bool(evidence.topo or evidence.nvlink or evidence.query or (evidence.nvml and evidence.nvml.gpus))
    _missing_sources(evidence, answers, snapshot, gpus=gpus)
    cluster = build(evidence, gpu=gpu, name=name, catalogue=catalogue or shipped_catalogue())
    return _visible(cluster, evidence, environment)


def _ask(evidence: Evidence, run: Runner, timeout_s: float) -> dict[Sequence[str], Answer]:
    """Run the commands in turn; stop after two that hang, since the others ask the same driver."""
    answers: dict[Sequence[str], Answer] = {}
    for command in (LIST, QUERY, TOPO, *P2P, *NVLINK):
        failures = [answer.failure for answer in answers.values()]
        if "missing" in failures or failures.count("timeout") >= MAX_TIMEOUTS:
            break
        answer = answers[command] = run(command, timeout_s)
        if answer.failure is not None:
            continue
        if command == TOPO:
            evidence.topo = parse_topo(answer.text)
        elif command == QUERY:
            evidence.query = parse_query(answer.text)
        elif command in P2P:
            # The table itself does not say what it is about; the command line does.
            evidence.p2p = (*evidence.p2p, *parse_p2p(f"$ {' '.join(command)}\n{answer.text}"))
        else:
            evidence.nvlink_text += f"\n{answer.text}"
            evidence.nvlink = parse_nvlink(evidence.nvlink_text)
    return answers


def _in_time(read: Callable[[], NvmlSnapshot], timeout_s: float) -> NvmlSnapshot | None:
    """Read NVML in a thread of its own: a call into a broken driver may never return. None means it did not."""
    box: list[NvmlSnapshot] = []
    thread = threading.Thread(target=lambda: box.append(read()), daemon=True, name="nvml")
    thread.start()
    thread.join(timeout_s)
    return box[0] if box else None


def _mismatch(answers: Mapping[Sequence[str], Answer], snapshot: NvmlSnapshot | None) -> None:
    words = [answer.failure or "" for answer in answers.values()]
    if any("version mismatch" in said.lower() for said in words) or (
        snapshot is not None and snapshot.failure == "version mismatch"
    ):
        raise ProbeError(
            "the NVIDIA driver and its library have different versions",
            why="the driver was updated while the old kernel module stayed loaded",
            remedy="reboot, or unload and load the nvidia kernel modules",
        )


def _missing_sources(
    evidence: Evidence, answers: Mapping[Sequence[str], Answer], snapshot: NvmlSnapshot | None, *, gpus: bool
) -> None:
    """One finding for each source that gave nothing, and one that sums up when there is no GPU at all."""
    say = evidence.findings.append
    on_bus = len(evidence.sysfs.gpus) if evidence.sysfs is not None else 0
    if not gpus:
        said = [f"{' '.join(command[:3])}: {answer.failure}" for command, answer in answers.items() if answer.failure]
        said += [f"NVML: {snapshot.failure}"] if snapshot is not None and snapshot.failure else []
        say(
            finding(
                ERROR if on_bus else INFO,
                f"no NVIDIA driver found, but {on_bus} NVIDIA GPUs on the PCI bus"
                if on_bus
                else "no NVIDIA driver found",
                "; ".join(said[:4]) or "no source lists a GPU",
                "nothing can be measured here; plans for another machine can still be made",
                "install or load the driver" if on_bus else "use `--from FILE` or a cluster of the catalogue",
            )
        )
        return
    smi = next((answer.failure for answer in answers.values() if answer.failure == "missing"), None)
    if smi is not None:
        say(_absent(INFO, "nvidia-smi", "it is not on the PATH", "link labels come from sysfs and NVML instead"))
    for command in (LIST, QUERY, TOPO, *P2P, *NVLINK):
        answer = answers.get(command)
        shown = " ".join(part.partition("=")[0] for part in command[:4])
        if answer is None and smi is None:
            say(_absent(WARNING, f"`{shown}`", "it was not run: earlier commands hung", "its readings are missing"))
        elif answer is not None and answer.failure == "timeout":
            late = (
                "it did not answer in time: the driver is slow or stuck, as with half-seated bridges (NVIDIA/nccl#557)"
            )
            say(_absent(WARNING, f"`{shown}`", late, "its readings are missing"))
        elif answer is not None and answer.failure is None and not _understood(evidence, command, answer):
            say(_absent(WARNING, f"`{shown}`", "its output is not understood", "its readings are missing"))
        elif answer is not None and answer.failure not in {None, "missing"}:
            severity = INFO if command in NVLINK else WARNING
            say(_absent(severity, f"`{shown}`", answer.failure or "", "its readings are missing"))
    if snapshot is None:
        say(_absent(ERROR, "NVML", "it did not answer in time", "the driver is stuck; CUDA programs may hang too"))
    elif snapshot.failure is not None:
        why = "nvidia-ml-py is not installed" if snapshot.failure == "no library" else snapshot.failure
        say(_absent(INFO, "NVML", why, "fabric state, clocks and processes are not known"))
    else:
        gaps = sorted({field for gpu in snapshot.gpus for field in gpu.missing})
        if gaps:
            say(_absent(INFO, "part of NVML", f"the driver does not give: {', '.join(gaps)}", "these stay empty"))
    if evidence.sysfs is not None and not evidence.sysfs.gpus:
        say(
            _absent(
                INFO, "sysfs", "it lists no NVIDIA GPU (a container?)", "the PCI tree behind the labels is not known"
            )
        )


def _understood(evidence: Evidence, command: Sequence[str], answer: Answer) -> bool:
    """Whether a command that answered gave anything a reader could use; NVLink texts may rightly be empty."""
    if command == TOPO:
        return evidence.topo is not None and bool(evidence.topo.gpus)
    if command == QUERY:
        return bool(evidence.query)
    return command not in P2P or bool(parse_p2p(f"$ {' '.join(command)}\n{answer.text}"))


def _absent(severity: Severity, what: str, why: str, consequence: str) -> Finding:
    return finding(severity, f"{what} gave nothing", why, consequence, "run it by hand to see why")


def _visible(cluster: Cluster, evidence: Evidence, environment: Mapping[str, str]) -> Cluster:
    """Keep the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order, and say which are gone."""
    node = cluster.groups[0].node
    blocks = evidence.nvlink.gpus if evidence.nvlink is not None else ()
    parents = {uuid: block.index for block in blocks for uuid in block.mig_uuids}
    seen = visible_gpus(environment, [(gpu.index, gpu.uuid) for gpu in node.gpus], parents)
    if seen.order is None or not node.gpus:
        return cluster
    notes = list(cluster.findings)
    hidden = [gpu.index for gpu in node.gpus if gpu.index not in seen.order]
    value = environment["CUDA_VISIBLE_DEVICES"][:200]
    if seen.problem:
        notes.append(
            finding(
                WARNING,
                "CUDA_VISIBLE_DEVICES cannot be resolved in full",
                f"it is {value!r}: {seen.problem}",
                f"{len(seen.order)} of {len(node.gpus)} GPUs are visible",
                "list each GPU once, by index or UUID",
            )
        )
    if hidden or list(seen.order) != sorted(seen.order):
        order = ", ".join(map(str, seen.order)) or "none"
        notes.append(
            finding(
                INFO,
                f"CUDA sees the GPUs {order}, in this order",
                f"CUDA_VISIBLE_DEVICES is {value!r}" + (f" and hides {names(hidden)}" if hidden else ""),
                "ranks follow this order; GPU indices here stay those of nvidia-smi",
                "set CUDA_DEVICE_ORDER=PCI_BUS_ID so that CUDA counts as nvidia-smi does",
            )
        )
    return replace(restrict(cluster, seen.order), findings=tuple(notes))
