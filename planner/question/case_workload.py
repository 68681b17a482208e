"""The workload of a case, as it and its note state it."""

from __future__ import annotations

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
from planner.question.notes import packed_noted, routing_noted
from simulator.config.model import Model
from simulator.config.workload import Workload
from simulator.runtimes.library import runtime_spec
from topology.codec import JsonObject
from topology.errors import BadInput, UserError


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
