"""Find models and hardware by the names that sources of serving measurements use."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import resources

from simulator.config.hf_config import load_model, named_model
from simulator.config.hub_models import hub_table
from simulator.config.model import Model
from topology.catalog.clusters import cluster_from_case
from topology.catalog.gpus import gpu_kind
from topology.cluster import Cluster
from topology.errors import BadCluster, BadModel, UserError

# Words that do not change a model's shapes.
_MODEL_NOISE = re.compile(r"[-_ ](instruct|hf|fp8|nvfp4|mxfp4|awq|chat|0528|v0\.1|99\.9|99)\b|^meta-|\bmeta-")


@cache
def _shipped() -> dict[str, str]:
    """Return models by their name on the Hub and by other names of the same shapes, both plain."""
    text = (resources.files("simulator") / "models" / "SOURCES.json").read_text("utf-8")
    names: dict[str, str] = {}
    for name, entry in json.loads(text).items():
        for spelled in (name, entry.get("hub", ""), *entry.get("same_shapes", ())):
            names[plain(spelled)] = name
    for row in hub_table().rows:
        for spelled in (*row.ids, *row.also):
            names.setdefault(plain(spelled), row.ids[0])
    for refused in hub_table().refused:  # loading them gives the reason
        for spelled in refused.ids:
            names.setdefault(plain(spelled), spelled)
    return names


def plain(name: str) -> str:
    """Return a model's name without owner, suffixes of format and training, and separators."""
    rest = name.lower().rsplit("/", 1)[-1]
    while (shorter := _MODEL_NOISE.sub("", rest)) != rest:
        rest = shorter
    return re.sub(r"[^a-z0-9.]", "", rest)


def model_of(name: str) -> Model:
    """Return the model for a source's name or a name on the Hub.

    Raises BadModel if there is none, and for a model with a part that is not modelled.
    """
    shipped = _shipped().get(plain(name))
    found = load_model(shipped) if shipped else named_model(name)
    if found is None:
        raise BadModel(f"model {name!r} is not among the known ones", remedy="give a config.json of it")
    return found


def cluster_of(hardware: str, gpus: int) -> Cluster:
    """Return a cluster with this number of the named GPUs, in nodes as they are sold. Raises UserError for an unknown
    GPU.
    """
    hardware = hardware[:200]
    said = re.sub(r"\([^)]{0,200}\)|nvidia|virtualized|geforce", " ", hardware, flags=re.IGNORECASE)
    words = re.sub(r"\b(\d{1,4}\s{0,4}GB( HBM\w{0,9})?|GPU|CTS|NVL72)\b|-(?=\d)|-CTS", " ", said, flags=re.IGNORECASE)
    kind = _sized(said) or _gpu(" ".join(words.replace("-", " ").split()))
    rack = 72 if "NVL72" in hardware.upper() else 8
    per_node = min(gpus, rack)
    return cluster_from_case({"gpu": kind, "gpus_per_node": per_node, "nodes": -(-gpus // per_node)})[0]


def _sized(said: str) -> str:
    """Return the GPU of a name that is known with the memory it states, such as one of 40 GB among larger ones."""
    try:
        return gpu_kind(" ".join(said.split())).name
    except UserError:
        return ""


def _gpu(words: str) -> str:
    tried = words.split()
    for count in range(len(tried), 0, -1):
        try:
            return gpu_kind(" ".join(tried[:count])).name
        except UserError:
            continue
    raise BadCluster(f"GPU {words!r} is not in the catalogue", remedy="add it to topology/catalog/gpus.json")
