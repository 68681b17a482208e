"""Kernels of layers of experts, operator by operator, on one GPU: torchtitan's, ours, and the two they spend time in.

    python tests/bench/measure_experts.py --out experts.json

`layers`: forward and backward of one layer of experts under torch's profiler, device seconds and calls of every
operator with the shapes of its inputs; torchtitan's own module (0.2.2) where that is installed, and the executor's.
`gathers`: the gradient of `x[index]`, whose kernel adds rows with equal indices one after the other: every index once,
every index `copies` times in a random order, and one index `repeated` times among indices that occur once.
`products`: grouped products of rows as a router gives them, run for a second, so that the power limiter has its say,
next to a dense product of the same size that runs as long.
"""

import argparse
import json
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from executor.model.moe import MixtureOfExperts
from simulator.config.model import MixtureOfExperts as Shapes

# (width, width of an expert, experts, experts a token, tokens)
LAYERS = (
    (2304, 896, 32, 8, 1280),
    (2048, 768, 128, 8, 8192),
    (2048, 1408, 64, 6, 4096),
    (4096, 14336, 8, 2, 4096),
    (5120, 1536, 32, 4, 2048),
    (1280, 1024, 16, 4, 16384),
)
REPEATS = 3
GATHERS = [
    *((rows, width, kind, copies, 0) for rows in (8192, 65536) for width in (1024, 4096) for kind in ("bfloat16", "float32") for copies in (1, 2, 8)),
    *((16384, width, kind, 1, repeated) for width in (1024, 2048, 4096) for kind in ("bfloat16", "float32") for repeated in (64, 256, 1024, 2048)),
    (65536, 7168, "bfloat16", 1, 256),
    (65536, 7168, "bfloat16", 8, 0),
]  # fmt: skip
PRODUCTS = (
    (32, 2304, 896, 320),
    (128, 2048, 768, 512),
    (64, 2048, 1408, 384),
    (8, 4096, 14336, 1024),
    (16, 1280, 1024, 4096),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    out = parser.parse_args().out
    torch.manual_seed(0)
    began = time.monotonic()
    found: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python tests/bench/measure_experts.py",
        "layers": [],
    }
    for case in LAYERS:
        for types in ("bfloat16", "mixed"):
            for name, module in (("torchtitan", titan_layer), ("meshwright", own_layer)):
                try:
                    found["layers"].append({"of": name, "types": types, "case": case, **layer(module, case, types)})
                except ImportError as error:
                    found["layers"].append({"of": name, "types": types, "case": case, "error": str(error)})
                torch.cuda.empty_cache()
        print(case, f"{time.monotonic() - began:.0f} s", flush=True)
    found["gathers"] = [gather(*case) for case in GATHERS]
    print("gathers", f"{time.monotonic() - began:.0f} s", flush=True)
    found["products"] = [row for case in PRODUCTS for row in products(*case)]
    Path(out).write_text(json.dumps(found, indent=1), encoding="utf-8")


def titan_layer(hidden: int, width: int, experts: int, chosen: int) -> nn.Module:
    from torchtitan.models.moe import MoEArgs, build_moe

    args = MoEArgs(
        num_experts=experts, num_shared_experts=0, top_k=chosen, score_func="softmax", route_norm=True,
        score_before_experts=False,
    )  # fmt: skip
    with torch.device("cuda"):
        module = build_moe(args, dim=hidden, hidden_dim=width)
    with torch.no_grad():
        module.init_weights(0.02, torch.device("cuda"))
    return module.cuda()


def own_layer(hidden: int, width: int, experts: int, chosen: int) -> nn.Module:
    with torch.device("cuda"):
        module = MixtureOfExperts(hidden, Shapes(experts=experts, experts_per_token=chosen, ffn=width))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    return module


