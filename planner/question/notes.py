"""Read a source's plain text about a run (`note`) for general words, and a case's workload, as both state it;
each result is listed as assumed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.question.case_fields import (
    kind_of,
    positive,
    refuse_unknown,
    stated_value,
    whole_number,
    whole_numbers,
    word_of,
)
from planner.question.case_words import WORKLOAD_KEYS
from simulator.config.model import Model
from simulator.config.workload import Workload
from simulator.runtimes.library import runtime_spec
from topology.codec import JsonObject
from topology.errors import BadInput, UserError

_SCOPES = re.compile(r'"?cuda_graph_scopes"?\s*[:=]\s*\[([^\]]{1,200})\]')
_BF16_MOMENTS = re.compile(r"\b(bf16|bfloat16) (optimi[sz]er |adam )?moments?\b")
_COMPILED = re.compile(r"\bcompile\b(?! off)")
_EAGER = re.compile(r"\b(no|not|without) (torch\.)?compile\b")
_FORCED = re.compile(r"\bforced?( load)?[ -]balanc|\bbalanc\w* forced|\brout\w+ forced")
_NATURAL = re.compile(r"\bnatural\b|\bnot balanced\b")
_PACKED = re.compile(r"(?<!not )\bpacked\b")
_WATTS = re.compile(r"\b(\d{3,4}) ?W\b")
_CARD = re.compile(r"\b(\d{2,3}) ?GiB (?:card|GPU)s?\b")
_FLOAT8 = re.compile(r"\b(?:compile|fsdp2?|tp)[ +]+float8\b")
_LOW_LAYERS = re.compile(r"\b(float8|float4|mxfp8|nvfp4) in layers (\d{1,4})-(\d{1,4}) only\b")
_MONTHS = (  # 2024-12 or 202412, and the number of a paper, whose first four digits are year and month
    re.compile(r"(?<![0-9A-Za-z])(20[12]\d)-?(0[1-9]|1[0-2])(?![0-9A-Za-z])"),
    re.compile(r"\barXiv[: ]?([12]\d)(0[1-9]|1[0-2])\.\d{4,5}\b"),
)


def graph_scopes_noted(note: str) -> tuple[str, ...]:
    """Return the parts of a layer that CUDA graphs replay, according to a note."""
    found = _SCOPES.search(note)
    parts = re.split(r"[^a-z_ ]", found.group(1).lower()) if found else []
    return tuple(part.strip("_ ") for part in parts if part.strip("_ "))


def bf16_moments_noted(note: str) -> bool:
    """Return whether a note states that Adam's moments are bfloat16."""
    return _BF16_MOMENTS.search(note.lower()) is not None


def compile_noted(note: str) -> bool:
    """Return whether a note states that layers were compiled."""
    return bool(_COMPILED.search(note.lower())) and not _EAGER.search(note.lower())


def float8_noted(note: str) -> bool:
    """Return whether a note lists float8 among what a run used, as in FSDP+compile+Float8."""
    return _FLOAT8.search(note.lower()) is not None


def low_layers_noted(note: str, types: set[str]) -> tuple[int, int] | None:
    """Return the first and the last layer of those that alone are in one of the low `types` according to a note."""
    found = _LOW_LAYERS.search(note.lower())
    return (int(found[2]), int(found[3])) if found and found[1] in types else None


def routing_noted(note: str) -> str:
    """Return how tokens are distributed over experts according to a note, as a workload's word; empty if not stated."""
    if _NATURAL.search(note.lower()):
        return "natural"
    return "balanced" if _FORCED.search(note.lower()) else ""


def packed_noted(note: str) -> bool:
    """Return whether a note states that sequences are packed of documents."""
    return _PACKED.search(note.lower()) is not None


def watts_noted(note: str) -> int | None:
    """Return the power of a GPU in a note, the first if there are several, or None."""
    found = _WATTS.search(note)
    return int(found.group(1)) if found else None


def card_memory_noted(note: str) -> int | None:
    """Return the memory of a GPU in a note, in GiB as torch counts it, or None."""
    found = _CARD.search(note)
    return int(found.group(1)) if found else None


def month_of(source: str) -> str | None:
    """Return the latest month that a reference to a publication names, as 2024-12, or None."""
    found = [(year[-2:], month) for pattern in _MONTHS for year, month in pattern.findall(source)]
    return "20{}-{}".format(*max(found)) if found else None


def case_workload(value: Any, name: str) -> Workload:
    """Return the workload that a case states. Raises UserError."""
    if not isinstance(value, dict):
        raise BadInput(f"case {name}: workload is {kind_of(value)}, not an object with seq_len and global_batch_size")
    refuse_unknown(value, WORKLOAD_KEYS, f"case {name}: workload")
    task = value.get("task") or "train"
    if task != "train":
        raise UserError(
            f"case {name}: task {task!r} is not covered yet",
            why="only training steps are predicted in this version",
            remedy='set workload.task to "train"',
        )
    return Workload(
        task="train",
        seq_len=whole_number(value.get("seq_len"), f"case {name}: workload.seq_len"),
        global_batch_size=whole_number(value.get("global_batch_size"), f"case {name}: workload.global_batch_size"),
        **_data(value, f"case {name}: workload"),
    )


def noted_workload(workload: Workload, note: str, model: Model, runtime: str) -> tuple[Workload, list[str]]:
    """Return the workload with what a note says of its data where the case does not, and each as an assumption."""
    assumed = []
    if not workload.routing and model.moe is not None and (routing := routing_noted(note)):
        workload = replace(workload, routing=routing)
        assumed.append(f"routing {routing} (the note says so)")
    packs = runtime_spec(runtime).document_len
    if packs and not workload.document_len and packed_noted(note):
        workload = replace(workload, document_len=packs)
        assumed.append(f"documents of {packs} tokens (packed, as the note says; their length is assumed)")
    return workload, assumed


def _data(value: Mapping[str, Any], where: str) -> JsonObject:
    """Return what a source states of its data: how tokens are distributed over experts, and the length of documents."""
    said: JsonObject = {}
    if (word := stated_value(value, "routing")) is not None:
        said["routing"] = word_of(word, f"{where}.routing")
    if (load := stated_value(value, "expert_imbalance")) is not None:
        said["expert_imbalance"] = positive(load, f"{where}.expert_imbalance")
    if (counts := stated_value(value, "expert_counts")) is not None:
        said["expert_counts"] = whole_numbers(counts, f"{where}.expert_counts")
    if (tokens := stated_value(value, "document_len")) is not None:
        said["document_len"] = whole_number(tokens, f"{where}.document_len", least=0)
    return said
