"""sysfs from a small tree: two GPUs behind one switch with a NIC, one GPU on the other socket."""

import pytest

from topology.readers.sysfs import PciPlace, path_class, read_sysfs


def device(root, path, *, kind, vendor="0x10de", numa=0, width="16", width_max="16", speed="32.0 GT/s PCIe"):
    """Make sys/devices/<path> with its files and the link from sys/bus/pci/devices."""
    real = root / "sys/devices" / path
    real.mkdir(parents=True, exist_ok=True)
    values = {
        "class": kind,
        "vendor": vendor,
        "numa_node": str(numa),
        "current_link_speed": speed,
        "max_link_speed": "32.0 GT/s PCIe",
        "current_link_width": width,
        "max_link_width": width_max,
    }
    for name, value in values.items():
        (real / name).write_text(value + "\n")
    bus = root / "sys/bus/pci/devices"
    bus.mkdir(parents=True, exist_ok=True)
    (bus / real.name).symlink_to(real)
    return real


def machine(root):
    switch = "pci0000:00/0000:00:01.0/0000:01:00.0"
    device(root, f"{switch}/0000:02:00.0/0000:03:00.0", kind="0x030200")
    device(root, f"{switch}/0000:02:01.0/0000:04:00.0", kind="0x030200", width="8", speed="2.5 GT/s PCIe")
    device(root, "pci0000:80/0000:80:01.0/0000:81:00.0", kind="0x030200", numa=1)
    nic = device(root, f"{switch}/0000:02:02.0/0000:05:00.0", kind="0x020700", vendor="0x15b3")
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (root / "sys/class/infiniband/mlx5_0/device").symlink_to(nic)
    (root / "sys/class/net/ibs1").mkdir(parents=True)
    (root / "sys/class/net/ibs1/device").symlink_to(nic)
    ethernet = device(root, "pci0000:80/0000:80:02.0/0000:82:00.0", kind="0x020000", vendor="0x8086", numa=1)
    (root / "sys/class/net/eno1").mkdir(parents=True)
    (root / "sys/class/net/eno1/device").symlink_to(ethernet)
    (root / "sys/class/net/eno1/speed").write_text("25000\n")
    (root / "sys/class/net/eno1/operstate").write_text("down\n")
    (root / "sys/class/net/lo").mkdir()
    (root / "sys/devices/system/node/node0").mkdir(parents=True)
    (root / "sys/devices/system/node/node1").mkdir()
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text("MemTotal:       264000000 kB\nMemFree:        1000 kB\n")


def test_devices_links_and_numa(tmp_path):
    machine(tmp_path)
    found = read_sysfs(tmp_path)
    assert [gpu.place.busid for gpu in found.gpus] == ["0000:03:00.0", "0000:04:00.0", "0000:81:00.0"]
    assert [gpu.place.numa for gpu in found.gpus] == [0, 0, 1]
    assert found.memory_bytes == 264_000_000 * 1024
    assert [gpu.link.width != gpu.link.width_max for gpu in found.gpus] == [False, True, False]
    # An idle link clocks down, so the rate counts the lanes in use at full speed.
    assert found.gpus[1].link.bytes_per_s == pytest.approx(found.gpus[0].link.bytes_per_s / 2)


def test_paths_through_the_tree(tmp_path):
    machine(tmp_path)
    found = read_sysfs(tmp_path)
    first, second, third = (gpu.place for gpu in found.gpus)
    nic = next(nic for nic in found.nics if nic.name == "mlx5_0")
    assert path_class(first, second) == "PIX"
    assert path_class(first, nic.place) == "PIX"
    assert path_class(first, third) == "SYS"


def test_nics_by_their_infiniband_name_and_state(tmp_path):
    machine(tmp_path)
    nics = {nic.name: nic for nic in read_sysfs(tmp_path).nics}
    assert set(nics) == {"mlx5_0", "eno1"}  # ibs1 is the same card, lo has none
    assert nics["mlx5_0"].rdma
    assert nics["mlx5_0"].up
    assert nics["mlx5_0"].interfaces == ("ibs1",)
    assert nics["mlx5_0"].bytes_per_s == pytest.approx(50e9)
    assert not nics["eno1"].up
    assert nics["eno1"].bytes_per_s == pytest.approx(25e9 / 8)


def test_an_empty_root_is_an_empty_machine(tmp_path):
    found = read_sysfs(tmp_path)
    assert (found.gpus, found.nics, found.memory_bytes) == ((), (), None)


def test_path_classes_by_definition():
    def place(host, *bridges, numa=0, tray=0, ports=True):
        return PciPlace(busid="x", host=host, bridges=bridges, numa=numa, tray=tray, ports_listed=ports)

    assert path_class(place("a", "r", "u", "d1"), place("a", "r", "u", "d2")) == "PIX"
    assert path_class(place("a", "r", "u", "d1", "u2", "d"), place("a", "r", "u", "d2")) == "PXB"
    assert path_class(place("a", "r1"), place("a", "r2")) == "PHB"
    assert path_class(place("a", "r1"), place("b", "r2")) == "NODE"
    assert path_class(place("a", "r1"), place("b", "r2", numa=1)) == "SYS"
    assert path_class(place("a", "r1", numa=None), place("b", "r2")) is None
    assert path_class(place("a"), place("a", tray=1)) is None
    # NCCL's XML has each switch once: siblings are PIX, cousins PXB.
    assert path_class(place("a", "s", ports=False), place("a", "s", ports=False)) == "PIX"
    assert path_class(place("a", "s", "t", ports=False), place("a", "s", ports=False)) == "PXB"


@pytest.mark.parametrize("value", ["-1", "0", "-16.0 GT/s PCIe"])
def test_speeds_and_widths_that_are_not_above_zero_are_unknown(tmp_path, value):
    device(tmp_path, "pci0000:00/0000:00:01.0", kind="0x030200", width=value, width_max=value, speed=value)
    (link,) = (gpu.link for gpu in read_sysfs(tmp_path).gpus)

    assert (link.speed_gt, link.width, link.width_max) == (None, None, None)
    assert link.bytes_per_s is None or link.bytes_per_s > 0
