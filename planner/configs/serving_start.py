"""Which texts start a server: what tells them from configurations of training, before anything of serving is loaded."""

from __future__ import annotations

import re

# Where a command may stand on its line: prose names commands in backquotes, comments are not run.
STARTS = {
    "vllm": re.compile(r"^[^#`\n]*(\bvllm\s+serve\b|vllm\.entrypoints\.openai\.api_server)", re.MULTILINE),
    "sglang": re.compile(r"^[^#`\n]*(sglang\.launch_server|\bsglang\s+serve\b)", re.MULTILINE),
}


def serving_engine(text: str) -> str:
    """Return the engine that a text starts, or nothing."""
    return next((name for name, pattern in STARTS.items() if pattern.search(text)), "")
