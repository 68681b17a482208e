"""Every diff of `planner check` is applied by git and given to the parser and the validation of the tool itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from planner.configs.asked import ask
from planner.configs.formats.configuration import CheckFlags
from planner.configs.variants import variants_of
from simulator.config.plan import Plan
from simulator.legality.rules import is_legal
from tests.planner.test_export_builds import PYTHONS

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "examples" / "check"
LAUNCH = "torchrun --nproc_per_node 8 train.py --per_device_train_batch_size 1 --gradient_accumulation_steps 8 --bf16"
# A layout of many scripts: options in one variable, torchrun's own words last.
SCRIPT = """#!/bin/bash
TP=${TP:-"8"}
SEQ=$((2048 * 2))
options=" \\
    --tensor-model-parallel-size $TP \\
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \\
    --seq-length $SEQ --max-position-embeddings $SEQ \\
    --micro-batch-size 1 --global-batch-size 64 --bf16"
LAUNCH="--nproc_per_node ${GPUS_PER_NODE:-8} --nnodes 1"
nsys profile --sample none -o trace numactl --cpunodebind=0 torchrun ${LAUNCH} pretrain_gpt.py ${options}
"""
VIRTUAL = SCRIPT.replace("--bf16", "--bf16 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2")
VIRTUAL = VIRTUAL.replace('TP:-"8"', 'TP:-"2"')
# For 128 GPUs: fewer pipeline ranks, with 8 stages each; and 96 sequences a step, at which a ramp from 16 stops.
INTERLEAVED = Plan(dp_replicate=2, tp=8, pp=8, virtual_stages=4, schedule="Interleaved1F1B", zero_stage=1)
WIDE = Plan(dp_replicate=32, tp=4, zero_stage=1, micro_batch_size=3, recompute="full")
FAR = (INTERLEAVED, INTERLEAVED.with_(virtual_stages=3, recompute="full"), WIDE)
OWN = "the file itself"
STUBS = ("nsys", "numactl", "torchrun", "python", "pretrain_gpt.py")


@dataclass(frozen=True)
class Given:
    """A file and how it is asked; `world` is on how many ranks its tool runs it, `others` are plans far from it."""

    tool: str
    name: str
    text: str
    flags: CheckFlags
    world: int = 8
    others: tuple[Plan, ...] = ()


def kept(tool: str, name: str, flags: CheckFlags, *, world: int = 8, others: tuple[Plan, ...] = ()) -> Given:
    return Given(tool, name, (KEPT / name).read_text(), flags, world, others)


GIVEN = {
    "ramp": kept("megatron", "megatron_gpt3_175b.sh", CheckFlags(gpus=128), world=128, others=FAR),
    "float8": kept("megatron", "megatron_llama3_8b_fp8.sh", CheckFlags()),
    "prefixed": Given("megatron", "a.sh", SCRIPT, CheckFlags()),
    "virtual": Given("megatron", "a.sh", VIRTUAL, CheckFlags()),
    "titan": kept("torchtitan@0.2.2", "torchtitan_llama3_8b.toml", CheckFlags(gpus=8)),
    "auto": kept("deepspeed", "deepspeed_zero3_auto.json", CheckFlags(model="qwen2.5-7b", seq_len=2048, launch=LAUNCH)),
    "fsdp1": kept("accelerate", "accelerate_fsdp1.yaml", CheckFlags(model="llama3-8b", seq_len=2048)),
    "context": kept("accelerate", "accelerate_cp.yaml", CheckFlags(model="llama3-8b", seq_len=65536)),
    "trainer": kept("transformers", "arguments_zephyr_7b.yaml", CheckFlags(model="mistral-7b")),
}


def patched(text: str, name: str, diff: str, folder: Path) -> str:
    (folder / name).write_text(text)
    subprocess.run(["git", "apply", "--unsafe-paths", "-"], cwd=folder, input=diff, text=True, check=True)
    return (folder / name).read_text()


def words_of(text: str, folder: Path) -> list[str]:
    """The words that bash hands the program of a script, whose every command is a stub that runs what follows it; of a
    script that starts nothing, those of its arrays.
    """
    stubs = folder / "stubs"
    stubs.mkdir(exist_ok=True)
    out = folder / "words"
    for stub in STUBS:
        own = stubs / stub
        own.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {out}.{stub}\n')
        own.chmod(0o755)
    (stubs / "nsys").write_text('#!/bin/bash\nshift 5\nexec "$@"\n')
    (stubs / "numactl").write_text('#!/bin/bash\nshift 1\nexec "$@"\n')
    script = folder / "script.sh"
    arrays = " ".join(
        f'"${{{name}[@]}}"'
        for name in ("GPT_MODEL_ARGS", "MODEL_ARGS", "TRAINING_ARGS", "MODEL_PARALLEL_ARGS", "DTYPE_ARGS")
    )
    ends = "" if "pretrain_gpt.py" in text else f"\ntorchrun pretrain_gpt.py {arrays}\n"
    script.write_text(text + ends)
    subprocess.run(["bash", str(script)], env={"PATH": f"{stubs}:{os.environ['PATH']}"}, cwd=folder, check=True)
    words = Path(f"{out}.torchrun").read_text().splitlines()
    return [word for word in words[words.index("pretrain_gpt.py") + 1 :] if word]


def diffs_of(name: str) -> dict[str, str]:
    """The diffs of all legal plans that are one change away, and of plans far from the file's own."""
    one = GIVEN[name]
    asked = ask(one.text, one.name, one.flags)
    assert asked.case is not None, asked.problems
    writer, question = asked.writer(one.name, one.flags), asked.case.question
    legal = [each for each in variants_of(asked.case.plan, question) if is_legal(question.problems(each.plan))]
    diffs = {each.what: writer.diff(each.plan, each.runtime) for each in legal}
    diffs |= {f"plan {number}": writer.diff(plan) for number, plan in enumerate(one.others)}
    return {what: diff for what, diff in diffs.items() if diff}


