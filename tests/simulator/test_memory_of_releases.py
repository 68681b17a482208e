"""What torchtitan held in memory in one release and not in another."""

from dataclasses import replace

import pytest

import simulator.memory.replay
from planner.question.question import question_of
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.memory.growing import GrowingAllocator
from simulator.memory.replay import MemoryReplay
from simulator.step.held import saved_bytes, tensors_bytes
from topology.catalog.cluster_file import load_cluster

LLAMA = replace(load_model("llama3-8b"), layers=4, name="")


def replay(plan: Plan, *, machine: str = "dgx-h100", vocab: int = 128_256, **runtime):
    """Return the replay of eight ranks of torchtitan, each with one sequence of 2,048 tokens."""
    workload = Workload(seq_len=2048, global_batch_size=8)
    model = replace(LLAMA, vocab=vocab)
    stated = Runtime(name="torchtitan", **runtime)
    return MemoryReplay(question_of(model, load_cluster(machine), workload, runtime=stated, gpus=8), plan)


@pytest.mark.parametrize("recompute", ["none", "selective-op"])
def test_a_compiled_layer_holds_what_torchs_partitioner_saves(recompute):
    """Of a block with torchtitan's policy, torch 2.13's min_cut_rematerialization_partition saved what wq, wv,
    attention and w1 give, not w2, besides the block's input; without recomputation both norms' results, that of wo,
    what attention has, three of the feed-forward's width, and what norms and attention have of a token.
    """
    asked = replay(Plan(dp_shard=8, recompute=recompute), compile=True)
    operators, context = asked.tensors.operators.dense_layer, asked.context
    mode = context.spec.recompute[recompute]
    saved = saved_bytes(operators, mode, context) if mode.recomputes else tensors_bytes(operators, context)
    h, kv, f, heads = LLAMA.hidden, LLAMA.kv_heads * LLAMA.head_dim, LLAMA.ffn, LLAMA.heads
    of = {"selective-op": 2 * (3 * h + kv + f) + 4 * heads, "none": 2 * (5 * h + 2 * kv + 3 * f) + 4 * (heads + 2)}

    assert saved[0] == 2048 * of[recompute]


def test_embedding_and_head_were_gathered_and_kept_as_one():
    """Until pull request 1094 they were FSDP2's root unit: one of the two matrices more is there whole, in 16 bits."""
    rows = 64_128

    def growth(version: str) -> int:
        many, few = (replay(Plan(dp_shard=8), vocab=v, version=version).rank(0) for v in (2 * rows, rows))
        return many.reserved_bytes - few.reserved_bytes

    assert growth("2025-07") - growth("2025-08") == pytest.approx(2 * rows * LLAMA.hidden, rel=0.1)


@pytest.mark.parametrize(
    ("machine", "version", "grows"),
    [("mi300x-x8", "2026-01", False), ("mi300x-x8", "2026-02", True), ("dgx-h100", "2026-01", True)],
)
def test_torch_on_amd_had_no_growing_segments(machine, version, grows, monkeypatch):
    """Before March 2026 (pytorch PR #173330)."""
    made = []
    monkeypatch.setattr(simulator.memory.replay, "GrowingAllocator", lambda: made.append(1) or GrowingAllocator())
    replay(Plan(dp_shard=8, recompute="full"), machine=machine, version=version).rank(0)

    assert bool(made) == grows
