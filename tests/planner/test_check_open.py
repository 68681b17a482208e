"""What a configuration leaves open is a question, what it contradicts is a fault; values as a shell would read them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from planner.configs.answer import check_text
from planner.configs.asked import ask
from planner.configs.formats.command_line import CommandLine
from planner.configs.formats.configuration import CheckFlags
from topology.errors import BadInput, UserError

START = """torchrun --nproc_per_node ${G:-8} --nnodes ${NNODES:-1} pretrain_gpt.py --num-layers 32 --hidden-size 4096 \\
  --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --bf16 \\
"""
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
}


@pytest.mark.parametrize(
    "lines",
    [
        "X=${X:-4}",
        'X="${X:-"4"}"',
        ": ${X:=4}",
        "N=2\nX=$((N * (1 + 1)))",
        "N=2\nX=$(( $N * ${M:-2} ))",
        "A=${B:-${C:-4}}\nX=$A",
        "X=4 # a comment with TP=9",
        "if [ -n a ]; then\n  Y=3\nfi\nX='4'",
    ],
)
def test_variables_are_what_bash_makes_of_them(lines: str, tmp_path: Path) -> None:
    shown = subprocess.run(
        ["bash", "-c", f"{lines}\necho $X"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    line = CommandLine(f"{lines}\n{START}  --tensor-model-parallel-size $X\n", "a.sh", lambda _: None)

    assert line.settings["--tensor-model-parallel-size"] == int(shown.stdout) == 4


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("", "TP"),
        ("TP=$(nvidia-smi -L | wc -l)", None),
        ("if [ $SIZE = 8b ]; then\n  TP=4\nelse\n  TP=8\nfi", "TP"),
        ("case $1 in\n  a) TP=1 ;;\n  b) TP=2 ;;\nesac", "TP"),
    ],
)
def test_what_a_script_does_not_resolve_is_a_question(planner, tmp_path: Path, lines: str, name: str | None) -> None:
    script = tmp_path / "a.sh"
    script.write_text(f"{lines}\n{START}  --tensor-model-parallel-size ${{TP}}\n")
    done = planner("check", script, "--json")
    found = json.loads(done.stdout)

    assert done.returncode == 2
    assert found["legal"] is None
    assert found["problems"] == []
    assert "--tensor-model-parallel-size" in found["questions"][0]["what"]
    if name is None:
        return
    assert found["questions"][0]["remedy"] == f"--set {name}=VALUE"
    again = planner("check", script, "--json", "--no-search", "--set", f"{name}=2")  # the remedy
    assert (again.returncode, json.loads(again.stdout)["plan"]["tp"]) == (0, 2)


def test_a_contradiction_is_a_fault_with_another_exit_code(planner, tmp_path: Path) -> None:
    script = tmp_path / "a.sh"
    script.write_text(f"{START}  --tensor-model-parallel-size 16\n")
    done = planner("check", script, "--json")

    assert done.returncode == 3
    assert "8 GPUs are not a multiple of tp 16" in json.loads(done.stdout)["problems"][0]["message"]


@pytest.mark.parametrize(
    "prefix",
    [
        "nsys profile --sample none --trace cuda,nvtx -o out --force-overwrite true",
        "numactl --cpunodebind=0 --membind=0",
        "srun --nodes 1 --ntasks-per-node 1 --export ALL",
    ],
)
def test_what_starts_the_program_is_not_of_it(prefix: str) -> None:
    plain = ask(START, "a.sh", CheckFlags())
    found = ask(f"{prefix} {START}", "a.sh", CheckFlags())

    assert found.configuration.unknown == plain.configuration.unknown == ()
    assert found.case.plan == plain.case.plan


@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_program_inside_a_command_of_bash_is_read_and_edited_there(quote: str) -> None:
    started = START.replace("\\\n", "").replace("${NNODES:-1}", "1").replace("${G:-8}", "8").strip()
    text = f"srun --nodes 1 --ntasks-per-node 1 --container-image x bash -lc {quote}{started}{quote}\n"
    plain, found = ask(started, "a.sh", CheckFlags()), ask(text, "a.sh", CheckFlags())

    assert found.configuration.unknown == plain.configuration.unknown == ()
    assert found.case.plan == plain.case.plan
    edited = found.configuration.edit({"--tensor-model-parallel-size": 2})
    assert edited == text.replace("--bf16", "--bf16 --tensor-model-parallel-size 2")


def test_flags_are_added_to_the_program_and_not_to_its_launcher() -> None:
    text = 'OPTIONS="--num-layers 4 --bf16"\ntorchrun --nproc_per_node 8 --nnodes 1 train.py $OPTIONS\n'
    line = CommandLine(text, "a.sh", {"--num-layers": True, "--bf16": False}.get)

    assert line.launcher == {"--nproc_per_node", "--nnodes"}
    assert line.edited({"--sequence-parallel": True}) == text.replace("--bf16", "--bf16 --sequence-parallel")


def test_the_usual_deepspeed_file_of_transformers_is_judged() -> None:
    """All auto: Transformers fills it in from arguments, which accumulate nothing by default."""
    found = check_text(json.dumps(AUTO), "ds.json", CheckFlags(gpus=16, model="qwen2.5-7b"), changes=False)

    assert found.legal is True
    assert found.found.case.question.workload.global_batch_size == 16
    assert found.found.case.question.runtime.compute_dtype == "bfloat16"
    assert any("auto" in line for line in found.assumed)
    launched = CheckFlags(
        model="qwen2.5-7b",
        launch="deepspeed --num_gpus 8 --num_nodes 2 t.py --per_device_train_batch_size 4 "
        "--gradient_accumulation_steps 2 --fp16",
    )
    case = ask(json.dumps(AUTO), "ds.json", launched).case
    assert (case.plan.gpus, case.plan.micro_batch_size, case.question.workload.global_batch_size) == (16, 4, 128)
    assert case.question.runtime.compute_dtype == "float16"


def test_options_of_sbatch_count_several_to_a_line_and_by_their_letters() -> None:
    """The script of NVIDIA's paper (Megatron-LM, examples/gpt3/gpt3_175b): 128 nodes of 8 in one line."""
    start = f"srun python pretrain_gpt.py {START.partition('.py')[2]}  --tensor-model-parallel-size 8\n"
    for line in (
        "--nodes=128 --exclusive --ntasks-per-node=8 --job-name=gpt3",
        "-N 128 --gpus-per-node 8",
        "-N128 --gres=gpu:8",
    ):
        case = ask(f"#!/bin/bash\n#SBATCH {line}\n{start}", "a.sh", CheckFlags()).case
        assert case.plan.gpus == 1024, line


