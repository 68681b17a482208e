"""torchtitan's loss in 8 pieces of the sequence, from 0.3 on: against its bytes and passes counted by hand."""

from __future__ import annotations

import pytest

from planner.question.case_runtime import resolve_runtime
from planner.question.prediction import predict
from planner.question.question import question_of
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.runtimes.library import is_later_version
from tests.planner.conftest import LLAMA8B, make_cluster

GIB = 2**30
TOKENS, WIDTH, VOCABULARY = 8192, 4096, 128256


@pytest.mark.parametrize(
    ("name", "version", "later"),
    [
        ("torchtitan", "0.3.0", True),
        ("torchtitan", "0.2.2", False),
        ("torchtitan", None, False),
        ("torchtitan", "2025-11", False),
        ("pytorch", "2.13", False),
    ],
)
def test_versions_from_0_3_on_have_it(name, version, later) -> None:
    assert is_later_version(Runtime(name=name, version=version)) == later


def asked(version: str, *, compiled: bool):
    runtime = resolve_runtime({"name": "torchtitan", "version": version, "compile": compiled})[0]
    workload = Workload(seq_len=TOKENS, global_batch_size=8)
    return question_of(LLAMA8B, make_cluster(), workload, runtime=runtime, framework="torchtitan")


@pytest.mark.parametrize("compiled", [False, True])
def test_logits_of_a_piece_and_gradients_in_float32_take_the_place_of_all_logits(compiled) -> None:
    """The peak of a step that recomputes nothing is where its loss turns round: three tensors of the logits' size in
    float32 (log-probabilities and two gradients); compiled, logits and their gradient in 16 bits. In pieces there is an
    eighth of it, and the float32 gradients of tokens and head.
    """
    plan = Plan(dp_shard=8, recompute="none")
    whole, pieces = (
        predict(asked(version, compiled=compiled), plan).estimate.memory.peak_bytes.value / GIB
        for version in ("0.2.2", "0.3.0")
    )
    logits = (2 * 2 if compiled else 3 * 4) * TOKENS * VOCABULARY / GIB
    gradients = 4 * WIDTH * (TOKENS + VOCABULARY) / GIB

    # What the allocator keeps of freed blocks is in neither sum.
    assert whole - pieces == pytest.approx(7 / 8 * logits - gradients, abs=0.5)


def test_the_same_products_take_a_few_more_passes_over_the_head() -> None:
    """Sums of the head's gradient: 8 of 2 bytes and 15 of 4 bytes an element; and copies of tokens."""
    plan = Plan(dp_shard=8, recompute="none")
    whole, pieces = (asked(version, compiled=True).estimate([plan]) for version in ("0.2.2", "0.3.0"))
    moved = (8 * 2 + 15 * 4) * WIDTH * VOCABULARY + (2 * 2 + 2 * 4 + 2 * 2) * TOKENS * WIDTH

    assert pieces.breakdown_s["compute"][0] - whole.breakdown_s["compute"][0] == pytest.approx(
        moved / 3.35e12, rel=0.35
    )
