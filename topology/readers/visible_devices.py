"""CUDA_VISIBLE_DEVICES: which GPUs a CUDA program sees, and in what order.

`CUDA_VISIBLE_DEVICES` holds indices, UUIDs or their beginnings, or MIG ids. CUDA reads from the left and stops at the
first entry it cannot resolve; an entry twice makes the whole list invalid (CUDA C++ programming guide, "CUDA
Environment Variables"). CUDA's indices are nvidia-smi's only with CUDA_DEVICE_ORDER=PCI_BUS_ID.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleGpus:
    """`order` holds GPU indices as nvidia-smi counts them; None means that the variable is not set (all are
    visible).
    """

    order: tuple[int, ...] | None = None
    mig: tuple[str, ...] = ()
    problem: str = ""


def visible_gpus(
    environment: Mapping[str, str], uuids: Sequence[tuple[int, str | None]], mig_parents: Mapping[str, int]
) -> VisibleGpus:
    """Resolve the variable against (index, uuid) of the machine's GPUs and MIG uuid -> index of its GPU."""
    value = environment.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return VisibleGpus()
    order: list[int] = []
    migs: list[str] = []
    problem = ""
    known = {index for index, _ in uuids}
    for entry in (part.strip() for part in value.split(",")):
        if entry.startswith("MIG-"):
            migs.append(entry)
            parents = [index for uuid, index in mig_parents.items() if uuid.startswith(entry)]
            index = parents[0] if len(parents) == 1 else None
            if index is not None and index in order:
                continue  # two instances of one GPU
        elif entry.isascii() and entry.isdigit():
            index = int(entry) if len(entry) <= 6 and int(entry) in known else None
        else:
            matches = [index for index, uuid in uuids if uuid and entry.startswith("GPU-") and uuid.startswith(entry)]
            index = matches[0] if len(matches) == 1 else None
        if index is None:
            if entry and entry not in {"-1", "NoDevFiles"}:
                problem = f"the entry {entry[:60]!r} names no GPU here; CUDA ignores it and all entries after it"
            break
        if index in order:
            return VisibleGpus(
                order=(), mig=tuple(migs), problem=f"GPU {index} is listed twice; CUDA then shows no GPU"
            )
        order.append(index)
    return VisibleGpus(order=tuple(order), mig=tuple(migs), problem=problem)