def test_a_command_with_training_arguments_says_what_their_file_says(tmp_path: Path) -> None:
    """Of Stanford Alpaca: torchrun with FSDP. What is in another file is asked for with a command that answers."""
    arguments = {
        "model_name_or_path": "meta-llama/Llama-2-7b-hf", "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 8, "model_max_length": 512, "bf16": True, "gradient_checkpointing": False,
        "fsdp": "full_shard auto_wrap",
    }  # fmt: skip
    options = " \\\n  ".join(f"--{name} {value!r}" for name, value in arguments.items())
    script = f"torchrun --nproc_per_node=8 --nnodes=2 train.py \\\n  {options}\n"
    command = ask(script, "a.sh", CheckFlags())
    file = ask(json.dumps(arguments), "a.json", CheckFlags(gpus=16))
    again = command.writer("a.sh", CheckFlags()).diff(command.case.plan.with_(recompute="full", micro_batch_size=8))

    assert command.case.plan == file.case.plan
    assert command.case.question == file.case.question
    assert "+  --per_device_train_batch_size 8" in again
    assert "+  --gradient_checkpointing True" in again
    launched = script.replace(
        "torchrun --nproc_per_node=8", "accelerate launch --num_processes 16 --mixed_precision fp16"
    )
    mixed = ask(launched.replace("--bf16 True", ""), "a.sh", CheckFlags()).case
    assert (mixed.question.runtime.compute_dtype, mixed.plan.gpus) == ("float16", 16)
    alone = ask(
        script.replace("torchrun --nproc_per_node=8 --nnodes=2", "CUDA_VISIBLE_DEVICES=0,3 python"),
        "a.sh",
        CheckFlags(),
    )
    assert alone.case.plan.gpus == 2
    with pytest.raises(BadInput, match="use_fsdp"):
        ask(launched.replace("launch", "launch --use_fsdp"), "a.sh", CheckFlags())
    sharded = tmp_path / "zero.json"
    sharded.write_text(json.dumps(AUTO))
    launched = script.replace("--fsdp 'full_shard auto_wrap'", "--deepspeed zero.json")
    with pytest.raises(BadInput) as named:
        ask(launched, str(tmp_path / "a.sh"), CheckFlags())
    assert named.value.remedy == f'planner check {sharded} --launch "$(cat {tmp_path / "a.sh"})"'
    case = ask(json.dumps(AUTO), str(sharded), CheckFlags(launch=launched)).case
    assert (case.plan.gpus, case.plan.micro_batch_size, case.question.model.name) == (
        16,
        4,
        file.case.question.model.name,
    )
    with pytest.raises(BadInput) as inline:
        ask(json.dumps({**arguments, "deepspeed": str(sharded)}), "a.json", CheckFlags())
    line = shlex.split(str(inline.value.remedy))[-1]
    assert ask(json.dumps(AUTO), str(sharded), CheckFlags(gpus=16, launch=line)).case.plan == case.plan
    with pytest.raises(UserError, match="names a file"):
        ask(json.dumps(AUTO), str(sharded), CheckFlags(launch=str(sharded)))


