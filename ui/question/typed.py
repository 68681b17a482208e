"""Errors of clusters and models that are typed and not known. No file is read for them."""

from __future__ import annotations

from simulator.config.hf_config import unknown_model
from topology.catalog.clusters import cluster
from topology.errors import BadCluster, BadModel, UserError


def not_known(key: str, word: str) -> UserError:
    """Return the error for a word of the field `key`, with near names."""
    if key == "model":
        unknown = unknown_model(word)
        remedy = "a name of the list or the Hub, or upload a config.json"
        return BadModel(unknown.what, why=unknown.why, remedy=remedy)
    remedy = "GPUs such as 4x8xH100, a machine type, a name of the list, or upload its file"
    try:
        cluster(word)
    except BadCluster as error:
        return BadCluster(error.what, why=error.why, remedy=remedy)
    return BadCluster(f"{word[:60]!r} is not a cluster", remedy=remedy)
