"""Symmetric memory: buffers that all GPUs of a group can access, and the protocol for writing to them.

A `Workspace` belongs to one group and one purpose. It has sets of buffers, used in turn, flags, and the words with
which kernels count calls (see `executor.kernels.signals`). Two sets make a barrier between calls unnecessary: no call
ends before every peer has delivered its part, so when a set is written again its reader has finished with it.

All ranks must make the same calls in the same order, on one stream. NVLink multicast is never used, and it is an error
if it is switched on: creating its objects can hang the fabric of virtual machines and shared hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import DeviceType
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed._symmetric_memory import rendezvous

from executor.gpu.exchange_watch import CallCounter, process_watch
from executor.gpu.stream_ops import Order
from topology.errors import PlannerError

POLLS = 1 << 28  # polls of a flag, a tenth to a fifth of a microsecond each: about a minute
BARRIER_MS = 60_000
STORE_ALIGNMENT = 256
MAX_PROGRAMS = 256  # programs of one kernel for which flags and epochs have room


class SymmetricMemoryError(PlannerError):
    """Symmetric memory is not available, or a peer did not deliver its part."""


class Allocation:
    """A symmetric allocation on every rank of a group. Creating one is a collective call.

    `at` are its addresses by rank, as seen from this process; `addresses` the same as a tensor on the GPU.
    """

    def __init__(self, nbytes: int, group: dist.ProcessGroup, device: torch.device) -> None:
        if _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index):
            raise SymmetricMemoryError(
                "NVLink multicast is switched on",
                why="symmetric memory would create multicast objects, which can hang GPUs that others share",
                remedy="set TORCH_SYMM_MEM_DISABLE_MULTICAST=1 (and NCCL_NVLS_ENABLE=0) in every process",
            )
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        # An allocation of its own: in a shared pool, offsets in addresses would differ from rank to rank.
        self.local = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device, group.group_name)
        self.handle = rendezvous(self.local, group)
        if self.handle.multicast_ptr:
            raise SymmetricMemoryError(
                "symmetric memory came with a multicast address", why="it was to be off", remedy="see SECURITY.md"
            )
        self.local.zero_()
        torch.cuda.synchronize(device)
        self.handle.barrier(0, BARRIER_MS)
        self.at = tuple(self.on(rank, (1,), torch.uint8).data_ptr() for rank in range(self.world))
        self.addresses = torch.tensor(self.at, dtype=torch.int64, device=device)

    def on(self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset_bytes: int = 0) -> Tensor:
        """Return a rank's memory, from `offset_bytes` on, as a tensor that this process can read and write."""
        return self.handle.get_buffer(rank, tuple(shape), dtype, offset_bytes // dtype.itemsize)


class Workspace:
    """Buffers in `sets`, flags, and counters of one group and purpose."""

    def __init__(self, group: dist.ProcessGroup, purpose: str, device: torch.device, sets: int = 2) -> None:
        self.group, self.purpose, self.device, self.sets = group, purpose, device, sets
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.set_bytes, self.turns = 0, 0
        self.data: Allocation | None = None
        self.signals: Allocation | None = None
        self.prepared: dict[
            Any, Any
        ] = {}  # kernels and plans that hold addresses of this memory; cleared when it grows
        self.order = Order(device)
        self.captured = False
        self.outgrown: list[Allocation | None] = []  # memory that captured graphs still use
        # epoch: calls so far; ticket: programs that have left the running kernel; error: 1 + the rank waited for in
        # vain.
        self.words = torch.zeros((3, 32), dtype=torch.int32, device=device)
        self.epoch, self.ticket, self.error = self.words[0, :1], self.words[1, :1], self.words[2, :1]
        self.epochs = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device)  # for kernels with an epoch a program

    def reserve(self, set_bytes: int, flags: int) -> None:
        """Ensure `set_bytes` in each set and `flags` int32 flags; a collective call when it has to grow."""
        wanted_bytes, wanted_flags = self.lacks(set_bytes, flags)
        capturing = self.is_capturing()
        self.captured |= capturing
        if not (wanted_flags or wanted_bytes):
            return
        if capturing:
            raise _cannot_grow(set_bytes, flags)
        if self.captured:
            self.outgrown += [self.data if wanted_bytes else None, self.signals if wanted_flags else None]
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)  # all ranks have stopped writing to the buffers
        self.prepared.clear()
        if wanted_flags:
            # Zero is earlier than every call, so new flags need not know the epoch.
            self.signals = Allocation(4 * max(1024, 1 << (flags - 1).bit_length()), self.group, self.device)
        if wanted_bytes:
            self.set_bytes = -(-max(set_bytes, 1 << 16) // STORE_ALIGNMENT) * STORE_ALIGNMENT
            self.data = Allocation(self.sets * self.set_bytes, self.group, self.device)

    def lacks(self, set_bytes: int, flags: int) -> tuple[bool, bool]:
        """Return whether the data buffers and the flags are too small."""
        return (
            self.data is None or self.set_bytes < set_bytes,
            self.signals is None or self.signals.local.numel() < 4 * flags,
        )

    def turn(self) -> int:
        """Return the number of the set that this call uses; each in turn."""
        self.turns += 1
        return self.turns % self.sets

    @staticmethod
    def is_capturing() -> bool:
        """Return whether a CUDA graph is being captured."""
        return torch._C._cuda_isCurrentStreamCapturing()  # noqa: SLF001 - the public function also checks for CUDA

    @cached_property
    def call_counter(self) -> CallCounter:
        """The counter of calls in which a stream waits; see `executor.gpu.exchange_watch`."""
        return process_watch().add_counter(f"{self.purpose}, group {self.group.group_name}")

    @property
    def slots(self) -> Allocation:
        assert self.data is not None, "reserve() comes first"  # noqa: S101 - ours to get right
        return self.data

    @property
    def flags(self) -> Allocation:
        assert self.signals is not None, "reserve() comes first"  # noqa: S101 - ours to get right
        return self.signals


def _cannot_grow(set_bytes: int, flags: int) -> SymmetricMemoryError:
    return SymmetricMemoryError(
        "symmetric memory cannot grow while a CUDA graph is captured",
        why=f"this call needs 2 x {set_bytes} bytes and {flags} flags, more than any before",
        remedy="run the call once before capturing it",
    )


_workspaces: dict[tuple[dist.ProcessGroup, str, int], Workspace] = {}


def workspace(group: dist.ProcessGroup, purpose: str, device: torch.device, *, sets: int = 2) -> Workspace:
    """Return the workspace of a group for a purpose; created at the first call, with so many sets."""
    key = (group, purpose, device.index)
    found = _workspaces.get(key)
    if found is None:
        found = _workspaces[key] = Workspace(group, purpose, device, sets)
    return found


def workspaces() -> tuple[Workspace, ...]:
    return tuple(_workspaces.values())


def workspace_bytes() -> int:
    """Return the bytes of all symmetric memory of this process, which torch's allocator does not count."""
    held = (one for space in _workspaces.values() for one in (space.data, space.signals, *space.outgrown))
    return sum(one.local.numel() for one in held if one is not None)


def release() -> None:
    """Release all workspaces. A collective call, so that no rank still writes to another's."""
    for space in _workspaces.values():
        torch.cuda.synchronize(space.device)
        dist.barrier(space.group)
    _workspaces.clear()


def check_delivered() -> None:
    """Raise SymmetricMemoryError if a wait since the last check exceeded its polls. Synchronizes with the GPU."""
    for (group, purpose, _), space in _workspaces.items():
        missed = int(space.error.item())
        if missed:
            space.error.zero_()
            raise SymmetricMemoryError(
                f"rank {missed - 1} of group {group.group_name} did not deliver its part",
                why=f"a kernel ({purpose}) polled its flag {POLLS} times and gave up; its result is not to be used",
                remedy="look for the first failure in that rank's log; the ranks must make the same calls in one order",
            )
