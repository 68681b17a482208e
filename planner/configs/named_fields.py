"""What a configuration of any kind, of training or of serving, says itself."""

from __future__ import annotations

from planner.configs.formats.configuration import CheckFlags
from planner.configs.formats.kinds import read_configuration
from planner.configs.serving_start import serving_engine


def named_by(text: str, where: str, launch: str = "") -> frozenset[str]:
    """Return which fields of CheckFlags a configuration says itself. Raises BadInput for a text that cannot be read."""
    if serving_engine(text):
        return frozenset({"model", "seq_len", "global_batch"})
    found = read_configuration(text, where, CheckFlags(launch=launch))
    named = {name for name in ("model", "cluster", "gpus") if getattr(found, name) is not None}
    return frozenset(named | ({"seq_len", "global_batch"} - found.leaves_open))
