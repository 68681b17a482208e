"""What `shard_on_gpus` runs on every rank: a module captured, planned on rank 0, predicted, compared with one GPU,
timed.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
from torch import distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from executor.sharding import api, capture
from executor.sharding.api import ShardedModule
from planner.io.inputs import read_cluster
from planner.sharding.answer import Answer, answer_request
from planner.sharding.backends.runnable import buffer_limit, simulate_program
from planner.sharding.plans.report import Limits
from planner.sharding.problem.problem import MemoryLimit
from simulator.config.hf_config import load_model
from tests.bench.shard_on_gpus import LAYERS, TOKENS, cluster_here, median_s
from tests.bench.shard_real_modules import COLUMNS, MODULES, ROWS, Attending, FeedForward, FusedAttending, Real
from tests.executor.sharding.modules import RoutedExperts
from topology.errors import UserError

Row = dict[str, Any]
MICRO_BATCHES = 4  # of the programs with stages
NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass
class Bench:
    """The device of this rank; `answers` are those of rank 0, by what was asked."""

    cpu: bool
    roomy: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.cpu else torch.device("cuda", torch.cuda.current_device())

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.cpu else torch.bfloat16


def planned(document: Row, memory_bytes: float | None = None) -> tuple[Any, Row]:
    """Return the program, on every rank, and what rank 0 says of it: the prediction comes before any run."""
    said: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            limits = Limits(memory_bytes=memory_bytes)
            answer = answer_request(document, where="the bench", cluster=read_cluster(cluster_here()), limits=limits)
            said = [(msgspec.json.encode(answer.written.program), _told(answer))]
        except Exception as error:  # noqa: BLE001 - reported to all ranks, which wait
            said = [(b"", {"refused": f"{type(error).__name__}: {error}"[:800]})]
    dist.broadcast_object_list(said, 0)
    program, reported = said[0]
    if "refused" in reported:
        raise UserError("no program", why=reported["refused"])
    return api.read_program(msgspec.json.decode(program), where="the bench"), reported


def _told(answer: Answer) -> Row:
    run = simulate_program(answer.written, answer.problem, read_cluster(cluster_here()))
    kinds = Counter(one.kind for one in answer.written.program.work.values() if hasattr(one, "kind"))
    kinds.update(
        one.op for one in answer.written.program.work.values() if getattr(one, "op", "").startswith("overlap.")
    )
    return {
        "predicted_s": run.step_s,
        "exchanges": ", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "none",
        "chunks": {name: str(way) for name, way in answer.written.chunks.items()},
        "predicted_peak_bytes": answer.written.peak_bytes,
        "state_bytes": state_bytes(answer),
        "again": len(answer.written.again),
    }


def state_bytes(answer: Answer) -> float:
    """Return what a rank holds of parameters and their optimizer besides the program's buffers."""
    roomy = replace(answer.problem, memory=MemoryLimit(limit_bytes=1e15))
    return 1e15 - buffer_limit(roomy, answer.plan)


def run_row(
    row: Row,
    bench: Bench,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Row,
    document_of: Callable[[Any], Row],
    memory_bytes: float | None = None,
) -> None:
    """Fill a row: plan, predict, run, compare, time."""
    captured = capture(module, args, kwargs)
    program, reported = planned(document_of(captured), memory_bytes)
    row |= reported
    sharded = ShardedModule(module, captured, program)
    names = [one.name for one in captured.graph.inputs if one.kind == "input"]
    leaves = [leaf for leaf in pytree.tree_leaves((list(args), kwargs)) if isinstance(leaf, torch.Tensor)]
    values = own_weights(sharded)
    values |= sharded.ranks.pieces({n: leaf for n, leaf in zip(names, leaves, strict=True) if n in program.inputs})
    # torch 2.11's cuDNN attention reads a gradient as the first one lay that came with queries, keys and values like
    # these (executor/sharding/operations.py): modules of other rows may have had such in another layout.
    with sdpa_kernel(NOT_CUDNN):
        whole, *others = pytree.tree_leaves(module(*args, **kwargs))
    torch.manual_seed(2)
    weight = torch.randn(whole.shape, device=bench.device).to(whole.dtype) / whole.shape[-2]
    values |= sharded.ranks.seeds([weight, *(torch.zeros_like(one) for one in others)])
    found = sharded.ranks.run(values)
    row["error_of_largest"] = _difference(module, whole, weight, sharded, found)
    del whole, others, found
    row["launched_s"] = median_s(lambda: sharded.ranks.run(values), bench.device)
    if bench.cpu:
        return
    row["peak_bytes"] = _peak(sharded, values)
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            kept = sharded.ranks.run(values)
        row["graph_s"] = median_s(graph.replay, bench.device)
        del kept
    except Exception as error:  # noqa: BLE001 - torch says in many ways that something cannot be recorded
        row["graph_failed"] = f"{type(error).__name__}: {error}"[:500]


