"""How Megatron-LM spells CUDA graphs, in both directions: whole steps, layers, or parts of them.

Source: `megatron/training/arguments.py` and `megatron/core/transformer/enums.py` (CudaGraphModule) of megatron-core
0.19.2. No list of modules is the whole layer; what replays it, TransformerEngine or Megatron-LM itself, costs the same
here.
"""

from __future__ import annotations

import re

from planner.export.frameworks.megatron_model import set_flags
from planner.export.mapping import Entry, Facts, NotModelled, Settings, require_said
from simulator.runtimes.library import runtime_spec
from topology.errors import BadInput

_IMPL, _PARTS = "--cuda-graph-impl", "--cuda-graph-modules"
_EARLIER = ("--cuda-graph-scope", "--external-cuda-graph", "--enable-cuda-graph")
_WHOLE = frozenset({"full", "full_iteration"})
_IMPLS = ("none", "local", "transformer_engine", "full_iteration")


def _write(facts: Facts) -> Settings:
    parts = list(facts["graph_scopes"])
    return set_flags({_IMPL: "transformer_engine" if facts["cuda_graph"] else None, _PARTS: parts or None})


def _read(settings: Settings, _: Facts) -> Facts:
    """Read what is captured. Raises NotModelled for parts that have no cost here."""
    impl = str(require_said(_IMPL, settings.get(_IMPL, "none")))
    if impl not in _IMPLS:
        raise BadInput(f"{_IMPL} is {impl[:40]!r}", why=f"known: {', '.join(_IMPLS)}")
    if impl == "none" and not any(settings.get(flag) for flag in _EARLIER[1:]):
        return {"cuda_graph": False, "graph_scopes": ()}
    said = require_said(_PARTS, settings.get(_PARTS, settings.get(_EARLIER[0]))) or ()
    words = said if isinstance(said, (list, tuple)) else re.split(r"[\s,\[\]'\"]+", str(said))
    parts = tuple(str(word) for word in words if word and str(word) not in _WHOLE)
    known = runtime_spec("megatron-lm").graph_scopes
    if unknown := [part for part in parts if part not in known]:
        raise NotModelled(f"{_PARTS} {unknown[0][:40]} is not modelled", remedy=f"known: {', '.join(known)}")
    return {"cuda_graph": True, "graph_scopes": () if len(parts) < len([w for w in words if w]) else parts}


GRAPH_ENTRY = Entry(keys=(_IMPL, _PARTS, *_EARLIER), write=_write, read=_read)
