"""What people ask first, and published runs, whose plans and measurements are compared with the answers.

Run as `python tests/bench/answers.py examples/answers.md` (two minutes on two cores). Answers are cut to the first
screen.
"""

import argparse
import datetime as dt
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hand_stories import STORIES, Story

SCREEN = 26  # lines of an answer that are kept
FIRST_LINES = 6  # of an answer with a calculation
ASKED = {
    "Which degrees for a model on these GPUs?": "suggest --model llama3-70b --cluster dgx-h100 --gpus 16 --global-batch 64 --top 4",
    "Will it fit?": "estimate --model llama3-8b --cluster dgx-h100 --gpus 8 --seq-len 8192 --micro-batch 2 --recompute none",
    "How many GPUs do I need?": "suggest --model llama3-70b --cluster dgx-h200 --gpus min --top 2",
    "Why is tensor parallelism slower without NVLink?": "suggest --model llama3.2-3b --cluster l40s-x8 --gpus 8 --seq-len 4096 --top 3",
    "Is my interconnect slow or wired wrongly?": "doctor --from tests/data/nccl_xml/gb300_1tray_fault_gpu1_count0.xml --gpu gb300",
    "What does an all-reduce cost without NVLink?": (
        "collective --cluster rtxpro6000-x8 --op all_reduce --gpus 4 --bytes 4096,131072,1048576"
    ),
    "Replicas or a split of a model that fits a GPU?": "suggest --model llama3.2-1b --cluster dgx-h200 --gpus 8 --seq-len 4096 --top 3",
    "My MFU is low: what should I expect?": (
        "suggest --model llama2-70b --cluster dgx-a100 --gpus 64 --seq-len 4096 --framework megatron-lm --top 3"
    ),
    "Full sharding, or replicas of it in each node?": (
        "suggest --model llama3-8b --cluster dgx-h200 --gpus 32 --tp 1 --cp 1 --pp 1 --top 3 --all"
    ),
    "An odd number of GPUs?": "suggest --model llama3-8b --cluster dgx-h200 --gpus 6 --global-batch 48 --top 3",
}


@dataclass(frozen=True, kw_only=True)
class Published:
    """A run that was published. `theirs` are flags of its plan, where it can be said in flags; `checked` says which of
    its figures were read where.
    """

    title: str
    question: str
    theirs: str | None
    ran: str
    measured: str
    difference: str
    checked: str


