"""When torch's pipelining gathers and reduces the stages of a rank, and what that takes: the independent side of
`simulator.memory.rank` and of `executor.parallel.data_parallel`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from planner.question.question import question_of
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.memory.allocator import Block, CachingAllocator
from simulator.memory.rank import RankReplay
from simulator.memory.replay import MemoryReplay
from topology.catalog.clusters import cluster

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - after the skip
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group  # noqa: E402
from torch.distributed.pipelining import PipelineStage  # noqa: E402
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from executor.model.decoder import Decoder  # noqa: E402
from executor.parallel.data_parallel import apply_fsdp  # noqa: E402

WIDTH, STAGES, UNITS = 8, 2, 2


@contextmanager
def pretended(ranks: int) -> Iterator[None]:
    """Be one of so many ranks; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_torch_gathers_all_stages_first_and_reduces_each_in_the_order_of_its_units(monkeypatch):
    """And each on streams of its own. Every weight has another length, by which it is known."""
    seen: list[tuple[str, int]] = []

    def noted(name):
        real = getattr(param_group, name)

        def also(params, *args, **kwargs):
            seen.append((name, params[0]._orig_size[0]))
            return real(params, *args, **kwargs)

        monkeypatch.setattr(param_group, name, also)

    noted("foreach_all_gather")
    noted("foreach_reduce")
    with pretended(2):
        mesh = init_device_mesh("cpu", (2,))
        stages = [_stage(index, mesh, seen) for index in range(STAGES)]
        contexts = {id(fully_shard.state(stage.submod)._comm_ctx) for stage in stages}
        schedule = ScheduleInterleaved1F1B(stages, 2, loss_fn=lambda out, _: out.sum(), scale_grads=False)
        schedule.step(torch.ones(4, WIDTH), target=torch.ones(4, WIDTH))

    names = [name for name, _ in seen]
    widths = [WIDTH * (1 + index) for index in range(STAGES * UNITS)]
    assert seen[: len(widths)] == [("foreach_all_gather", width) for width in widths]
    assert names.count("foreach_all_gather") == len(widths)
    for stage in range(STAGES):
        own = widths[stage * UNITS :][:UNITS]
        reduced = [seen.index(("foreach_reduce", width)) for width in own]
        assert reduced == sorted(reduced)
        assert reduced[0] > max(at for at, one in enumerate(seen) if one == ("backward", stage))
    assert len(contexts) == STAGES


def _stage(index: int, mesh, seen) -> PipelineStage:
    class Noted(PipelineStage):
        def backward_one_chunk(self, *args, **kwargs):
            super().backward_one_chunk(*args, **kwargs)
            seen.append(("backward", self.stage_index))

    def unit(number: int) -> nn.Module:
        rows = WIDTH * (1 + index * UNITS + number)
        return nn.Sequential(nn.Linear(WIDTH, rows, bias=False), _Narrow())

    module = nn.Sequential(*map(unit, range(UNITS)))
    for child in module:
        fully_shard(child, mesh=mesh, reshard_after_forward=False)
    fully_shard(module, mesh=mesh)
    example = torch.empty(2, WIDTH, requires_grad=True, device="meta")
    alone = dist.new_group([0])
    return Noted(module, index, STAGES, torch.device("cpu"), input_args=example, output_args=example, group=alone)


class _Narrow(nn.Module):
    def forward(self, x):
        return 1.0 * x[..., :WIDTH]


class Logged(CachingAllocator):
    """Notes what is allocated, by stream."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def allocate(self, nbytes: int, stream: str) -> Block:
        self.seen.append((stream, nbytes))
        return super().allocate(nbytes, stream)


def test_the_replay_does_so_too():
    model = replace(load_model("llama3-8b"), layers=6, name="")
    question = question_of(
        model, cluster("dgx-h100"), Workload(seq_len=512, global_batch_size=8), framework="torchtitan", gpus=4
    )
    plan = Plan(dp_shard=2, pp=2, virtual_stages=2, schedule="Interleaved1F1B")
    tensors, memory = MemoryReplay(question, plan).tensors, Logged()
    replay = RankReplay(tensors, 0, memory)
    replay.begin()
    memory.seen.clear()
    replay.step()

    units = [unit for stage in tensors.schedule.stages_of(0) for unit in tensors.stages[stage]]
    whole = [round(2 * float(unit.elements[0])) for unit in units]  # bfloat16
    assert memory.seen[: len(units)] == [("compute", nbytes) for nbytes in whole]
    shards = [(stream, nbytes) for stream, nbytes in memory.seen if stream.startswith("reduce")]
    place = [number for number, stage in enumerate(tensors.schedule.stages_of(0)) for _ in tensors.stages[stage]]
    expected = [(("reduce", "reduce 1")[at], nbytes) for at, nbytes in zip(place, whole, strict=True)]
    for name in ("reduce", "reduce 1"):  # float32, half of it on each rank
        assert [one for one in shards if one[0] == name] == [one for one in expected if one[0] == name]
    assert not any(stream == "gather" for stream, _ in memory.seen)


class Divided(TorchDispatchMode):
    """Notes how many numbers each division makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.div.Tensor:
            self.numbers += [one.numel() for one in tree_leaves(out)]
        return out


def test_gradients_of_one_rank_are_not_divided_into_a_tensor_of_their_own():
    """Torch divides the gradients of a unit into one as large as the unit if its factor is stated."""
    model = replace(load_model("llama3-8b"), layers=1, hidden=32, heads=2, kv_heads=2, head_dim=16, ffn=64, vocab=96)
    with pretended(1):
        mesh = init_device_mesh("cpu", (1,))
        decoder = Decoder(model, range(1), first=True, last=True)
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        apply_fsdp(decoder, mesh, expert_mesh=None, precision=precision, reshard_after_forward=True)
        decoder.set_positions(torch.arange(4), torch.bfloat16)
        with Divided() as divided:
            decoder(torch.zeros(1, 4, dtype=torch.long)).float().sum().backward()

    assert all(parameter.grad is not None for parameter in decoder.parameters())
    assert not [numbers for numbers in divided.numbers if numbers >= model.hidden * model.hidden]
