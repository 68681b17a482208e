"""Just enough of torch.cuda to run the measuring code without a GPU: streams with clocks, events that read them.

Time is virtual, in milliseconds. The host takes `issue_ms` for each call; a copy or a product takes `WORK_MS` on the
streams that are current, from when host and streams are ready. So a measurement can be compared with what it should
say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

WORK_MS = 10.0
SLEEP_MS = 10_000.0  # of a kernel that holds a stream back


class Stream:
    def __init__(self, torch: Fake, device: int) -> None:
        self.torch, self.device, self.free_ms = torch, device, 0.0

    def wait_event(self, event: Event) -> None:
        self.torch.issue()
        self.free_ms = max(self.free_ms, event.at_ms)


class Event:
    def __init__(self, torch: Fake) -> None:
        self.torch, self.at_ms = torch, -1.0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.torch.current_stream(self.torch.device)
        self.torch.issue()
        self.at_ms = max(self.torch.host_ms, stream.free_ms)

    def synchronize(self) -> None:
        assert self.at_ms >= 0, "waited for an event that was not recorded"
        self.torch.host_ms = max(self.torch.host_ms, self.at_ms)

    def elapsed_time(self, end: Event) -> float:
        assert end.at_ms <= self.torch.host_ms, "read before the host knows that it has passed"
        return end.at_ms - self.at_ms


class Graph:
    """What was issued while it was captured runs at each replay, for one call of the host."""

    def __init__(self, torch: Fake) -> None:
        self.torch, self.work, self.replays, self.held = torch, list[Callable[[], None]](), 0, False
        torch.graphs.append(self)

    def replay(self) -> None:
        self.torch.issue()
        self.replays += 1
        for run in self.work:
            run()

    def reset(self) -> None:
        self.held = False


class Fake:
    """A stand-in for the module `torch` with `count` devices."""

    int32, bfloat16 = "int32", "bfloat16"

    def __init__(self, count: int, issue_ms: float = 1.0) -> None:
        self.count, self.issue_ms, self.host_ms, self.device = count, issue_ms, 0.0, 0
        self.default = [Stream(self, device) for device in range(count)]
        self.streams: list[Stream] = list(self.default)
        self.current: dict[int, Stream] = {}
        self.graphs: list[Graph] = []
        self.capturing: Graph | None = None
        self.cuda = SimpleNamespace(
            Stream=self._new_stream,
            Event=lambda **_: Event(self),
            stream=self._stream,
            device=self._device,
            device_count=lambda: self.count,
            synchronize=self._synchronize,
            can_device_access_peer=lambda a, b: a != b,
            mem_get_info=lambda _: (2**20, 2**30),
            _sleep=lambda _: self.work([self.current_stream(self.device)], SLEEP_MS),
            CUDAGraph=lambda: Graph(self),
            graph=self._graph,
        )

    def issue(self) -> None:
        self.host_ms += self.issue_ms

    def current_stream(self, device: int) -> Stream:
        return self.current.get(device) or self.default[device]

    def work(self, streams: list[Stream], takes_ms: float = WORK_MS) -> None:
        """Run something on streams, or keep it for the replays of the graph that is being captured."""

        def run() -> None:
            end = max(self.host_ms, *(stream.free_ms for stream in streams)) + takes_ms
            for stream in streams:
                stream.free_ms = end

        if self.capturing is not None:
            self.capturing.work.append(run)
            return
        self.issue()
        run()

    def _new_stream(self, device: int) -> Stream:
        self.streams.append(Stream(self, device))
        return self.streams[-1]

    def _synchronize(self, device: int | None = None) -> None:
        assert self.capturing is None, "CUDA refuses to wait while it captures"
        on = [stream.free_ms for stream in self.streams if device in {None, stream.device}]
        self.host_ms = max(self.host_ms, *on)

    @contextmanager
    def _stream(self, stream: Stream) -> Iterator[None]:
        had, before = self.current.get(stream.device), self.device
        self.current[stream.device], self.device = stream, stream.device
        try:
            yield
        finally:
            self.device = before
            self.current.pop(stream.device)
            if had is not None:
                self.current[stream.device] = had

    @contextmanager
    def _device(self, ordinal: int) -> Iterator[None]:
        before, self.device = self.device, ordinal
        try:
            yield
        finally:
            self.device = before

    @contextmanager
    def _graph(self, graph: Graph, *, capture_error_mode: str = "global") -> Iterator[None]:
        if capture_error_mode == "global":  # NCCL's watchdog thread queries events at any time
            raise RuntimeError("operation not permitted when stream is capturing")
        self.capturing, graph.held = graph, True
        try:
            yield
        finally:
            self.capturing = None

    def empty(self, elements: int, *, dtype: str, device: str | None = None, pin_memory: bool = False) -> Tensor:
        assert (device is None) == pin_memory
        return Tensor(self, elements, device)

    def empty_like(self, other: Tensor) -> Tensor:
        return Tensor(self, other.elements, other.device)

    def randn(self, rows: int, columns: int, *, device: str, dtype: str) -> Tensor:
        return Tensor(self, rows * columns, device)

    def arange(self, elements: int, *, dtype: str, device: str) -> Tensor:
        return Tensor(self, elements, device, value=("arange",))

    def mm(self, a: Tensor, b: Tensor, *, out: Tensor) -> None:
        assert a.device == b.device == out.device == f"cuda:{self.device}"
        self.work([self.current_stream(self.device)])

    def equal(self, a: Tensor, b: Tensor) -> bool:
        assert a.device == b.device, "a comparison across devices would copy again"
        return a.value == b.value


class Tensor:
    def __init__(self, torch: Fake, elements: int, device: str | None, value: Any = None) -> None:
        self.torch, self.elements, self.device, self.value = torch, elements, device, value

    def numel(self) -> int:
        return self.elements

    def zero_(self) -> Tensor:
        self.value = 0
        return self

    def mul_(self, by: int) -> Tensor:
        assert -(2**31) <= by < 2**31
        self.value = (*self.value, "mul", by)
        return self

    def add_(self, what: int) -> Tensor:
        assert -(2**31) <= what < 2**31
        self.value = (*self.value, "add", what)
        return self

    def copy_(self, other: Tensor, *, non_blocking: bool = False) -> Tensor:
        self.value = other.value
        ends = {tensor.device for tensor in (self, other) if tensor.device is not None}
        self.torch.work([self.torch.current_stream(int(end.removeprefix("cuda:"))) for end in ends])
        return self
