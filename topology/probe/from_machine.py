"""Probe this machine with nvidia-smi, NVML and sysfs; each may be missing, slow or broken.

Every command has a time limit: on a broken machine `topo -m` takes minutes (112 s in NVIDIA/nccl#557), and `nvlink` may
never return (a GB300 in nccl-eBPF). A source that does not answer becomes a finding.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from topology.cluster import Cluster, Finding, Severity
from topology.errors import ProbeError
from topology.finding import ERROR, INFO, WARNING, finding, gpu_names
from topology.probe.from_text import build, select_gpus
from topology.probe.machine import Evidence
from topology.readers.nvml import NvmlSnapshot, read_nvml
from topology.readers.smi_nvlink import parse_nvlink
from topology.readers.smi_p2p import parse_p2p
from topology.readers.smi_query import FIELDS, parse_query
from topology.readers.smi_topo import parse_topo
from topology.readers.sysfs import read_sysfs
from topology.readers.visible_devices import visible_gpus
from topology.units import MIB

TIMEOUT_S = 20.0
MAX_OUTPUT_BYTES = 4 * MIB
MAX_TIMEOUTS = 2

LIST = ("nvidia-smi", "-L")
QUERY = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,nounits")
TOPO = ("nvidia-smi", "topo", "-m")
P2P = (("nvidia-smi", "topo", "-p2p", "r"), ("nvidia-smi", "topo", "-p2p", "w"))
UNREACHABLE = re.compile(r"Unable to determine the device handle for GPU ?([0-9A-Fa-f:.]{7,20}): ", re.IGNORECASE)
NVLINK = (("nvidia-smi", "nvlink", "-s"), ("nvidia-smi", "nvlink", "-R"), ("nvidia-smi", "nvlink", "-e"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutput:
    """What a command printed, or why it failed: `missing`, `timeout`, or its error message."""

    text: str = ""
    failure: str | None = None


Runner = Callable[[Sequence[str], float], CommandOutput]


def run_command(arguments: Sequence[str], timeout_s: float) -> CommandOutput:
    """Run one command without a shell and return its output.

    A process that does not end when killed (one stuck in the driver) is not waited for.
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
        return CommandOutput(failure="missing")
    except OSError as error:
        return CommandOutput(failure=error.strerror or str(error))
    raw = _read_output(process, timeout_s)
    if raw is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1.0)
        return CommandOutput(failure="timeout")
    if len(raw) > MAX_OUTPUT_BYTES:
        process.kill()
        return CommandOutput(failure=f"it printed more than {MAX_OUTPUT_BYTES >> 20} MiB")
    text = raw.decode("utf-8", errors="replace")
    return CommandOutput(
        text=text, failure=None if process.returncode == 0 else text.strip()[:300] or "it failed silently"
    )


def _read_output(process: subprocess.Popen[bytes], timeout_s: float) -> bytes | None:
    """Return what a process printed, and not much more than the limit of it; None where it did not end in time."""
    deadline = time.monotonic() + timeout_s
    raw = b""
    if process.stdout is None:
        return raw
    with process.stdout as pipe, selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while len(raw) <= MAX_OUTPUT_BYTES:
            if not selector.select(max(deadline - time.monotonic(), 0.0)):
                return None
            part = os.read(pipe.fileno(), 1 << 16)
            if not part:
                break
            raw += part
        else:
            return raw
    try:
        process.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        return None
    return raw


def probe_machine(
    *,
    gpu: str | None = None,
    name: str = "this machine",
    environment: Mapping[str, str] | None = None,
    run: Runner = run_command,
    nvml: Callable[[], NvmlSnapshot] | None = None,
    root: str | Path = "/",
    timeout_s: float = TIMEOUT_S,
) -> Cluster:
    """Return this machine as a Cluster of one node: the GPUs a CUDA program would see, in the order it would see them.

    `gpu` names the GPU model of the catalogue, for drivers whose name for it is not known. Without a GPU or driver the
    cluster has no GPUs, and a finding says why. Raises ProbeError if the driver and its library have different
    versions: nothing that uses CUDA works then.
    """
    environment = os.environ if environment is None else environment
    evidence = Evidence()
    outputs = _run_commands(evidence, run, timeout_s)
    snapshot = _read_with_timeout(nvml or read_nvml, timeout_s)
    _refuse_version_mismatch(outputs, snapshot)
    evidence.nvml = snapshot if snapshot is not None and snapshot.failure is None else None
    evidence.sysfs = read_sysfs(root)
    evidence.unreachable = _unreachable(outputs)
    gpus = bool(evidence.topo or evidence.nvlink or evidence.query or (evidence.nvml and evidence.nvml.gpus))
    _missing_sources(evidence, outputs, snapshot, gpus=gpus)
    cluster = build(evidence, gpu=gpu, name=name)
    return _apply_visible_devices(cluster, evidence, environment)


