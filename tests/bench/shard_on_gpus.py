"""One layer of a Llama-like decoder, captured and sharded by the compiler, on 2 and 4 GPUs: right, how fast, and as predicted?

    python3 tests/bench/shard_on_gpus.py OUT                on a machine with GPUs; at most 90 s
    python3 tests/bench/shard_on_gpus.py OUT --cpu          on gloo with a small layer: whether it runs

Rows go to OUT/rows.jsonl as they are made: the layer tensor parallel and fully sharded, forward and backward, as the
executor's hand-written parallelism runs it and as the captured program does (launched one by one, and as a CUDA graph),
with the largest difference to one GPU and the time that the same program takes on SimPy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
LIMIT_S = 42.0  # for the ranks of one world size
TOKENS = 4096
REPEATS, WARM_UP = 12, 4
AXES = {
    "args_0": "batch seq embed",
    "x": "batch seq embed",
    "*norm.weight": "embed",
    "*.wo.weight": "embed heads",
    "*.w2.weight": "embed mlp",
    **dict.fromkeys(("*.wq.weight", "*.wk.weight", "*.wv.weight"), "heads embed"),
    **dict.fromkeys(("*.w1.weight", "*.w3.weight"), "mlp embed"),
}
HALVES = {"heads": "model", "mlp": "model"}
WAYS = {
    "tensor parallel": ("model", {"parameters": HALVES, "compute": HALVES}),
    "fully sharded": ("data", {"parameters": {"embed": "data"}, "compute": {"batch": "data"}}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.worker:
        _worker(arguments.out, cpu=arguments.cpu)
        return
    environment = {
        **os.environ,
        "NCCL_NVLS_ENABLE": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    for ranks in (2, 4):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [__file__, str(arguments.out), "--worker", *(["--cpu"] if arguments.cpu else [])]
        with (arguments.out / f"ranks{ranks}.log").open("w", encoding="utf-8") as log:
            try:
                limit = LIMIT_S * (10 if arguments.cpu else 1)
                subprocess.run(command, stdout=log, stderr=log, timeout=limit, check=False, env=environment)
            except subprocess.TimeoutExpired:
                log.write(f"ended after {limit:.0f} s\n")


def _worker(out: Path, *, cpu: bool) -> None:
    import torch
    from torch import distributed as dist

    rank = int(os.environ["RANK"])
    if not cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if cpu else "nccl")
    started = time.monotonic()
    for name, (axis, constraints) in WAYS.items():
        row = {"way": name, "ranks": dist.get_world_size(), "device": _device_name(cpu)}
        try:
            _measure(row, axis, constraints, cpu=cpu)
        except Exception as error:  # noqa: BLE001 - the other way is still worth its time
            row["failed"] = f"{type(error).__name__}: {error}"[:1500]
        row["seconds"] = round(time.monotonic() - started, 1)
        if rank == 0:
            with (out / "rows.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


def _device_name(cpu: bool) -> str:
    import torch

    return "cpu" if cpu else f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def _layer(cpu: bool):
    """Return one layer of Llama 3 8B (a small one on the CPU), the same values on every rank, with its angles set."""
    import torch

    from executor.model.decoder import Decoder
    from simulator.config.hf_config import load_model

    model = load_model("tiny-llama" if cpu else "llama3-8b")
    dtype, device = (torch.float32, "cpu") if cpu else (torch.bfloat16, "cuda")
    with torch.device("meta"):
        layer = Decoder(model, layers=[0], first=False, last=False)
    layer = layer.to_empty(device="cpu").to(dtype)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, device=device) * 0.02)
    tokens = 64 if cpu else TOKENS
    layer.set_positions(torch.arange(tokens), torch.float32)
    return model, layer, tokens


def _measure(row: dict, axis: str, constraints: dict, *, cpu: bool) -> None:
    import torch
    from torch import distributed as dist

    from executor.sharding import shard

    device = torch.device("cpu") if cpu else torch.device("cuda", torch.cuda.current_device())
    ranks = dist.get_world_size()
    model, layer, tokens = _layer(cpu)
    batch = ranks if axis == "data" else 1
    generator = torch.Generator().manual_seed(2)
    dtype = next(layer.parameters()).dtype
    x = torch.randn(batch, tokens, model.hidden, generator=generator).to(dtype)
    row |= {"model": model.name, "tokens": tokens, "batch": batch, "dtype": str(dtype)}

    axes = _named(layer, x)
    sharded = shard(layer, (x,), mesh={axis: ranks}, axes=axes, gradients=["x"], **constraints)
    program = sharded.program
    x_name = next(one.name for one in sharded.captured.graph.inputs if one.kind == "input")
    values = {**{b: sharded.pieces[n].detach() for b, n in sharded._keys.items()}, **sharded.fixed}
    values |= sharded.ranks.pieces({x_name: x.to(device)})
    weight = torch.randn(batch, tokens, model.hidden, generator=generator).to(device, dtype) / tokens
    values |= sharded.ranks.seeds([weight])

    found = sharded.ranks.run(values)
    row["error_of_largest"] = _difference(layer, x, weight, sharded, found, device)
    row["captured_s"] = _seconds(lambda: sharded.ranks.run(values), device)
    row["hand_written_s"] = _hand_written(model, layer, x, weight, axis, device, tokens)
    row["predicted_s"] = _predicted(sharded, constraints, axes, axis, ranks)
    row["exchanges"] = sum(hasattr(work, "kind") for work in program.work.values())
    if not cpu:
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                sharded.ranks.run(values)
            row["captured_as_cuda_graph_s"] = _seconds(graph.replay, device)
        except Exception as error:  # noqa: BLE001 - torch says in many ways that something cannot be recorded
            row["captured_as_cuda_graph_failed"] = f"{type(error).__name__}: {error}"[:500]


def _named(layer, x) -> dict[str, str]:
    from executor.sharding import capture

    names = {one.name for one in capture(layer, (x,)).graph.inputs}
    return {pattern: text for pattern, text in AXES.items() if "*" in pattern or pattern in names}


def _difference(layer, x, weight, sharded, found, device) -> float:
    """Return the largest difference of outputs and gradients to one process, over the largest value of each."""
    import torch

    whole = layer.to(device)
    y = whole(x.to(device))
    parameters = dict(whole.named_parameters())
    gradients = torch.autograd.grad((y * weight).sum(), list(parameters.values()))
    program, place = sharded.program, sharded.ranks.place
    targets = {one.target: one.name for one in sharded.captured.graph.inputs}
    pairs = [(found[program.outputs[0]], place.piece(y.detach(), program.buffers[program.outputs[0]]))]
    for name, gradient in zip(parameters, gradients, strict=True):
        buffer = program.gradients[targets[name]]
        pairs.append((found[buffer], place.piece(gradient, program.buffers[buffer])))
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


def _seconds(run, device) -> float:
    """Return the median time of a run in the worst rank, with the host not waiting between runs."""
    import torch
    from torch import distributed as dist

    for _ in range(WARM_UP):
        run()
    times = []
    for _ in range(REPEATS):
        _wait(device)
        dist.barrier()
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    worst = torch.tensor([statistics.median(times)], dtype=torch.float64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst.item())


def _wait(device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _hand_written(model, layer, x, weight, axis: str, device, tokens: int) -> float:
    """Return the time of the executor's own tensor parallelism or FSDP2 on the same layer."""
    import torch
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from executor.model.decoder import Decoder
    from executor.parallel.data_parallel import apply_fsdp
    from executor.parallel.tensor_parallel import apply_tensor_parallel

    with torch.device("meta"):
        own = Decoder(model, layers=[0], first=False, last=False)
    own = own.to_empty(device=device).to(x.dtype)
    own.load_state_dict(layer.state_dict())
    own.set_positions(torch.arange(tokens, device=device), torch.float32)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if axis == "model":
        apply_tensor_parallel(own, dist.group.WORLD, sequence_parallel=False, expert_parallel=False)
        here, seed = x, weight
    else:
        mesh = init_device_mesh(device.type, (ranks,))
        apply_fsdp(own, mesh, expert_mesh=None, precision=MixedPrecisionPolicy(), reshard_after_forward=False)
        here, seed = x[rank : rank + 1], weight[rank : rank + 1]
    here = here.to(device).requires_grad_()

    def run() -> None:
        own.zero_grad(set_to_none=True)
        here.grad = None
        own(here).backward(seed)

    return _seconds(run, device)


def _predicted(sharded, constraints: dict, axes: dict[str, str], axis: str, ranks: int) -> dict[str, float | str]:
    """Return the time of the same program on SimPy, from the datasheet of four H200s."""
    from executor.sharding import api
    from planner.io.inputs import read_cluster
    from planner.sharding.answer import answer_request
    from planner.sharding.backends.runnable import simulate_program

    document = api.request(sharded.captured, {axis: ranks}, axes=axes, gradients=["x"], **constraints)
    answer = answer_request(document, where="the bench")
    run = simulate_program(answer.written, answer.captured.problem, read_cluster("h200x4"))
    return {"value": run.step_s, "source": "datasheet"}


if __name__ == "__main__":
    main()
