"""What a host launches in a step that no graph replays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.config.hf_config import load_model
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.engine import engine_of
from simulator.serving.forward_pass import ForwardPass
from simulator.serving.launches import Launches
from topology.catalog.clusters import cluster


def of(engine: str, model: str = "deepseek-v3") -> Launches:
    return Launches(load_model(model), engine_of(engine), Pool(tp=8), "float8", "blackwell")


@pytest.mark.parametrize("model", ["deepseek-v3", "llama3-8b"])
def test_a_compiled_engine_issues_a_step_later_than_kernels_alone_and_sooner_than_from_python(model: str) -> None:
    compiled = of("vllm", model)
    engine = compiled.engine
    eager = replace(compiled, engine=replace(engine, compiled=False, host_launch_s=engine.host_eager_launch_s))
    assert compiled.count == eager.count
    assert compiled.count * engine.host_launch_s < compiled.seconds < eager.seconds
    assert compiled.attention_s < compiled.seconds


def test_operators_that_python_calls_by_hand() -> None:
    """DeepSeek-V3 on Blackwell: 61 layers of ten operators of attention and two sums, 58 of a cast, a kernel of all
    experts, and the shared one's three with two casts.
    """
    engine = engine_of("vllm")
    called = 61 * (10 + 2) + 58 * (2 + 3 + 2)
    rest = of("vllm").count - called
    assert of("vllm").seconds == pytest.approx(called * engine.host_eager_launch_s + rest * engine.host_launch_s)
    assert of("sglang").seconds == of("sglang").count * engine_of("sglang").host_launch_s


def test_a_short_prompt_is_not_read_sooner_by_more_gpus_than_the_host_issues_it() -> None:
    machine = cluster("dgx-b200")

    def read_s(tp: int, tokens: int) -> float:
        deployment = Deployment(pool=Pool(tp=tp), weights="float4")
        costs = ForwardPass(load_model("deepseek-v3"), machine, deployment, deployment.pool)
        return costs.seconds(prompt_tokens=tokens, pairs=tokens**2 / 2, sequences=0, keys=0.0)

    assert read_s(8, 600) == pytest.approx(read_s(4, 600), rel=1e-3)
    assert read_s(8, 16384) < 0.8 * read_s(4, 16384)
    assert read_s(8, 500) < read_s(8, 600), "graphs replay all but attention"
