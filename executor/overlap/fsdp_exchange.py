"""FSDP2's exchanges by copy engines, which take no SMs from the products alongside, through FSDP2's own interface.

    gather   a shard is pushed into its place in every peer's symmetric memory, where FSDP2 unpacks it
    scatter  a part is pushed to its owner's slot; the owner adds the parts up in the order of ranks

PyTorch calls such exchanges low-contention collectives. There is no barrier. A rank whose peers' pushes of call n have
arrived knows that they have unpacked call n - 2, since FSDP2's gathers wait for the copy out of the gather before the
last (`_fsdp_param_group.py`: `wait_for_unshard`), or have added up call n - 1, which ran on the same stream. So call
n + 1 finds a free set among three of gathers and two of scatters. Flags hold the number of a set's use and need no
reset.

Only blocks are exchanged in this way, so that the buffers are as large as a block, not as the embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from executor.gpu import stream_ops
from executor.gpu import symmetric_memory as symmetric
from simulator.config.plan import COPY_ENGINE, NCCL
from simulator.step.symmetric_memory import GATHER_SETS, SCATTER_SETS


class Pushes:
    """The pushes of one kind of exchange of a group, of up to `set_bytes` in total; creating it is a collective
    call.
    """

    def __init__(self, purpose: str, sets: int, set_bytes: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.what = f"FSDP's {purpose}"
        self.space = symmetric.workspace(group, self.what, device, sets=sets)
        self.space.reserve(set_bytes, sets * self.space.world)

    @property
    def offset(self) -> int:
        """The byte offset of the set of the next call."""
        return self.space.turns % self.space.sets * self.space.set_bytes

    def received(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return this rank's memory in the set of the next call. Raises ValueError if the set is smaller."""
        if prod(shape) * dtype.itemsize > self.space.set_bytes:
            raise ValueError(f"{self.what} of {shape} numbers do not fit into {self.space.set_bytes} bytes")
        return self.space.slots.on(self.space.rank, shape, dtype, self.offset)

    def exchange(self, sources: Sequence[int], nbytes: int) -> None:
        """Push `nbytes` from the address in `sources` for each peer to this rank's place there, and wait for the pushes
        of all peers, on the current stream.
        """
        space = self.space
        stream, (use, turn) = stream_ops.current_stream(space.device), divmod(space.turns, space.sets)
        others = [(space.rank - step) % space.world for step in range(1, space.world)]
        for peer in others:
            stream_ops.copy(space.slots.at[peer] + self.offset + space.rank * nbytes, sources[peer], nbytes, stream)
            stream_ops.write_word(self._flag(peer, turn, space.rank), use + 1, stream)
        for peer in reversed(others):
            stream_ops.wait_word(self._flag(space.rank, turn, peer), use + 1, stream)
        counter = space.call_counter  # detects a wait that does not end
        stream_ops.write_word(counter.address, counter.issue(self.what), stream)
        space.turn()

    def _flag(self, rank: int, turn: int, source: int) -> int:
        return self.space.flags.at[rank] + 4 * (turn * self.space.world + source)


class PushedGather(AllGather):
    """FSDP2's all-gather. Without `pushes`, as on a CPU, the process group gathers."""

    def __init__(self, pushes: Pushes | None) -> None:
        self.pushes = pushes

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.pushes is None:
            return torch.empty(size, dtype=dtype, device=device)
        return self.pushes.received(tuple(int(length) for length in size), dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self.pushes is None:
            gathering: dist.Work | None = dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
            return gathering
        nbytes = input_tensor.numel() * input_tensor.element_size()
        self.pushes.exchange([input_tensor.data_ptr()] * self.pushes.space.world, nbytes)
        return None


class PushedScatter(ReduceScatter):
    """FSDP2's reduce-scatter by sum. Without `pushes`, as on a CPU, the process group reduces."""

    def __init__(self, pushes: Pushes | None) -> None:
        self.pushes = pushes

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self.pushes is None:
            reducing: dist.Work | None = dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
            return reducing
        rank, world = self.pushes.space.rank, self.pushes.space.world
        parts = input_tensor.view(world, -1)
        slots = self.pushes.received(tuple(parts.shape), parts.dtype)
        self.pushes.exchange([part.data_ptr() for part in parts], parts[0].numel() * parts.element_size())
        first, second, *others = (parts[rank] if source == rank else slots[source] for source in range(world))
        torch.add(first, second, out=output_tensor)
        for part in others:
            output_tensor.add_(part)
        return None


def padded_numel(module: nn.Module, ranks: int) -> int:
    """Return the numbers in a unit's buffer: rows of each parameter are padded to a multiple of the ranks."""
    shapes = [parameter.shape or (1,) for parameter in module.parameters()]
    return sum(-(-shape[0] // ranks) * ranks * prod(shape[1:]) for shape in shapes)


def push_exchanges(
    units: Sequence[nn.Module], group: dist.ProcessGroup, device: torch.device, precision: MixedPrecisionPolicy
) -> None:
    """Let copy engines exchange units that FSDP2 shards over `group`; a collective call."""
    largest = max((padded_numel(unit, dist.get_world_size(group)) for unit in units), default=0)
    stored = max((parameter.dtype.itemsize for unit in units for parameter in unit.parameters()), default=0)
    gathered, reduced = (
        largest * (stored if kept is None else kept.itemsize)
        for kept in (precision.param_dtype, precision.reduce_dtype)
    )
    cuda = device.type == "cuda"
    gather = PushedGather(Pushes("all-gather", GATHER_SETS, gathered, group, device) if cuda else None)
    scatter = PushedScatter(Pushes("reduce-scatter", SCATTER_SETS, reduced, group, device) if cuda else None)
    for unit in units:
        if isinstance(unit, FSDPModule):
            unit.set_custom_all_gather(gather)
            unit.set_custom_reduce_scatter(scatter)


def applied_exchange(units: Sequence[nn.Module]) -> str:
    """Return how sharded units exchange, read from FSDP's state; several ways are joined by `/`."""
    found = set()
    for unit in units:
        if isinstance(unit, FSDPModule):
            state = unit._get_fsdp_state()  # noqa: SLF001 - nothing public says it
            for one in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]:
                comms = (getattr(one, "_all_gather_comm", None), getattr(one, "_reduce_scatter_comm", None))
                found |= {COPY_ENGINE if isinstance(comm, PushedGather | PushedScatter) else NCCL for comm in comms}
    return "/".join(sorted(found))
