"""Which commands a service answers, and what they write in any case."""

from __future__ import annotations

SERVED = ("suggest", "estimate", "explain", "compare", "check", "trace", "apply", "tune")
RUNS = frozenset({"apply", "tune"})  # commands that use the machine itself: one at a time, never started twice
SHORT = frozenset({"estimate", "compare"})  # answered within seconds, whatever is asked
# What commands write in any case: the flag that names it, and a name.
ALWAYS_WRITTEN = {"apply": ("out", "run"), "trace": ("out", "trace.json"), "tune": ("state", "state.jsonl")}
# What a command that takes long writes while it runs, below the folder of its job.
SO_FAR = {"apply": "run/records/rank0.jsonl", "tune": ALWAYS_WRITTEN["tune"][1]}
CONTINUED = "resume"  # a file that is sent, and goes on in the place of what would be written
