"""Datasheets: published figures, driver names, and the honesty of their sources."""

import pytest

from topology.catalog.cluster_file import load_cluster
from topology.catalog.gpus import bridges, gpu_kind, gpu_kinds, match_driver_name
from topology.catalog.verify import BOOST
from topology.errors import BadCluster
from topology.rates.reach import cluster_caveats

DRIVER_NAMES = {
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H200": "h200-sxm",
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
    "NVIDIA A100-SXM4-40GB": "a100-sxm-40gb",
    "A100-SXM4-40GB": "a100-sxm-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "Tesla V100-SXM2-32GB": "v100-sxm-32gb",
    "Tesla P100-SXM2-16GB": "p100-sxm-16gb",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 4070": "rtx-4070",
    "NVIDIA GeForce RTX 4060": "rtx-4060",
    "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada",
    "Tesla T4": "t4",
    "NVIDIA A10": "a10",
    "NVIDIA A10G": "a10g",
    "NVIDIA A40": "a40",
    "NVIDIA L40S": "l40s",
    "NVIDIA B200": "b200-sxm",
    "NVIDIA B300 SXM6 AC": "b300-sxm",
    "NVIDIA GB200": "gb200",
    "NVIDIA GH200 480GB": "gh200-96gb",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000-server",
    "AMD Instinct MI300X": "mi300x",
}


@pytest.mark.parametrize(("printed", "name"), DRIVER_NAMES.items())
def test_driver_names(printed, name):
    kind = match_driver_name(printed)
    assert kind is not None
    assert kind.name == name


@pytest.mark.parametrize(
    "printed",
    [
        "A100-SXM-64GB",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "",
        "Quadro K600",
        "NVIDIA",
        "NVIDIA GeForce RTX 4070 Ti",
        "NVIDIA GeForce RTX 4060 Laptop GPU",
    ],
)
def test_other_names_match_nothing(printed):
    assert match_driver_name(printed) is None


def test_names_and_aliases_are_unambiguous():
    for kind in gpu_kinds():
        assert all(gpu_kind(alias) is kind for alias in (kind.name, *kind.aliases))


def test_unknown_name_offers_near_ones():
    with pytest.raises(BadCluster, match="h100-sxm"):
        gpu_kind("h100-sxn")


def test_every_figure_has_a_source():
    for kind in gpu_kinds():
        for field in ("sm_count", "memory_bytes", "memory_bytes_per_s", "peak_flops", "power_w", "pcie_bytes_per_s"):
            assert kind.sources.get(field), (kind.name, field)
        for field in ("l2_bytes", "nvlink_links", "nvlink_bytes_per_s", "nvlink_nccl_bytes_per_s", "c2c_bytes_per_s"):
            assert not getattr(kind, field) or kind.sources.get(field), (kind.name, field)
        assert not kind.achieved_flops or kind.sources.get("achieved_flops"), kind.name


@pytest.mark.parametrize("spoken", ["8xh100-sxm-96gb-hbm2e-500w", "meta-grand-teton"])
def test_figures_that_nobody_confirms_are_listed_however_a_machine_is_named(spoken):
    (line,) = [one for one in cluster_caveats(load_cluster(spoken)) if "no published source" in one]

    assert "memory_bytes" in line
    assert not any("no published source" in one for one in cluster_caveats(load_cluster("dgx-h100")))


@pytest.mark.parametrize(
    ("name", "bf16", "fp8", "memory_rate", "sms", "nvlink", "nccl"),
    [
        ("a100-sxm-80gb", 312e12, None, 2.039e12, 108, 300e9, 240e9),
        ("a100-sxm-40gb", 312e12, None, 1.555e12, 108, 300e9, 240e9),
        ("h100-sxm", 989e12, 1979e12, 3.35e12, 132, 450e9, 370.8e9),
        ("h100-sxm-96gb-hbm2e-500w", 989e12, 1979e12, 2.4e12, 132, 450e9, 370.8e9),
        ("h200-sxm", 989e12, 1979e12, 4.8e12, 132, 450e9, 370.8e9),
        ("b200-sxm", 2250e12, 4500e12, 7.7e12, 148, 900e9, 721.8e9),
        ("gb200", 2500e12, 5000e12, 8.0e12, 152, 900e9, 721.8e9),
    ],
)
def test_published_figures(name, bf16, fp8, memory_rate, sms, nvlink, nccl):
    kind = gpu_kind(name)
    assert kind.peak_flops["bfloat16"] == bf16
    assert kind.peak_flops.get("float8") == fp8
    assert kind.memory_bytes_per_s == memory_rate
    assert kind.sm_count == sms
    assert kind.nvlink_links * kind.nvlink_bytes_per_s == pytest.approx(nvlink)
    assert kind.nvlink_links * kind.nvlink_nccl_bytes_per_s == pytest.approx(nccl)


@pytest.mark.parametrize(
    ("name", "nvidia_smi_mib"),
    [
        ("h100-sxm", 81559),
        ("h200-sxm", 143771),
        ("a100-sxm-80gb", 81920),
        ("a100-sxm-40gb", 40960),
        ("b200-sxm", 183359),
    ],
)
def test_programs_see_a_little_less_memory_than_nvidia_smi(name, nvidia_smi_mib):
    assert 0.97 < gpu_kind(name).memory_bytes / (nvidia_smi_mib * 2**20) < 1


def test_rates_are_consistent():
    for kind in gpu_kinds():
        for dtype, achieved in kind.achieved_flops.items():
            assert achieved < BOOST * kind.peak_flops[dtype], (kind.name, dtype)
            if dtype == "float4":  # memory and power keep it further below its peak, but above float8
                assert achieved > kind.achieved_flops["float8"], kind.name
            else:
                assert achieved > 0.5 * kind.peak_flops[dtype], (kind.name, dtype)
        tf32, bf16 = kind.peak_flops.get("tfloat32"), kind.peak_flops.get("bfloat16")
        if tf32 and bf16:
            assert 0.4 < tf32 / bf16 < 0.52, kind.name
        if kind.nvlink_nccl_bytes_per_s:
            assert 0.75 < kind.nvlink_nccl_bytes_per_s / kind.nvlink_bytes_per_s <= 0.9, kind.name
        assert kind.sm_count > 10
        assert 7 * 2**30 < kind.memory_bytes < 300 * 2**30


def test_cards_with_bridges_have_nvlinks_to_join():
    assert all(gpu_kind(name).nvlink_links for name in bridges())
