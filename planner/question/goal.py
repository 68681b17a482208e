"""What a whole training run shall be: how many tokens, at what price, in what time, for how much money."""

from __future__ import annotations

import re
from dataclasses import dataclass

from topology.errors import UserError

TIMES_S = {"h": 3600.0, "d": 86400.0, "w": 604800.0}
THOUSANDS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A training run of `tokens`. `budget` is in the currency of the price of a GPU for an hour."""

    tokens: float
    gpu_price_per_hour: float | None = None
    deadline_s: float | None = None
    budget: float | None = None

    @property
    def seeks_count(self) -> bool:
        """Whether the number of GPUs is to be found."""
        return self.deadline_s is not None or self.budget is not None


def goal_of(tokens: str | None, gpu_price: float | None, deadline: str | None, budget: str | None) -> Goal | None:
    """Return the goal that flags state; None without tokens. Raises UserError where one flag needs another."""
    if tokens is None:
        if option := "--deadline" if deadline is not None else "--budget" if budget is not None else "":
            raise UserError(
                f"{option} is about a whole run",
                why="the number of tokens to train on is not given",
                remedy="--tokens 2T",
            )
        return None
    if budget is not None and not gpu_price:
        raise UserError("--budget needs the price of a GPU for an hour", remedy="--gpu-price 2.5")
    return Goal(
        tokens=_amount(tokens, "--tokens", "2T, 300B or 15e9"),
        gpu_price_per_hour=gpu_price,
        deadline_s=None if deadline is None else _seconds(deadline),
        budget=None if budget is None else _amount(budget, "--budget", "1M, 250k or 50000"),
    )


def _amount(text: str, flag: str, examples: str) -> float:
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?(?:[eE][0-9]{1,2})?)\s*([kKmMbBgGtT]?)", text[:100].strip())
    value = float(match[1]) * THOUSANDS[match[2].lower()] if match else 0.0
    if not 1 <= value <= 1e18:
        raise UserError(f"{flag} {text[:40]!r} is not an amount from 1 to 10^18", remedy=f"{flag} {examples}")
    return value


def _seconds(text: str) -> float:
    match = re.fullmatch(r"\s*([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*([hdw])\s*", text[:100].lower())
    value = float(match[1]) * TIMES_S[match[2]] if match else 0.0
    if value <= 0:
        raise UserError(f"--deadline {text[:40]!r} is not a time", why="units are h, d and w", remedy="--deadline 30d")
    return value
