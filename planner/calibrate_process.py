"""Start the executor's calibration as a process of its own, and read what it measured, however it ended."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner import child
from topology import codec
from topology.errors import ProbeError

if TYPE_CHECKING:
    from planner.calibration_request import Request
    from topology.profile import Profile


def calibrate(
    request: Request,
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
    """Measure `request` on GPUs `indices` within `budget_s` seconds; every sample is in the file `records` at once.

    Raises ProbeError when nothing could be measured; KeyboardInterrupt, after the executor has tidied up, with what was
    measured still in `records`.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        path = Path(folder) / "request.json"
        codec.write_text(path, codec.to_json(request) + "\n")
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
        code = child.run("executor.calibrate_run", arguments, budget_s=budget_s, output=child.our_standard_error())
    found = read_records(records)
    if found is None or not (found.calibrated or found.collectives):
        raise ProbeError(
            "nothing could be measured",
            why=f"the measuring process {child.ended(code)}; its words are above",
            remedy="run this on a machine with an NVIDIA GPU, its driver and torch",
        )
    return found


def read_records(path: Path) -> Profile | None:
    """Return the profile of the records in a file, or None where there is none that says what it was measured on."""
    from topology.calibration_records import profile_from_records  # noqa: PLC0415 - keeps `--help` light

    found = list(_lines(path))
    if not any(record.get("kind") == "header" and "gpu" in record for record in found):
        return None
    return profile_from_records(found)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file; a line cut short by a kill ends it."""
    if not path.is_file():
        return
    for line in codec.read_text(path).splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            return
        if isinstance(record, dict):
            yield record
