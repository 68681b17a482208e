"""`nvidia-smi nvlink -s`, `-R` and `-e` (and `nvidia-smi -L`, which has the same headings): the state of each link.

The rate printed by `-s` is the line rate of one link (26.562 GB/s on Hopper, whose payload rate is 25), not a
measurement. An active link is not proof of a working fabric, and a healthy fabric state is not proof of links:
both have been seen alone (dstackai/dstack#1167; the GB300 report in tests/data/nccl_xml).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from topology.readers.matrix_text import clean_lines

_GPU = re.compile(r"GPU\s+([0-9]{1,4})\s*:(.*)")
_UUID = re.compile(r"\(UUID:\s*([^)\s]{1,80})\s*\)")
_MIG = re.compile(r"\s+MIG\s+(\S{1,40})\s+Device\s+([0-9]{1,3})\s*:\s*\(UUID:\s*([^)\s]{1,80})\s*\)\s*")
_LINK = re.compile(r"Link\s+([0-9]{1,3})\s*:\s*(\S.*)")
_RATE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*GB/s")
_REMOTE = re.compile(
    r"Remote Device\s+([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])(?::\s*Link\s+([0-9]{1,3}))?"
)
_ERRORS = re.compile(
    r"(Replay|Recovery|CRC(?: \w+)?|ECC(?: \w+)?)\s*(?:Errors?|Count)\s*:\s*([0-9]{1,19})", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatus:
    """One link of a GPU. Every field is None when the text at hand did not say it."""

    index: int
    active: bool | None = None
    bytes_per_s: float | None = None  # line rate, one direction
    remote: str | None = None  # PCI address of the other end, lower case
    remote_link: int | None = None
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLinks:
    """The block of one GPU. `links` is empty if none was listed; `all_inactive` if the driver text so in words."""

    index: int
    name: str | None = None
    uuid: str | None = None
    links: tuple[LinkStatus, ...] = ()
    all_inactive: bool = False
    mig_uuids: tuple[str, ...] = ()

    @property
    def active(self) -> int | None:
        """Active links; None when this text says nothing about activity (`-R`, `-e` and `-L` do not)."""
        if self.all_inactive:
            return 0
        states = [link.active for link in self.links if link.active is not None]
        return sum(states) if states else None

    @property
    def remotes(self) -> dict[str, int]:
        """PCI address of each far end and how many links reach it."""
        counts: dict[str, int] = {}
        for link in self.links:
            if link.remote is not None:
                counts[link.remote] = counts.get(link.remote, 0) + 1
        return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class NvlinkReport:
    gpus: tuple[GpuLinks, ...]
    unknown: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(slots=True)
class _Block:
    name: str | None = None
    uuid: str | None = None
    links: dict[int, dict[str, object]] = field(default_factory=dict)
    all_inactive: bool = False
    migs: list[str] = field(default_factory=list)


def parse_nvlink(text: str) -> NvlinkReport | None:
    """Read link states from one or several outputs in `text`; None if there is no GPU heading. Never raises.

    Blocks of the same GPU (`-s` followed by `-R`) are merged.
    """
    blocks: dict[int, _Block] = {}
    unknown: list[str] = []
    problems: list[str] = []
    current: _Block | None = None
    for line in clean_lines(text):
        gpu = _GPU.fullmatch(line.strip())
        if gpu:
            current = blocks.setdefault(int(gpu.group(1)), _Block())
            name, uuid = _named(gpu.group(2))
            current.name = current.name or name or None
            current.uuid = current.uuid or uuid
            continue
        if current is None:
            continue
        mig, link = _MIG.fullmatch(line), _LINK.fullmatch(line.strip())
        if mig:
            current.migs.append(mig.group(3))
        elif link:
            if not _read_link(current.links.setdefault(int(link.group(1)), {}), link.group(2)):
                unknown.append(line.strip()[:80])
        elif re.search(r"all links are in-?active", line, re.IGNORECASE):
            current.all_inactive = True
        elif re.search(r"unable to retrieve|error|failed|not supported", line, re.IGNORECASE):
            problems.append(line.strip()[:160])
    if not blocks:
        return None
    return NvlinkReport(
        gpus=tuple(_finish(index, block) for index, block in sorted(blocks.items())),
        unknown=tuple(unknown),
        problems=tuple(problems),
    )


def _named(text: str) -> tuple[str, str | None]:
    """Return the name and the UUID of a GPU from what is behind its number."""
    start = text.rfind("(UUID:")
    found = _UUID.fullmatch(text, start) if start >= 0 else None
    return (text.strip(), None) if found is None else (text[:start].strip(), found.group(1))


def _read_link(fields: dict[str, object], text: str) -> bool:
    """Add the content of a `Link n:` line to `fields`; return False when its format is not known."""
    rate, remote, errors = _RATE.fullmatch(text), _REMOTE.fullmatch(text), _ERRORS.search(text)
    if rate:
        fields["active"] = float(rate.group(1)) > 0
        fields["bytes_per_s"] = float(rate.group(1)) * 1e9
    elif re.fullmatch(r"<?\s*in-?active\s*>?", text, re.IGNORECASE):
        fields["active"] = False
    elif remote:
        fields["remote"] = remote.group(1).lower()
        fields["remote_link"] = int(remote.group(2)) if remote.group(2) else None
    elif errors:
        counters = fields.setdefault("errors", {})
        if isinstance(counters, dict):
            counters[errors.group(1).lower()] = int(errors.group(2))
    else:
        return False
    return True


def _finish(index: int, block: _Block) -> GpuLinks:
    links: list[LinkStatus] = []
    for number, fields in sorted(block.links.items()):
        known: dict[str, object] = {"index": number, **fields}
        links.append(LinkStatus(**known))  # type: ignore[arg-type]  # _read_link wrote each field with its own type
    return GpuLinks(
        index=index,
        name=block.name,
        uuid=block.uuid,
        links=tuple(links),
        all_inactive=block.all_inactive,
        mig_uuids=tuple(block.migs),
    )
