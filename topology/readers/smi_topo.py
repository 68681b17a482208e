"""`nvidia-smi topo -m`: which path joins each pair of devices, and which cores are near each GPU.

The labels say where a path goes, not how fast it is: `NV18` through NVSwitch is the number of links of one GPU and is
printed for every pair; `SYS` in a virtual machine says nothing; `topo -mp` leaves NVLink out. This module therefore
returns only what was printed; `topology.probe.machine` and `topology.probe.fabric` interpret it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from topology.readers.matrix_text import P2P_LABEL, RawMatrix, RawRow, clean_lines, is_affinity, read_matrices

PATH_ORDER = ("PIX", "PXB", "PHB", "NODE", "SYS")  # nearest first, as nvidia-smi's own legend orders them

_P2P = re.compile(P2P_LABEL)
_LEGEND = re.compile(r"\s*(NIC[0-9]{1,4})\s*:\s*(\S{1,64})\s*")
_NV = re.compile(r"NV([0-9]{1,3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Affinity:
    """The columns after the pairs, as printed: `None` is a blank cell, `"N/A"` is kept."""

    cpu: str | None = None
    numa: str | None = None
    gpu_numa_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopoMatrix:
    """What one matrix says. Pairs are `"0-1"`, lower index first; `SOC` is spelt `SYS`, as newer drivers print it.

    `gpus` are the columns; `gpu_rows` the rows that could be read (fewer when the text was cut). `gpu_nics` maps a GPU
    to NIC label to class. `legend` maps `NIC0` to its device name and may be partial.
    """

    gpus: tuple[int, ...]
    gpu_rows: tuple[int, ...] = ()
    pairs: dict[str, str] = field(default_factory=dict)
    nics: tuple[str, ...] = ()
    nic_rows: tuple[str, ...] = ()
    legend: dict[str, str] = field(default_factory=dict)
    gpu_nics: dict[int, dict[str, str]] = field(default_factory=dict)
    nic_pairs: dict[tuple[str, str], str] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    affinity: dict[int, Affinity] = field(default_factory=dict)
    unknown: tuple[tuple[str, str, str], ...] = ()  # (row, column, token): printed, not understood
    problems: tuple[str, ...] = ()
    command: str | None = None

    @property
    def hides_nvlink(self) -> bool:
        """`topo -mp` prints PCIe paths only: no conclusion about NVLink may be drawn from it."""
        return self.command is not None and re.match(r"-mp\b", self.command) is not None

    def nic_name(self, label: str) -> str:
        """The device name behind a column label: from the legend, else the label itself."""
        return self.legend.get(label, label)


def nv_count(label: str | None) -> int:
    """Return the number of links that a class names: 18 for `NV18`, 0 for everything else."""
    match = _NV.fullmatch(label or "")
    return int(match.group(1)) if match else 0


def parse_topo(text: str) -> TopoMatrix | None:
    """Read the first path matrix in `text`; None when there is none. Never raises, never invents a pair."""
    found = [matrix for matrix in read_matrices(text) if is_path_matrix(matrix)]
    if not found:
        return None
    matrix = _interpret(found[0], _read_legend(text))
    if len(found) > 1:
        extra = f"{len(found)} matrices in one text; the first is used"
        return _with_problem(matrix, extra)
    return matrix


def is_path_matrix(matrix: RawMatrix) -> bool:
    """Tell `topo -m` from `topo -p2p`: by the cells, or for a single GPU (only `X`) by the affinity columns."""
    cells = [cell for row in matrix.rows for cell in row.cells if cell != "X" and not cell.startswith("?")]
    access = sum(1 for cell in cells if _P2P.fullmatch(cell))
    if not cells:
        return bool(matrix.rows) and (bool(matrix.extras) or not (matrix.command or "").startswith("-p2p"))
    return 2 * access <= len(cells)


def closest_nics(matrix: TopoMatrix) -> dict[int, tuple[str, tuple[str, ...]]]:
    """Return for each GPU with a readable row the best class printed and the names of all NICs that have it."""
    closest: dict[int, tuple[str, tuple[str, ...]]] = {}
    for gpu, classes in matrix.gpu_nics.items():
        known = [label for label in classes.values() if label in PATH_ORDER]
        if known:
            best = min(known, key=PATH_ORDER.index)
            names = tuple(matrix.nic_name(nic) for nic in matrix.nics if classes.get(nic) == best)
            closest[gpu] = (best, names)
    return closest


def _read_legend(text: str) -> dict[str, str]:
    legend: dict[str, str] = {}
    for line in clean_lines(text):
        match = _LEGEND.fullmatch(line)
        if match:
            legend.setdefault(match.group(1), match.group(2))
    return legend


def _interpret(raw: RawMatrix, legend: dict[str, str]) -> TopoMatrix:
    """Sort the cells of a raw table into GPU pairs, GPU-NIC classes and NIC pairs."""
    gpu_of = {name: int(name[3:]) for name in raw.devices if re.fullmatch(r"GPU[0-9]{1,4}", name)}
    nics = tuple(name for name in raw.devices if name not in gpu_of)
    pairs: dict[tuple[int, int], str] = {}
    gpu_nics: dict[int, dict[str, str]] = {}
    nic_pairs: dict[tuple[str, str], str] = {}
    unknown, problems = list(raw.unknown), list(raw.problems)
    # Whole rows first, so that a cut row can never overrule one that was read to its end.
    for row in sorted(raw.rows, key=lambda row: not row.complete):
        for column, printed in zip(raw.devices, row.cells, strict=False):
            if printed == "X" or printed.startswith("?"):
                continue
            if _P2P.fullmatch(printed):
                unknown.append((row.name, column, printed))
                continue
            label = "SYS" if printed == "SOC" else printed
            if row.name in gpu_of and column in gpu_of:
                a, b = sorted((gpu_of[row.name], gpu_of[column]))
                if pairs.setdefault((a, b), label) != label:
                    problems.append(
                        f"GPU{a}-GPU{b} is {pairs[a, b]} in one row and {label} in the other; {pairs[a, b]} is used"
                    )
            elif row.name in gpu_of:
                gpu_nics.setdefault(gpu_of[row.name], {})[column] = label
            elif column not in gpu_of:
                first, second = sorted((row.name, column))
                nic_pairs.setdefault((first, second), label)
    # NIC rows repeat the GPU-NIC cells; they only fill in what a lost GPU row left open.
    for row in raw.rows:
        if row.name in gpu_of:
            continue
        for column, printed in zip(raw.devices, row.cells, strict=False):
            if column in gpu_of and re.fullmatch("PIX|PXB|PHB|NODE|SYS|SOC", printed):
                label = "SYS" if printed == "SOC" else printed
                before = gpu_nics.setdefault(gpu_of[column], {}).setdefault(row.name, label)
                if before != label:
                    problems.append(f"{column}-{row.name} is {before} in one row and {label} in the other")
    affinity = {}
    for row in raw.rows:
        if row.name in gpu_of:
            affinity[gpu_of[row.name]] = _affinity(row, raw.extras, unknown)
    problems += [f"the NIC legend names {name}, which has no column" for name in legend if name not in nics]
    read = {row.name for row in raw.rows}
    missing = [gpu for gpu in gpu_of if gpu not in read]
    if missing:
        problems.append(f"no readable row for {', '.join(missing)}")
    return TopoMatrix(
        gpus=tuple(gpu_of.values()),
        gpu_rows=tuple(sorted(gpu_of[row.name] for row in raw.rows if row.name in gpu_of)),
        pairs={f"{a}-{b}": label for (a, b), label in sorted(pairs.items())},
        nics=nics,
        nic_rows=tuple(row.name for row in raw.rows if row.name in nics),
        legend={name: device for name, device in legend.items() if name in nics},
        gpu_nics={gpu: gpu_nics[gpu] for gpu in sorted(gpu_nics)},
        nic_pairs=nic_pairs,
        columns=tuple(name for name, _ in raw.extras),
        affinity=affinity,
        unknown=tuple(unknown),
        problems=tuple(problems),
        command=raw.command,
    )


def _affinity(row: RawRow, extras: tuple[tuple[str, int], ...], unknown: list[tuple[str, str, str]]) -> Affinity:
    """Assign the rest of a row to the columns after the pairs; any of its cells may be blank."""
    values: dict[str, str] = {}
    for column, token in _tail_cells(row, extras, unknown):
        if column in {"CPU Affinity", "NUMA Affinity", "GPU NUMA ID"} and not is_affinity(token):
            unknown.append((row.name, column, token))
        else:
            values[column] = token
    return Affinity(
        cpu=values.get("CPU Affinity"), numa=values.get("NUMA Affinity"), gpu_numa_id=values.get("GPU NUMA ID")
    )


def _tail_cells(
    row: RawRow, extras: tuple[tuple[str, int], ...], unknown: list[tuple[str, str, str]]
) -> list[tuple[str, str]]:
    """Return (column, token). With a blank cell among them, tabs (counted) or screen offsets (nearest) decide."""
    names = [name for name, _ in extras]
    tokens = row.tail.split()
    if len(tokens) >= len(names):
        unknown += [(row.name, "", token) for token in tokens[len(names) :]]
        return list(zip(names, tokens, strict=False))
    if "\t" in row.tail:
        cells = [cell.strip() for cell in row.tail.split("\t")[1:]]
        placed: list[tuple[str, str]] = []
        if names[-1:] == ["GPU NUMA ID"] and len(cells) > len(names):
            # The driver prints two tabs before this column, and since 570 two after a short CPU list.
            placed.append((names.pop(), cells.pop()))
            middle = [cell for cell in cells[1:] if cell]
            cells = [cells[0], *middle]
        placed += zip(names, cells, strict=False)
        return [(name, cell) for name, cell in placed if cell]
    if row.tail_offset is None or any(offset < 0 for _, offset in extras):
        return list(zip(names, tokens, strict=False))
    offset_cells: list[tuple[str, str]] = []
    free = list(extras)
    for match in re.finditer(r"\S+", row.tail):
        start = row.tail_offset + match.start()
        if not free:
            unknown.append((row.name, "", match.group()))
            continue
        column = min(free, key=lambda item: abs(item[1] - start))
        offset_cells.append((column[0], match.group()))
        free = free[free.index(column) + 1 :]
    return offset_cells


def _with_problem(matrix: TopoMatrix, problem: str) -> TopoMatrix:
    return replace(matrix, problems=(*matrix.problems, problem))
