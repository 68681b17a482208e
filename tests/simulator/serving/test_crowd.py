"""Very many clients: figures on a line through two smaller simulations are those of the simulation that was spared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.config.hf_config import load_model
from simulator.serving import crowd, estimate
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.estimate import estimate_serving
from simulator.serving.latency import Latency
from simulator.serving.traffic import Lengths, Traffic, with_clients
from topology.catalog.clusters import cluster

SENT = Traffic(prompt=Lengths(mean=512), output=Lengths(mean=8))


def seen(deployment: Deployment, clients: int) -> Latency:
    found = estimate_serving(load_model("llama3-8b"), cluster("dgx-h100", 8), deployment, with_clients(SENT, clients))
    return found.latency


@pytest.mark.parametrize(
    "deployment",
    [
        Deployment(pool=Pool(engines=7), prefill=Pool()),
        Deployment(pool=Pool(engines=1), max_num_seqs=16),
        Deployment(pool=Pool(engines=2), max_num_seqs=16),
    ],
    ids=["one engine reads", "few answers at once", "one of two engines is simulated"],
)
def test_a_saturated_deployment_is_continued(monkeypatch, deployment):
    whole = seen(deployment, 1024)
    monkeypatch.setattr(crowd, "FIRST", 128)
    monkeypatch.setattr(crowd, "MOST", 512)
    monkeypatch.setattr(estimate, "MOST", 512)
    monkeypatch.setattr(estimate, "CROWDED", 128)

    continued = seen(deployment, 1024)

    assert continued != whole
    for name in ("mean", "p50", "p95"):
        assert getattr(continued.ttft_s, name) == pytest.approx(getattr(whole.ttft_s, name), rel=0.02)
    assert continued.tpot_s.mean == pytest.approx(whole.tpot_s.mean, rel=0.02)
    assert continued.output_tokens_per_s == pytest.approx(whole.output_tokens_per_s, rel=0.02)


def test_where_more_clients_bring_more_all_are_simulated():
    one = seen(Deployment(), 1)
    asked = []

    def growing(clients: int) -> Latency:
        asked.append(clients)
        return replace(one, output_tokens_per_s=float(clients))

    found = crowd.latency_of(10 * crowd.MOST, growing)

    assert asked[-1] == 10 * crowd.MOST
    assert found.output_tokens_per_s == 10 * crowd.MOST
