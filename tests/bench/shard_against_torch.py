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
from math import prod
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._tp_transform import tensor_parallel_transformation
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from executor.sharding import api, capture
from planner.sharding.answer import Answer, answer_request
from planner.sharding.backends.runnable import simulate_program
from planner.sharding.plans.report import Limits
from simulator.sharded.program import OVERLAPPED, Exchange, Kernel
from tests.bench.shard_with_torch import llama
from tests.bench.sharded_runs import state_bytes
from tests.executor.sharding.modules import LlamaBlock
from topology.catalog.cluster_file import load_cluster
from topology.cluster import Cluster

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
        "Weights split by columns and rows as in Megatron-LM, but where nothing is placed. Seconds are of CPU time. The last rows",
        "are like for like: forward and backward, arguments and result whole on every rank. Memory is that of parameters, gradients,",
        "Adam's state, and buffers at their peak; limits are shares of what the split needs. Bytes are those of the forward pass.",
        "Without GPUs torch writes an all-to-all as a gather and a slice: its gathers here may be that, and its bytes more than on GPUs.",
        "",
        "| by | objective | s | collectives | ring MB a rank sends | GB of a rank |",
        "|---|---|--:|---|--:|--:|",
        by_torch(module, x),
        ours(captured, "planner shard", "operands stay where they agree, then fewest bytes", placements=split),
        ours(
            captured,
            "planner shard on DGX H100",
            "least time",
            placements=split,
            policy="min_time",
            cluster=True,
        ),
        ours(
            captured,
            "planner shard on DGX H100, nothing placed",
            "least time",
            choose=["*"],
            policy="min_time",
            cluster=True,
        ),
        by_parallelize_module(),
        *like_for_like(captured, split),
    ]
    print("\n".join(lines))
    if asked.out is not None:
        asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def like_for_like(captured: Any, split: dict[str, list[str]]) -> list[str]:
    """Return the rows of the hand plan, and of what is found with its boundary within its memory, and with less."""
    boundary, machine = {"x": ["R"], "output0": ["R"]}, load_cluster("dgx-h100")
    asked = {"policy": "min_time", "placements": {**boundary, **split}}
    hand, row = trained(captured, "Megatron-LM's split", machine, Limits(), asked)
    rows, asked = [row], {"policy": "min_time", "placements": boundary, "choose": ["*"]}
    memory = state_bytes(hand) + hand.written.peak_bytes
    for share in (1.0, 0.95, 0.9):
        by = f"found within {share:.0%} of that memory"
        rows.append(trained(captured, by, machine, Limits(memory_bytes=share * memory), asked)[1])
    return [*rows, trained(captured, "found, memory not limited", machine, Limits(), asked)[1]]


def trained(captured: Any, by: str, machine: Cluster, limits: Limits, asked: dict[str, Any]) -> tuple[Answer, str]:
    """Return the answer to a step of forward and backward, and its row."""
    started = process_time()
    document = api.request(captured, {"tp": RANKS}, **asked)
    answer = answer_request(document, where=by, cluster=machine, limits=limits)
    seconds, program = process_time() - started, answer.written.program
    kinds = Counter(one.kind for one in program.work.values() if isinstance(one, Exchange))
    kinds.update(one.op for one in program.work.values() if isinstance(one, Kernel) and one.op.startswith(OVERLAPPED))
    step_s = simulate_program(answer.written, answer.problem, machine).step_s
    what = f"planner shard on DGX H100, {by}: {step_s * 1e3:.2f} ms predicted"
    memory = state_bytes(answer) + answer.written.peak_bytes
    sent = float(answer.plan.ring_send_bytes)
    return answer, _row(what, "least time of forward and backward", seconds, kinds, sent, memory)


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


class _Sent(TorchDispatchMode):
    """Counts the collectives that torch issues, and the ring bytes that a rank sends."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()
        self.sent = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = next((one for one in SHARE if f"c10d_functional.{one}" in str(func)), None)
        if kind is not None:
            self.kinds[kind] += 1
            self.sent += SHARE[kind] * args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def by_parallelize_module() -> str:
    """Return the row of the split as torch runs it eagerly, counted on tensors without values; the layer is that of
    `shard_with_torch`, of the same sizes.
    """
    started, mesh = process_time(), init_device_mesh("cpu", (RANKS,))
    with FakeTensorMode():
        module, shape = llama(small=False)
        styles: dict[str, Any] = {**dict.fromkeys(COLUMNS, ColwiseParallel()), **dict.fromkeys(ROWS, RowwiseParallel())}
        parallelize_module(module, mesh, styles)
        with _Sent() as count:
            y = module(torch.empty(shape))
            forward = count.sent
            y.backward(torch.empty_like(y))
    what = f"parallelize_module, Megatron-LM's split; {(count.sent - forward) / 1e6:,.1f} MB more backward"
    return _row(what, "none", process_time() - started, count.kinds, forward)


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
