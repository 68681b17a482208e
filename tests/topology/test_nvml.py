"""NVML through a stand-in for pynvml: each call can be made to fail, as real drivers do."""

import ctypes
from types import SimpleNamespace

import pytest

from topology.readers.nvml import read_nvml


class NVMLError(Exception):
    def __init__(self, value, words="not supported"):
        super().__init__(words)
        self.value = value


class _Fabric(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint),
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint),
    ]


class FakeNvml:
    """Four H200s on an NVSwitch fabric. `broken` names functions that fail, `absent` those this version lacks."""

    NVMLError = NVMLError
    NVML_NVLINK_MAX_LINKS = 18
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_INVALID_ARGUMENT = 2
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    c_nvmlGpuFabricInfo_v3_t = _Fabric  # noqa: N815  # pynvml's name

    def __init__(self, *, count=4, broken=(), absent=(), dead_gpu=None, init_error=None, fabric_state=3, width=16,
                 lost_gpu=None, bad_memory=None):  # fmt: skip
        self.lost_gpu, self.bad_memory = lost_gpu, bad_memory
        self.count, self.broken, self.absent = count, set(broken), set(absent)
        self.dead_gpu, self.init_error, self.fabric_state, self.width = dead_gpu, init_error, fabric_state, width

    def __getattr__(self, name):
        if name in self.__dict__.get("absent", ()):
            raise AttributeError(name)
        if name in self.__dict__.get("broken", ()):
            return self._fail
        try:
            return object.__getattribute__(self, f"do_{name}")
        except AttributeError:
            raise AttributeError(name) from None

    @staticmethod
    def _fail(*_):
        raise NVMLError(999, "unknown error")

    def do_nvmlInit(self):  # noqa: N802  # pynvml's names
        if self.init_error is not None:
            raise NVMLError(self.init_error, "init failed")

    def do_nvmlShutdown(self): ...  # noqa: N802

    def do_nvmlDeviceGetCount(self):  # noqa: N802
        return self.count

    def do_nvmlSystemGetDriverVersion(self):  # noqa: N802
        return b"570.86.15"

    def do_nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        if index == self.lost_gpu:
            raise NVMLError(15, "GPU is lost")
        return index

    def do_nvmlDeviceGetTotalEccErrors(self, handle, kind, counter):  # noqa: N802
        return 2 if (handle, kind, counter) == (self.bad_memory, 1, 0) else 0

    def do_nvmlDeviceGetRemappedRows(self, handle):  # noqa: N802
        return [0, 1, 1, 0] if handle == self.bad_memory else [0, 0, 0, 0]

    def do_nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return f"GPU-{handle:08d}"

    def do_nvmlDeviceGetName(self, handle):  # noqa: N802
        return b"NVIDIA H200"

    def do_nvmlDeviceGetPciInfo(self, handle):  # noqa: N802
        return SimpleNamespace(busId=f"00000000:{handle + 8:02X}:00.0".encode())

    def do_nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return SimpleNamespace(total=150_754_820_096)

    def do_nvmlDeviceGetNumaNodeId(self, handle):  # noqa: N802
        return 0xFFFFFFFF  # -1 as unsigned

    def do_nvmlDeviceGetCurrPcieLinkGeneration(self, handle):  # noqa: N802
        return 5

    def do_nvmlDeviceGetMaxPcieLinkGeneration(self, handle):  # noqa: N802
        return 5

    def do_nvmlDeviceGetCurrPcieLinkWidth(self, handle):  # noqa: N802
        return self.width

    def do_nvmlDeviceGetMaxPcieLinkWidth(self, handle):  # noqa: N802
        return 16

    def do_nvmlDeviceGetNvLinkState(self, handle, link):  # noqa: N802
        return 0 if handle == self.dead_gpu else 1

    def do_nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, link):  # noqa: N802
        return 2

    def do_nvmlDeviceGetGpuFabricInfoV(self, handle, reference):  # noqa: N802
        info = reference._obj
        info.state, info.status, info.cliqueId = self.fabric_state, 0, 7
        info.clusterUuid[0] = 0xAB

    def do_nvmlDeviceGetMigMode(self, handle):  # noqa: N802
        return [0, 0]

    def do_nvmlDeviceGetClockInfo(self, handle, kind):  # noqa: N802
        return 1980

    do_nvmlDeviceGetMaxClockInfo = do_nvmlDeviceGetClockInfo  # noqa: N815

    def do_nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):  # noqa: N802
        return 0x4 | 0x1

    def do_nvmlDeviceGetEnforcedPowerLimit(self, handle):  # noqa: N802
        return 700_000

    def do_nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        return [SimpleNamespace(pid=4242, usedGpuMemory=None)] if handle == 1 else []


