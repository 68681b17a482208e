"""The goal of a whole training run: its tokens, price, time and budget."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from planner.io.inputs import parse_bytes, parse_seconds
from planner.requests.training import Suggest
from topology.errors import UserError

ABOUT_RUNS = (
    *("deadline", "budget", "mtbf", "checkpoint_bandwidth", "restart", "async_checkpoint", "spot", "repair", "spares"),
)
SLOWEST_STORAGE, FASTEST_STORAGE = 1e6, 1e16  # bytes per second
THOUSANDS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A training run of `tokens`. `budget` is in the currency of the price of a GPU for an hour.

    `mtbf_hours` is the mean time between failures of one GPU, or of one node if `mtbf_of` states so; checkpoints are
    written at `checkpoint_bytes_per_s`, during steps if they are asynchronous; `restart_s` is the time from a failure
    to the next step. A spot node is taken back after `spot_hours` on average. A node that failed or was taken back
    returns after `repair_hours`; `spare_nodes` are paid for and take its place. None: the value of published runs
    (`simulator.failures.goodput`).
    """

    tokens: float
    gpu_price_per_hour: float | None = None
    deadline_s: float | None = None
    budget: float | None = None
    mtbf_hours: float | None = None
    mtbf_of: str = "gpu"
    checkpoint_bytes_per_s: float | None = None
    restart_s: float | None = None
    async_checkpoint: bool = False
    spot_hours: float | None = None
    repair_hours: float | None = None
    spare_nodes: int = 0

    def gpu_hours(self, gpus_per_node: int) -> float | None:
        """Return the GPU hours per failure; None if not stated."""
        if self.mtbf_hours is None:
            return None
        return self.mtbf_hours * (gpus_per_node if self.mtbf_of == "node" else 1)

    def interrupted_gpu_hours(self, failing: float, gpus_per_node: int) -> float:
        """Return the GPU hours per interruption of either kind, with a failure every `failing` hours."""
        if self.spot_hours is None:
            return failing
        return 1 / (1 / failing + 1 / (self.spot_hours * gpus_per_node))

    @property
    def seeks_count(self) -> bool:
        """Whether the number of GPUs is to be chosen."""
        return self.deadline_s is not None or self.budget is not None


def goal_of(asked: Suggest) -> Goal | None:
    """Return the goal that flags state; None without tokens. Raises UserError for a flag that needs another one."""
    tokens, gpu_price, deadline, budget = asked.tokens, asked.gpu_price, asked.deadline, asked.budget
    if tokens is None:
        about = {name: getattr(asked, name) for name in ABOUT_RUNS}
        if said := next((name for name, value in about.items() if value not in (None, False, 0)), None):
            raise UserError(
                f"--{said.replace('_', '-')} is about a whole run",
                why="the number of tokens to train on is not given",
                remedy="--tokens 2T",
            )
        return None
    if budget is not None and not gpu_price:
        raise UserError("--budget needs the price of a GPU for an hour", remedy="--gpu-price 2.5")
    return Goal(
        tokens=_amount(tokens, "--tokens", "2T, 300B or 15e9"),
        gpu_price_per_hour=gpu_price,
        deadline_s=None if deadline is None else _deadline_s(deadline),
        budget=None if budget is None else _amount(budget, "--budget", "1M, 250k or 50000"),
        **_mtbf(asked.mtbf),
        checkpoint_bytes_per_s=_rate(asked.checkpoint_bandwidth),
        restart_s=asked.restart,
        async_checkpoint=asked.async_checkpoint,
        spot_hours=asked.spot,
        repair_hours=asked.repair,
        spare_nodes=asked.spares or 0,
    )


def _mtbf(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?(?:e[0-9])?)(?::(gpu|node))?", text[:100].strip().lower())
    hours = float(match[1]) if match else 0.0
    if match is None or hours <= 0:
        raise UserError(
            f"--mtbf {text[:40]!r} is no time between failures",
            why="it is in hours, of one GPU or of one node",
            remedy="--mtbf 50000:gpu, or --mtbf 6000:node",
        )
    return {"mtbf_hours": hours, "mtbf_of": match[2] or "gpu"}


def _deadline_s(text: str) -> float:
    return parse_seconds(
        text, "--deadline", range_s=(1.0, math.inf), units="hdw", why="units are h, d and w", example="30d"
    )


def _rate(text: str | None) -> float | None:
    """Return bytes per second from a number, or a number with a unit."""
    if text is None:
        return None
    try:
        rate = parse_bytes(re.sub(r"(?<=b)(/s|ps)$", "", text[:100].strip(), flags=re.IGNORECASE))
    except UserError:
        rate = 0.0
    if not SLOWEST_STORAGE <= rate <= FASTEST_STORAGE:
        raise UserError(
            f"--checkpoint-bandwidth {text[:40]!r} is no rate from 1 MB/s to 10 PB/s",
            why="it is what storage takes from all GPUs together: GB is 10^9 bytes, GiB 2^30",
            remedy="--checkpoint-bandwidth 100GB/s, 2TB/s or 1e11",
        )
    return rate


def _amount(text: str, flag: str, examples: str) -> float:
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?(?:[eE][0-9]{1,2})?)\s*([kKmMbBgGtT]?)", text[:100].strip())
    value = float(match[1]) * THOUSANDS[match[2].lower()] if match else 0.0
    if not 1 <= value <= 1e18:
        raise UserError(f"{flag} {text[:40]!r} is not an amount from 1 to 10^18", remedy=f"{flag} {examples}")
    return value
