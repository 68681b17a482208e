"""Each GPU as the driver's library reports it (NVML, through nvidia-ml-py).

Every query can fail on its own: old drivers lack functions, containers hide devices, GeForce has no fabric. A field
whose query failed is None and its name is in `missing`; nothing here raises once NVML has started.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

FABRIC_STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
REMOTE_TYPES = {0: "gpu", 1: "npu", 2: "switch"}
# Bits of nvmlClocksEventReasons that mean "slower than asked" (nvml.h); idle and application clocks are not faults.
THROTTLE_BITS = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
MAX_LINKS = 36
MAX_GPUS = 1024  # of a machine, of which eight are usual and 72 the most
GPU_IS_LOST = 15  # NVML_ERROR_GPU_IS_LOST: it has fallen off the bus

# What a query can raise: the driver's errors, those of a missing function, of structures and values of other versions.
FAILURES = (Exception,)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlLink:
    index: int
    active: bool
    remote_type: str | None = None  # "gpu", "switch", "npu"


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlGpu:
    index: int
    uuid: str | None = None
    pci_bus_id: str | None = None
    name: str | None = None
    memory_bytes: int | None = None
    numa: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    links: tuple[NvmlLink, ...] | None = None  # None: the query failed; empty: the GPU has no NVLink
    fabric_state: str | None = None
    fabric_status: int | None = None
    fabric_clique: int | None = None
    fabric_cluster: str | None = None
    mig: bool | None = None
    throttle: tuple[str, ...] | None = None
    power_limit_w: float | None = None
    processes: tuple[tuple[int, int | None], ...] | None = None  # (pid, memory in bytes)
    lost: bool = False  # the driver knows the GPU and cannot reach it
    uncorrected_errors: int | None = None  # of its memory, since the driver was loaded
    remap_pending: bool | None = None  # rows of its memory are replaced at the next reset
    remap_failed: bool | None = None  # a row could not be replaced: no spare ones are left
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlSnapshot:
    """`failure` is why nothing could be read: `no library`, `no driver`, `version mismatch`, or the driver's words."""

    driver: str | None = None
    gpus: tuple[NvmlGpu, ...] = ()
    failure: str | None = None


def read_nvml(nvml: Any = None) -> NvmlSnapshot:
    """Read every GPU through `nvml` (default: the installed `pynvml`). Never raises; see `failure` and `missing`."""
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except FAILURES:
            return NvmlSnapshot(failure="no library")
    try:
        nvml.nvmlInit()
    except FAILURES as error:
        return NvmlSnapshot(failure=_failure(nvml, error))
    try:
        count = _get(lambda: int(nvml.nvmlDeviceGetCount()))
        driver = _get(lambda: _text(nvml.nvmlSystemGetDriverVersion()))
        gpus = [_read_gpu(nvml, index) for index in range(min(count or 0, MAX_GPUS))]
        return NvmlSnapshot(driver=driver, gpus=tuple(gpus), failure="it cannot count GPUs" if count is None else None)
    finally:
        _get(nvml.nvmlShutdown)


