"""Reads steps from the output of a training command, by a regular expression or from JSON lines.

A regular expression names its groups after their content: `step_s`, `step_ms`, `tokens_per_s`, `tokens_per_s_per_gpu`,
and `memory_gib` alongside one of them; an unnamed group holds seconds. JSON lines have keys of the same names;
`jsonl:KEY` says which other key holds the seconds of a step.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from topology.errors import UserError
from topology.units import GIB

QUANTITIES = ("step_s", "step_ms", "tokens_per_s", "tokens_per_s_per_gpu")
JSONL = "jsonl"
# Log lines of frameworks: torchtitan 0.2 and 0.3 (components/metrics.py), Megatron-LM core 0.16 (training.py).
KNOWN = {
    "torchtitan": r"memory:\s*(?P<memory_gib>[\d.]+)GiB.*?tps:\s*(?P<tokens_per_s_per_gpu>[\d,]+)",
    "megatron-lm": r"elapsed time per iteration \(ms\):\s*(?P<step_ms>[\d.]+)",
}
MOST_CHARACTERS = 4096  # characters of a line that are read
OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|out of memory|can't allocate memory", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A step as printed. `memory_bytes` is None if the line does not contain it."""

    step_s: float
    memory_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """The format of steps in lines. `pattern` is None for JSON lines."""

    pattern: re.Pattern[str] | None
    tokens_per_step: float
    gpus: int
    key: str = ""  # for JSON lines: a key with the seconds, in addition to the known names

    def samples(self, lines: Iterable[str]) -> list[Sample]:
        """Return the steps reported by the lines, in order; other lines are skipped."""
        return [one for line in lines if (one := self._sample(line[:MOST_CHARACTERS])) is not None]

    def _sample(self, line: str) -> Sample | None:
        said = self._json(line) if self.pattern is None else self._matched(self.pattern, line)
        step_s = next((self._seconds(name, said[name]) for name in QUANTITIES if name in said), None)
        if step_s is None or not 0 < step_s < math.inf:
            return None
        memory = said.get("memory_gib")
        return Sample(step_s=step_s, memory_bytes=memory * GIB if memory and 0 < memory < 1e6 else None)

    def _seconds(self, name: str, value: float) -> float | None:
        if value <= 0:
            return None
        if name in {"step_s", "step_ms"}:
            return value * (1.0 if name == "step_s" else 1e-3)
        return self.tokens_per_step / value / (self.gpus if name == "tokens_per_s_per_gpu" else 1)

    def _json(self, line: str) -> dict[str, float]:
        try:
            found: Any = json.loads(line)
        except (ValueError, RecursionError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {
            "step_s" if name == self.key else name: float(value)
            for name, value in found.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
        }

    @staticmethod
    def _matched(pattern: re.Pattern[str], line: str) -> dict[str, float]:
        match = pattern.search(line)
        if match is None:
            return {}
        texts = match.groupdict() or {"step_s": match[1]}
        found = {}
        for name, text in texts.items():
            try:
                found[name] = float((text or "").replace(",", ""))
            except ValueError:
                continue
        return found


def metric_of(text: str, *, tokens_per_step: float, gpus: int) -> Metric:
    """Return the metric given by `--metric`: `jsonl`, `jsonl:KEY`, a framework's name, or a regular expression. Raises
    UserError.
    """
    if text == JSONL or text.startswith(f"{JSONL}:"):
        return Metric(pattern=None, tokens_per_step=tokens_per_step, gpus=gpus, key=text[len(JSONL) + 1 :])
    try:
        pattern = re.compile(KNOWN.get(text, text[:1000]))
    except re.error as error:
        raise UserError(f"--metric {text[:60]!r} is no regular expression", why=str(error)) from error
    strange = set(pattern.groupindex) - {*QUANTITIES, "memory_gib"}
    if strange or not pattern.groups or (pattern.groupindex and not set(pattern.groupindex) & set(QUANTITIES)):
        raise UserError(
            f"--metric {text[:60]!r} does not name the quantity it matches",
            why=f"groups are named {', '.join(QUANTITIES)} and memory_gib; one without a name holds seconds",
            remedy=r"--metric 'step time: (?P<step_ms>[\d.]+)'",
        )
    return Metric(pattern=pattern, tokens_per_step=tokens_per_step, gpus=gpus)