def _run_commands(evidence: Evidence, run: Runner, timeout_s: float) -> dict[Sequence[str], CommandOutput]:
    """Run the commands in turn and parse their output into `evidence`.

    Stops after two that time out, since all of them depend on the same driver.
    """
    outputs: dict[Sequence[str], CommandOutput] = {}
    for command in (LIST, QUERY, TOPO, *P2P, *NVLINK):
        failures = [output.failure for output in outputs.values()]
        if "missing" in failures or failures.count("timeout") >= MAX_TIMEOUTS:
            break
        output = outputs[command] = run(command, timeout_s)
        if output.failure is not None:
            continue
        if command == TOPO:
            evidence.topo = parse_topo(output.text)
        elif command == QUERY:
            evidence.query = parse_query(output.text)
        elif command in P2P:
            # The table does not say which capability it shows; the command line does.
            evidence.p2p = (*evidence.p2p, *parse_p2p(f"$ {' '.join(command)}\n{output.text}"))
        else:
            evidence.nvlink_text += f"\n{output.text}"
            evidence.nvlink = parse_nvlink(evidence.nvlink_text)
    return outputs


def _read_with_timeout(read: Callable[[], NvmlSnapshot], timeout_s: float) -> NvmlSnapshot | None:
    """Read NVML in a thread, since a call into a broken driver may never return; None if it did not return in time."""
    box: list[NvmlSnapshot] = []
    thread = threading.Thread(target=lambda: box.append(read()), daemon=True, name="nvml")
    thread.start()
    thread.join(timeout_s)
    return box[0] if box else None


def _refuse_version_mismatch(outputs: Mapping[Sequence[str], CommandOutput], snapshot: NvmlSnapshot | None) -> None:
    words = [output.failure or "" for output in outputs.values()]
    if any("version mismatch" in failures.lower() for failures in words) or (
        snapshot is not None and snapshot.failure == "version mismatch"
    ):
        raise ProbeError(
            "the NVIDIA driver and its library have different versions",
            why="the driver was updated while the old kernel module stayed loaded",
            remedy="reboot, or unload and load the nvidia kernel modules",
        )


def _unreachable(outputs: Mapping[Sequence[str], CommandOutput]) -> tuple[tuple[str, str], ...]:
    """Return the address of each GPU that nvidia-smi says it cannot reach, and its words."""
    found: dict[str, str] = {}
    for output in outputs.values():
        for line in f"{output.text}\n{output.failure or ''}".splitlines():
            if match := UNREACHABLE.match(line.strip()):
                found.setdefault(match[1].lower(), line.strip()[:200])
    return tuple(found.items())


