"""`nvidia-smi --query-gpu=... --format=csv,nounits`: names and identities when NVML itself cannot be loaded.

The header line names the columns, so any order and any subset reads; a cell such as `[N/A]` is None.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from topology.readers.matrix_text import clean_lines
from topology.units import MIB

FIELDS = (
    "index",
    "uuid",
    "pci.bus_id",
    "name",
    "memory.total",
    "driver_version",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "mig.mode.current",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueriedGpu:
    index: int
    uuid: str | None = None
    pci_bus_id: str | None = None
    name: str | None = None
    memory_bytes: int | None = None
    driver: str | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    mig: bool | None = None


def parse_query(text: str) -> tuple[QueriedGpu, ...]:
    """Read the CSV with its header; empty when there is none. Never raises. Memory is printed in MiB."""
    header: list[str] | None = None
    gpus: dict[int, QueriedGpu] = {}
    for line in clean_lines(text):
        cells = [cell.strip() for cell in line.split(",")]
        if header is None:
            names = [_without_unit(cell) for cell in cells]
            if "index" in names and len(set(names) & set(FIELDS)) >= 2:
                header = names
            continue
        row = {name: _value(cell) for name, cell in zip(header, cells, strict=False)}
        index = _whole(row.get("index"))
        if index is None or len(cells) != len(header):
            continue
        mebibytes = _whole(row.get("memory.total"))
        mig = row.get("mig.mode.current")
        gpus.setdefault(
            index,
            QueriedGpu(
                index=index,
                uuid=row.get("uuid"),
                pci_bus_id=row.get("pci.bus_id"),
                name=row.get("name"),
                memory_bytes=mebibytes * MIB if mebibytes is not None else None,
                driver=row.get("driver_version"),
                pcie_width=_whole(row.get("pcie.link.width.current")),
                pcie_width_max=_whole(row.get("pcie.link.width.max")),
                mig={"Enabled": True, "Disabled": False}.get(mig) if mig is not None else None,
            ),
        )
    return tuple(gpus[index] for index in sorted(gpus))


def _without_unit(cell: str) -> str:
    """Return a column's name without the unit after it: `memory.total [MiB]`."""
    name, bracket, unit = cell.partition("[")
    return name.rstrip() if bracket and unit.endswith("]") else cell


def _value(cell: str) -> str | None:
    return None if not cell or cell.startswith("[") or cell == "N/A" else cell


def _whole(cell: str | None) -> int | None:
    match = re.fullmatch(r"([0-9]{1,12})(?: MiB)?", cell or "")
    return int(match.group(1)) if match else None
