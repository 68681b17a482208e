"""Have the executor measure this machine: bounded in time, its answer read back as data."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from planner import child
from topology.errors import ProbeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from topology.measured import Measured


def measure(
    indices: Sequence[int], *, budget_s: float, machine: str, allow_busy: bool = False, device: str = "cuda"
) -> Measured:
    """Measure GPUs `indices` (nvidia-smi's, in CUDA's order) within `budget_s` seconds.

    Raises ProbeError when nothing could be measured; KeyboardInterrupt after the worker has tidied up.
    """
    from topology.measured import read_measured  # noqa: PLC0415 - keeps `--help` light

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
        code = child.run(
            "executor.doctor_worker",
            arguments,
            budget_s=budget_s,
            output=child.our_standard_error(),
        )
        if not out.is_file():
            raise ProbeError(
                "nothing could be measured",
                why=f"the measuring process {child.ended(code)}; its words are above",
                remedy="run planner doctor without --measure for what can be read",
            )
        return read_measured(out)
