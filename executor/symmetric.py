"""Memory that all GPUs of a group see, and who may write where when.

A `Workspace` belongs to one group and one purpose. It has two sets of data, used in turn, flags, and the words with
which kernels count calls (`executor.kernels.signals` tells how). Because they take turns, no barrier is needed between
calls: no call ends before every peer has delivered its part, so whoever writes into a set again knows that its reader
has finished with it. A captured CUDA graph repeats with the same addresses and cannot take turns: its copies go to memory
that no eager call uses (`Workspace.for_graphs`), behind a barrier.

All ranks make the same calls in the same order, on one stream: that is the contract of symmetric memory altogether.
NVLink multicast is never used, and it is refused where it is switched on: creating its objects can hang the fabric of
virtual machines and shared hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._symmetric_memory import rendezvous

from executor.exchange_watch import Line, the_watch
from executor.stream_ops import Order
from topology.errors import PlannerError

POLLS = 1 << 28  # of a flag, a tenth to a fifth of a microsecond each: about a minute
BARRIER_MS = 60_000
STORE_ALIGNMENT = 256
MAX_PROGRAMS = 256  # of one kernel, for which flags and epochs are laid out


class SymmetricMemoryError(PlannerError):
    """Symmetric memory cannot be had here, or a peer did not deliver."""


class Allocation:
    """Bytes at the same place on every rank of a group. Making one is a collective call."""

    def __init__(self, nbytes: int, group: dist.ProcessGroup, device: torch.device) -> None:
        from torch._C._autograd import DeviceType  # noqa: PLC0415 - torch exposes it nowhere else
        from torch._C._distributed_c10d import _SymmetricMemory  # noqa: PLC0415 - as above

        if _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index):
            raise SymmetricMemoryError(
                "NVLink multicast is switched on",
                why="symmetric memory would create multicast objects, which can hang GPUs that others share",
                remedy="set TORCH_SYMM_MEM_DISABLE_MULTICAST=1 (and NCCL_NVLS_ENABLE=0) in every process",
            )
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        # An allocation of its own: in a shared pool, addresses would carry an offset that differs from rank to rank.
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
        """Return a rank's memory as a tensor that this process can copy from and to."""
        return self.handle.get_buffer(rank, tuple(shape), dtype, offset_bytes // dtype.itemsize)


class Workspace:
    """Two sets of data, flags, and counters, of one group and purpose."""

    def __init__(self, group: dist.ProcessGroup, purpose: str, device: torch.device) -> None:
        self.group, self.purpose, self.device = group, purpose, device
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.set_bytes, self.turns = 0, 0
        self.data: Allocation | None = None
        self.signals: Allocation | None = None
        self.prepared: dict[Any, Any] = {}  # what refers to this memory by address; goes when it grows
        self.order = Order(device)
        self.captured = False
        self.graphs: Workspace | None = None
        self.outgrown: list[Allocation | Workspace | None] = []  # that captured graphs still refer to
        # epoch: calls so far; ticket: programs that have left the running kernel; error: 1 + the rank that was missed.
        self.words = torch.zeros((3, 32), dtype=torch.int32, device=device)
        self.epoch, self.ticket, self.error = self.words[0, :1], self.words[1, :1], self.words[2, :1]
        self.epochs = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device)  # for programs that count alone

    def reserve(self, set_bytes: int, flags: int) -> None:
        """Make room for `set_bytes` in each set and that many int32 flags; collective when it has to grow."""
        wanted_bytes, wanted_flags = self.lacks(set_bytes, flags)
        capturing = self.fenced()
        self.captured |= capturing
        if not (wanted_flags or wanted_bytes):
            return
        if capturing:
            raise _cannot_grow(set_bytes, flags)
        if self.captured:
            self.outgrown += [self.data if wanted_bytes else None, self.signals if wanted_flags else None]
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)  # nobody writes to what is given back now
        self.prepared.clear()
        if wanted_flags:
            # Zero is before every call, so fresh flags need no knowledge of the epoch.
            self.signals = Allocation(4 * max(1024, 1 << (flags - 1).bit_length()), self.group, self.device)
        if wanted_bytes:
            self.set_bytes = -(-max(set_bytes, 1 << 16) // STORE_ALIGNMENT) * STORE_ALIGNMENT
            self.data = Allocation(2 * self.set_bytes, self.group, self.device)

    def lacks(self, set_bytes: int, flags: int) -> tuple[bool, bool]:
        """Say whether there is too little room for data, and for flags."""
        return (
            self.data is None or self.set_bytes < set_bytes,
            self.signals is None or self.signals.local.numel() < 4 * flags,
        )

    def for_graphs(self, set_bytes: int, flags: int) -> Workspace:
        """Return what copies in captured graphs use, for the call that is being captured.

        Nothing can be allocated now. The first capture takes the memory that there is, of calls that ran before, and the
        next eager call gets new memory. An eager call could meet a graph's in no other way: a graph is replayed without
        our knowledge, and what it holds is still read by products after it.
        """
        if self.graphs is None or any(self.graphs.lacks(set_bytes, flags)):
            if any(self.lacks(set_bytes, flags)):
                raise _cannot_grow(set_bytes, flags)
            self.outgrown.append(self.graphs)
            self.graphs = copy(self)
            self.data, self.signals, self.set_bytes, self.prepared = None, None, 0, {}
        return self.graphs

    def turn(self) -> int:
        """Return the set (0 or 1) whose addresses this call may be given."""
        self.turns += 1
        return self.turns % 2

    @staticmethod
    def fenced() -> bool:
        """Say whether a graph is being captured, whose calls begin with a barrier (`fence`) instead of taking turns."""
        return torch._C._cuda_isCurrentStreamCapturing()  # noqa: SLF001 - without a look whether CUDA is there

    def fence(self) -> None:
        """A barrier of the ranks on the current stream: behind it nobody reads what calls before it have brought."""
        self.flags.handle.barrier(0, BARRIER_MS)

    @cached_property
    def line(self) -> Line:
        """Where calls whose streams wait are counted, see `executor.exchange_watch`."""
        return the_watch().line(f"{self.purpose}, group {self.group.group_name}")

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


def workspace(group: dist.ProcessGroup, purpose: str, device: torch.device) -> Workspace:
    """Return the workspace of a group for a purpose; the same object every time."""
    key = (group, purpose, device.index)
    found = _workspaces.get(key)
    if found is None:
        found = _workspaces[key] = Workspace(group, purpose, device)
    return found


def workspaces() -> tuple[Workspace, ...]:
    return tuple(_workspaces.values())


def held_bytes() -> int:
    """Return the bytes of all symmetric memory of this process, of which torch's allocator knows nothing."""
    found = [part for space in _workspaces.values() for part in (space, space.graphs, *space.outgrown)]
    memory = {id(one): one for part in found for one in _allocations(part)}
    return sum(one.local.numel() for one in memory.values())


def _allocations(part: Workspace | Allocation | None) -> tuple[Allocation, ...]:
    held = (part.data, part.signals) if isinstance(part, Workspace) else (part,)
    return tuple(one for one in held if one is not None)


def release() -> None:
    """Forget all workspaces. Collective: no rank may still write to another's."""
    for space in _workspaces.values():
        torch.cuda.synchronize(space.device)
        dist.barrier(space.group)
    if any("line" in vars(part) for space in _workspaces.values() for part in (space, space.graphs) if part):
        the_watch().forget()
    _workspaces.clear()


def check_delivered() -> None:
    """Raise SymmetricMemoryError if any wait since the last check ran out of polls. Synchronizes with the GPU."""
    for (group, purpose, _), space in _workspaces.items():
        missed = int(space.error.item())
        if missed:
            space.error.zero_()
            raise SymmetricMemoryError(
                f"rank {missed - 1} of group {group.group_name} did not deliver its part",
                why=f"a kernel ({purpose}) polled its flag {POLLS} times and gave up; its result is not to be used",
                remedy="look for the first failure in that rank's log; the ranks must make the same calls in one order",
            )
