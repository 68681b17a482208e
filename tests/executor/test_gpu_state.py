"""What nvidia-smi prints, read field by field."""

from executor.gpu import state as gpu_state
from executor.gpu.state import gpu_processes, read_states
from topology.profile.measurement import GpuState


def test_states_are_read() -> None:
    lines = "0, 1980, 412.55, 51, 0x0000000000000004\n1, 345, 71.2, 30, 0x0000000000000041\n"

    states = read_states(lambda _: lines)

    assert states[0].throttle == ("software power cap",)
    assert states[1].throttle == ("hardware thermal slowdown",)  # bit 0x01, idle, is no fault
    assert states[0].sm_clock_hz == 1980e6


def test_fields_that_a_driver_does_not_give_are_none() -> None:
    states = read_states(lambda _: "0, [N/A], [Not Supported], 51, [N/A]\n")

    assert states[0] == GpuState(gpu=0, temperature_c=51.0)


def test_an_old_driver_knows_the_old_name_only() -> None:
    asked = []

    def run(command):
        asked.append(command[1])
        return "0, 1, 2, 3, 0x0\n" if "clocks_throttle_reasons" in command[1] else ""

    assert read_states(run)[0].throttle == ()
    assert len(asked) == 2


def test_nothing_and_nonsense_give_nothing() -> None:
    assert read_states(lambda _: "") == {}
    assert read_states(lambda _: "No devices were found\n, , , ,\n") == {}
    assert gpu_processes(lambda _: "garbage\n") == []


def test_occupants_have_an_owner(monkeypatch) -> None:
    monkeypatch.setattr(gpu_state, "process_owner", {42: "alice"}.get)

    found = gpu_processes(lambda _: "GPU-1, 42, 3072\nGPU-2, 43, [N/A]\n")

    assert [(one.gpu_uuid, one.pid, one.owner) for one in found] == [("GPU-1", 42, "alice"), ("GPU-2", 43, None)]
    assert [one.memory_bytes for one in found] == [3 * 2**30, None]
