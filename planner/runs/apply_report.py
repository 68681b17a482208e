"""The result of `planner apply` as lines of text."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from typing import Any

from topology.units import GIB, in_gib

BUSY_HOST = 0.1  # share of its cores: a host that is less busy counts as idle
NO_MORE_FILES = os.strerror(errno.EMFILE)


def lines(document: Mapping[str, Any], comparison: Mapping[str, Any] | None) -> Iterator[str]:
    """Return the report as lines of text."""
    measured, verified = document["measured"], document["verified"]
    if document["status"] != "finished":
        yield from _failure_lines(document)
    if verified:
        verdict = "as one process computes" if verified["ok"] else "NOT what one process computes"
        yield (
            f"numbers   {verdict}: gradients within {_difference_text(verified['gradient'])} (tolerance"
            f" {verified['tolerance']:.1e}, {verified['dtype']}, {verified['compared']} tensors of a small model)"
        )
    types = document.get("verified_types")
    if types:
        what = f"gradients within {_difference_text(types['gradient'])} (rounding allows {types['allowed']:.1e})"
        yield (
            f"          in {types['dtype']}{', compiled' if types['compiled'] else ''}"
            f" {'as rounding allows' if types['ok'] else 'NOT what rounding allows'}:"
            f" {what if types['gradients_compared'] else 'the loss alone is compared, for experts are chosen anew'}"
        )
    step = measured["step_s"]
    if step:
        partial = "" if document["complete"] else f" (partial: {measured['steps']} of {measured['steps_asked']} steps)"
        yield (
            f"step      {step['median']:.4g} s median of {measured['steps']}, spread {step['spread']:.0%}, measured"
            + partial
        )
        yield (
            f"speed     {measured['tokens_per_s']:,.0f} tokens/s, {measured['tokens_per_s_per_gpu']:,.0f} a rank,"
            f" {measured['tflops_per_gpu']:.4g} TFLOP/s a rank"
        )
        denominator = measured["mfu_denominator"]
        if measured["mfu"] is not None:
            yield (
                f"MFU       {measured['mfu']:.1%} of {denominator['peak_flops'] / 1e12:.0f} TFLOP/s"
                f" ({denominator['source']})"
            )
    peaks = _peak_memory_text(measured["memory_by_rank"])
    if peaks:
        yield f"memory    {peaks}"
    yield from (
        f"setting   {e['what']}: requested {e['requested']}, took effect {e['effective']}"
        for e in document.get("effects") or ()
        if not e["ok"]
    )
    yield from (f"missing   {what}" for what in document.get("missing") or ())
    yield from (f"slow      {line}" for line in document.get("slow_ranks") or ())
    clock_hz = measured.get("sm_clock_hz")
    if clock_hz:
        clock = f"{clock_hz / 1e9:.2f} GHz on average over a step"
        yield f"clocks    {clock}, on the slowest rank, by its processors' count"
    change = measured.get("sm_clock_change")
    if change:
        yield (
            f"clocks    changed from {change['before_hz'] / 1e9:.2f} to {change['after_hz'] / 1e9:.2f} GHz at step"
            f" {change['step']:.0f}: a limit was set or lifted, or the GPU drew more or less power;"
            " the median mixes both"
        )
    slow = {reason for gpu in document.get("gpus") or () for reason in gpu["throttle"]}
    if slow:
        yield f"clocks    throttled while steps were timed: {', '.join(sorted(slow))}"
    host = measured.get("host")
    if host and host["others"] + host["stolen"] >= BUSY_HOST * host["cores"]:
        stolen = f", and {host['stolen']:.1f} served other machines," if host["stolen"] >= 0.05 else ""
        yield (
            f"host      {host['others']:.1f} of {host['cores']:.0f} cores ran other processes{stolen} while steps were"
            " timed: steps that wait for the host may vary"
        )
    if comparison is not None:
        word = "within" if comparison["within"] else "OUTSIDE"
        tolerance = comparison["tolerance_percent"]
        of = "the predicted interval" if tolerance is None else f"{tolerance:g}%"
        yield f"predicted step {comparison['step_error']:+.1%} (predicted/measured - 1), {word} {of}"


def _failure_lines(document: Mapping[str, Any]) -> Iterator[str]:
    failure = document.get("failure") or {}
    who = "" if failure.get("rank") is None else f"rank {failure['rank']} failed first: "
    how = failure.get("signal") or ""
    text = " ".join(str(failure.get("message") or "").split())[:400]
    yield f"status    {document['status']}: {who}{how}{' ' if how and text else ''}{text}".rstrip(": ")
    yield from (f"          {line}" for line in failure.get("suspects") or ())
    yield from (f"          {line}" for line in failure.get("gpus") or ())
    if NO_MORE_FILES in text:
        yield "          a process may open no more files: raise the limit (ulimit -n 65536)"
    yield from _out_of_memory_lines(failure.get("memory") or {}, (document.get("predicted") or {}).get("memory") or {})
    if document["survivors"]:
        yield f"          processes {document['survivors']} could not be ended"


def _out_of_memory_lines(memory: Mapping[str, Mapping[str, Any]], predicted: Mapping[str, Any]) -> list[str]:
    """Return lines on the memory of each rank that ran out, and on the predicted memory by category."""
    text_lines = []
    for rank, reached in memory.items():
        peaks = [
            f"{in_gib(reached[key], 2)} {word}"
            for key, word in (
                ("peak_allocated_bytes", "allocated"),
                ("peak_reserved_bytes", "reserved"),
                ("peak_resident_bytes", "resident"),
            )
            if key in reached
        ]
        text_lines.append(
            f"          rank {rank} had reached {', '.join(peaks)}, in {reached.get('phase', 'an unknown phase')}"
        )
    parts = predicted.get("by_category") or {}
    if text_lines and parts:
        listed = ", ".join(
            f"{name} {size / GIB:.2f}" for name, size in sorted(parts.items(), key=lambda p: -p[1]) if size
        )
        text_lines.append(f"          predicted peak {in_gib(predicted['peak_bytes']['value'], 2)}: {listed}")
    return text_lines


def _peak_memory_text(memory: list[dict[str, int]]) -> str:
    for key, word in (("peak_allocated_bytes", "allocated"), ("peak_resident_bytes", "resident (whole process)")):
        values = [rank[key] for rank in memory if key in rank]
        if values:
            reserved = [rank.get("peak_reserved_bytes", 0) for rank in memory]
            more = f", {in_gib(max(reserved), 2)} reserved" if any(reserved) else ""
            return f"{in_gib(max(values), 2)} {word} on the fullest rank{more}, measured"
    return ""


def _difference_text(value: float | None) -> str:
    """Return a difference as text; records have None for an infinite or undefined one."""
    return "no number" if value is None else f"{value:.1e}"