def test_a_plan_that_the_file_s_ramp_cannot_reach_has_no_diff() -> None:
    found = diffs_of("ramp")

    assert {"plan 0", "plan 1"} <= found.keys()
    assert "plan 2" not in found  # 96 sequences a step, and a ramp by 16


def test_sharding_that_the_script_s_environment_forbids_has_no_diff() -> None:
    """Megatron-LM's FSDP stops where CUDA_DEVICE_MAX_CONNECTIONS is 1."""
    one = GIVEN["prefixed"]
    text = one.text.replace("TP=", "export CUDA_DEVICE_MAX_CONNECTIONS=1\nTP=")
    asked = ask(text, one.name, one.flags)
    plan = asked.case.plan.with_(tp=1, dp_replicate=8, zero_stage=3, sequence_parallel=False)

    assert asked.writer(one.name, one.flags).diff(plan) == ""
    assert ask(one.text, one.name, one.flags).writer(one.name, one.flags).diff(plan) != ""


@pytest.mark.skipif(shutil.which("git") is None or shutil.which("bash") is None, reason="git applies, bash runs stubs")
@pytest.mark.parametrize("tool", sorted({one.tool for one in GIVEN.values()}))
def test_the_tool_accepts_every_diff(tool: str, tmp_path: Path) -> None:
    environment = {"transformers": "accelerate"}.get(tool, tool)
    if environment not in PYTHONS:
        pytest.skip(f"no interpreter with {tool} is named in MESHWRIGHT_EXPORT_PYTHONS")
    files = {}
    for name, one in GIVEN.items():
        if one.tool != tool:
            continue
        diffs = diffs_of(name)
        assert len(diffs) >= 3, name
        texts = {what: patched(one.text, one.name, diff, tmp_path) for what, diff in diffs.items()}
        for what, text in {OWN: one.text, **texts}.items():
            said = {"words": words_of(text, tmp_path)} if tool == "megatron" else {"text": text}
            files[name, what] = {**said, "world": one.world}
    asked = tmp_path / "files.json"
    asked.write_text(json.dumps(list(files.values())))
    script = ROOT / "tests" / "tools" / "config_parsers.py"
    run = subprocess.run(
        [PYTHONS[environment], "-W", "ignore", str(script), tool, str(asked)],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    answers = dict(zip(files, json.loads(run.stdout.splitlines()[-1]), strict=True))
    # Two files are for older versions of their tools: there a diff adds nothing that the tool refuses.
    older = {("float8", OWN), ("titan", OWN)}
    assert {key: said for key, said in answers.items() if said and key[1] == OWN and key not in older} == {}
    assert {key: said for key, said in answers.items() if said not in {"", answers[key[0], OWN]}} == {}
