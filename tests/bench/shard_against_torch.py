"""One Llama layer forward by torch's own automatic sharding and by `planner shard`: objective, seconds, collectives,
bytes.

    python -m tests.bench.shard_against_torch --out examples/sharding/torch.md

torch's is `tensor_parallel_transformation` (torch.distributed.tensor.experimental._tp_transform): the user says how
linear layers are split, and every operator takes the cheapest of DTensor's strategies by what moving its operands
takes, one after another. Ring bytes are those that one of eight ranks sends.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.tensor.experimental._tp_transform import tensor_parallel_transformation
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from executor.sharding import api, capture
from planner.sharding.answer import Answer, answer_request
from planner.sharding.backends.runnable import simulate_program
from planner.sharding.plans.report import Limits
from simulator.config.runtime import ELEMENT_BYTES
from simulator.sharded.program import Exchange
from tests.bench.sharded_runs import state_bytes
from tests.executor.sharding.modules import LlamaBlock
from topology.catalog.cluster_file import load_cluster

RANKS = 8
COLUMNS, ROWS = ("wq", "wk", "wv", "w1", "w3"), ("wo", "w2")
SHAPES = {"embed": 4096, "hidden": 14336, "heads": 32, "kv_heads": 8}
SHARE = {
    "all_reduce": 2 * (RANKS - 1) / RANKS,
    "all_gather": (RANKS - 1) / RANKS,
    "reduce_scatter": RANKS - 1,
    "all_to_all": (RANKS - 1) / RANKS,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    with torch.device("meta"):
        module = LlamaBlock(**SHAPES)
    module = module.to_empty(device="cpu")  # values do not matter
    x = torch.empty(1, 4096, SHAPES["embed"])
    captured = capture(module, (x,))
    split = {f"{n}.weight": ["S(0)"] for n in COLUMNS} | {f"{n}.weight": ["S(1)"] for n in ROWS}
    lines = [
        "# Against torch's automatic sharding",
        "",
        f"`python -m tests.bench.shard_against_torch`: a Llama 3 8B layer, forward, 4,096 tokens, float32, {RANKS} ranks, torch {torch.__version__}.",
        "Weights split by columns and rows as in Megatron-LM, but where nothing is placed. Seconds are of CPU time. The last two rows",
        "are like for like: forward and backward, arguments and result whole on every rank, the second within the memory of the first",
        "(parameters, gradients, Adam's state, and buffers at their peak).",
        "Without GPUs torch writes an all-to-all as a gather and a slice: its gathers here may be that, and its bytes more than on GPUs.",
        "",
        "| by | objective | s | collectives | ring MB a rank sends | GB of a rank |",
        "|---|---|--:|---|--:|--:|",
        by_torch(module, x),
        ours(captured, "planner shard", "operands stay where they agree, then fewest bytes", placements=split),
        ours(
            captured,
            "planner shard on DGX H100",
            "least time, proved",
            placements=split,
            policy="min_time",
            cluster=True,
        ),
        ours(
            captured,
            "planner shard on DGX H100, nothing placed",
            "least time, proved",
            choose=["*"],
            policy="min_time",
            cluster=True,
        ),
        *like_for_like(captured, split),
    ]
    print("\n".join(lines))
    if asked.out is not None:
        asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def like_for_like(captured: Any, split: dict[str, list[str]]) -> list[str]:
    """Return the rows of the hand plan, and of what is found with its boundary within its memory."""
    boundary, memory, rows = {"x": ["R"], "output0": ["R"]}, None, []
    for by, more in (("Megatron-LM's split", {"placements": {**boundary, **split}}), ("found", {"choose": ["*"]})):
        document = api.request(captured, {"tp": RANKS}, **{"placements": boundary, "policy": "min_time", **more})
        started = process_time()
        limits = Limits(memory_bytes=memory)
        answer = answer_request(document, where=by, cluster=load_cluster("dgx-h100"), limits=limits)
        seconds, program = process_time() - started, answer.written.program
        kinds = Counter(one.kind for one in program.work.values() if isinstance(one, Exchange))
        run = simulate_program(answer.written, answer.problem, load_cluster("dgx-h100"))
        memory = state_bytes(answer) + answer.written.peak_bytes
        sent = sum(sent_bytes(one, answer) for one in program.instructions)
        what = f"planner shard on DGX H100, {by}, {run.step_s * 1e3:.2f} ms"
        rows.append(_row(what, "least time of forward and backward", seconds, kinds, sent, memory))
    return rows


def sent_bytes(instruction: Mapping[str, Any], answer: Answer) -> float:
    """Return what a rank sends around a ring in one exchange of a program."""
    do = answer.written.program.work.get(next(iter(instruction.get("writes", ())), ""))
    if not isinstance(do, Exchange) or do.kind not in SHARE:
        return 0.0
    name = (instruction["reads"] if do.kind == "all_to_all" else instruction["writes"])[0]
    buffer = answer.written.program.buffers[name]
    return SHARE[do.kind] * prod(buffer.local) * ELEMENT_BYTES[buffer.dtype]


def by_torch(module: torch.nn.Module, x: torch.Tensor) -> str:
    exported = torch.export.export(module, (x,), strict=False).run_decompositions()
    styles: dict[str, Any] = {**dict.fromkeys(COLUMNS, ColwiseParallel), **dict.fromkeys(ROWS, RowwiseParallel)}
    objective = "cheapest redistribution, operator by operator"
    started = process_time()
    try:
        made = tensor_parallel_transformation(exported, 0, RANKS, "cpu", styles)
    except Exception as error:  # noqa: BLE001 - what it refuses is a result
        why = " ".join(str(error).split())[:160]
        return f"| torch | {objective} | {process_time() - started:.1f} | refused: {type(error).__name__}: {why} | | |"
    seconds = process_time() - started
    kinds: Counter[str] = Counter()
    sent = 0.0
    for node in made.graph_module.graph.nodes:
        kind = next((k for k in SHARE if k in str(node.target)), None)
        if kind is not None:
            value = node.meta["val"]
            kinds[kind] += 1
            sent += SHARE[kind] * prod(value.shape) * value.element_size()
    return _row("torch", objective, seconds, kinds, sent)


def ours(captured: Any, by: str, objective: str, *, cluster: bool = False, **constraints: Any) -> str:
    document = api.request(captured, {"tp": RANKS}, backward=False, **constraints)
    started = process_time()
    answer = answer_request(document, where=by, cluster=load_cluster("dgx-h100") if cluster else None)
    seconds = process_time() - started
    kinds = Counter(one.kind for one in answer.plan.collectives)
    return _row(by, objective, seconds, kinds, float(answer.plan.ring_send_bytes))


def _row(by: str, objective: str, seconds: float, kinds: Counter[str], sent: float, memory: float | None = None) -> str:
    held = "" if memory is None else f"{memory / 1e9:.2f}"
    found = ", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "none"
    return f"| {by} | {objective} | {seconds:.1f} | {found} | {sent / 1e6:,.1f} | {held} |"


if __name__ == "__main__":
    main()
