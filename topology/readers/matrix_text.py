"""Square tables of device pairs, as `nvidia-smi topo -m` and `topo -p2p` print them, read as text people paste.

Both commands print a header of device names, one row a device, one cell a pair, `X` on the diagonal. What reaches us
has been through terminals and chat windows: ANSI underline codes, spaces for tabs, cells that lost their tab
(`PIXNODE`), wrapped or cut lines, rows in another order, prose around it. The rule here is to place a cell only where
the row's own `X` confirms the place, and to say of everything else that it was not understood. Nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

MAX_CHARACTERS = 4 * 2**20
MAX_LINES = 20_000
MAX_HEADER_LINES = 32  # into which a terminal breaks one
MAX_HEADER_CHARACTERS = 16_384  # of 256 names
MAX_ROWS = 1024  # without a header, of several tables
MAX_COLUMNS = 256  # GPUs and network ports of one host; sixteen GPUs are the most that were built

PATH_LABEL = "NV[0-9]{1,3}|PIX|PXB|PHB|NODE|SYS|SOC"
P2P_LABEL = "OK|CNS|GNS|TNS|NS|DR|U"

_LABEL = re.compile(f"X|{PATH_LABEL}|{P2P_LABEL}")
_CELLS = re.compile(f"(?:X|{PATH_LABEL}|{P2P_LABEL})+")
# The escape character itself is often lost on the way, its "[4m" is not.
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\[[0-9;]{0,8}m")
_QUOTE = re.compile(r"^ {0,3}>[> ]*")
_COMMAND = re.compile(r"nvidia-smi\s+topo\s+(-[^\n#`]*)")
_GPU = re.compile(r"GPU[0-9]{1,4}")
_FUSED_NAMES = re.compile(r"(?:(?:GPU|NIC)[0-9]{1,4})+")
_NAME = re.compile(r"(?:GPU|NIC)[0-9]{1,4}")
_DEVICE = re.compile(r"[A-Za-z][A-Za-z0-9_.\-]{0,30}")
_KNOWN_COLUMN = re.compile(r"CPU\s+Affinity|NUMA\s+Affinity|GPU\s+NUMA\s+ID", re.IGNORECASE)
_CANONICAL = {"cpu affinity": "CPU Affinity", "numa affinity": "NUMA Affinity", "gpu numa id": "GPU NUMA ID"}
_AFFINITY = re.compile(r"N/A|[0-9]+(?:[-,][0-9]+)*,?")


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRow:
    """Cells of one device against the columns, in column order: as many as could be placed. `tail` is what follows."""

    name: str
    cells: tuple[str, ...]
    tail: str = ""
    tail_offset: int | None = None  # column on the screen where `tail` begins; None when lines were joined
    complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RawMatrix:
    """One table. `extras` are the columns after the devices with their offset on the screen."""

    command: str | None
    devices: tuple[str, ...]
    extras: tuple[tuple[str, int], ...]
    rows: tuple[RawRow, ...]
    unknown: tuple[tuple[str, str, str], ...]  # (row, column, token)
    problems: tuple[str, ...]


def clean_lines(text: str) -> list[str]:
    """Return `text` as lines without terminal codes and quoting marks."""
    lines = text[:MAX_CHARACTERS].splitlines()[:MAX_LINES]
    return [_QUOTE.sub("", _ANSI.sub(_without_code, line)).rstrip() for line in lines]


def _without_code(code: re.Match[str]) -> str:
    """Drop a terminal code, but never let the words on its two sides grow together."""
    line = code.string
    inside = (
        code.start() > 0 and code.end() < len(line) and line[code.start() - 1].isalnum() and line[code.end()].isalnum()
    )
    return " " if inside else ""


@lru_cache(maxsize=4096)
def is_affinity(token: str) -> bool:
    """Say whether a token reads like a CPU or NUMA list, or `N/A`."""
    return _AFFINITY.fullmatch(token) is not None


def read_matrices(text: str) -> tuple[RawMatrix, ...]:
    """Return every table found in `text`, in order. Never raises; what was not understood is in `problems`."""
    lines = [line.replace("|", " ") for line in clean_lines(text)]  # a table someone drew in Markdown
    tables = list(_split_tables(lines))
    if not any(table.rows for table in tables):
        tables = [table for table in (_read_without_header(lines),) if table is not None] or tables
    cut = len(text) > MAX_CHARACTERS or len(lines) == MAX_LINES
    return tuple(table.finish(cut=cut) for table in tables)


@dataclass(slots=True)
class _TableBuilder:
    """A table that is being read line by line."""

    command: str | None
    header: str
    devices: list[str]
    extras: list[tuple[str, int]]
    header_lines: int = 1
    rows: list[tuple[str, str, bool]] = field(default_factory=list)  # name, rest of the line, joined from several
    problems: list[str] = field(default_factory=list)

    def extend(self, line: str) -> bool:
        """Take a line that continues the header or the last row; return False when it does neither."""
        if not self.rows:
            return self._extend_header(line)
        name, rest, _ = self.rows[-1]
        tokens = line.split()
        cells, tail, _ = _cells(rest, len(self.devices))
        if not all(split_cell(token) or is_affinity(token) for token in tokens):
            return self._join_split_label(line)
        lists_only = all(map(is_affinity, tokens))
        broken_list = tail.endswith(",") and lists_only
        fits = len(tail.split()) + len(tokens) - broken_list <= len(self.extras)
        if (len(cells) < len(self.devices) and not tail) or (len(cells) == len(self.devices) and lists_only and fits):
            self.rows[-1] = (name, rest + ("" if broken_list else " ") + line.strip(), True)
            return True
        return self._join_split_label(line)

    def _extend_header(self, line: str) -> bool:
        """A terminal breaks a header between columns, between the words of one, or in the middle of a word."""
        if self.header_lines == MAX_HEADER_LINES:
            return False
        candidates = [self.header + " " + line.strip(), self.header + line.strip()]
        read = [(whole, header) for whole in candidates if (header := _read_header(whole, first=True)) is not None]
        if not read:
            return False
        self.header_lines += 1
        # The right way to join has the most devices and, among equals, the fewest unknown columns.
        self.header, (self.devices, extras) = max(read, key=lambda item: (len(item[1][0]), -len(item[1][1])))
        self.extras = [(column, -1) for column, _ in extras]
        return True

    def _join_split_label(self, line: str) -> bool:
        """Join a class that a terminal broke in two (`NO` / `DE`). Never a link count: `NV1` / `8` stays apart."""
        name, rest, _ = self.rows[-1]
        before, tokens = rest.split(), line.split()
        if not before or not tokens:
            return False
        whole = before[-1] + tokens[0]
        broken = not split_cell(before[-1]) and split_cell(whole) and "NV" not in whole
        if not broken or not all(split_cell(token) or is_affinity(token) for token in tokens[1:]):
            return False
        self.rows[-1] = (name, rest + line.strip(), True)
        return True

    def finish(self, *, cut: bool) -> RawMatrix:
        problems = [*self.problems]
        if cut:
            problems.append(f"only the first {MAX_LINES} lines and {MAX_CHARACTERS} characters were read")
        rows: dict[str, RawRow] = {}
        unknown: list[tuple[str, str, str]] = []
        for name, rest, joined in self.rows:
            row = _align_cells(name, rest, self.devices, joined=joined, problems=problems, unknown=unknown)
            if row is None:
                continue
            if name not in rows:
                rows[name] = row
            elif rows[name].cells != row.cells:
                problems.append(f"row {name} is printed twice with different cells; the first is used")
        return RawMatrix(
            command=self.command,
            devices=tuple(self.devices),
            extras=tuple(self.extras),
            rows=tuple(rows.values()),
            unknown=tuple(unknown),
            problems=tuple(problems),
        )


def _split_tables(lines: Iterable[str]) -> Iterator[_TableBuilder]:
    """Cut the text into tables: a header opens one, rows and continuations fill it, anything else closes the row."""
    table: _TableBuilder | None = None
    command: str | None = None
    open_row = False
    for line in lines:
        found = _COMMAND.search(line)
        if found:
            command = found.group(1).strip()
            continue
        words = line.split(maxsplit=1)
        if not words:
            continue
        if not open_row and "GPU" not in line and (table is None or (table.rows and words[0] not in table.devices)):
            continue  # most lines of a long log
        if table is not None and words[0] in table.devices and _is_row(line, words, table):
            table.rows.append((words[0], line.lstrip()[len(words[0]) :], False))
            # Offsets on the screen only compare with the header's when the row was not indented further.
            open_row = True
            continue
        header = _read_header(line, first=True) if table is None or table.rows else None
        if header is not None:
            if table is not None:
                yield table
            table = _TableBuilder(command=command, header=line, devices=header[0], extras=header[1])
            command, open_row = None, False
            continue
        if table is not None and (open_row or not table.rows):
            open_row = table.extend(line)
    if table is not None:
        yield table


def _is_row(line: str, words: list[str], table: _TableBuilder) -> bool:
    """A line that starts with a device is its row, unless it repeats the header (which has no class in it)."""
    if len(words) == 1:
        return bool(table.rows) and not line[:1].isspace()
    return _read_header(line, first=True) is None


def _read_header(line: str, *, first: bool) -> tuple[list[str], list[tuple[str, int]]] | None:
    """Return (devices, extra columns with offset) if every word of `line` can be a column name, else None.

    `first` asks for a header that opens a table: its first word is a GPU. Later lines may continue a wrapped one.
    """
    if len(line) > MAX_HEADER_CHARACTERS:
        return None
    body = line.expandtabs(8)
    extras = [
        (_CANONICAL[" ".join(match.group().lower().split())], match.start()) for match in _KNOWN_COLUMN.finditer(body)
    ]
    rest = _KNOWN_COLUMN.sub(lambda match: " " * len(match.group()), body)
    devices: list[str] = []
    end = 0
    for match in re.finditer(r"\S+", rest):
        token = match.group()
        if _CELLS.fullmatch(token) or is_affinity(token):
            return None
        names = _NAME.findall(token) if _FUSED_NAMES.fullmatch(token) else [token]
        is_device = _DEVICE.fullmatch(token) is not None and any(ch in "0123456789" for ch in token)
        if is_device and (not extras or match.start() < extras[0][1]) and end == len(devices):
            devices += names
            end = len(devices)
        elif is_device and _GPU.fullmatch(token):
            return None  # prose that names a GPU twice
        else:
            gap = rest[: match.start()]
            if not (extras or gap.endswith("  ")) or len(token) > 32:
                return None
            extras.append((token, match.start()))
            end = -1
    if len(devices) > MAX_COLUMNS or len(set(devices)) != len(devices):
        return None
    if first and not (devices and _GPU.fullmatch(devices[0])):
        return None
    if not devices and not extras:
        return None
    return devices, sorted(extras, key=lambda item: item[1])


@lru_cache(maxsize=4096)
def split_cell(token: str) -> tuple[str, ...]:
    """Return the labels that `token` is made of (`NODENODE` has two), or nothing when it is not made of labels."""
    return tuple(_LABEL.findall(token)) if _CELLS.fullmatch(token) else ()


def _cells(rest: str, columns: int) -> tuple[list[str], str, int]:
    """Return (cells, tail, offset of the tail in `rest`). A token that is neither label nor list fills one cell."""
    cells: list[str] = []
    end = 0
    for match in re.finditer(r"\S+", rest):
        token = match.group()
        if len(cells) >= columns or is_affinity(token):
            break
        cells += split_cell(token) or [f"?{token}"]
        end = match.end()
    tail = rest[end:]
    return cells, tail if tail.strip() else "", end


def _align_cells(
    name: str, rest: str, devices: list[str], *, joined: bool, problems: list[str], unknown: list[tuple[str, str, str]]
) -> RawRow | None:
    """Put a row's cells under its columns, or refuse: a row whose `X` is not its own column has shifted."""
    cells, tail, offset = _cells(rest, len(devices))
    own = devices.index(name)
    if len(cells) > len(devices):
        problems.append(f"row {name} has {len(cells)} cells for {len(devices)} columns; it is not used")
        return None
    if any(cell == "X" for index, cell in enumerate(cells) if index != own) or (own < len(cells) and cells[own] != "X"):
        problems.append(f"row {name} is shifted: its X is not in its own column; it is not used")
        return None
    complete = len(cells) == len(devices)
    if not complete:
        if tail:
            problems.append(f"row {name} has a gap: {len(cells)} of {len(devices)} cells; it is not used")
            return None
        problems.append(f"row {name} is cut after {len(cells)} of {len(devices)} cells")
        if cells and cells[-1].startswith("NV"):
            cells.pop()  # NV1 may be the first half of NV18
    for column, cell in zip(devices, cells, strict=False):
        if cell.startswith("?"):
            unknown.append((name, column, cell[1:]))
    return RawRow(
        name=name, cells=tuple(cells), tail=tail, tail_offset=None if joined else offset + len(name), complete=complete
    )


def _read_without_header(lines: Iterable[str]) -> _TableBuilder | None:
    """Read rows whose header was not copied: each row's `X` says which column is its own."""
    rows: list[tuple[str, str]] = []
    place: dict[int, str] = {}
    named = (words for line in lines if len(words := line.split(maxsplit=1)) == 2 and _GPU.fullmatch(words[0]))
    for words in islice(named, MAX_ROWS):
        cells = _cells(words[1], MAX_COLUMNS)[0]
        if cells.count("X") == 1 and place.setdefault(cells.index("X"), words[0]) == words[0]:
            rows.append((words[0], words[1]))
    if not rows or len(set(place.values())) != len(place) or sorted(place) != list(range(len(place))):
        return None
    table = _TableBuilder(command=None, header="", devices=[place[index] for index in range(len(place))], extras=[])
    for name, rest in rows:
        cells = _cells(rest, MAX_COLUMNS)[0][: len(place)]
        table.rows.append((name, " " + " ".join(cell.removeprefix("?") for cell in cells), True))
    table.problems.append("the header is missing: columns are placed by the X of each row, further columns are dropped")
    return table
