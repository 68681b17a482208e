"""Memory that cuBLAS allocates besides the tensors of a step."""

from __future__ import annotations

from topology.units import MIB


def workspace_bytes(architecture: str) -> int:
    """Return the bytes of one cuBLAS handle's workspace on a stream.

    Source: aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`: 32 MiB on Hopper and Blackwell, else 8
    MiB and 128 KiB. Forward and backward run in threads of their own, each with its handle.
    """
    return 32 * MIB if architecture.lower().startswith(("hopper", "blackwell")) else 8 * MIB + 128 * 1024
