"""A measured step compared with its prediction, as text."""

from __future__ import annotations

import math

from planner.calibrate.difference import Difference
from planner.io.figures import interval_text, last_digit_s, seconds_text

FAR = 2.0  # multiple of a step's usual error beyond which terms alone hardly explain the difference


def difference_lines(found: Difference, file: str) -> list[str]:
    """Return lines with the difference, the terms that could account for it, and what to measure next."""
    last_s, apart = last_digit_s(found.predicted), found.measured_s / found.predicted.value - 1
    side = "inside" if found.inside else "outside"
    far = abs(math.log1p(apart)) > FAR * math.log1p(found.expected)
    other = (
        "work outside the step: loading data, checkpoints, logging, validation, other jobs on the machine"
        if apart > 0
        else "less work than the plan says: fewer tokens in a sequence, a smaller batch, frozen parameters"
    )
    measured, predicted = seconds_text(found.measured_s, last_s), interval_text(found.predicted)
    lines = [f"measured  {measured}, {apart:+.0%} against the predicted {predicted}: {side} its 80% range"]
    lines += [f"likely    {other}"] if far else []
    lines += [
        f"{'could be' if place == 0 else '':10s}{one.name}: they are expected to account for {one.share:.0%} of the"
        f" difference; to account for all of it, they would take {_times(one.times)} as long as predicted"
        for place, one in enumerate(found.accounts)
    ]
    lines += [] if far else [f"or        {other}"]
    lines += [
        f"{'measure' if place == 0 else '':10s}{one.name}: this takes about {one.seconds:.0f} s, after which the step"
        f" is known within {one.after:.1%}"
        for place, one in enumerate(found.next)
    ]
    lines.append(f"start     on the machine: planner calibrate --for {file} --out profile.json")
    return lines


def _times(factor: float) -> str:
    return "more than 20 times" if factor > 20 else "almost no time, not" if factor < 0.05 else f"{factor:.2g} times"
