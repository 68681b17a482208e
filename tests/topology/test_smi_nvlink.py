import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.topology.captures import text
from topology.readers.smi_nvlink import parse_nvlink
from topology.readers.smi_query import parse_query


def test_a6000s_of_which_one_has_no_bridge():
    report = parse_nvlink(text("topo/nvlink_status/3x_a6000_one_pair.txt"))
    assert [gpu.active for gpu in report.gpus] == [4, 4, 0]
    assert report.gpus[2].all_inactive
    assert report.gpus[0].name == "NVIDIA RTX A6000"
    assert report.gpus[0].links[3].bytes_per_s == pytest.approx(14.062e9)


def test_inactive_links_of_a_v100():
    (gpu,) = parse_nvlink(text("topo/nvlink_status/v100_gpu3_two_inactive.txt")).gpus
    assert gpu.index == 3
    assert gpu.active == 4
    assert [link.index for link in gpu.links if not link.active] == [3, 5]


def test_far_ends_of_an_h100():
    (gpu,) = parse_nvlink(text("topo/nvlink_status/h100_gpu0_nvlink_R_remote.txt")).gpus
    assert gpu.active is None  # -R says nothing about activity
    assert sorted(gpu.remotes.values()) == [4, 4, 5, 5]  # the 18 links of an H100 over 4 NVSwitches
    assert sum(gpu.remotes.values()) == 18
    assert gpu.links[0].remote_link == 46


def test_outputs_of_one_gpu_are_merged():
    status = text("h200x4/nvidia_smi_nvlink_s_gpu0.txt")
    errors = "GPU 0: NVIDIA H200 (UUID: GPU-0)\n\t Link 0: Replay Errors: 3\n\t Link 0: CRC Errors: 0\n"
    (gpu,) = parse_nvlink(status + "\n" + errors).gpus
    assert gpu.active == 18
    assert gpu.links[0].errors == {"replay": 3, "crc": 0}
    assert gpu.links[0].bytes_per_s == pytest.approx(26.562e9)


def test_the_list_of_gpus_with_mig_instances():
    report = parse_nvlink(
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aa)\n  MIG 3g.20gb     Device  0: (UUID: MIG-bb)\n"
        "  MIG 3g.20gb     Device  1: (UUID: MIG-cc)\nGPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-dd)\n"
    )
    assert report.gpus[0].mig_uuids == ("MIG-bb", "MIG-cc")
    assert [gpu.uuid for gpu in report.gpus] == ["GPU-aa", "GPU-dd"]
    assert report.gpus[0].active is None


def test_a_sentence_that_is_not_known_is_kept_as_unknown():
    report = parse_nvlink("GPU 0: X (UUID: GPU-0)\n Link 0: sparkling\n")
    assert report.unknown == ("Link 0: sparkling",)
    assert report.gpus[0].active is None


_WORDS = st.sampled_from(
    ["GPU 0: A (UUID: GPU-0)", "Link 0: ", "Link 1: ", "14.062 GB/s", "<inactive>", "\n", " ", "9"]
)


@given(st.one_of(st.text(), st.lists(_WORDS, max_size=40).map("".join)))
def test_no_text_crashes_the_parser_or_invents_a_rate(text):
    report = parse_nvlink(text)
    for gpu in report.gpus if report else ():
        for link in gpu.links:
            assert f"Link {link.index}" in text or f"{link.index}" in text
            assert not link.active or "GB/s" in text


CSV = """\
index, uuid, pci.bus_id, name, memory.total [MiB], pcie.link.width.current, pcie.link.width.max, mig.mode.current
0, GPU-aa, 00000000:08:00.0, NVIDIA H200, 143771 MiB, 16, 16, Disabled
1, GPU-bb, 00000000:09:00.0, NVIDIA H200, 143771, 8, 16, [N/A]
oops
"""


def test_the_query_table():
    first, second = parse_query(CSV)
    assert first.memory_bytes == second.memory_bytes == 143771 * 2**20
    assert (first.mig, second.mig) == (False, None)
    assert (second.pcie_width, second.pcie_width_max) == (8, 16)
    assert second.pci_bus_id == "00000000:09:00.0"


@given(st.one_of(st.text(), st.lists(st.sampled_from([*CSV.split(","), "\n"]), max_size=30).map(",".join)))
def test_no_text_crashes_the_query_reader(text):
    for gpu in parse_query(text):
        assert str(gpu.index) in text
