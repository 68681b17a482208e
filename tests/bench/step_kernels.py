"""Kernels of whole training steps on one GPU, eager and compiled, of our executor and of torchtitan.

    python3 tests/bench/step_kernels.py run OUT --budget 400 --text .titan     on a machine with a GPU
    python3 tests/bench/step_kernels.py table OUT.jsonl [OUT.jsonl ...]        anywhere: the tables of kernels.md

`run` takes six Llama shapes, times their steps as the ledger of fresh runs does (tests/bench/fresh_worker.py), and
keeps every kernel of one profiled step. `table` sorts kernels by kind, and prints what one element costs in the kernels
that eager steps share. A profiled step comes after a pause: its products run at higher clocks than those of the steps
that were timed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from tests.bench.fresh_pool import Pool
from topology import codec

# layers, width, heads, heads of keys, width of the feed-forward, tokens, sequences, of a micro batch, recomputation
SHAPES = (
    (16, 2560, 20, 4, 6912, 4096, 2, 2, "none"),
    (16, 2560, 20, 4, 6912, 4096, 2, 2, "full"),
    (12, 3840, 30, 10, 10240, 1280, 8, 2, "full"),
    (6, 4608, 36, 12, 12288, 1024, 8, 8, "none"),
    (8, 2048, 16, 16, 5632, 16384, 2, 1, "none"),
    (10, 1280, 10, 10, 3456, 2816, 8, 4, "none"),
)
TYPES = {"mixed": ("float32", "bfloat16", "float32"), "bfloat16": ("bfloat16", "bfloat16", "bfloat16")}
IN_BFLOAT16 = (0, 3)  # shapes that are run in one type as well
KINDS = (
    ("attention", ("cudnn", "sdpa", "flash", "fmha")),
    ("products", ("nvjet", "gemm", "splitK")),
    ("update", ("multi_tensor",)),
)
# Kernels of eager steps, by a part of their name, and whether an element is one of the feed-forward.
EAGER = (
    ("norm, forward", "vectorized_layer_norm_kernel", False),
    ("norm, gradient of its input", "layer_norm_grad_input", False),
    ("norm, gradient of its weight", "GammaBeta", False),
    ("float32 added to bfloat16", "unrolled_elementwise_kernel<at::native::CUDAFunctor_add", False),
    ("SiLU, gradient", "silu_backward_kernel", True),
    ("SiLU", "silu_kernel", True),
    ("product of two bfloat16", "BinaryFunctor<c10::BFlo", True),
)


def runs() -> list[dict[str, Any]]:
    """Return what is run, in order."""
    found = []
    for number, shape in enumerate(SHAPES):
        layers, hidden, heads, kv_heads, ffn, tokens, sequences, micro_batch, recompute = shape
        llama = replace(
            load_model("llama3-8b"), name="llama", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads,
            head_dim=hidden // heads, ffn=ffn, vocab=32768,
        )  # fmt: skip
        for types in ("mixed", "bfloat16") if number in IN_BFLOAT16 else ("mixed",):
            for name, version in (("meshwright", None), ("torchtitan", "0.2.2")):
                param, compute, reduced = TYPES[types]
                runtime = Runtime(
                    name=name, version=version, param_dtype=param, compute_dtype=compute,
                    reduce_dtype=reduced if version is None else "float32",
                )  # fmt: skip
                plan = Plan(micro_batch_size=micro_batch, recompute=recompute)
                work = Workload(seq_len=tokens, global_batch_size=sequences)
                found += [
                    {
                        "name": f"{number} {types} {name} {'compiled' if compiled else 'eager'}",
                        "model": codec.to_builtins(llama),
                        "workload": codec.to_builtins(work),
                        "plan": codec.to_builtins(plan),
                        "runtime": codec.to_builtins(replace(runtime, compile=compiled)),
                    }
                    for compiled in (False, True)
                ]
    return found


def run(out: Path, budget_s: float, text: str) -> None:
    """Run what is in time, a line of OUT.jsonl each."""
    end, pool, ranks = time.monotonic() + budget_s, Pool("cuda"), Path(tempfile.mkdtemp())
    with out.with_suffix(".jsonl").open("w", encoding="utf-8") as file:
        for one in runs():
            left = end - time.monotonic()
            if left < 25.0:
                break
            request = {key: one[key] for key in ("model", "workload", "plan", "runtime")}
            request |= {
                "gpus": 1,
                "device": "cuda",
                "text": str(Path(text).absolute()),
                "environment": {},
                "named": 400,
            }
            ended = pool.run(request, ranks / one["name"].replace(" ", "-"), min(70.0, left - 3.0))
            file.write(json.dumps(one | {"launch_s": pool.launch_s, "ended": ended}) + "\n")
            file.flush()
            print(one["name"], ended["status"], ended.get("cause", "")[:100], flush=True)


def kind_of(name: str) -> str:
    """Return what a kernel does."""
    return next((kind for kind, words in KINDS if any(word in name for word in words)), "others")


def table(paths: list[Path]) -> None:
    """Print both tables."""
    print("| GPU | run | step | products | attention | update | others | clock |\n|---|---|--:|--:|--:|--:|--:|--:|")
    lines = [(path.stem, json.loads(line)) for path in paths for line in path.read_text("utf-8").splitlines()]
    lines = [(gpu, one) for gpu, one in lines if one["ended"].get("measured")]
    for gpu, one in lines:
        measured, spent = one["ended"]["measured"], dict.fromkeys(("products", "attention", "update", "others"), 0.0)
        for kernel in measured["profiled"]["longest"]:
            spent[kind_of(kernel["name"])] += kernel["seconds"]
        times = " | ".join(f"{1e3 * seconds:.1f}" for seconds in (measured["step_s"], *spent.values()))
        print(f"| {gpu} | {one['name']} | {times} | {measured['mean_sm_clock_hz'] / 1e9:.2f} |")
    print("\n| GPU | run | " + " | ".join(words for words, *_ in EAGER) + " |\n|---|---|" + "--:|" * len(EAGER))
    for gpu, one in lines:
        if one["runtime"]["compile"]:
            continue
        tokens = one["workload"]["seq_len"] * one["plan"]["micro_batch_size"]
        cells = []
        for _, part, wide in EAGER:
            kernels = [kernel for kernel in one["ended"]["measured"]["profiled"]["longest"] if part in kernel["name"]]
            calls = sum(kernel["count"] for kernel in kernels)
            elements = tokens * one["model"]["ffn" if wide else "hidden"]
            seconds = sum(kernel["seconds"] for kernel in kernels)
            cells.append(f"{1e12 * seconds / calls / elements:.2f}" if calls else "-")
        print(f"| {gpu} | {one['name'].removesuffix(' eager')} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("out", type=Path, nargs="+")
    parser.add_argument("--budget", type=float, default=400.0, help="seconds for everything")
    parser.add_argument("--text", default="", help="tokenizer/ and c4_test/ for torchtitan's own loader")
    options = parser.parse_args()
    if options.what == "run":
        run(options.out[0], options.budget, options.text)
    else:
        table(options.out)


if __name__ == "__main__":
    main()
