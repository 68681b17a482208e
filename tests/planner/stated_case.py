"""A small case, and the same with sections changed."""

from __future__ import annotations

import copy

BASE = {
    "id": "base",
    "model": "llama3-8b",
    "cluster": "dgx-h100",
    "workload": {"task": "train", "seq_len": 8192, "global_batch_size": 64},
    "plan": {"dp_shard": 8, "micro_batch_size": 1, "recompute": "none"},
    "runtime": {"name": "torchtitan"},
}


def changed(**sections):
    case = copy.deepcopy(BASE)
    for name, value in sections.items():
        case[name] = {**case[name], **value} if isinstance(value, dict) and isinstance(case[name], dict) else value
    return case
