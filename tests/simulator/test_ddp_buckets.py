"""DDP all-reduces a bucket as soon as it is full, and copies buckets out one by one: what of it a step waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.question.question import question_of
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from topology.catalog.clusters import cluster

WIDE = replace(load_model("llama3-70b"), layers=3, vocab=16_000)
LINK_BYTES_PER_S = 450e9  # NVLink of an H100, each way: NVIDIA H100 datasheet


def exposed_s(model, tokens):
    question = question_of(
        model, cluster("dgx-h100", 2), Workload(seq_len=tokens, global_batch_size=2), framework="meshwright"
    )
    return question.estimate([Plan(dp_replicate=2)]).estimate(0).breakdown_s["exposed_communication"]


def test_what_a_step_waits_for_is_the_embedding_and_not_a_layer():
    layer_s, embedding_s = (
        4 * held / LINK_BYTES_PER_S for held in (3 * WIDE.hidden * WIDE.ffn, WIDE.hidden * WIDE.vocab)
    )
    assert exposed_s(WIDE, 8192) < 2 * embedding_s < layer_s  # in float32; a layer computes ten times as long


@pytest.mark.parametrize("fewer", [8192, 2048, 512])
def test_what_computes_for_less_time_hides_less(fewer):
    assert exposed_s(WIDE, fewer // 2) >= exposed_s(WIDE, fewer)
