"""What the command line or the explorer states of a question, before anything is looked up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """None is what nobody stated. `model` and `cluster` are names or paths, `gpu` a GPU model for captured texts.

    `gpus` holds the numbers of GPUs to choose from: None for the whole cluster, none at all for the fewest that fit.
    `runtime` has keys of a case's runtime, `plan` those of a case's plan.
    """

    model: str | None = None
    cluster: str | None = None
    gpu: str | None = None
    gpus: tuple[int, ...] | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    runtime: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
