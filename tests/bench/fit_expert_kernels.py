"""Fit the constants of simulator/serving/expert_kernels.toml to a table of kernels by themselves.

    git clone https://github.com/ai-dynamo/aiconfigurator
    python tests/bench/fit_expert_kernels.py \
        aiconfigurator/aic-core/src/aiconfigurator_core/systems/data/b200_sxm/moe/trtllm/1.2.0rc5/moe_perf.parquet \
        --gpu "B200 SXM" --kernels moe_torch_flow_min_latency --listed nvfp4 --stored float4 --multiplied float4

Needs pandas, pyarrow and scipy.
"""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd
from scipy.optimize import lsq_linear

from simulator.serving.deployment import WEIGHT_BYTES
from topology.catalog.gpus import gpu_kind

FAR = 0.2  # of a relative error, beyond which it counts less
MOST_TOKENS = 65_536
FASTEST = 0.95  # of the time that memory takes by its datasheet, below which loads are not as they are said to be


def rows_of(path: str, listed: str, kernels: str) -> pd.DataFrame:
    """Return the rows of a format and a kernel: 32 experts and more, whole or cut, evenly loaded."""
    rows = pd.read_parquet(path)
    rows = rows[(rows.moe_dtype == listed) & (rows.distribution == "balanced") & (rows.num_tokens <= MOST_TOKENS)]
    rows = rows[(rows.moe_ep_size == 1) & (rows.num_experts >= 32) & (rows.inter_size / rows.moe_tp_size >= 128)]
    return rows[rows.kernel_source == kernels] if kernels else rows


def as_loaded(rows: pd.DataFrame, weight_bytes: float, bytes_per_s: float) -> pd.DataFrame:
    """Return the rows of networks whose experts are read no faster than memory allows, if loads are as even as they are
    said to be. Others' routers keep half of the groups of experts, which all tie under such loads, so half the experts
    are read (collector/trtllm/collect_moe.py, "all use deepseek setting"), or have two products instead of three.
    """
    touched = np.minimum(rows.num_experts, rows.num_tokens * rows.topk)
    least = touched * 3 * rows.hidden_size * rows.inter_size / rows.moe_tp_size * weight_bytes / bytes_per_s
    network = list(zip(rows.hidden_size, rows.inter_size, rows.topk, rows.num_experts, strict=True))
    faster = {kind for kind, fast in zip(network, rows.latency / 1e3 < FASTEST * least, strict=True) if fast}
    return rows[[kind not in faster for kind in network]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    for name in ("gpu", "listed", "stored", "multiplied"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--kernels", default="")
    options = parser.parse_args()
    gpu = gpu_kind(options.gpu)
    stored = WEIGHT_BYTES[options.stored]
    table = as_loaded(rows_of(options.path, options.listed, options.kernels), stored, gpu.memory_bytes_per_s)
    rows, width = (table.num_tokens * table.topk).to_numpy(float), (table.inter_size / table.moe_tp_size).to_numpy()
    hidden, experts = table.hidden_size.to_numpy(float), table.num_experts.to_numpy(float)
    elements = 3 * hidden * width
    parts = np.column_stack(
        [
            np.ones_like(rows),
            experts,
            np.minimum(experts, rows) * elements * stored / gpu.memory_bytes_per_s,
            2 * rows * elements / gpu.peak_flops[options.multiplied],
            rows * hidden / gpu.memory_bytes_per_s,
        ]
    )
    seconds, weight = table.latency.to_numpy() / 1e3, np.ones_like(rows)
    for _ in range(8):
        sought = lsq_linear(parts * (weight / seconds)[:, None], weight, bounds=([0, 0, 1, 1, 0], np.inf)).x
        error = np.log(parts @ sought / seconds)
        weight = 1 / np.sqrt(1 + (error / FAR) ** 2)
    fixed, expert, read, rate, passed = sought
    print(f"fixed_s = {fixed:.1e}\nexpert_s = {expert:.1e}\nread = {1 / read:.2f}\nrate = {1 / rate:.2f}")
    print(f"passed = {passed:.1f}\n# {len(table)} rows, mean error {np.mean(np.abs(error)):.0%}")


if __name__ == "__main__":
    main()
