"""Networks with linear attention: what they keep of a request does not grow with it, and they are not trained here."""

from __future__ import annotations

import pytest

from planner.question.flags import Flags
from planner.search.answer import search_question
from simulator.config.hf_config import load_model
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.forward_pass import ForwardPass
from simulator.serving.kv_cache import cache_capacity
from simulator.serving.linear_attention import delta_rule_s
from simulator.serving.request_bytes import cache_bytes_per_token, state_bytes
from topology.catalog.clusters import cluster
from topology.errors import BadModel

QWEN = load_model("Qwen/Qwen3-Next-80B-A3B-Instruct")  # 12 of 48 layers attend, two key/value heads of 256
H200 = cluster("dgx-h200", 8)
FOUR = Pool(tp=4)


def test_only_layers_that_attend_cache_keys_and_the_others_have_a_state():
    assert cache_bytes_per_token(QWEN, Pool(), "bfloat16") == 12 * 2 * 2 * 256 * 2
    matrices, convolution = 32 * 128 * 128 * 4, 3 * (2 * 16 + 32) * 128 * 2
    assert state_bytes(QWEN, FOUR) == pytest.approx(36 * (matrices + convolution) / 4)


def test_longer_requests_share_less_of_their_memory_with_a_state():
    deployment = Deployment(pool=FOUR)
    short, long = (cache_capacity(QWEN, H200, deployment, FOUR, length=length).tokens for length in (512, 65536))

    assert 1.5 * short < long


def test_context_costs_a_quarter_of_the_layers():
    costs = ForwardPass(QWEN, H200, Deployment(pool=FOUR), FOUR)

    def token_s(keys: float) -> float:
        return costs.seconds(prompt_tokens=0, pairs=0.0, sequences=64, keys=keys)

    grown = token_s(64 * 100_000) - token_s(64 * 10_000)
    read = 12 * 64 * 90_000 * 2 * 256 * 2 / H200.slowest_kind.memory_bytes_per_s  # one key/value head a rank, at least
    assert read < grown < 1.5 * read


def test_training_is_refused_with_the_reason():
    with pytest.raises(BadModel, match="serving only") as refused:
        search_question(Flags(model="Qwen/Qwen3-Next-80B-A3B-Instruct", cluster="dgx-h100"), "torchtitan")

    assert "linear attention" in refused.value.why


@pytest.mark.parametrize(("tp", "measured_ms"), [(8, 0.324), (4, 0.434), (2, 0.597), (1, 0.925)])
def test_chunks_of_a_prompt_beside_kernels_by_themselves(tp: int, measured_ms: float):
    """One prompt of 8,192 tokens in a layer of Qwen3.5 397B on B200, 64 heads over `tp` GPUs (SGLang 0.5.14,
    ai-dynamo/aiconfigurator gdn_perf.parquet); of two prompts as long together, no chunk waits twice as long.
    """
    model = load_model("Qwen/Qwen3.5-397B-A17B")
    costs = ForwardPass(model, cluster("dgx-b200", 8), Deployment(engine="sglang", pool=Pool(tp=tp)), Pool(tp=tp))
    costs.attention.pair_ratio = 0.0  # of the other layers
    scan_s = costs.parts(prompt_tokens=8192, pairs=1e-9, sequences=0, keys=0.0)["attention"] / model.linear_layers
    assert 1e3 * (8192 * delta_rule_s(costs.kernels, model.linear, tp) + scan_s) == pytest.approx(measured_ms, rel=0.12)
    both = costs.parts(prompt_tokens=16_384, pairs=1e-9, sequences=0, keys=0.0, readers=2)["attention"]
    assert both == pytest.approx(scan_s * model.linear_layers)