def _missing_sources(
    evidence: Evidence, outputs: Mapping[Sequence[str], CommandOutput], snapshot: NvmlSnapshot | None, *, gpus: bool
) -> None:
    """Add a finding for each source that gave nothing; a single one when there is no GPU at all."""
    add = evidence.findings.append
    on_bus = len(evidence.sysfs.gpus) if evidence.sysfs is not None else 0
    if not gpus:
        failures = [
            f"{' '.join(command[:3])}: {output.failure}" for command, output in outputs.items() if output.failure
        ]
        failures += [f"NVML: {snapshot.failure}"] if snapshot is not None and snapshot.failure else []
        if any(output.failure == "timeout" for output in outputs.values()):
            add(
                finding(
                    "stuck",
                    ERROR,
                    "the NVIDIA driver does not answer",
                    "; ".join(failures[:4]),
                    "no GPU can be used while it hangs",
                    "look for Xid messages in `dmesg`; reset the GPU or reboot",
                )
            )
            return
        add(
            finding(
                "no_gpu",
                ERROR if on_bus else INFO,
                f"no NVIDIA driver found, but {on_bus} NVIDIA GPUs on the PCI bus"
                if on_bus
                else "no NVIDIA driver found",
                "; ".join(failures[:4]) or "no source lists a GPU",
                "nothing can be measured here; plans for another machine can still be made",
                "install or load the driver"
                if on_bus
                else "name another machine: --from FILE, or --cluster dgx-h100, say",
            )
        )
        return
    smi = next((output.failure for output in outputs.values() if output.failure == "missing"), None)
    if smi is not None:
        add(_no_output(INFO, "nvidia-smi", "it is not on the PATH", "link labels come from sysfs and NVML instead"))
    for command in (LIST, QUERY, TOPO, *P2P, *NVLINK):
        output = outputs.get(command)
        shown = " ".join(part.partition("=")[0] for part in command[:4])
        if output is None and smi is None:
            hung = "it was not run: earlier commands hung"
            add(_no_output(WARNING, f"`{shown}`", hung, "its readings are missing", code="stuck"))
        elif output is not None and output.failure == "timeout":
            late = (
                "it did not answer in time: the driver is slow or stuck, as with half-seated bridges (NVIDIA/nccl#557)"
            )
            add(_no_output(WARNING, f"`{shown}`", late, "its readings are missing", code="stuck"))
        elif output is not None and output.failure is None and not _understood(evidence, command, output):
            add(_no_output(WARNING, f"`{shown}`", "its output is not understood", "its readings are missing"))
        elif output is not None and output.failure not in {None, "missing"}:
            severity = INFO if command in NVLINK else WARNING
            add(_no_output(severity, f"`{shown}`", output.failure or "", "its readings are missing"))
    if snapshot is None:
        hung = "the driver is stuck; CUDA programs may hang too"
        add(_no_output(ERROR, "NVML", "it did not answer in time", hung, code="stuck"))
    elif snapshot.failure is not None:
        why = "nvidia-ml-py is not installed" if snapshot.failure == "no library" else snapshot.failure
        add(_no_output(INFO, "NVML", why, "fabric state, clocks and processes are not known"))
    else:
        gaps = sorted({field for gpu in snapshot.gpus for field in gpu.missing})
        if gaps:
            add(_no_output(INFO, "part of NVML", f"the driver does not give: {', '.join(gaps)}", "these stay empty"))
    if evidence.sysfs is not None and not evidence.sysfs.gpus:
        add(
            _no_output(
                INFO, "sysfs", "it lists no NVIDIA GPU (a container?)", "the PCI tree behind the labels is not known"
            )
        )


def _understood(evidence: Evidence, command: Sequence[str], output: CommandOutput) -> bool:
    """Whether a command's output could be parsed; the output of `nvlink` may be empty."""
    if command == TOPO:
        return evidence.topo is not None and bool(evidence.topo.gpus)
    if command == QUERY:
        return bool(evidence.query)
    return command not in P2P or bool(parse_p2p(f"$ {' '.join(command)}\n{output.text}"))


def _no_output(severity: Severity, what: str, why: str, consequence: str, *, code: str = "silent") -> Finding:
    """Return a finding about a source without output: `stuck` is a fault, `silent` may be an old driver."""
    return finding(code, severity, f"{what} gave nothing", why, consequence, "run it by hand to see why")


def _apply_visible_devices(cluster: Cluster, evidence: Evidence, environment: Mapping[str, str]) -> Cluster:
    """Keep the GPUs that CUDA_VISIBLE_DEVICES lists, in its order, and add a finding about the hidden ones."""
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
                "visible",
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
                "visible",
                INFO,
                f"CUDA sees the GPUs {order}, in this order",
                f"CUDA_VISIBLE_DEVICES is {value!r}" + (f" and hides {gpu_names(hidden)}" if hidden else ""),
                "ranks follow this order; GPU indices here stay those of nvidia-smi",
                "set CUDA_DEVICE_ORDER=PCI_BUS_ID so that CUDA counts as nvidia-smi does",
                gpus=seen.order,
            )
        )
    return replace(select_gpus(cluster, seen.order), findings=tuple(notes))
