"""Configurations that people write by hand, as their tools' parsers read them: comments, variables, keys twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.configs.asked import Asked, ask
from planner.configs.formats.configuration import CheckFlags
from planner.configs.formats.kinds import read_configuration
from topology.errors import BadInput

FLAGS = CheckFlags(model="llama3-8b", cluster="dgx-h100", gpus=8, seq_len=2048)
BATCH = '"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1'
COMMENTED = """{
  // sequences "a step"
  "train_batch_size": 64, # of all GPUs
  /* each
     GPU */
  "train_micro_batch_size_per_gpu": 1,
  "tensorboard": {"output_path": "http://here, ]"},
  "zero_optimization": {"stage": 3,},
}
"""
TORCHTITAN = """[training]
seq_len = "${SEQ_LEN}"
local_batch_size = 1
global_batch_size = 64
[parallelism]
data_parallel_shard_degree = 8
[model]
name = "llama3"
flavor = "8B"
"""
AUTOMODEL = """step_scheduler:
  global_batch_size: ${oc.env:GBS,64}
  local_batch_size: 1
model:
  pretrained_model_name_or_path: meta-llama/Llama-3.1-8B
distributed:
  tp_size: %s
"""


def asked(text: str, name: str, **flags: Any) -> Asked:
    given = replace(FLAGS, **flags)
    return ask(text, name, given)


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        (COMMENTED, 3),
        ("{" + BATCH + ', "zero_optimization": {"stage": "3"}}', 3),
        ("{" + BATCH + ', "zero_optimization": true}', 1),
    ],
)
def test_deepspeed_reads_what_its_parser_reads(text, stage):
    """DeepSpeedConfig of 0.19.8 takes each of these, of 64 sequences on 8 ranks and of this stage."""
    found = asked(text, "ds.json").case

    assert found is not None
    assert (found.plan.zero_stage, found.question.workload.global_batch_size) == (stage, 64)


def test_what_is_written_back_keeps_comments():
    document = read_configuration(COMMENTED, "ds.json", FLAGS)

    assert document.edit({"zero_optimization.stage": 1}) == COMMENTED.replace('"stage": 3', '"stage": 1')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"train_batch_size": 8, ' + BATCH + "}", "twice"),
        ("{" + BATCH + ', "zero_optimization": [3]}', "zero_optimization is"),
    ],
)
def test_deepspeed_refuses_what_its_parser_refuses(text, said):
    """DeepSpeedConfig of 0.19.8 ends with "Duplicate keys in DeepSpeed config", and with a TypeError."""
    try:
        words = " ".join(problem.message for problem in asked(text, "ds.json").problems)
    except BadInput as error:
        words = error.what

    assert said in words


def test_comments_are_deepspeeds_alone():
    """Transformers reads its arguments by Python's json."""
    with pytest.raises(BadInput, match="not JSON"):
        asked('{"output_dir": "x", // here\n"per_device_train_batch_size": 1}', "arguments.json")


def test_the_value_that_a_question_asks_for_answers_it():
    question = asked(TORCHTITAN, "t.toml", seq_len=None).questions[0]
    answered = asked(TORCHTITAN, "t.toml", variables=(("SEQ_LEN", "4096"),), seq_len=None)

    assert "--set SEQ_LEN=VALUE" in str(question.remedy)
    assert answered.case is not None
    assert answered.case.question.workload.seq_len == 4096


@pytest.mark.parametrize(("variables", "batch"), [((), 64), ((("GBS", "128"),), 128)])
def test_a_default_written_with_a_variable_counts(variables, batch):
    """NeMo AutoModel's loader replaces `${oc.env:GBS,64}` by the environment's GBS, else by 64."""
    found = asked(AUTOMODEL % 1, "a.yaml", variables=variables).case

    assert found is not None
    assert found.question.workload.global_batch_size == batch


def test_a_key_that_stands_twice_is_named():
    """PyYAML takes the last one."""
    found = asked(AUTOMODEL % "1\n  tp_size: 2", "a.yaml")

    assert found.case is not None
    assert found.case.plan.tp == 2
    assert any("distributed.tp_size stands twice" in line for line in found.assumed)


def test_a_script_that_has_megatrons_fsdp_is_not_told_to_set_it():
    """ZeRO-3 of a script comes from --use-megatron-fsdp alone; the line on it says what it is by."""
    words = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer"
    sizes = "--micro-batch-size 1 --global-batch-size 8 --seq-length 2048 --max-position-embeddings 8192"
    line = f"torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 1 {sizes} {words}"
    found = asked(line, "run.sh", seq_len=None)

    assert found.case is not None
    assert found.case.plan.zero_stage == 3
    said = [problem.message for problem in found.case.question.problems(found.case.plan)]
    assert not any(message.startswith("needs --use-megatron-fsdp") for message in said)