def _peak(sharded: ShardedModule, values: dict[str, torch.Tensor]) -> int:
    """Return the bytes of a run at its peak: what it is given, and what the allocator hands out meanwhile."""
    given = sum(value.numel() * value.element_size() for value in values.values())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sharded.ranks.run(values)
    torch.cuda.synchronize()
    return given + torch.cuda.max_memory_allocated() - before


def own_weights(sharded: ShardedModule) -> dict[str, torch.Tensor]:
    """Return this rank's pieces of parameters, buffers and constants by buffer of the program."""
    weights = sharded.weights
    return {b: one.detach() for b, one in weights.pieces(weights.parameters).items()} | weights.fixed()


def _difference(
    module: torch.nn.Module,
    whole: torch.Tensor,
    weight: torch.Tensor,
    sharded: ShardedModule,
    found: dict[str, torch.Tensor],
) -> float:
    """Return the largest difference of outputs and gradients to one process, over the largest value of each.

    A gradient that is smaller than a thousandth of the largest one (of a bias that softmax cancels) counts as that.
    """
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad((whole * weight).sum(), list(parameters.values()), materialize_grads=True)
    program, place = sharded.program, sharded.ranks.place
    targets = {one.target: one.name for one in sharded.captured.graph.inputs}
    least = 1e-3 * max(float(one.abs().max()) for one in gradients)
    pairs = [(found[program.outputs[0]], place.piece(whole.detach(), program.buffers[program.outputs[0]]))]
    for name, gradient in zip(parameters, gradients, strict=True):
        buffer = program.gradients.get(targets.get(name, ""))
        if buffer is not None:
            pairs.append((found[buffer], place.piece(gradient, program.buffers[buffer])))
    off = max(float((a - b).abs().max() / b.abs().max().clamp_min(least)) for a, b in pairs)
    worst = torch.tensor([off], device=whole.device, dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst.item())


def _decoder(bench: Bench) -> tuple[Any, torch.nn.Module, int]:
    """Return a layer of Llama 3 8B (a small one on the CPU), the same values on every rank, with its angles set."""
    from executor.model.decoder import Decoder

    model = load_model("tiny-llama" if bench.cpu else "llama3-8b")
    with torch.device("meta"):
        own = Decoder(model, layers=[0], first=False, last=False)
    own = own.to_empty(device=bench.device).to(bench.dtype)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.normal_(std=0.02)
    tokens = 64 if bench.cpu else TOKENS
    own.set_positions(torch.arange(tokens, device=bench.device), torch.float32)
    return model, own, tokens


def layer(row: Row, bench: Bench, axis: str, constraints: Row, memory_bytes: float | None = None) -> None:
    """The executor's own decoder layer, captured, alongside its hand-written parallelism."""
    model, own, tokens = _decoder(bench)
    batch = dist.get_world_size() if axis == "data" else 1
    torch.manual_seed(3)
    x = torch.randn(batch, tokens, model.hidden, device=bench.device).to(bench.dtype)
    row |= {"tokens": tokens, "batch": batch}

    def document(captured: Any) -> Row:
        names = {one.name for one in captured.graph.inputs}
        axes = {pattern: text for pattern, text in constraints["axes"].items() if "*" in pattern or pattern in names}
        asked = {**constraints, "axes": axes}
        return api.request(captured, {axis: dist.get_world_size()}, gradients=["x"], **asked)

    run_row(row, bench, own, (x,), {}, document, memory_bytes)
    if memory_bytes is None:
        row["hand_written_s"] = _hand_written(model, own, x, axis, tokens)