def test_machines_that_a_file_counts_are_the_cluster_s() -> None:
    text = "distributed_type: FSDP\nnum_machines: {}\nnum_processes: 8\nmixed_precision: bf16\n"
    one, two = (ask(text.format(n), "a.yaml", CheckFlags(model="llama3-8b")).case.question.cluster for n in (1, 2))

    assert (one.node_count, one.gpus_per_node) == (1, 8)
    assert (two.node_count, two.gpus_per_node, two.gpu_count) == (2, 4, 8)
    assert two.fabric is not None
    rack = ask(text.format(2), "a.yaml", CheckFlags(model="llama3-8b", cluster="gb200-nvl72")).case.question.cluster
    assert (rack.node_count, rack.gpus_per_node) == (1, 8)  # two trays of it
    other = CheckFlags(model="llama3-8b", launch="accelerate launch --num_machines 2 --num_processes 16 t.py")
    assert ask(text.format(3), "a.yaml", other).case.question.cluster.node_count == 2


def test_gpus_that_nobody_counts_are_as_many_as_the_degrees_need() -> None:
    degrees = "tensor_parallel_degree = 8\npipeline_parallel_degree = 4\n"
    text = f'[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\n{degrees}'
    asked = ask(text, "a.toml", CheckFlags())

    assert asked.case is not None
    assert asked.case.plan.gpus == 32
    assert any("32 GPUs" in line for line in asked.assumed)


def test_the_command_that_a_file_with_a_deepspeed_file_asks_for_answers_the_same_run() -> None:
    """The same settings of axolotl with FSDP in the place of the file: batch, length, recomputation, LoRA."""
    text = (
        "base_model: meta-llama/Llama-3.2-1B\nsequence_len: 2048\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\n"
        "bf16: auto\ngradient_checkpointing: true\nadapter: lora\nlora_r: 16\nlora_target_modules: [q_proj, v_proj]\n"
    )
    flags = CheckFlags(gpus=8)
    asked = ask(f"{text}deepspeed: my files/zero3.json\n", "a.yaml", flags).questions
    command = shlex.split(asked[-1].remedy)
    found = ask(json.dumps(AUTO), command[2], CheckFlags(gpus=8, launch=command[4])).case
    same = ask(f"{text}fsdp: [full_shard]\nfsdp_version: 2\n", "a.yaml", flags).case

    assert command[:2] == ["planner", "check"]
    assert command[2:4] == ["my files/zero3.json", "--launch"]
    assert found is not None
    assert found.plan.zero_stage == 3
    for case in (found, same):
        assert (case.plan.micro_batch_size, case.plan.recompute, case.question.workload.seq_len) == (2, "full", 2048)
    assert found.question.workload == same.question.workload
    assert found.question.model.parameters == same.question.model.parameters
    assert found.question.runtime.adapter.rank == same.question.runtime.adapter.rank == 16
    assert found.question.runtime.adapter.target_modules == same.question.runtime.adapter.target_modules