def test_every_field_is_read():
    snapshot = read_nvml(FakeNvml())
    gpu = snapshot.gpus[1]
    assert (snapshot.driver, snapshot.failure, len(snapshot.gpus)) == ("570.86.15", None, 4)
    assert (gpu.uuid, gpu.name, gpu.pci_bus_id) == ("GPU-00000001", "NVIDIA H200", "00000000:09:00.0")
    assert gpu.memory_bytes == 150_754_820_096
    assert (gpu.pcie_width, gpu.pcie_width_max) == (16, 16)
    assert sum(link.active for link in gpu.links) == 18
    assert gpu.links[0].remote_type == "switch"
    assert (gpu.fabric_state, gpu.fabric_clique, gpu.fabric_status) == ("completed", 7, 0)
    assert gpu.fabric_cluster.startswith("ab00")
    assert gpu.power_limit_w == 700.0
    assert gpu.throttle == ("software power cap",)  # through the older name of the call; idle is no fault
    assert gpu.processes == ((4242, None),)
    assert gpu.numa is None


FIELDS = {
    "nvmlDeviceGetUUID": "uuid",
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetPciInfo": "pci_bus_id",
    "nvmlDeviceGetMemoryInfo": "memory_bytes",
    "nvmlDeviceGetMaxPcieLinkWidth": "pcie_width_max",
    "nvmlDeviceGetNvLinkState": "links",
    "nvmlDeviceGetGpuFabricInfoV": "fabric_state",
    "nvmlDeviceGetMigMode": "mig",
    "nvmlDeviceGetCurrentClocksThrottleReasons": "throttle",
    "nvmlDeviceGetEnforcedPowerLimit": "power_limit_w",
    "nvmlDeviceGetComputeRunningProcesses": "processes",
}


@pytest.mark.parametrize("function", FIELDS)
@pytest.mark.parametrize("how", ["broken", "absent"])
def test_each_field_fails_alone(function, how):
    snapshot = read_nvml(FakeNvml(**{how: [function]}))
    gpu = snapshot.gpus[0]
    if (function, how) == ("nvmlDeviceGetNvLinkState", "absent"):
        assert gpu.links is None  # a missing function is not "no NVLink"
    assert getattr(gpu, FIELDS[function]) is None
    assert gpu.missing
    others = [name for name in FIELDS.values() if name != FIELDS[function]]
    assert all(getattr(gpu, name) is not None for name in others)


def test_a_gpu_that_cannot_be_opened_is_still_counted():
    snapshot = read_nvml(FakeNvml(broken=["nvmlDeviceGetHandleByIndex"]))
    assert [gpu.missing for gpu in snapshot.gpus] == [("handle",)] * 4


@pytest.mark.parametrize(
    ("code", "failure"), [(18, "version mismatch"), (9, "no driver"), (12, "no driver"), (7, "init failed")]
)
def test_why_nvml_does_not_start(code, failure):
    assert read_nvml(FakeNvml(init_error=code)).failure == failure


def test_a_gpu_without_nvlink_has_no_links_rather_than_unknown_ones():
    class Geforce(FakeNvml):
        def do_nvmlDeviceGetNvLinkState(self, handle, link):  # noqa: N802
            raise NVMLError(3)

    assert read_nvml(Geforce()).gpus[0].links == ()


@pytest.mark.parametrize("error", [OverflowError, IndexError, RuntimeError, AssertionError, MemoryError, UnicodeError])
def test_a_library_that_raises_anything_leaves_fields_unknown(error):
    class Broken(FakeNvml):
        def _fail(self, *_):
            raise error("no")

    names = ("Name", "UUID", "NvLinkState", "MigMode", "RemappedRows")
    (gpu, *_) = read_nvml(Broken(broken={f"nvmlDeviceGet{name}" for name in names})).gpus

    assert {"uuid", "name", "links", "mig"} <= set(gpu.missing)
    assert gpu.remap_failed is None
    assert gpu.memory_bytes
