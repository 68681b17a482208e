"""Stand-ins for the driver's library (NVML) whose GPUs fail when they are asked to."""

from types import SimpleNamespace


class FailingNvml:
    """Two GPUs. `lose`, `spoil` and `say` make one fall off the bus, have memory errors, or report an Xid."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(f"error {value}")
            self.value = value

    def __init__(self) -> None:
        self.lost: set[int] = set()
        self.errors, self.clock_mhz = {0: 7, 1: 0}, {0: 1980, 1: 1980}  # errors of before the run are no fault of it
        self.events: list[SimpleNamespace] = []

    def lose(self, gpu: int) -> None:
        self.lost.add(gpu)

    def spoil(self, gpu: int, errors: int) -> None:
        self.errors[gpu] += errors

    def say(self, gpu: int, xid: int) -> None:
        self.events.append(SimpleNamespace(device=gpu, eventData=xid))

    def here(self, gpu: int) -> None:
        if gpu in self.lost:
            raise self.NVMLError(15)

    def nvmlInit(self) -> None: ...  # noqa: N802 - the library's names

    def nvmlShutdown(self) -> None: ...  # noqa: N802 - as above

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - as above
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802 - as above
        return index

    def nvmlDeviceGetIndex(self, handle: int) -> int:  # noqa: N802 - as above
        return handle

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802 - as above
        self.here(handle)
        return SimpleNamespace(total=1)

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:  # noqa: N802 - as above
        self.here(handle)
        return self.clock_mhz[handle]

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:  # noqa: N802 - as above
        self.here(handle)
        return self.errors[handle]

    def nvmlEventSetCreate(self) -> str:  # noqa: N802 - as above
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: str) -> None: ...  # noqa: N802 - as above

    def nvmlEventSetWait_v2(self, events: str, milliseconds: int) -> SimpleNamespace:  # noqa: N802 - as above
        if not self.events:
            raise self.NVMLError(10)
        return self.events.pop(0)
