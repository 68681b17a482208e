"""Run the executor's measurement of this machine as a child process within a time budget, and read its result."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from planner.io import child
from topology.errors import ProbeError
from topology.profile.measurement import Measurement, read_measurement


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
