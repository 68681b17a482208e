"""Recognise texts that start a server, before any module of serving is imported."""

from __future__ import annotations

import re

# Where a command may be on its line: commands in backquotes are prose, and comments are not run.
STARTS = {
    "vllm": re.compile(r"^[^#`\n]*(\bvllm\s+serve\b|vllm\.entrypoints\.openai\.api_server)", re.MULTILINE),
    "sglang": re.compile(r"^[^#`\n]*(sglang\.launch_server|\bsglang\s+serve\b)", re.MULTILINE),
}


def serving_engine(text: str) -> str:
    """Return the engine that a text starts; empty for none."""
    return next((name for name, pattern in STARTS.items() if pattern.search(text)), "")