PUBLISHED = (
    Published(
        title="Llama 3 405B on 16,384 H100",
        question="--model llama3-405b --cluster dgx-h100 --gpus 16384 --seq-len 8192 --global-batch 2048 --framework megatron-lm",
        theirs="--dp-replicate 128 --zero 1 --tp 8 --sequence-parallel --pp 16 --micro-batch 1 --virtual-stages 8 --schedule Interleaved1F1B --recompute none",
        ran="tensor parallelism over 8, a pipeline of 16, data parallelism over 128 (arXiv 2407.21783, table 4)",
        measured="41 % MFU",
        difference=(
            "Their plan is predicted near what they measured, with sequence parallelism and one layer a stage: 126 "
            "layers on 128 stages, of which the first and the last hold the embedding and the head. Its predicted "
            "memory is somewhat more than 80 GB. Meta frees tensors of the pipeline early (section 3.3.2), which the "
            "description of Megatron-LM here does not include. The machine is that of the paper, with 700 W and HBM3, "
            "as in a DGX H100; meta-grand-teton in the catalogue is another machine, with 96 GB at 500 W."
        ),
        checked=(
            "16,384 GPUs, the degrees and 41 % MFU, 700 W and HBM3, all as others quote the paper; the paper itself "
            "was not read again, and its number of stages a rank is inferred from section 3.3.2"
        ),
    ),
    Published(
        title="DeepSeek-V3 on 2,048 H800",
        question="--model deepseek-v3 --cluster {h800} --seq-len 4096 --global-batch 15360 --framework megatron-lm",
        theirs="--dp-replicate 128 --zero 1 --tp 1 --pp 16 --ep 64 --micro-batch 1 --recompute selective",
        ran="a pipeline of 16 under DualPipe, 64-way expert parallelism over 8 nodes, ZeRO-1, no tensor parallelism, float8 (arXiv 2412.19437, sections 3.2 and 4.2)",
        measured="180,000 GPU hours for 10^12 tokens, which is 1,540 tokens/s/GPU and 20 s a step",
        difference=(
            "Their degrees are predicted in bfloat16 under Megatron-LM's 1F1B, 61 layers spread over 16 stages by a "
            "layout (3, 14 x 4, 2), where the experts' all-to-all waits for the network: it is more than half of the "
            "step, and its micro batches do not fit. DeepSeek hides it with computation in DualPipe, sends each token "
            "to at most four nodes by its own kernels, and multiplies in float8. The answer hides it, too (--overlap-moe-expert-parallel-"
            "comm with delayed weight gradients in an interleaved pipeline), and comes within a third of theirs."
        ),
        checked=(
            "degrees and GPU hours read in the report's text; 1,543 tokens/s a GPU is 10^12 tokens in 180,000 hours; the "
            "batch of 15,360 sequences as others quote it"
        ),
    ),
    Published(
        title="GPT-3 175B on 1,024 A100",
        question="--model gpt3-175b --cluster dgx-a100 --gpus 1024 --seq-len 2048 --global-batch 1536 --framework megatron-lm",
        theirs="--runtime megatron-lm@2021-04 --dp-replicate 16 --zero 0 --tp 8 --pp 8 --micro-batch 1 --recompute full",
        ran="tensor parallelism over 8 and a pipeline, all activations recomputed (arXiv 2104.04473, section 5.1)",
        measured="140 TFLOP/s a GPU, counting what is computed again: about 34 % MFU",
        difference=(
            "In 2021 there was neither sequence parallelism nor attention that stores no scores, so everything was "
            "recomputed. Megatron-LM has both today. It also hides tensor-parallel communication by userbuffers, and "
            "the optimizer's communication during the passes. Most of the difference in MFU is the forward pass that "
            "is not computed again. No A100 run with all of these is among the runs that predictions were compared "
            "with; one of 2022 with sequence parallelism and selective recomputation (arXiv 2205.05198) is predicted "
            "within 1 %. Their plan is predicted as Megatron-LM ran it in 2021: attention was two matrix products, "
            "and gradients were reduced after the last backward pass. As Megatron-LM runs it today, the same plan is "
            "predicted two points higher."
        ),
        checked=(
            "140 TFLOP/s, 1,024 GPUs and the batch read in section 5.1; the degrees of that run are not stated there. "
            "Those used here, tensor parallelism over 8 and a pipeline, are those of table 1 for 175 B, from memory"
        ),
    ),
    Published(
        title="Mixtral 8x7B on 64 H100",
        question="--model mixtral-8x7b --cluster dgx-h100 --gpus 64 --seq-len 4096 --global-batch 256 --framework megatron-lm",
        theirs="--dp-replicate 16 --zero 1 --tp 1 --pp 4 --ep 8 --virtual-stages 8 --schedule Interleaved1F1B --micro-batch 1 --recompute none",
        ran="a pipeline of 4 with 8 stages a rank, expert parallelism over 8, no tensor parallelism, micro batch 1 (NVIDIA/Megatron-LM, megatron/core/transformer/moe/README.md, reference mappings of MCore v0.8)",
        measured="468 TFLOP/s a GPU, 47 % MFU (the same file, MCore v0.9)",
        difference=(
            "Theirs is among the best: what the answer has instead of its four stages gains less than the range of a "
            "step over several nodes, which is wide, because it was learned from no run of a mixture of experts."
        ),
        checked=(
            "read in NVIDIA/Megatron-LM at commit 022bcb5a; the file gives 468 TFLOP/s for Mixtral 8x7B and the "
            "mapping for 64 GPUs in different places, and does not say that one was measured with the other"
        ),
    ),
    Published(
        title="MPT 7B on 128 A100 of 40 GB",
        question="--model mosaicml/mpt-7b --cluster 16x8xA100-40GB --seq-len 2048 --global-batch 2304 --framework llm-foundry",
        theirs="--dp-shard 128 --micro-batch 18 --recompute full",
        ran="FSDP over all GPUs, everything recomputed, micro batch 18 (mosaicml/llm-foundry, scripts/train/benchmarking/README.md at 8c8dd48f)",
        measured="10.2 s, 3,623 tokens/s/GPU, 50 % MFU as they count it",
        difference=(
            "Their plan is predicted 3 % too short. The answer recomputes nothing, and its MFU is more than any row of "
            "that file has at this scale: about 53 % is to be expected. Without recomputation the file has this model "
            "on eight A100 of 80 GB at 64 % as they count it, which is 62 % here, where 64 % is predicted; and its 3B "
            "model on 128 A100 of 40 GB, where 10 % less time is predicted than it took. From 8 to 128 GPUs that model "
            "lost 5 %, and nothing is predicted to be lost: that GPUs wait for the slowest of many, and what a trainer "
            "does between two steps, are not part of the model. The range of the step includes both."
        ),
        checked="the rows were read in that file; of this project only the widths of ranges were learned from them, with other runs",
    ),
    Published(
        title="Llama 3 8B on eight RTX 4090",
        question="--model llama3-8b --cluster rtx4090-x8 --seq-len 2048 --global-batch 256",
        theirs="--dp-shard 8 --micro-batch 2 --recompute full --offload parameters",
        ran="ZeRO over all GPUs, with recomputation and parts of the state offloaded to the CPU (arXiv 2311.03687, Llama 2 7B on the same machine)",
        measured="no figure for this model with all of its state on the GPUs was found",
        difference=(
            "Parameters, gradients and two moments in float32 take 16 GB of each GPU's 24 GB. Little is left, and "
            "what surely fits is slow over PCIe; the answer also gives the time of the plan that may fit. Their plan "
            "is predicted with all state in host memory, which frees GPU memory and costs copies and an update on the "
            "CPU. --param-dtype bfloat16 halves the state."
        ),
        checked=(
            "the paper's abstract and its machine (8 RTX 4090 over PCIe 4) were read; its tables were not, so no "
            "figure of theirs is given here"
        ),
    ),
)
H800 = {
    "name": "h800",
    "gpu": "h800-sxm",
    "gpus_per_node": 8,
    "nodes": 256,
    "interconnect": "nvswitch",
    "nic_gbit_per_gpu": 400,
}