def layer(make: object, case: tuple[int, ...], types: str) -> dict[str, object]:
    """Return the operators of a forward and a backward pass, the longest first: [operator, shapes, calls, seconds]."""
    hidden, width, experts, chosen, tokens = case
    module = make(hidden, width, experts, chosen)
    if types == "bfloat16":
        module = module.to(torch.bfloat16)
    x = torch.randn(1, tokens, hidden, device="cuda", dtype=torch.bfloat16 if types == "bfloat16" else torch.float32)
    x.requires_grad_()

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=types == "mixed"):
            y = module(x)
        y.backward(torch.ones_like(y))
        x.grad = None
        for parameter in module.parameters():
            parameter.grad = None

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiler:
        for _ in range(REPEATS):
            step()
        torch.cuda.synchronize()
    rows = [
        [event.key, str(event.input_shapes)[:200], event.count / REPEATS, event.self_device_time_total / 1e6 / REPEATS]
        for event in profiler.key_averages(group_by_input_shape=True)
        if event.self_device_time_total > 0 and event.device_type == torch.autograd.DeviceType.CPU
    ]
    return {
        "seconds": sum(row[3] for row in rows),
        "operators": sorted(rows, key=lambda row: -row[3])[:30],
    }


def gather(rows: int, width: int, kind: str, copies: int, repeated: int) -> dict[str, object]:
    """Return the device seconds of the gradient of `x[index]`: in all, and of the kernel that adds."""
    x = torch.randn(rows // copies + 1, width, device="cuda", dtype=getattr(torch, kind))
    index = torch.arange(rows // copies, device="cuda").repeat_interleave(copies)[torch.randperm(rows, device="cuda")]
    if repeated:
        index = torch.cat((index, torch.full((repeated,), rows // copies, device="cuda")))
    gradient = torch.randn(len(index), width, device="cuda", dtype=x.dtype)
    x.requires_grad_()

    def step() -> None:
        x[index].backward(gradient)
        x.grad = None

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
    seconds: dict[str, float] = defaultdict(float)
    for event in profiler.events():
        for kernel in event.kernels:
            seconds[kernel.name[:120]] += kernel.duration / 1e6 / 5
    return {
        "rows": rows, "width": width, "type": kind, "copies": copies, "repeated": repeated,
        "adding_s": sum(value for name, value in seconds.items() if "indexing_backward" in name),
        "gathering_s": sum(value for name, value in seconds.items() if "gather" in name or "index_elementwise" in name),
        "all_s": sum(seconds.values()),
    }  # fmt: skip


def products(experts: int, hidden: int, width: int, each: int) -> list[dict[str, object]]:
    """Return a row a direction: seconds of grouped products and of dense ones of as much arithmetic, both sustained."""
    tokens = experts * each
    scores = torch.randn(tokens, experts) + 0.5 * torch.randn(experts)
    counts = torch.bincount(scores.argmax(1), minlength=experts)
    ends = counts.cumsum(0).to("cuda", torch.int32)
    x, y = (torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16) for size in (hidden, width))
    w = torch.randn(experts, hidden, width, device="cuda", dtype=torch.bfloat16)
    dense = w[0].contiguous()
    cases = {
        "forward": (lambda: functional.grouped_mm(x, w, offs=ends), lambda: x @ dense),
        "tokens": (lambda: functional.grouped_mm(y, w.transpose(-2, -1), offs=ends), lambda: y @ dense.t()),
        "weights": (lambda: functional.grouped_mm(x.t(), y, offs=ends), lambda: x.t() @ y),
    }
    return [
        {
            "experts": experts, "rows": each, "hidden": hidden, "width": width, "direction": name,
            "most": int(counts.max()), "least": int(counts.min()),
            "grouped_s": sustained(one), "dense_s": sustained(other),
        }
        for name, (one, other) in cases.items()
    ]  # fmt: skip


def sustained(call: object, for_s: float = 1.0) -> float:
    """Return the mean device seconds of a call in the second half of `for_s` seconds of nothing else."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    began = time.monotonic()
    count = 0
    while time.monotonic() - began < for_s / 2:
        for _ in range(8):
            call()
        torch.cuda.synchronize()
        count += 8
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


if __name__ == "__main__":
    main()
