"""`nvidia-smi topo -p2p r|w|n|a`: whether the driver lets each pair of GPUs read or write each other's memory.

Two GPUs behind one PCIe switch may still have no peer access (GeForce), so this table decides where `topo -m` cannot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from topology.readers.matrix_text import P2P_LABEL, RawMatrix, read_matrices
from topology.readers.smi_topo import is_path_matrix

MEANING = {
    "OK": "peer access works",
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "the topology does not support it",
    "NS": "not supported",
    "DR": "disabled in the driver's registry",
    "U": "unknown to the driver",
}
CAPABILITY = {"r": "read", "w": "write", "n": "NVLink", "a": "atomics", "p": "PCIe"}

_STATUS = re.compile(P2P_LABEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class P2pMatrix:
    """One table: `status[(0, 1)]` is GPU0 accessing GPU1. `capability` is `r`, `w`, `n`, `a` or None if not stated."""

    capability: str | None
    gpus: tuple[int, ...]
    status: dict[tuple[int, int], str] = field(default_factory=dict)
    unknown: tuple[tuple[str, str, str], ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def denied(self) -> dict[str, str]:
        """Pairs (`"0-1"`) that do not have the capability in at least one direction, with the status printed."""
        found: dict[str, str] = {}
        for (a, b), status in sorted(self.status.items()):
            if status != "OK":
                found.setdefault(f"{min(a, b)}-{max(a, b)}", status)
        return found


def parse_p2p(text: str) -> tuple[P2pMatrix, ...]:
    """Read every peer-access table in `text`. Never raises; a cell that is not a status goes to `unknown`."""
    return tuple(_interpret(raw) for raw in read_matrices(text) if not is_path_matrix(raw))


def _interpret(raw: RawMatrix) -> P2pMatrix:
    gpu_of = {name: int(name[3:]) for name in raw.devices if re.fullmatch(r"GPU[0-9]{1,4}", name)}
    status: dict[tuple[int, int], str] = {}
    unknown = list(raw.unknown)
    for row in raw.rows:
        for column, printed in zip(raw.devices, row.cells, strict=False):
            if printed == "X" or printed.startswith("?") or row.name not in gpu_of or column not in gpu_of:
                continue
            if _STATUS.fullmatch(printed):
                status[gpu_of[row.name], gpu_of[column]] = printed
            else:
                unknown.append((row.name, column, printed))
    match = re.match(r"-p2p\s+([a-z])", raw.command or "")
    return P2pMatrix(
        capability=match.group(1) if match else None,
        gpus=tuple(gpu_of.values()),
        status=status,
        unknown=tuple(unknown),
        problems=raw.problems,
    )
