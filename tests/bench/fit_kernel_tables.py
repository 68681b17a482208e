"""Fit simulator/serving/product_kernels.toml, prompt_kernels.toml, answer_kernels.toml and reduce_kernels.toml to
tables of kernels by themselves.

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
from scipy.optimize import least_squares, lsq_linear, minimize

from simulator.kernels.efficiency import efficiency
from simulator.serving.deployment import WEIGHT_BYTES
from simulator.serving.kernel_tables import ReduceKernels
from topology.catalog.gpus import gpu_kind

GPUS = {
    "b200_sxm": "B200 SXM", "b300_sxm": "B300 SXM", "h200_sxm": "H200 SXM", "h100_sxm": "H100 SXM",
    "a100_sxm": "A100 SXM 80GB", "l40s": "L40S",
}  # fmt: skip
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
    ("vllm013", "ampere", ("a100_sxm",), ("vllm/0.14.0",)),
    ("sglang059", "hopper", HOPPERS, ("sglang/0.5.9", "sglang/0.5.10")),
    ("sglang059", "blackwell", ("b200_sxm",), ("sglang/0.5.9", "sglang/0.5.10")),
    ("sglang059", "ampere", ("a100_sxm",), ("sglang/0.5.9", "sglang/0.5.10")),
    ("sglang", "hopper", HOPPERS, ("sglang/0.5.14",)),
    ("sglang", "blackwell", ("b200_sxm",), ("sglang/0.5.14",)),
    ("trtllm", "hopper", HOPPERS, ("trtllm/1.3.0rc10", "trtllm/1.3.0rc20")),
    ("trtllm", "ampere", ("a100_sxm",), ("trtllm/1.0.0",)),
    ("trtllm", "blackwell", ("b200_sxm",), ("trtllm/1.2.0rc5", "trtllm/1.3.0rc10", "trtllm/1.3.0rc20")),
)

# Attention over prompts: kind, systems, release, and the kernel where a table has several.
PROMPTS = (
    *(("vllm", kind, systems, "vllm/0.24.0", "") for kind in ("heads", "heads8") for systems in (HOPPERS, ("b200_sxm",))),
    *(("vllm", kind, ("b300_sxm",), "vllm/0.24.0", "") for kind in ("heads", "heads8")),
    ("vllm", "heads", ("a100_sxm",), "vllm/0.14.0", ""),
    ("vllm", "heads", ("l40s",), "vllm/0.24.0", ""),
    ("sglang", "heads", HOPPERS, "sglang/0.5.14", "fa3"),
    *(("sglang", kind, (b,), "sglang/0.5.14", "trtllm_mha") for kind in ("heads", "heads8") for b in ("b200_sxm", "b300_sxm")),
    *(("sglang", kind, (b,), "sglang/0.5.14", "") for kind in ("latent", "latent8") for b in ("b200_sxm", "b300_sxm")),
    *(("trtllm", kind, systems, "trtllm/1.3.0rc20", "") for kind in ("heads", "heads8", "latent", "latent8")
      for systems in (HOPPERS, ("b200_sxm",), ("b300_sxm",))),
    ("trtllm", "heads", ("a100_sxm",), "trtllm/1.0.0", ""),
    ("trtllm", "heads", ("l40s",), "trtllm/1.3.0rc20", ""),
)  # fmt: skip
# Attention of answers; on older GPUs copies fit the cache, so that keys seem to be read faster than memory allows.
ANSWERS = tuple(
    (program, kind, systems, release)
    for program, release in (("vllm", "vllm/0.24.0"), ("sglang", "sglang/0.5.14"), ("trtllm", "trtllm/1.3.0rc20"))
    for systems in (HOPPERS, ("b200_sxm",), ("b300_sxm",))
    for kind in ("heads", "heads8", *(("single", "single8") if (program, systems) == ("trtllm", HOPPERS) else ()))
)
GROUPS = {"heads": (4, 8, 16), "single": (1,)}  # query heads of a key head
WIDTHS = (64, 128, 192, 256)
LONG_S = 1e-4  # of keys, from which their reading is most of a launch: the least that it is fitted to is their median
SHORTEST, MOST_TOKENS = 64, 32_768  # tokens of a prompt, of all prompts of a launch
BEST = 1.1  # most of the rate of the fastest launch that pairs alone are taken to reach


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


def prompt_parts(data: Path, system: str, release: str, kind: str, kernel: str) -> tuple[Any, Any]:
    """Return columns (width; seconds at the peak of pairs, of one pair a query, of the longest tile by itself; seconds
    of queries, keys, values and results at the datasheet's rate of memory; tiles of each SM), and measured seconds.
    """
    latent = kind.startswith("latent")
    where = "mla/{}/context_mla" if latent else "attention/{}/context_attention"
    table = pd.read_parquet(data / system / f"{where.format(release)}_perf.parquet")
    table = table[table.kv_cache_dtype == ("fp8" if kind.endswith("8") else "bfloat16")]
    if not latent:
        narrow = kind.endswith("8") and (table.attn_dtype == "fp8").any()
        table = table[table.attn_dtype == ("fp8" if narrow else "bfloat16")]
        table = table[table.head_dim.isin(WIDTHS)]
        table = table[table.window_size == 0] if "window_size" in table else table
        table = table[table.kernel_source == kernel] if kernel else table
    table = table[(table.isl >= SHORTEST) & (table.batch_size * table.isl <= MOST_TOKENS)]
    gpu = gpu_kind(GPUS[system])
    heads, tokens = table.num_heads, table.batch_size * table.isl
    width, both = (192, 192 + 128) if latent else (table.head_dim, 2 * table.head_dim)
    moved = 2.0 * tokens * both * (heads + (heads if latent else table.num_key_value_heads)) / gpu.memory_bytes_per_s
    pair_s = 2.0 * both / gpu.peak_flops["bfloat16"]  # of one head
    rows = efficiency(gpu.architecture).attention["cudnn"].rows
    waves = table.batch_size * np.ceil(table.isl / rows) * heads / gpu.sm_count
    columns = [width + 0 * heads, pair_s * heads * tokens * (table.isl + 1) / 2, pair_s * heads * tokens,
               pair_s * rows * gpu.sm_count * table.isl, moved, waves]  # fmt: skip
    return np.column_stack(columns), table.latency.to_numpy() / 1e3


def prompt_error(sought: Any, parts: Any, seconds: Any, place: Any) -> Any:
    """Return logarithms of priced over measured seconds; as `PromptAttention` of simulator/serving/kernels.py."""
    fixed_s, passed, query, share = *np.exp(sought[:3]), np.exp(sought[4:])[place]
    _, pairs, queries, tile, moved, waves = parts.T
    tail = 1 / (1 + np.exp(-sought[3]))
    whole = np.where(waves > 1, np.maximum(pairs + tail * tile, tile), tile) + query * queries
    return np.log((fixed_s + passed * moved + whole / share) / seconds)


def fit_prompts(data: Path) -> None:
    for program, kind, systems, release, kernel in PROMPTS:
        found = [prompt_parts(data, system, release, kind, kernel) for system in systems]
        parts, seconds = np.vstack([one for one, _ in found]), np.concatenate([one for _, one in found])
        widths, place = np.unique(parts[:, 0], return_inverse=True)
        reached = np.array([np.max((parts[:, 1] / seconds)[place == at]) for at in range(len(widths))])
        begin = np.array([*np.log([9e-6, 2.0, 100.0]), -1.0, *np.log(0.9 * reached)])
        most = np.array([*[np.inf] * 4, *np.log(BEST * reached)])
        rows = (parts, seconds, place)
        best = least_squares(prompt_error, begin, bounds=(-np.inf, most), loss="soft_l1", f_scale=0.1, args=rows).x
        off, (fixed_s, passed, query) = np.mean(np.abs(prompt_error(best, *rows))), np.exp(best[:3])
        architecture = gpu_kind(GPUS[systems[0]]).architecture.lower()
        shares = ", ".join(
            f'"{width:.0f}" = {share:.2f}' for width, share in zip(widths, np.exp(best[4:]), strict=True)
        )
        of = f'"{architecture}"' if " " in architecture else architecture
        print(f"[{program}.{of}.{kind}]  # {release}, {len(seconds)} rows, {off:.0%}")
        print(f"fixed_s = {fixed_s:.1e}\npassed = {passed:.2f}\nquery = {query:.0f}.0")
        print(f"tail = {1 / (1 + np.exp(-best[3])):.2f}\nshare = {{ {shares} }}")


def answer_rows(data: Path, system: str, release: str, kind: str) -> tuple[Any, Any, Any]:
    """Return columns (one, pairs of an answer and a key head beyond one a SM, seconds of all keys and values at the
    datasheet's rate), the width of heads, and measured seconds.
    """
    table = pd.read_parquet(data / system / "attention" / release / "generation_attention_perf.parquet")
    narrow = kind.endswith("8")
    table = table[(table.kv_cache_dtype == ("fp8" if narrow else "bfloat16")) & (table.window_size == 0)]
    table = table[
        (table.num_heads / table.num_key_value_heads).isin(GROUPS[kind.rstrip("8")]) & table.head_dim.isin((64, 128))
    ]
    programs = table.batch_size * table.num_key_value_heads
    moved = programs * (table.step + 1.0) * 2 * table.head_dim * (1 if narrow else 2)
    gpu = gpu_kind(GPUS[system])
    waiting = np.maximum(programs - gpu.sm_count, 0)
    columns = [np.ones(len(table)), waiting, moved / gpu.memory_bytes_per_s]
    return np.column_stack(columns), table.head_dim.to_numpy(), table.latency.to_numpy() / 1e3


def fit_answers(data: Path) -> None:
    for program, kind, systems, release in ANSWERS:
        found = [answer_rows(data, system, release, kind) for system in systems]
        parts, width, seconds = (np.concatenate(some) for some in zip(*found, strict=True))
        widths, place = np.unique(width, return_inverse=True)

        def error(sought: Any, parts: Any = parts, seconds: Any = seconds, place: Any = place) -> Any:
            fixed_s, program_s, read = *np.exp(sought[:2]), np.exp(sought[3:])[place]
            programs, hidden = program_s * parts[:, 1], 1 / (1 + np.exp(-sought[2]))
            return np.log((fixed_s + programs + np.maximum(parts[:, 2] / read - hidden * programs, 0)) / seconds)

        long = parts[:, 2] >= min(LONG_S, float(np.quantile(parts[:, 2], 0.95)))
        share = parts[:, 2] / seconds
        reached = np.array([np.median(share[long & (place == at)]) for at in range(len(widths))])
        least, most = [*[-np.inf] * 3, *np.log(reached)], [*[np.inf] * 3, *np.full(len(widths), 0.1)]
        begin = np.array([*np.log([1e-5, 1e-8]), 0.0, *np.log(1.01 * reached)])
        best = least_squares(error, begin, bounds=(least, most), loss="soft_l1", f_scale=0.1).x
        architecture = gpu_kind(GPUS[systems[0]]).architecture.lower()
        shares = ", ".join(f'"{width}" = {share:.2f}' for width, share in zip(widths, np.exp(best[3:]), strict=True))
        of = f'"{architecture}"' if " " in architecture else architecture
        print(f"[{program}.{of}.{kind}]  # {release}, {len(seconds)} rows, {np.mean(np.abs(error(best))):.0%}")
        print(f"fixed_s = {np.exp(best[0]):.1e}\nprogram_s = {np.exp(best[1]):.1e}")
        print(f"hidden = {1 / (1 + np.exp(-best[2])):.2f}\nread = {{ {shares} }}")


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
    fit_prompts(data)
    fit_answers(data)
    fit_reduces(data)


if __name__ == "__main__":
    main()
