"""Which model a configuration is about: what the file names, or none, and then no number rests on one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.configs.answer import check_text
from planner.configs.asked import ask
from planner.configs.formats.configuration import CheckFlags

TOML = """[model]
name = "{module}"
flavor = "{flavor}"
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
tensor_parallel_degree = {tp}
"""
MEGATRON = (
    "torchrun --nproc_per_node 8 pretrain.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
    "--seq-length 4096"
    " --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --bf16 --tensor-model-parallel-size "
    "{tp} "
)
DATA_PARALLEL = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'


@pytest.mark.parametrize(
    ("module", "flavor", "billions"),
    [  # parameters as the models' cards on the Hub count them
        ("llama4", "17bx16e_irope", "107.77"),
        ("qwen3", "1.7B", "1.72"),
        ("qwen3", "30B-A3B", "30.53"),
        ("llama3", "405B", "405.85"),
        ("deepseek_v3", "671B", "671.03"),
    ],
)
def test_a_flavor_is_the_model_that_has_its_shapes(module: str, flavor: str, billions: str) -> None:
    asked = ask(TOML.format(module=module, flavor=flavor, tp=1), "a.toml", CheckFlags())

    assert asked.case is not None
    assert f"{asked.case.question.model.parameters / 1e9:.2f}" == billions


@pytest.mark.parametrize(
    ("text", "name", "which"),
    [
        (TOML.format(module="llama3", flavor="30B", tp=4), "a.toml", "torchtitan's llama3 30B"),
        (MEGATRON.format(tp=4) + "--hybrid-override-pattern M-M*-", "a.sh", "hybrid"),
        (MEGATRON.format(tp=4) + "--spec megatron.core.models.mamba.mamba_layer_specs x", "a.sh", "--spec"),
        (MEGATRON.format(tp=4).replace("--hidden-size 4096", "--hidden-size $SIZE"), "a.sh", "--hidden-size"),
        (DATA_PARALLEL, "a.json", "which model?"),
        ("distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\n", "a.yaml", "which model?"),
        ("per_device_train_batch_size: 1\nmodel_name_or_path: someone/own-1b\n", "a.yaml", "someone/own-1b"),
        (
            "per_device_train_batch_size: 1\nmodel_name_or_path: ai21labs/AI21-Jamba-1.5-Mini\n",
            "a.yaml",
            "not modelled",
        ),
    ],
)
def test_without_a_model_there_is_a_verdict_and_no_number(planner, tmp_path: Path, text: str, name: str, which: str):
    path = tmp_path / name
    path.write_text(text)
    done = planner("check", path, "--json")
    found = json.loads(done.stdout)

    assert done.returncode == 0, done.stderr
    assert found["legal"] is True
    assert which in " ".join(question["what"] for question in found["questions"])
    assert (found["model"], found["estimate"], found["best"], found["changes"]) == (None, None, None, [])
    assert found["plan"]["tp"] == (4 if name in {"a.toml", "a.sh"} else 1)
    whole = check_text(text, name, CheckFlags(model="llama3-8b"), changes=False)
    assert whole.questions == ()
    assert whole.found is not None


def test_rules_that_need_no_model_judge_without_one() -> None:
    """A sequence of 8192 tokens does not divide by three."""
    found = check_text(TOML.format(module="llama3", flavor="30B", tp=3), "a.toml")

    assert found.legal is False
    assert any("8192 is not divisible by" in problem.message for problem in found.problems)
    assert not any("heads" in problem.message for problem in found.problems)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen2-1.5B-Instruct", 1_543_714_304),  # safetensors' total on the Hub
        ("/mnt/models/Qwen3-30B-A3B", 30_532_122_624),
        ("meta-llama/Llama-3.2-3B", 3_212_749_824),
    ],
)
def test_names_on_the_hub_are_models(name: str, parameters: int) -> None:
    arguments = f"per_device_train_batch_size: 1\nmodel_name_or_path: {name}\n"
    launched = CheckFlags(launch=f"torchrun --nproc_per_node 8 train.py --model_name_or_path {name}")

    for asked in (ask(arguments, "a.yaml", CheckFlags()), ask(DATA_PARALLEL, "a.json", launched)):
        assert asked.case is not None
        assert asked.case.question.model.parameters == parameters
