"""How an engine is started: the format of its checkpoint, eager or captured, whose all-reduce; said, costed, exported,
read back.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from planner import estimate
from planner.configs.formats.configuration import CheckFlags
from planner.configs.serving import check_serving
from planner.export.serving.commands import command
from planner.serving.answer import answer_deployment
from planner.serving.question.from_flags import ServingFlags, serving_question
from planner.serving.stated import stated_deployment
from simulator.config.hf_config import hub_name
from simulator.config.stored_weights import of_config, stored_weights
from simulator.serving.deployment import Pool
from simulator.serving.engine import engine_of
from simulator.serving.forward_pass import ForwardPass
from simulator.serving.kv_cache import cache_capacity
from topology.errors import Infeasible, UserError


def flags(**changed: Any) -> ServingFlags:
    return ServingFlags(**({"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 2, "isl": 256, "osl": 32} | changed))


@pytest.mark.parametrize(
    ("source", "format_"),
    [
        ("gpt-oss-120b", "mxfp4"),
        ("deepseek-ai/DeepSeek-V3", "float8"),
        ("llama3-8b", ""),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "int4"),
        ("nvidia/DeepSeek-R1-0528-NVFP4-v2", "float4"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic", "float8"),
        ("RedHatAI/Llama-3.3-70B-Instruct-quantized.w4a16", "int4"),
    ],
)
def test_names_of_published_checkpoints_say_their_format(source: str, format_: str) -> None:
    assert stored_weights(source) == format_


@pytest.mark.parametrize(
    ("said", "format_"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, "float8"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, "mxfp4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, ""),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "float4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}, "targets": ["Linear"]}},
            },
            "int4",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": []}, ""),
        ({"quant_method": "bitsandbytes"}, ""),
        ("fp8", ""),
    ],
)
def test_a_configuration_says_the_format_of_its_checkpoint(said: Any, format_: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"quantization_config": said}))

    assert of_config(json.loads(path.read_text())) == format_
    assert stored_weights(str(path)) == stored_weights(str(tmp_path)) == format_


def test_weights_are_in_the_format_of_the_checkpoint_unless_said() -> None:
    stored = serving_question(flags(model="gpt-oss-20b"))
    assert stored.weights == "mxfp4"
    assert "weights in mxfp4, as the checkpoint has them" in stored.assumed

    narrow = serving_question(flags(weights="int4"))
    assert narrow.weights == "int4"
    assert any("a checkpoint with weights in int4" in line for line in narrow.assumed)
    assert not any("checkpoint" in line for line in serving_question(flags(weights="float8")).assumed)


def test_an_eager_step_takes_the_launches_of_all_its_kernels_and_no_memory_for_graphs() -> None:
    pool = Pool(tp=2)
    steps, graphs = {}, {}
    for eager in (False, True):
        question = serving_question(flags(eager=eager))
        deployment = question.deployment(pool)
        costs = ForwardPass(question.model, question.cluster, deployment, pool)
        steps[eager] = costs.seconds(prompt_tokens=0, pairs=0.0, sequences=1, keys=100.0)
        graphs[eager] = cache_capacity(question.model, question.cluster, deployment, pool).by_category["graphs"]
    engine = engine_of("vllm")

    assert steps[True] == pytest.approx(costs.launches.count * engine.host_eager_launch_s + engine.host_exposed_s)
    assert steps[True] > 3 * steps[False]
    assert graphs == {False: 2.0**30, True: 0.0}


def test_without_its_own_all_reduce_an_engine_waits_for_nccls() -> None:
    pool = Pool(tp=2)
    sums = [
        ForwardPass(question.model, question.cluster, question.deployment(pool), pool).reduced_s(1)
        for question in (serving_question(flags()), serving_question(flags(no_custom_all_reduce=True)))
    ]
    assert sums[1] > 1.3 * sums[0]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_what_an_engine_is_told_is_read_back_from_its_command(engine: str, eager: bool, own: bool) -> None:
    question = serving_question(flags(engine=engine, eager=eager, no_custom_all_reduce=not own))
    words = command(question.deployment(Pool(tp=2)), Pool(tp=2), hub_name("llama3-8b"), longest=2000)

    found = check_serving(shlex.join(words), "a", CheckFlags(cluster="dgx-h100"), flags(gpus=None), search=False)

    assert found.legal, found.problems
    assert found.answer is not None
    read = found.answer.question
    assert (read.eager, read.custom_all_reduce) == (eager, own)


def test_settings_that_change_nothing_of_a_prediction_are_named() -> None:
    text = "vllm serve Qwen/Qwen2.5-7B-Instruct-AWQ --block-size 32 --port 80 --quantization bitsandbytes"
    found = check_serving(text, "a", CheckFlags(cluster="dgx-h100"), flags(model=None, gpus=None), search=False)

    assert "nothing changed by --block-size" in found.assumed
    assert found.answer is not None
    assert found.answer.question.weights == "int4"

    text = "vllm serve meta-llama/Llama-3.1-8B --quantization bitsandbytes"
    found = check_serving(text, "a", CheckFlags(cluster="dgx-h100"), flags(model=None, gpus=None), search=False)
    assert "nothing changed by --quantization" in found.assumed


# What may be said of an engine, each with a value that is not its default.
SETTINGS = {
    "weights": "mxfp4",
    "kv_cache": "float8",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "gpu_memory_utilization": 0.5,
    "eager": True,
    "no_custom_all_reduce": True,
    "two_batch_overlap": True,
    "receive_every": 8,
    "cached_prompt": 0.5,
    "ep": 2,
    "dp_attention": 2,
    "pp": 2,
}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "meshwright"])
@pytest.mark.parametrize(("model", "tp"), [("llama3.2-1b", 1), ("llama3.2-1b", 2), ("gpt-oss-20b", 2)])
def test_what_is_said_of_an_engine_is_used_refused_or_said_to_change_nothing(engine: str, model: str, tp: int) -> None:
    about = {
        "model": model,
        "engine": engine,
        "tp": tp,
        "concurrency": 12,
        "isl": 2048,
        "osl": 8,
        "weights": "bfloat16",
    }

    def answer(**said: object) -> tuple[object, set[str]]:
        stated = flags(**(about | said))
        question = serving_question(stated)
        found = answer_deployment(question, *stated_deployment(question, stated))
        return found.estimate, {*found.assumed}

    plain, assumed = answer()
    assert plain is not None
    dropped = []
    for name, value in SETTINGS.items():
        try:
            found, lines = answer(**{name: value})
        except UserError:
            continue
        if found == plain and lines <= assumed:
            dropped.append(name)

    assert dropped == []


@pytest.mark.parametrize("said", [{"routing": "natural"}, {"document_len": 64}, {"seq_len": 64}, {"compile": True}])
def test_options_of_training_are_refused_for_an_engine(said: dict[str, object]) -> None:
    name = next(iter(said))
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')}: an option of training"):
        estimate(task="serve", model="tiny-llama", cluster="h200x4", gpus=1, isl=64, osl=8, **said)


def test_engines_that_cannot_run_so_refuse() -> None:
    with pytest.raises(UserError, match="does not run so"):
        serving_question(flags(engine="torch", eager=True))
    question = serving_question(flags(engine="trtllm", eager=True))
    with pytest.raises(Infeasible, match="YAML"):
        command(question.deployment(Pool()), Pool(), "model", longest=100)