def _get(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except FAILURES:
        return None


def _failure(nvml: Any, error: Exception) -> str:
    code = getattr(error, "value", None)
    if code is not None and code == getattr(nvml, "NVML_ERROR_LIB_RM_VERSION_MISMATCH", 18):
        return "version mismatch"
    if code is not None and code in {
        getattr(nvml, "NVML_ERROR_DRIVER_NOT_LOADED", 9),
        getattr(nvml, "NVML_ERROR_LIBRARY_NOT_FOUND", 12),
    }:
        return "no driver"
    return str(error) or type(error).__name__


def _read_gpu(nvml: Any, index: int) -> NvmlGpu:
    missing: list[str] = []
    handle = None
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        nvml.nvmlDeviceGetMemoryInfo(handle)  # some drivers give the handle of a lost GPU
    except FAILURES as error:
        if getattr(error, "value", None) == GPU_IS_LOST:
            return NvmlGpu(index=index, lost=True)
    if handle is None:
        return NvmlGpu(index=index, missing=("handle",))

    def field(name: str, call: Callable[[], T]) -> T | None:
        value = _get(call)
        if value is None:
            missing.append(name)
        return value

    fabric = field("fabric", lambda: _fabric(nvml, handle)) or {}
    state = fabric.get("state")
    remapped = _get(lambda: _remapped(nvml, handle))
    uncorrected = getattr(nvml, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", 1)
    volatile = getattr(nvml, "NVML_VOLATILE_ECC", 0)
    return NvmlGpu(
        index=index,
        uuid=field("uuid", lambda: _text(nvml.nvmlDeviceGetUUID(handle))),
        pci_bus_id=field("pci_bus_id", lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()),
        name=field("name", lambda: _text(nvml.nvmlDeviceGetName(handle))),
        memory_bytes=field("memory_bytes", lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total)),
        numa=field("numa", lambda: _numa(nvml.nvmlDeviceGetNumaNodeId(handle))),
        pcie_width=field("pcie_width", lambda: int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle))),
        pcie_width_max=field("pcie_width_max", lambda: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))),
        links=field("links", lambda: _links(nvml, handle)),
        fabric_state=FABRIC_STATES.get(state, f"state {state}") if state is not None else None,
        fabric_status=fabric.get("status"),
        fabric_clique=fabric.get("clique"),
        fabric_cluster=fabric.get("cluster"),
        mig=field("mig", lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0])),
        throttle=field("throttle", lambda: _throttle(nvml, handle)),
        power_limit_w=field("power_limit_w", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3),
        processes=field("processes", lambda: _processes(nvml, handle)),
        uncorrected_errors=_get(lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, volatile))),
        remap_pending=remapped[0] if remapped is not None else None,
        remap_failed=remapped[1] if remapped is not None else None,
        missing=tuple(missing),
    )


def _remapped(nvml: Any, handle: Any) -> tuple[bool, bool]:
    """Return whether rows of memory wait to be replaced, and whether some could not be."""
    _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    return bool(pending), bool(failed)


def _text(value: Any) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)


def _numa(value: Any) -> int | None:
    node = int(value)
    return node if 0 <= node < 2**16 else None  # NVML says -1 as an unsigned number


def _links(nvml: Any, handle: Any) -> tuple[NvmlLink, ...] | None:
    """Query links by index until the driver reports that there is no such link; any other error is a failure."""
    links: list[NvmlLink] = []
    for number in range(int(getattr(nvml, "NVML_NVLINK_MAX_LINKS", MAX_LINKS))):
        try:
            active = bool(nvml.nvmlDeviceGetNvLinkState(handle, number))
        except FAILURES as error:
            ends = {getattr(nvml, "NVML_ERROR_NOT_SUPPORTED", 3), getattr(nvml, "NVML_ERROR_INVALID_ARGUMENT", 2)}
            if getattr(error, "value", None) not in ends:
                return None
            break
        kind = _get(lambda link=number: int(nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)))  # type: ignore[misc]  # the default argument binds the loop variable
        remote_type = REMOTE_TYPES.get(kind) if kind is not None else None
        links.append(NvmlLink(index=number, active=active, remote_type=remote_type))
    return tuple(links)


def _fabric(nvml: Any, handle: Any) -> dict[str, Any] | None:
    """Fabric state by the newest call that works; the older structures have the same leading fields."""
    calls = (
        ("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v3_t"),
        ("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v2_t"),
        ("nvmlDeviceGetGpuFabricInfo", "c_nvmlGpuFabricInfo_t"),
    )
    for function, structure in calls:
        make = getattr(nvml, structure, None)
        if make is None:
            continue
        info = make()
        if _get(lambda name=function, out=info: (getattr(nvml, name)(handle, ctypes.byref(out)),)) is None:  # type: ignore[misc]  # binds loop variables
            continue
        return {
            "state": int(info.state),
            "status": int(info.status),
            "clique": int(info.cliqueId),
            "cluster": bytes(info.clusterUuid).hex(),
        }
    return None


def _throttle(nvml: Any, handle: Any) -> tuple[str, ...] | None:
    bits = _get(lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)))
    if bits is None:
        bits = _get(lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
    if bits is None:
        return None
    return tuple(name for bit, name in THROTTLE_BITS.items() if bits & bit)


def _processes(nvml: Any, handle: Any) -> tuple[tuple[int, int | None], ...]:
    found = []
    for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
        used = getattr(process, "usedGpuMemory", None)
        found.append((int(process.pid), int(used) if used is not None else None))
    return tuple(found)
