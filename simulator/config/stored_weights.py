"""The format of a checkpoint's weights where it is not 16 bits, from its configuration or its name."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from simulator.config.hub_models import hub_model
from topology.codec import read_json
from topology.errors import BadInput, BadModel

# Parts of names on the Hub; the first that matches decides. Source: the quantised checkpoints of NVIDIA, Red Hat AI and
# Qwen.
_WORDS = (("mxfp4", "mxfp4"), ("fp4", "float4"), ("awq|gptq|int4|w4a16", "int4"), ("fp8|w8a8-float", "float8"))
# `quant_method` of transformers' quantization_config; methods with several widths state them in `bits` or
# `config_groups`.
_METHODS = {"fp8": "float8", "fbgemm_fp8": "float8", "mxfp4": "mxfp4", "awq": "int4", "gptq": "int4"}
_ALGORITHMS = {"FP8": "float8", "NVFP4": "float4"}  # `quant_algo` of modelopt


def stored_weights(source: str) -> str:
    """Return the format of the checkpoint of a model, given as `load_model` takes it; empty for 16 bits or unknown."""
    path = Path(source)
    try:
        path = path / "config.json" if path.is_dir() else path
        is_file = path.is_file()
    except (OSError, ValueError):
        return ""
    if is_file:
        try:
            return of_config(read_json(path))
        except BadInput:
            return ""
    published = _published()
    if said := published.get(source.strip().casefold(), "") or of_name(source):
        return said
    try:
        found = hub_model(source)
    except BadModel:
        return ""
    return "" if found is None else found[1].weights or published.get(found[1].like, "")


def of_name(name: str) -> str:
    """Return the format in a checkpoint's name; empty if none."""
    last = name.rsplit("/", 1)[-1].lower()
    return next((format_ for words, format_ in _WORDS if re.search(rf"(?<![a-z0-9])n?v?({words})\b", last)), "")


def of_config(config: Any) -> str:
    """Return the format in a config.json's `quantization_config`; empty if none."""
    said = config.get("quantization_config") if isinstance(config, dict) else None
    if not isinstance(said, dict):
        return ""
    method = str(said.get("quant_method", "")).lower()
    if method in {"awq", "gptq"} and said.get("bits", 4) != 4:
        return ""
    if method == "compressed-tensors":
        groups = said.get("config_groups")
        parts = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
        kinds = {(part.get("type"), part.get("num_bits")) for part in parts if isinstance(part, dict)}
        known: dict[tuple[Any, Any], str] = {("float", 8): "float8", ("float", 4): "float4", ("int", 4): "int4"}
        return known.get(next(iter(kinds)), "") if len(kinds) == 1 else ""
    return _METHODS.get(method, "") or _ALGORITHMS.get(str(said.get("quant_algo", "")).upper(), "")


@cache
def _published() -> dict[str, str]:
    """Return the formats of shipped models not published in 16 bits, by our name and by the Hub's."""
    sources = json.loads((resources.files("simulator") / "models" / "SOURCES.json").read_text("utf-8"))
    found: dict[str, str] = {}
    for name, entry in sources.items():
        if "weights" in entry:
            found |= dict.fromkeys((name, entry["hub"].casefold()), entry["weights"])
    return found