def planner(flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "planner", *shlex.split(flags)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "80"})


def screen(flags: str) -> list[str]:
    """Return the command and the first screen of its answer."""
    run = planner(flags)
    lines = (run.stdout + run.stderr).rstrip().splitlines()
    shown = [line.rstrip() for line in lines[:SCREEN]] + (["..."] if len(lines) > SCREEN else [])
    return ["```", f"$ planner {flags}", *shown, "```", "", f"Exit code {run.returncode}.", ""]


def worked(story: Story) -> list[str]:
    """Return the command of a story, the first lines of its answer, and the calculation by hand alongside it."""
    text = planner(story.flags)
    shown = [line.rstrip() for line in text.stdout.splitlines()[:FIRST_LINES]]
    said = story.said(json.loads(planner(f"{story.flags} --json").stdout))
    answered = f"The answer says **{said:.3g} {story.unit}**."
    return [
        "```",
        f"$ planner {story.flags}",
        *shown,
        "...",
        "```",
        "",
        f"By hand, {story.what}: {story.worked} = **{story.by_hand:.3g} {story.unit}**. {answered}",
        "",
        f"{story.why[:1].upper()}{story.why[1:]}.",
        "",
    ]


def alongside(one: Published, cluster: Path) -> list[str]:
    """Return a published question, the answer, and the authors' plan as predicted and as measured."""
    question = one.question.format(h800=cluster)
    answer = json.loads(planner(f"suggest {question} --top 3 --json").stdout)["plans"][0]
    rows = [("suggested", degrees(answer["plan"]), figures(answer["estimate"]))]
    theirs = "cannot be stated with these options"
    if one.theirs is not None:
        run = question.split(" --framework")[0] if "--runtime" in one.theirs else question
        document = json.loads(planner(f"estimate {run} {one.theirs} --json").stdout)
        theirs = figures(document["estimate"]) if document["legal"] else "not legal here"
    rows += [("theirs, predicted", one.ran, theirs), ("theirs, measured", "the same", one.measured)]
    table = [f"| {' | '.join(row)} |" for row in rows]
    checked = f"Checked: {one.checked}."
    return ["| | plan | step, throughput |", "|---|---|---|", *table, "", one.difference, "", checked, ""]


def degrees(plan: dict[str, object]) -> str:
    named = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
    return " x ".join(f"{name} {plan[name]}" for name in named if plan[name] != 1) + f", recompute {plan['recompute']}"


def figures(estimate: dict) -> str:
    step, memory = estimate["step_s"], estimate["memory"]
    middle, low, high = (
        f"{step[end]:.0f}" if step["value"] >= 10 else f"{step[end]:.1f}" for end in ("value", "low", "high")
    )
    return (
        f"{middle} s ({low} to {high}), {estimate['tflops_per_gpu']:.0f} TFLOP/s a GPU, {estimate['mfu']:.0%} MFU, "
        f"{memory['reserved_bytes'] / 2**30:.0f} of {memory['capacity_bytes'] / 2**30:.0f} GiB"
    )


def main(out: Path) -> None:
    """Ask everything and write what was answered."""
    cluster = out.parent / "clusters" / "h800_2048.json"
    cluster.write_text(json.dumps(H800, indent=2) + "\n")
    day = f"{dt.datetime.now(tz=dt.UTC):%Y-%m-%d}"
    made = (
        f"Made on {day} by `python tests/bench/answers.py {out}`, from datasheets. Answers are cut to {SCREEN} lines."
    )
    lines = [
        "# Questions and answers",
        "",
        made,
        "",
        "## What people ask",
        "",
    ]
    for title, flags in ASKED.items():
        lines += [f"### {title}", "", *screen(flags)]
    lines += ["## By hand", "", "Each number is held by `tests/planner/test_hand_stories.py`.", ""]
    for story in STORIES:
        lines += [f"### {story.title}", "", *worked(story)]
    lines += ["## Compared with published runs", ""]
    for one in PUBLISHED:
        question = one.question.format(h800=cluster)
        lines += [f"### {one.title}", "", *screen(f"suggest {question} --top 3"), *alongside(one, cluster)]
    out.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    main(options.out)
