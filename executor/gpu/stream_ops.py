"""CUDA stream operations without a kernel: copy, write a word, wait for a word or for another stream.

Driver calls by address and stream handle cost about a microsecond of host time each, against five to ten through
tensors, events and stream contexts. They use no SM, so they also run concurrently with kernels that fill the GPU.

A stream that waits for a word has no timeout: `executor.gpu.exchange_watch` detects a wait that does not end, and ends
the process. To avoid deadlock even where the hardware maps two streams to one queue, the calls of each rank must be
able to complete when they run strictly one after the other.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import torch

from topology.errors import PlannerError

_thread = threading.local()


class StreamError(PlannerError):
    """The driver refused, or its Python package is missing."""


@cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver  # noqa: PLC0415 - comes with torch's wheels for CUDA
    except ImportError as error:
        raise StreamError("overlap modes need the package cuda-bindings", remedy="pip install cuda-bindings") from error
    return driver


def _check_status(answer: tuple[Any, ...]) -> None:
    if answer[0]:
        raise StreamError("the driver refused a stream operation", why=str(answer[0]))


def set_context(device: torch.device) -> None:
    """Make the device's context current in this thread, since autograd's threads start without one."""
    driver = _driver()
    status, ordinal = driver.cuDeviceGet(device.index)
    _check_status((status,))
    status, context = driver.cuDevicePrimaryCtxRetain(ordinal)
    _check_status((status,))
    _check_status(driver.cuCtxSetCurrent(context))
    _thread.device = device.index


def current_stream(device: torch.device) -> int:
    """Return the handle of the current stream, after making the device's context current in this thread."""
    if getattr(_thread, "device", None) != device.index:
        set_context(device)
    return torch._C._cuda_getCurrentRawStream(device.index)  # noqa: SLF001 - torch's own fast way, which Triton uses too


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copy bytes between addresses of this GPU or its peers."""
    _check_status(_driver().cuMemcpyAsync(target, source, nbytes, stream))


def write_word(address: int, value: int, stream: int) -> None:
    """Write a 32-bit word, here or on a peer, after all earlier copies of the stream. Cannot be captured in a graph."""
    _check_status(_driver().cuStreamWriteValue32(stream, address, value, 0))


def wait_word(address: int, value: int, stream: int) -> None:
    """Wait until a word of this GPU is `value` or later in the cyclic order of int32. Cannot be captured."""
    _check_status(_driver().cuStreamWaitValue32(stream, address, value & 0xFFFFFFFF, 0))  # 0: greater or equal


class Order:
    """Makes one or several streams wait for the work submitted to another so far. Can be captured."""

    def __init__(self, device: torch.device) -> None:
        current_stream(device)
        status, self._event = _driver().cuEventCreate(_driver().CUevent_flags.CU_EVENT_DISABLE_TIMING.value)
        _check_status((status,))

    def __call__(self, *, first: int, then: int | tuple[int, ...]) -> None:
        driver = _driver()
        _check_status(driver.cuEventRecord(self._event, first))
        for stream in then if isinstance(then, tuple) else (then,):
            _check_status(driver.cuStreamWaitEvent(stream, self._event, 0))