def _hand_written(model: Any, layer_of_one: torch.nn.Module, x: torch.Tensor, axis: str, tokens: int) -> float:
    """Return the time of the executor's own tensor parallelism or FSDP2 on the same layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from executor.model.decoder import Decoder
    from executor.parallel.data_parallel import apply_fsdp
    from executor.parallel.tensor_parallel import apply_tensor_parallel

    with torch.device("meta"):
        own = Decoder(model, layers=[0], first=False, last=False)
    own = own.to_empty(device=x.device).to(x.dtype)
    own.load_state_dict(layer_of_one.state_dict())
    own.set_positions(torch.arange(tokens, device=x.device), torch.float32)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if axis == "model":
        apply_tensor_parallel(own, dist.group.WORLD, sequence_parallel=False, expert_parallel=False)
        here = x.clone()
    else:
        mesh = init_device_mesh(x.device.type, (ranks,))
        apply_fsdp(own, mesh, expert_mesh=None, precision=MixedPrecisionPolicy(), reshard_after_forward=False)
        here = x[rank : rank + 1].clone()
    here.requires_grad_()
    seed = torch.ones_like(here)

    def run() -> None:
        own.zero_grad(set_to_none=True)
        here.grad = None
        own(here).backward(seed)

    return median_s(run, x.device)


def modules(bench: Bench) -> Iterator[tuple[str, Callable[[Row], None]]]:
    """Yield modules of other packages: placed by hand first, then found by time."""
    for by_time in (False, True):
        for real in MODULES:
            how = "found by time" if by_time else real.how
            yield (
                f"{real.name}, {how}",
                lambda row, real=real, by_time=by_time: _module(row, bench, real, by_time=by_time),
            )


def _module(row: Row, bench: Bench, real: Real, *, by_time: bool) -> None:
    torch.manual_seed(4)
    with torch.device(bench.device):
        module, args, kwargs = real.make(bench.cpu)
    module = module.to(bench.device, bench.dtype)
    args, kwargs = pytree.tree_map(lambda one: one.to(bench.device, bench.dtype), (args, kwargs))
    open_ = {"choose": ["*"], "policy": "min_time"} if by_time else {"placements": real.placements}
    run_row(
        row, bench, module, args, kwargs, lambda captured: api.request(captured, {"d": dist.get_world_size()}, **open_)
    )


def way(row: Row, bench: Bench, how: int | str) -> None:
    """A feed-forward network on sharded tokens, whose gather and scatter go one way."""
    width, hidden, tokens = (32, 64, 64) if bench.cpu else (4096, 14336, 8192)
    torch.manual_seed(5)
    module = FeedForward(width, hidden).to(bench.device, bench.dtype)
    x = torch.randn(1, tokens, width, device=bench.device).to(bench.dtype)
    placements = {"x": ["S(1)"], "output0": ["S(1)"], "up.weight": ["S(0)"], "down.weight": ["S(1)"]}

    def document(captured: Any) -> Row:
        names = [node.name for node in captured.graph.nodes if node.op == "aten.linear.default"]
        ways = {} if how == "whole" else dict.fromkeys(names, how)
        mesh = {"d": dist.get_world_size()}
        asked = {"placements": placements, "gradients": ["x"], "policy": "follow_weights"}
        return api.request(captured, mesh, chunks=ways, **asked)

    run_row(row, bench, module, (x,), {}, document)


def attention(row: Row, bench: Bench, how: str) -> None:
    """Attention on sharded tokens around a ring, or of heads that one matrix makes, which tokens in order enter."""
    width, heads, tokens = (32, 4, 16) if bench.cpu else (4096, 32, TOKENS)
    torch.manual_seed(8)
    module = (Attending if how == "ring" else FusedAttending)(width, heads).to(bench.device, bench.dtype)
    x = torch.randn(2, tokens, width, device=bench.device).to(bench.dtype)
    placements = {"x": ["S(1)"], "output0": ["S(1)"]}
    if how != "ring":
        placements |= {"qkv.weight": ["SS(0,3)"], "out.weight": ROWS}

    def document(captured: Any) -> Row:
        names = [node.name for node in captured.graph.nodes if "attention" in node.op]
        ways = dict.fromkeys(names, "ring") if how == "ring" else {}
        return api.request(captured, {"d": dist.get_world_size()}, chunks=ways, placements=placements, gradients=["x"])

    run_row(row, bench, module, (x,), {}, document)


def experts(row: Row, bench: Bench) -> None:
    """Tokens sent to the experts of other ranks, few of them: products of groups are taken row by row here."""
    width, tokens = (16, 8) if bench.cpu else (512, 64)
    torch.manual_seed(9)
    module = RoutedExperts(4, width, width // 2).to(bench.device, bench.dtype)
    x = torch.randn(2, tokens, width, device=bench.device).to(bench.dtype)
    placements = {"up": ["S(0)"], "down": ["S(0)"], "x": ["S(1)"]}

    def document(captured: Any) -> Row:
        mesh = {"d": dist.get_world_size()}
        return api.request(captured, mesh, placements=placements, gradients=["x"], routes="all_to_all")

    run_row(row, bench, module, (x,), {}, document)


def sizes(row: Row, bench: Bench) -> None:
    """A module sharded as a person does it, called with other batches and lengths than it was captured with."""
    width, heads, tokens = (32, 4, 16) if bench.cpu else (4096, 32, TOKENS)
    torch.manual_seed(7)
    alone = Attending(width, heads).to(bench.device, bench.dtype)

    def drawn(batch: int, length: int) -> torch.Tensor:
        return torch.randn(batch, length, width, device=bench.device).to(bench.dtype)

    placements = {**dict.fromkeys(("q.weight", "k.weight", "v.weight"), COLUMNS), "out.weight": ROWS}
    mesh = {"d": dist.get_world_size()}
    sharded = api.shard(
        copy.deepcopy(alone), (drawn(1, tokens),), mesh=mesh, placements=placements, cluster=cluster_here()
    )
    row["error_of_largest"], row["sizes"] = 0.0, [(1, tokens), (1, tokens // 2), (2, tokens // 4), (1, tokens)]
    for batch, length in row["sizes"]:
        x, weight = drawn(batch, length), drawn(batch, length)
        ours = sharded(x).full_tensor()
        (ours * weight).sum().backward()
        with sdpa_kernel(NOT_CUDNN):
            (alone(x) * weight).sum().backward()
            whole = alone(x)
        pairs = [(ours.detach(), whole.detach())]
        for mine, other in zip(sharded.parameters(), alone.parameters(), strict=True):
            pairs.append((mine.grad.full_tensor(), other.grad))
            mine.grad = other.grad = None
        off = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        row["error_of_largest"] = max(row["error_of_largest"], off)


def memory(row: Row, bench: Bench, share: float) -> None:
    """The fully sharded layer, whose program has so much of the memory that it takes when nothing is made again."""
    limit = 1e15
    if bench.roomy:
        limit = bench.roomy["state_bytes"] + share * bench.roomy["predicted_peak_bytes"]
    row["limit_bytes"] = limit
    layer(row, bench, *LAYERS["fully sharded"], memory_bytes=limit)
    if not bench.roomy:
        bench.roomy = dict(row)


def stages(row: Row, bench: Bench, schedule: str) -> None:
    """Two pipeline stages of two feed-forward layers each, four micro batches; tensor parallelism over the other
    ranks.
    """
    width, hidden, tokens = (32, 64, 32) if bench.cpu else (4096, 14336, 4096)
    torch.manual_seed(6)
    module = torch.nn.Sequential(*(FeedForward(width, hidden) for _ in range(4))).to(bench.device, bench.dtype)
    x = torch.randn(MICRO_BATCHES, tokens, width, device=bench.device).to(bench.dtype)
    inside = dist.get_world_size() // 2
    mesh = {"pp": 2, "tp": inside} if inside > 1 else {"pp": 2}
    halves = {"*.up.weight": ["R", "S(0)"], "*.down.weight": ["R", "S(1)"]} if inside > 1 else {}
    of = {"axis": "pp", "of": {"2": 1}, "micro_batches": MICRO_BATCHES, "schedule": schedule}
    captured = capture(module, (x[:1],))
    program, reported = planned(api.request(captured, mesh, stages=of, placements=halves))
    row |= reported | {"batch": MICRO_BATCHES, "tokens": tokens}
    sharded = ShardedModule(module, captured, program)
    values = own_weights(sharded)
    name = next(one.name for one in captured.graph.inputs if one.kind == "input")
    parts = {f"{name}[{number}]": x[number : number + 1] for number in range(MICRO_BATCHES)}
    weight = torch.randn(x.shape, device=bench.device).to(bench.dtype) / tokens
    values |= sharded.ranks.pieces(parts) | sharded.ranks.seeds(weight.split(1))
    found = sharded.ranks.run(values)
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad((module(x) * weight).sum(), list(parameters.values()))
    of_tensor = {one.target: program.gradients.get(one.name, "") for one in captured.graph.inputs}
    least = 1e-3 * max(float(one.abs().max()) for one in gradients)
    off = 0.0
    for target, gradient in zip(parameters, gradients, strict=True):
        if of_tensor[target] in found:  # the other stage's parameters are not here
            piece = sharded.ranks.place.piece(gradient, program.buffers[of_tensor[target]])
            difference = (found[of_tensor[target]] - piece).abs().max() / piece.abs().max().clamp_min(least)
            off = max(off, float(difference))
    worst = torch.tensor([off], device=bench.device, dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    row["error_of_largest"] = float(worst.item())
    row["launched_s"] = median_s(lambda: sharded.ranks.run(values), bench.device)
