"""Run the executor's calibration as a child process, and read its measurements, however it ended."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.io import child
from topology import codec
from topology.errors import ProbeError
from topology.profile.measurement import Measurement, read_measurement
from topology.profile.profile import Profile
from topology.profile.store import profile_from_records


def calibrate(
    jobs: Sequence[Mapping[str, Any]],
    indices: Sequence[int],
    *,
    budget_s: float,
    machine: str,
    gpu: str,
    records: Path,
    command: str = "",
    device: str = "cuda",
    allow_busy: bool = False,
    text: str = "",
) -> Profile:
    """Do `jobs` (`planner.calibrate.measurements.job_of`) on GPUs `indices` within `budget_s` seconds; samples are
    appended to `records` as they are taken.

    Raises ProbeError when nothing could be measured, and KeyboardInterrupt after the executor has cleaned up; samples
    taken until then stay in `records`.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        path = Path(folder) / "request.json"
        codec.write_text(path, codec.to_json({"jobs": list(jobs)}) + "\n")
        arguments = [
            f"--request={path}",
            f"--records={records}",
            f"--budget={budget_s:g}",
            f"--device={device}",
            f"--indices={','.join(map(str, indices))}",
            f"--machine={machine}",
            f"--gpu-name={gpu}",
            f"--command={command}",
            f"--text={text}",
            *(["--allow-busy"] if allow_busy else []),
        ]
        code = child.run_module("executor.calibrate.run", arguments, budget_s=budget_s, output=child.standard_error())
    found = read_records(records)
    if found is None or not (found.calibrated or found.collectives):
        raise ProbeError(
            "nothing could be measured",
            why=f"the measuring process {child.exit_text(code)}; its words are above",
            remedy="run this on a machine with an NVIDIA GPU, its driver and torch",
        )
    return found


HOST_ALONE_S = 60.0  # limit for timing the host, which takes four seconds of a processor


def time_host(*, machine: str, gpu: str, command: str = "") -> Profile | None:
    """Return a profile with the times of layers on this machine's CPU alone (`executor.calibrate.host_alone`), or None
    if torch cannot run them here.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        records = Path(folder) / "host.jsonl"
        arguments = [f"--records={records}", f"--machine={machine}", f"--gpu-name={gpu}", f"--command={command}"]
        module, output = "executor.calibrate.host_alone", child.standard_error()
        code = child.run_module(module, arguments, budget_s=HOST_ALONE_S, output=output)
        return read_records(records) if code == 0 else None


def read_records(path: Path) -> Profile | None:
    """Return the profile of the records in a file, or None if no header says which GPU they were measured on."""
    found = list(codec.parse_lines(codec.read_text(path))) if path.is_file() else []
    if not any(record.get("kind") == "header" and "gpu" in record for record in found):
        return None
    return profile_from_records(found)


# --- measurements of the machine --------------------------------------------------------------------------------------


def measure(
    indices: Sequence[int], *, budget_s: float, machine: str, allow_busy: bool = False, device: str = "cuda"
) -> Measurement:
    """Measure GPUs `indices` (of nvidia-smi, in the order of CUDA) within `budget_s` seconds.

    Raises ProbeError when nothing could be measured, and KeyboardInterrupt after the worker has cleaned up.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        out = Path(folder) / "measured.json"
        arguments = [
            f"--out={out}",
            f"--budget={budget_s:g}",
            f"--device={device}",
            f"--indices={','.join(map(str, indices))}",
            f"--machine={machine}",
            *(["--allow-busy"] if allow_busy else []),
        ]
        code = child.run_module(
            "executor.measure.doctor_worker", arguments, budget_s=budget_s, output=child.standard_error()
        )
        if not out.is_file():
            raise ProbeError(
                "nothing could be measured",
                why=f"the measuring process {child.exit_text(code)}; its words are above",
                remedy="run planner doctor without --measure for what can be read",
            )
        return read_measurement(out)
