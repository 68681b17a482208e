"""Which commands a service answers, and what they write in any case."""

from __future__ import annotations

SERVED = ("suggest", "estimate", "explain", "compare", "check", "trace", "apply", "tune")
RUNS = frozenset({"apply", "tune"})  # commands that use the machine itself: one at a time, never started twice
SHORT = frozenset({"estimate", "compare"})  # answered within seconds, for any request
# Files that a command writes in any case: the flag for the file, and its name.
ALWAYS_WRITTEN = {"apply": ("out", "run"), "trace": ("out", "trace.json"), "tune": ("state", "state.jsonl")}
# Files that a long-running command writes while it runs, in the folder of its job.
SO_FAR = {"apply": "run/records/rank0.jsonl", "tune": ALWAYS_WRITTEN["tune"][1]}
CONTINUED = "resume"  # a file that is sent, and continued instead of writing a new one
