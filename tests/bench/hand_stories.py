"""Questions that a person can work out by hand to the first digit, each with the calculation next to the answer.

`python tests/bench/answers.py` writes them into examples/answers.md; `tests/planner/test_hand_stories.py` holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

GB, GIB = 1e9, 2.0**30
LLAMA_8B, LLAMA_13B, LLAMA_70B = 8.03e9, 13.02e9, 70.55e9  # parameters
Answer = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Story:
    """A question, the flags that ask it, and one number of the answer: by hand (`worked`, as it is written down), and
    as `said` by the answer's JSON. They agree within a part `within`, for the reason `why`.
    """

    title: str
    flags: str
    what: str
    unit: str
    worked: str
    by_hand: float
    said: Callable[[Answer], float]
    within: float
    why: str


def _memory(*categories: str) -> Callable[[Answer], float]:
    return lambda one: sum(one["estimate"]["memory"]["by_category"][name] for name in categories) / GIB


def _part(name: str) -> Callable[[Answer], float]:
    return lambda one: float(one["estimate"]["breakdown_s"][name])


def _share(name: str) -> Callable[[Answer], float]:
    return lambda one: 100 * one["estimate"]["breakdown_s"][name] / one["estimate"]["step_s"]["value"]


STORIES = (
    Story(
        title="How many GPUs hold a 70B model's state?",
        flags="estimate --model llama3-70b --cluster dgx-h100 --gpus 24 --dp-shard 24 --micro-batch 1 --global-batch 48"
        " --recompute full --framework torchtitan",
        what="parameters, gradients and optimizer on a GPU",
        unit="GiB",
        worked="70.55 B parameters x 16 bytes (float32 parameters, gradients and two moments) / 24 GPUs",
        by_hand=LLAMA_70B * 16 / 24 / GIB,
        said=_memory("parameters", "gradients", "optimizer"),
        within=0.03,
        why="1,051 GiB of state are 14 GPUs full to the last byte, and nothing is left for a layer gathered whole (1.6"
        " GiB), the logits of 8,192 tokens (4 GiB in float32) and activations",
    ),
    Story(
        title="What does tensor parallelism cost without NVLink?",
        flags="estimate --model llama3-8b --cluster l40s-x8 --gpus 8 --tp 8 --dp-shard 1 --seq-len 4096 --micro-batch 1"
        " --global-batch 1 --recompute full",
        what="exposed communication",
        unit="s",
        worked="32 layers x 12 gathers and scatters (4 forward, 4 when they are computed again, 4 backward) of 4,096 tokens"
        " x 4,096 x 2 bytes = 34 MB, 7/8 of it over PCIe at 0.6 of 31.5 GB/s: 1.55 ms each",
        by_hand=32 * 12 * 4096 * 4096 * 2 * 7 / 8 / (0.6 * 31.5 * GB),
        said=_part("exposed_communication"),
        within=0.3,
        why="every layer waits for each of them, as products of so few tokens hide nothing; start-up and the loss over the"
        " vocabulary come on top",
    ),
    Story(
        title="How long is a pipeline idle?",
        flags="estimate --model llama3-8b --cluster dgx-h100 --gpus 8 --pp 8 --schedule 1F1B --micro-batch 1 --global-batch"
        " 32 --seq-len 4096 --recompute none --framework megatron-lm",
        what="bubble of the step",
        unit="%",
        worked="7 x 872 M parameters of a stage while the pipeline fills and drains, against 32 x 1,397 M of the last"
        " stage, which has the head as well and never waits in between",
        by_hand=100 * 7 * 872 / (32 * 1397 + 7 * 872),
        said=_share("bubble"),
        within=0.1,
        why="with equal stages it were (8 - 1) / (32 + 8 - 1) = 18 %; here the other seven wait for the head instead",
    ),
    Story(
        title="An 8B model at 128k tokens?",
        flags="estimate --model llama3-8b --cluster dgx-h100 --gpus 8 --seq-len 131072 --global-batch 4 --cp 8 --micro-batch"
        " 1 --recompute full",
        what="activations",
        unit="GiB",
        worked="131,072 / 8 tokens x 4,096 x 4 bytes (the residual stream is float32 under autocast) x 32 layers = 8.0 GiB"
        " kept, and one layer whole: 16,384 tokens x about 2 x (3 x 14,336 + 6 x 4,096) bytes = 2.1 GiB, twice that with"
        " its gradients",
        by_hand=(16384 * 4096 * 4 * 32 + 2 * 16384 * 2 * (3 * 14336 + 6 * 4096)) / GIB,
        said=_memory("activations"),
        within=0.35,
        why="the layer that is computed again has keys and values of all 131,072 tokens, too",
    ),
    Story(
        title="13B on 2 x 8 A100 of 40 GB over 100 GbE?",
        flags="estimate --model llama2-13b --cluster 2x8xA100-40GB@100GbE --dp-shard 16 --micro-batch 4 --global-batch 64"
        " --recompute full",
        what="state of a GPU",
        unit="GiB",
        worked="13.02 B x 16 bytes / 16 GPUs",
        by_hand=LLAMA_13B * 16 / 16 / GIB,
        said=_memory("parameters", "gradients", "optimizer"),
        within=0.06,
        why="at the moment of the peak not all gradients are there yet. A step sends 15/16 of 2 + 2 + 4 bytes a parameter out of each node (two gathers in bfloat16, gradients in"
        " float32): 98 GB at 12.5 GB/s are 7.8 s at line rate, about as long as four sequences a GPU compute",
    ),
    Story(
        title="Six GiB over: where do they come from?",
        flags="estimate --model llama3-8b --cluster dgx-h100 --gpus 8 --dp-shard 8 --seq-len 8192 --micro-batch 2"
        " --global-batch 16 --recompute selective-op",
        what="loss",
        unit="GiB",
        worked="2 x 8,192 tokens x 128,256 words x 4 bytes (logits in float32), twice: what the softmax keeps, and its gradient",
        by_hand=2 * 2 * 8192 * 128256 * 4 / GIB,
        said=_memory("loss_and_recompute"),
        within=0.1,
        why="one sequence at a time halves it, which is why a smaller micro batch is the first remedy",
    ),
    Story(
        title="What crosses nodes under full sharding?",
        flags="explain --model llama3-8b --cluster dgx-h100 --gpus 16 --global-batch 16 --seq-len 4096 --top 1",
        what="sent by a GPU",
        unit="GB",
        worked="15/16 of 8.03 B parameters x (2 bytes gathered + 4 bytes of gradients in float32); resharded after forward, 2"
        " bytes more",
        by_hand=15 / 16 * LLAMA_8B * 6 / GB,
        said=lambda one: sum(link["mean_bytes"] for link in one["traffic"]["links"]) / GB,
        within=0.05,
        why="each node's ports carry that once, however many GPUs a node has, since a ring crosses nodes in one place",
    ),
    Story(
        title="GPUs in NVLink pairs?",
        flags="estimate --model llama3-8b --cluster a100-pcie-x4 --tp 4 --dp-shard 1 --seq-len 4096 --micro-batch 1"
        " --global-batch 1 --recompute full",
        what="exposed tensor-parallel communication",
        unit="s",
        worked="32 layers x 12 gathers and scatters of 34 MB, 3/4 of it over PCIe between the pairs, at 0.6 of 31.5 GB/s",
        by_hand=32 * 12 * 4096 * 4096 * 2 * 3 / 4 / (0.6 * 31.5 * GB),
        said=lambda one: float(one["estimate"]["exposed_by_axis_s"]["tp"]),
        within=0.3,
        why="a group of four is as slow as its slowest link; with --tp 2 --dp-shard 2 the groups are the pairs, and it is"
        " 0.06 s, over bridges of 300 GB/s",
    ),
    Story(
        title="A trillion tokens: how many days?",
        flags="suggest --model llama3-8b --cluster dgx-h100 --gpus 64 --tp 1 --pp 1 --cp 1 --tokens 1T --top 1",
        what="days without faults",
        unit="days",
        worked="6 x 8.03 B x 10^12 FLOPs, and 12 x 32 layers x 4,096 x 8,192 / 2 a token for attention, at 44 % of 989"
        " TFLOP/s on 64 GPUs",
        by_hand=(6 * LLAMA_8B + 6 * 32 * 4096 * 8192) * 1e12 / (0.44 * 989e12 * 64) / 86400,
        said=lambda one: float(one["run"]["days"]["value"]),
        within=0.15,
        why="44 % is the MFU of the answer, so this checks its arithmetic: embeddings count no products, so fewer than 6"
        " FLOPs a parameter are needed",
    ),
    Story(
        title="DeepSeek-V3's own degrees on 2,048 H800",
        flags="estimate --model deepseek-v3 --cluster examples/clusters/h800_2048.json --seq-len 4096 --global-batch 15360"
        " --runtime megatron-lm --pp 16 --ep 64 --zero 1 --micro-batch 1 --recompute selective",
        what="time of products at the bfloat16 peak",
        unit="s",
        worked="6 x 36.6 B active parameters (embedding left out) x 15,360 x 4,096 tokens / 2,048 GPUs / 989 TFLOP/s, and"
        " attention: 61 layers x 12 x 128 heads x (192 + 128) / 2 x 4,096 / 2 a token",
        by_hand=(6 * 36.6e9 + 61 * 12 * 128 * 160 * 2048) * 15360 * 4096 / 2048 / 989e12,
        said=lambda one: one["estimate"]["mfu"] * one["estimate"]["step_s"]["value"],
        within=0.15,
        why="their 1,543 tokens/s a GPU are 20 s a step, in float8 with DualPipe and their own all-to-all; what remains"
        " between 7.8 s of arithmetic and the predicted step is exchange of tokens, the bubble, and kernels below the peak",
    ),
)
