"""Fit simulator/serving/product_kernels.toml and reduce_kernels.toml to tables of kernels by themselves.

    git clone https://github.com/ai-dynamo/aiconfigurator
    python tests/bench/fit_kernel_tables.py aiconfigurator/aic-core/src/aiconfigurator_core/systems/data

Needs pandas, pyarrow and scipy.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import lsq_linear, minimize

from simulator.serving.deployment import WEIGHT_BYTES
from simulator.serving.kernel_tables import ReduceKernels
from topology.catalog.gpus import gpu_kind

GPUS = {"b200_sxm": "B200 SXM", "h200_sxm": "H200 SXM", "h100_sxm": "H100 SXM"}
CACHE_BYTES = {"b200_sxm": 126e6, "h200_sxm": 50e6, "h100_sxm": 50e6}  # the GPU's last cache, whitepapers
FORMATS = {"bfloat16": "bfloat16", "fp8_block": "float8", "nvfp4": "float4"}
# Copies of the weights that a table's run goes through: SGLang's and vLLM's six, TensorRT-LLM's as many as fill the
# cache, at most five (collector/*/collect_gemm.py).
COPIES = {"sglang": 6.0, "vllm": 6.0, "trtllm": 5.0}
MOST_ROWS, LEAST, MOST = 64, 256, 20_000
MOST_ELEMENTS = 4 << 20  # of an all-reduce over peer memory
PRODUCTS = (
    ("blackwell", "bfloat16", ("b200_sxm",), ("sglang/0.5.14", "trtllm/1.3.0rc20", "vllm/0.24.0")),
    ("blackwell", "fp8_block", ("b200_sxm",), ("sglang/0.5.14", "trtllm/1.3.0rc20")),
    ("blackwell", "nvfp4", ("b200_sxm",), ("sglang/0.5.14",)),
    ("hopper", "bfloat16", ("h100_sxm", "h200_sxm"), ("sglang/0.5.14", "trtllm/1.3.0rc20", "vllm/0.24.0")),
    ("hopper", "fp8_block", ("h100_sxm", "h200_sxm"), ("sglang/0.5.14", "trtllm/1.3.0rc20")),
)
HOPPERS = ("h100_sxm", "h200_sxm")
REDUCES = (
    ("vllm", "hopper", HOPPERS, ("vllm/0.18.0", "vllm/0.19.0", "vllm/0.24.0")),
    ("vllm", "blackwell", ("b200_sxm",), ("vllm/0.19.0", "vllm/0.24.0")),
    ("vllm013", "hopper", HOPPERS, ("vllm/0.14.0",)),
    ("sglang059", "hopper", HOPPERS, ("sglang/0.5.9", "sglang/0.5.10")),
    ("sglang059", "blackwell", ("b200_sxm",), ("sglang/0.5.9", "sglang/0.5.10")),
    ("sglang", "hopper", HOPPERS, ("sglang/0.5.14",)),
    ("sglang", "blackwell", ("b200_sxm",), ("sglang/0.5.14",)),
    ("trtllm", "hopper", HOPPERS, ("trtllm/1.3.0rc10", "trtllm/1.3.0rc20")),
    ("trtllm", "blackwell", ("b200_sxm",), ("trtllm/1.2.0rc5", "trtllm/1.3.0rc10", "trtllm/1.3.0rc20")),
)


def product_parts(data: Path, system: str, release: str, listed: str) -> tuple[Any, Any]:
    """Return columns that add up to a product's seconds (one, depth, bytes at the datasheet's rate from the cache and
    from memory), and measured seconds.
    """
    table = pd.read_parquet(data / system / "gemm" / release / "gemm_perf.parquet")
    table = table[(table.gemm_dtype == listed) & (table.m <= MOST_ROWS)]
    table = table[table.n.between(LEAST, MOST) & table.k.between(LEAST, MOST)]
    gpu, engine = gpu_kind(GPUS[system]), release.split("/", maxsplit=1)[0]
    weights = (table.n * table.k * WEIGHT_BYTES[FORMATS[listed]]).to_numpy(float)
    copies = np.full(len(table), COPIES[engine])
    if engine == "trtllm":
        copies = np.clip(np.ceil(CACHE_BYTES[system] / weights), 1, COPIES[engine])
    cached = weights * copies < CACHE_BYTES[system]
    moved = (weights + 2.0 * table.m * (table.n + table.k)).to_numpy(float) / gpu.memory_bytes_per_s
    parts = [np.ones(len(table)), table.k.to_numpy(float), moved * cached, moved * ~cached]
    return np.column_stack(parts), table.latency.to_numpy() / 1e3


def fit_products(data: Path) -> None:
    for generation, listed, systems, releases in PRODUCTS:
        found = [product_parts(data, system, release, listed) for system in systems for release in releases]
        parts, seconds = np.vstack([one for one, _ in found]), np.concatenate([one for _, one in found])
        weight, error = np.ones_like(seconds), np.zeros_like(seconds)
        for _ in range(8):  # far ones count less
            bounds = ([0, 0, 0.1, 1.0], np.inf)
            sought = lsq_linear(parts * (weight / seconds)[:, None], weight, bounds=bounds).x
            error = np.log(parts @ sought / seconds)
            weight = 1 / np.sqrt(1 + (error / 0.2) ** 2)
        print(f"[{generation}.{FORMATS[listed]}]  # {len(seconds)} rows, mean error {np.mean(np.abs(error)):.0%}")
        print(f"fixed_s = {sought[0]:.1e}\ndepth_s = {sought[1]:.1e}\nread = {1 / sought[3]:.2f}")


def reduce_rows(data: Path, system: str, release: str) -> Any:
    """Return columns (bytes, ranks, link in bytes/s, seconds) of all-reduces that graphs replay."""
    path = data / system / "comm" / release / "custom_allreduce_perf.parquet"
    if not path.exists():
        return np.zeros((0, 4))
    table = pd.read_parquet(path)
    table = table[~table.kernel_source.str.contains("eager") & table.num_gpus.isin([2, 4, 8])]
    table = table[table.message_size.between(1024, MOST_ELEMENTS)]
    gpu = gpu_kind(GPUS[system])
    link = gpu.nvlink_links * gpu.nvlink_bytes_per_s
    columns = [2.0 * table.message_size, table.num_gpus, np.full(len(table), link), table.latency / 1e3]
    return np.column_stack(columns)


def priced(logarithms: Any, rows: Any) -> Any:
    once_s, once_rate, twice_s, rank_s, twice_rate = np.exp(logarithms)
    kernels = ReduceKernels(once_s=once_s, once_rate=once_rate, twice_s=twice_s, rank_s=rank_s, twice_rate=twice_rate)
    nbytes, ranks, link, _ = rows.T
    return kernels.seconds(nbytes, ranks, link)


def fit_reduces(data: Path) -> None:
    for name, generation, systems, releases in REDUCES:
        rows = np.vstack([reduce_rows(data, system, release) for system in systems for release in releases])

        def loss(logarithms: Any, rows: Any = rows) -> float:
            error = np.log(priced(logarithms, rows) / rows[:, 3])
            return float(np.sum(np.sqrt(1 + (error / 0.1) ** 2) - 1))

        starts = [(base, 0.5, twice, 1e-6, 0.5) for base in (3e-6, 6e-6) for twice in (3e-6, 7e-6, 1.5e-5)]
        options = {"maxiter": 8000, "maxfev": 8000, "xatol": 1e-4, "fatol": 1e-4}
        tried = [minimize(loss, np.log(start), method="Nelder-Mead", options=options) for start in starts]
        best = min(tried, key=lambda one: one.fun)
        error = np.abs(np.log(priced(best.x, rows) / rows[:, 3]))
        once_s, once_rate, twice_s, rank_s, twice_rate = np.exp(best.x)
        print(f"[{name}.{generation}]  # {len(rows)} rows, mean error {np.mean(error):.0%}")
        print(f"once_s = {once_s:.1e}\nonce_rate = {once_rate:.2f}\ntwice_s = {twice_s:.1e}")
        print(f"rank_s = {rank_s:.1e}\ntwice_rate = {twice_rate:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    data = parser.parse_args().data
    fit_products(data)
    fit_reduces(data)


if __name__ == "__main__":
    main()
