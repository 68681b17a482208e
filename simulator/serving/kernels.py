"""Times of serving kernels: products with weights of any format, attention over a cache, small kernels.

Rows are tokens. All functions take numpy arrays of row counts and return seconds of the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from simulator.columns.plan_table import Floats
from simulator.kernels.efficiency import AttentionEfficiency, efficiency
from simulator.kernels.low_precision import low_peak_flops
from simulator.kernels.roofline import FULL_GRID, TILES, Roofline, matmul_utilization
from simulator.serving.deployment import WEIGHT_BYTES
from simulator.serving.engine import SlowerKernels
from simulator.serving.expert_choice import popularity
from simulator.serving.kernel_tables import (
    AnswerKernels,
    ExpertKernels,
    ProductKernels,
    PromptKernels,
    answer_kernels,
    by_width,
    expert_kernels,
    product_kernels,
    prompt_kernels,
)
from topology.cluster import GpuKind

# Tensor cores multiply float4 at twice the rate of float8 from Blackwell on (NVIDIA Blackwell architecture brief: 9
# against 4.5 PFLOP/s dense); before it, and for int4 and mxfp4, weights are widened to 16 bits inside the product.
FLOAT4_FROM = 100
# Least share of the datasheet's memory rate for reading weights and caches: kernels that only stream reach 0.85 to 0.92
# over generations (stas00/ml-engineering, compute/accelerator, BabelStream). Blackwell's rate in efficiency.toml is of
# kernels that write as much as they read.
STREAMED = 0.85
# The least of the peak that large products in 16 bits reach in engines; efficiency.toml has the share of training. vLLM
# 0.24, SGLang 0.5.14 and TensorRT-LLM 1.3.0rc20 reach 1,430 to 1,560 TFLOP/s of 2,250 on B200 from 4,096 rows on, at
# widths and depths from 4,096 on (ai-dynamo/aiconfigurator 0.12 systems/data/b200_sxm/gemm). On A100 a search for the
# largest found 0.87 (MAMF, stas00/ml-engineering), and four tables there have 0.89 in the middle.
SERVED = {"blackwell": 0.67, "ampere": 0.87}
# The share of the peak that tiles which fill a GPU reach at full clocks, where the power limit lowers them: the middle
# of six tables of the same engines on H100 and H200, 1,024 to 4,352 rows, widths and depths of 2,048 to 20,000, which
# take less than a millisecond each (0.85 to 0.92; there, systems/data/*/gemm).
FULL_CLOCKS = {"hopper": 0.88}
FLOAT8_FROM = 89
# Seconds of attention of an answer with hardly any keys, its write to the cache included: SGLang 0.5.14, TensorRT-LLM
# 1.3.0rc20 and vLLM 0.24 take 8.5 to 11 us with a 16-bit cache on B200, 8.1 to 12 on H100 and H200, 5.8 to 12 on L40S;
# SGLang 0.5.10 and TensorRT-LLM 1.0 14.3 on A100, vLLM 0.14 there 18 (ai-dynamo/aiconfigurator 0.12
# systems/data/*/attention, generation_attention_perf.parquet, medians of launches of up to 64 pairs of an answer and a
# key head and 1 MB of keys). Latent attention's kernel
# takes 10 to 12 by itself, but its whole block as long as the two starts counted for it add up to
# (mla_generation_module_perf.parquet of TensorRT-LLM and vLLM, B200: 46 to 52 us in 8 bits with 16 heads).
UNPAGED = {"torch"}  # programs whose cache is one tensor, which their compiled attention reads and writes
ANSWERED_S = {"ampere": 1.43e-5, "ada": 8.9e-6, "hopper": 1.0e-5, "blackwell": 9.6e-6}
# Share of the datasheet's memory rate at which latent attention of answers reads the cache, by bits of the cache and by
# query heads on a GPU: medians of kernels by themselves with more than 0.3 GB of cache (TensorRT-LLM's of SGLang 0.5.10
# and 0.5.14 and TensorRT-LLM 1.3.0rc20 on B200 and B300; FlashAttention's of SGLang and TensorRT-LLM's of 1.2 and 1.3
# on H200, 8 bits of the latter alone; ai-dynamo/aiconfigurator @095f58a5 systems/data/*/mla,
# generation_mla_perf.parquet).
LATENT_READ = {
    ("blackwell", 8): {16: 0.79, 32: 0.52, 64: 0.61, 128: 0.56},
    ("blackwell", 16): {16: 0.70, 32: 0.49, 64: 0.65, 128: 0.60},
    ("hopper", 8): {16: 0.60, 32: 0.60, 64: 0.58, 128: 0.31},
    ("hopper", 16): {16: 0.88, 32: 0.86, 64: 0.82, 128: 0.52},
}
# Engines that compile casts of rows into the kernels before them: norms and activations (fuse_norm_quant and
# fuse_act_quant of vllm/config/compilation.py).
CASTS_BEFORE = {"vllm"}
OWN_FLASH = "flash2"  # FlashAttention-2: an engine's attention, and its kernel by itself in prompt_kernels.toml
SINGLE = 512  # largest number of tokens up to which every count is tabulated
# Rate of grouped products of many experts, over that of one large product. Source: kernels of vLLM 0.20 alone
# (ai-dynamo/aiconfigurator campaign_checkpoints, moe_perf.txt, 7168 x 2048 with 8 of 256 or 384 experts, between 8,192
# and 16,384 tokens): H200 float8 in blocks 650 TFLOP/s with whole experts; with experts split over sixteen GPUs, and
# the bytes and fill time counted here, 1.10 and 3.58 ms at 4,096 and 16,384 tokens; B200 float4 1,700 TFLOP/s, float8
# assumed alike.
GROUPED = {("hopper", "float8"): 0.52, ("blackwell", "float8"): 0.38, ("blackwell", "float4"): 0.38}

# The same of TensorRT-LLM's Cutlass kernels on Hopper, as a share of the peak: its releases 1.2 and 1.3 alone
# (ai-dynamo/aiconfigurator systems/data/h200_sxm/moe/trtllm, moe_perf.parquet, balanced, 8,192 to 16,384 tokens). The
# time of a row has a part that grows with the share of an expert on a GPU and a constant part, the same for degrees of
# 1 to 8 and two widths: 870 TFLOP/s in blocks of float8; and of each element of the row 8.6 ps in blocks of float8, 3.1
# ps else, which are bytes at the rate of memory. One token alone takes 26 to 54 us with 16 to 32 experts on a GPU, 90
# to 180 with 128 and 256.
CUTLASS = {("hopper", "float8"): 0.44}
PASSED = {"float8": 35.0, "other": 13.0}  # bytes an element
SORTED_S, SORTED_EXPERT_S = 2e-5, 2e-7
# Bytes of each element of a token that kernels of experts pass on a rank whether or not its experts are chosen, if all
# tokens come to all ranks: between 1,024 and 8,192 or 16,384 tokens a rank of an expert-parallel group does not get
# quicker by as much as its rows get fewer. Medians of evenly loaded kernels in nvfp4, all models and degrees: 22 with
# SGLang 0.5.14 on B200 and on B300, 21 with TensorRT-LLM 1.2.0rc5's Cutlass, 42 with its own; DeepGEMM in 8 bits 20,
# SGLang's in 8 bits 40 (ai-dynamo/aiconfigurator @095f58a5 systems/data, moe_perf.parquet).
OTHERS_PASSED = {"blackwell": 21.0}

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAttention:
    """Seconds of attention over prompts: of its start, of a pair of a query and a key, of a query, of each key that a
    tile of `rows` queries meets alone on an SM. There are `heads` tiles for as many queries on `sms` SMs. Where tiles
    differ in length, a share `tail` of the longest runs when other SMs have nothing left to do. `grid` is how much
    longer than its pairs a benchmark's grid takes for its longest tile.
    """

    start_s: float
    pair_s: float
    query_s: float
    key_s: float
    rows: float
    heads: float
    sms: float
    tail: float = 1.0
    grid: float = 1.0

    def seconds(self, tokens: float, pairs: float, *, readers: float = 1, window: int = 0) -> float:
        """Return the seconds of `tokens` of `readers` prompts with `pairs`, where a query meets the keys within
        `window`.
        """
        longest = pairs / tokens + (tokens / readers - 1) / 2
        if 0 < window < longest:  # a tile's queries see another window each, so it meets half a tile of keys more
            pairs = readers * windowed_pairs(tokens / readers, longest, window) + tokens * self.rows / 2
            longest = min(longest, window + self.rows)
        waves = readers * math.ceil(tokens / readers / self.rows) * self.heads / self.sms
        tile = self.key_s * longest
        whole = tile
        if waves > 1:
            met = self.pair_s * pairs
            even = min(1.0, max(0.0, 2 * pairs / tokens / longest - 1))  # 1: all tiles are as long
            idle = even * (math.ceil(waves) - waves) + (1 - even) * self.tail
            whole = max(met, tile, (met + idle * tile) / self.grid)
        return self.start_s + self.query_s * tokens + whole


def windowed_pairs(tokens: float, longest: float, window: int) -> float:
    """Return the pairs of the last `tokens` queries of `longest` with the keys within `window`."""
    first = longest - tokens + 1
    growing = min(max(window - first, 0.0), tokens)
    return growing * (2 * first + growing - 1) / 2 + (tokens - growing) * window


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Kernel times on one GPU for weights of one format; activations are 16 bits wide between products."""

    gpu: GpuKind
    weights: str
    experts: str = "triton"  # what multiplies them, see engines.toml
    program: str = ""  # the engine, where expert_kernels.toml lists its own
    slower: Mapping[str, SlowerKernels] = field(default_factory=dict)  # the engine's, by generation
    apart: bool = False  # attention has requests of its own on each rank
    attention: str = "cudnn"
    powered: Floats | float = 1.0  # power for products in 16 bits, of what they have on a GPU that does nothing else

    @property
    def multiplied_in(self) -> str:
        """The type in which tensor cores multiply."""
        capability = self.gpu.compute_capability
        if self.weights == "float4" and capability >= FLOAT4_FROM:
            return "float4"
        if self.weights == "mxfp4" and capability >= FLOAT4_FROM:  # activations have 8 bits
            return "float8"
        if self.weights in {"float4", "float8"} and capability >= FLOAT8_FROM and self.gpu.peak_flops.get("float8"):
            return "float8" if self.weights == "float8" else "bfloat16"
        return "bfloat16"

    @property
    def flops_per_s(self) -> float:
        """Dense arithmetic rate that a large product in this format reaches."""
        known, peak, type_ = efficiency(self.gpu.architecture), self.gpu.peak_flops, self.multiplied_in
        wide = (peak.get("bfloat16") or peak.get("float16") or max(peak.values())) * known.burst
        low = {"float8": known.float8, "float4": known.float4}.get(type_, 0.0) * low_peak_flops(self.gpu, type_)
        return max(self._supplied(wide, "bfloat16"), self._supplied(low, type_))

    def _supplied(self, rate: float, type_: str) -> float:
        """Return what this GPU's power makes of the reference part's rate: less with less power for its arithmetic,
        more with more, up to the largest product that a search found on it in this type.
        """
        power = Roofline(gpu=self.gpu).power_supplied
        return max(rate * min(1.0, power), min(rate * power, self.gpu.achieved_flops.get(type_, 0.0)))

    @property
    def product_flops_per_s(self) -> float:
        """Arithmetic rate of one large product of an engine."""
        if self.multiplied_in != "bfloat16":
            return self.flops_per_s
        peak = self.gpu.peak_flops
        least = SERVED.get(self.generation, 0.0) * (peak.get("bfloat16") or 0.0)
        return max(self.flops_per_s, self._supplied(least, "bfloat16"))

    @property
    def full_clocks(self) -> float:
        """How much faster products in 16 bits are at full clocks than on a GPU that does nothing else; 1 where that is
        not known.
        """
        reached = FULL_CLOCKS.get(self.generation, 0.0) * (self.gpu.peak_flops.get("bfloat16") or 0.0)
        return max(1.0, reached / Roofline(gpu=self.gpu).sustained_flops)

    @property
    def attention_flops_per_s(self) -> float:
        """Arithmetic rate of the fused 16-bit attention kernel on long sequences, with heads of 128."""
        roofline = Roofline(gpu=self.gpu)
        return roofline.peak_flops * roofline.power_supplied * self._attention_curve.forward

    @property
    def _attention_curve(self) -> AttentionEfficiency:
        known = efficiency(self.gpu.architecture).attention
        return known.get(self.attention) or known["flash2"]

    @property
    def bytes_per_s(self) -> float:
        return self.gpu.memory_bytes_per_s * max(efficiency(self.gpu.architecture).hbm, STREAMED)

    @property
    def start_s(self) -> float:
        """The shortest time between two dependent kernels of one stream."""
        return efficiency(self.gpu.architecture).kernel_s

    def attention_start_s(self, heads: float, *, latent: bool, cache_bits: int = 16, kv_heads: float = 1) -> float:
        """Return seconds of attention of answers with hardly any keys for `heads` query heads: the write to the cache,
        attention over parts of the keys and their sum.
        """
        if not latent:
            listed = self.listed_answers(cache_bits, single=heads == kv_heads)
            known = {} if self.program in UNPAGED else ANSWERED_S
            return listed.fixed_s if listed else known.get(self.generation, 2 * self.start_s)
        return 2 * self.start_s + next((seconds for most, seconds in self._slower.latent_s if heads <= most), 0.0)

    def listed_answers(self, cache_bits: int, *, single: bool = False) -> AnswerKernels | None:
        """Return what answer_kernels.toml says of attention of answers, of as many key heads as query heads if
        `single`; None where it says nothing. Its engines have FlashAttention-3 or newer kernels on Hopper.
        """
        if self.attention == OWN_FLASH:
            return None
        return self._listed_attention(answer_kernels(), (self.program,), cache_bits, "single" if single else "")

    def _listed_attention(
        self, listed: Mapping[tuple[str, ...], T], programs: tuple[str, ...], cache_bits: int, special: str
    ) -> T | None:
        """Return the entry of a table of attention that describes these kernels best: of a `special` kind, or any."""
        kinds = [kind for kind in (special, "heads") if kind]
        kinds = [kind + bits for kind in kinds for bits in (("8", "") if cache_bits == 8 else ("",))]
        where = (self.gpu.architecture.lower(), self.generation)
        keys = ((program, of, kind) for program in programs for kind in kinds for of in where)
        return next((listed[key] for key in keys if key in listed), None)

    def product(self, rows: Floats, columns: float, depth: float, *, stored: str = "") -> Floats:
        """Return the seconds of `rows` x `depth` activations times a matrix of weights, in the format `stored` or the
        default one.
        """
        format_ = stored or self.weights
        kernels = self if format_ == self.weights else replace(self, weights=format_)
        known = efficiency(self.gpu.architecture)
        used = matmul_utilization(
            (*TILES, *known.tiles), rows, columns, depth, 1.0, sms=self.gpu.sm_count, ramp_k=known.ramp_k
        )
        # The power limit holds back what fills all SMs, not what leaves some of them idle.
        rate, allowed = kernels.product_flops_per_s, np.asarray(known.sustained)
        if kernels.multiplied_in == "bfloat16" and self.full_clocks > 1.0:
            rate = self.full_clocks * Roofline(gpu=self.gpu).sustained_flops
            allowed = np.asarray(self.powered / self.full_clocks)
        reached = np.clip(used, 1e-9, allowed * depth / (depth + known.ramp_k))
        arithmetic = 2 * rows * columns * depth / (rate * reached)
        moved = columns * depth * WEIGHT_BYTES[format_] + 2.0 * rows * (columns + depth)
        listed = self.listed_products(format_)
        if listed is None:
            return np.asarray(np.maximum(arithmetic, moved / self.bytes_per_s) + self.start_s)
        reading = moved / (listed.read * self.gpu.memory_bytes_per_s) + listed.depth_s * depth
        cast = 0.0 if self.program in CASTS_BEFORE else listed.cast * rows * depth / self.gpu.memory_bytes_per_s
        return np.asarray(np.maximum(arithmetic, reading) + listed.fixed_s + cast)

    def listed_products(self, format_: str) -> ProductKernels | None:
        """Return what product_kernels.toml says of weights in a format; None where it says nothing. Such products
        include the cast of their rows.
        """
        return product_kernels().get((self.generation, "bfloat16" if format_ == "float16" else format_))

    @property
    def listed_experts(self) -> ExpertKernels | None:
        """What expert_kernels.toml says of these kernels; None where it says nothing."""
        listed, kind = expert_kernels(), (self.generation, self.weights)
        apart = listed.get((f"{self.program}-dp", *kind)) if self.apart else None
        return apart or listed.get((self.program, *kind))

    @property
    def _slower(self) -> SlowerKernels:
        return self.slower.get(self.generation, SlowerKernels())

    @property
    def experts_route(self) -> bool:
        """Whether expert kernels also include the choice of experts."""
        return self.listed_experts is not None and self.listed_experts.routes

    @property
    def generation(self) -> str:
        return self.gpu.architecture.split()[0].lower()

    def experts_s(self, rows: Floats, visited: Floats, here: float, hidden: float, width: float, up: int) -> Floats:
        """Return the seconds of `rows` rows in total through `here` experts, `visited` of which have rows. Each expert
        has `up` products to `width` and one back to `hidden`. Sorting and summing are included.
        """
        known = self.listed_experts
        if known is None:
            time = self.expert_products(rows, visited, up * width, hidden)
            return time + self.expert_products(rows, visited, hidden, width) + self.between_experts(rows, here, hidden)
        elements = (up + 1) * hidden * width
        time = known.fixed_s + known.expert_s * here + known.passed * rows * hidden / self.gpu.memory_bytes_per_s
        read = np.minimum(visited, rows) * elements * WEIGHT_BYTES[self.weights]
        time = time + read / (known.read * self.gpu.memory_bytes_per_s)
        format_ = self.multiplied_in
        peak = self.gpu.peak_flops.get(format_) or low_peak_flops(self.gpu, format_)
        time = time + 2 * rows * elements / (known.rate * peak)
        return np.asarray(np.where(rows > 0, time, 0.0))

    def passed_by_s(self, tokens: Floats, hidden: float) -> Floats:
        """Return the seconds for which kernels of experts pass tokens that chose none of the experts here."""
        listed = OTHERS_PASSED.get(self.generation, 0.0) if self.listed_experts else 0.0
        return np.asarray(listed * tokens * hidden / self.gpu.memory_bytes_per_s)

    def expert_products(self, rows: Floats, experts: Floats, columns: float, depth: float) -> Floats:
        """Return the seconds of `rows` rows in total through products of `experts` different matrices that have rows.

        In Triton's kernels the tiles of an expert wait for its weights, so the times to read and to multiply add up;
        see GROUPED. In Cutlass' each expert takes the longer of the two: popular ones have rows to multiply while the
        rest are still read. They have a rate of their own for narrow formats on Hopper; see CUTLASS.
        """
        generation = self.generation
        touched = np.minimum(experts, rows)
        moved = touched * columns * depth * WEIGHT_BYTES[self.weights] + 2.0 * rows * (columns + depth)
        reading = moved / self.bytes_per_s
        filling = 1 + efficiency(self.gpu.architecture).ramp_k / depth  # the pipeline along a tile's depth fills first
        rate = self.flops_per_s
        if self.experts == "triton":
            rate *= GROUPED.get((generation, self.multiplied_in), 1.0)
        elif self.experts == "cutlass" and (generation, self.weights) in CUTLASS:
            rate, filling = CUTLASS[generation, self.weights] * self.gpu.peak_flops[self.multiplied_in], 1.0
        arithmetic = 2 * rows * columns * depth * filling / rate
        if self.experts == "triton":
            time = arithmetic + reading
        else:
            each = np.multiply.outer(popularity(), arithmetic) if self.experts == "cutlass" else arithmetic[None]
            time = np.mean(np.maximum(each, reading), axis=0)
        return np.asarray(np.where(rows > 0, time + self.start_s, 0.0))

    def between_experts(self, rows: Floats, experts: float, hidden: float) -> Floats:
        """Return the seconds of sorting `rows` to this many experts on a GPU, casting them, and summing their
        results.
        """
        plain = self.moved(2.0 * rows * hidden * 2, 0.0)
        if self.experts != "cutlass" or self.generation != "hopper":
            return plain
        passed, fixed_s = PASSED["float8" if self.weights == "float8" else "other"], SORTED_S
        if self.weights == "float8":
            passed, fixed_s = passed + self._slower.experts_passed, fixed_s + self._slower.experts_s
        return self.moved(passed * rows * hidden, 0.0) + np.where(rows > 0, fixed_s + SORTED_EXPERT_S * experts, 0.0)

    def moved(self, nbytes: Floats, launches: float) -> Floats:
        """Return the seconds of `launches` kernels that read and write `nbytes` in total."""
        return np.asarray(nbytes / self.bytes_per_s + launches * self.start_s)

    def listed_prompts(self, cache_bits: int, *, latent: bool) -> PromptKernels | None:
        """Return what prompt_kernels.toml says of attention over prompts; None where it says nothing."""
        programs = (OWN_FLASH, self.program) if self.attention == OWN_FLASH else (self.program,)
        return self._listed_attention(prompt_kernels(), programs, cache_bits, "latent" if latent else "")

    def prompt_attention(
        self, heads: float, kv_heads: float, qk_dim: int, v_dim: int, *, cache_bits: int = 16, latent: bool = False
    ) -> PromptAttention:
        """Return the times of attention over prompts with this many heads on a GPU, what it writes to the cache
        included.

        As in training (roofline.py) where nothing is listed: tiles of queries fill their pipelines, and a prompt's
        longest tile, which meets all its keys, runs when other SMs have nothing left to do.
        """
        curve, listed = self._attention_curve, self.listed_prompts(cache_bits, latent=latent)
        alone = curve.rows * self.gpu.sm_count
        if listed is not None:
            peak = self.gpu.peak_flops.get("bfloat16") or max(self.gpu.peak_flops.values())
            pair_s = 2.0 * heads * (qk_dim + v_dim) / (by_width(listed.share, qk_dim) * peak)
            moved = 2.0 * (heads + kv_heads) * (qk_dim + v_dim)
            return PromptAttention(
                # A layer's time already has the start of attention of answers.
                start_s=max(
                    0.0,
                    listed.fixed_s
                    - self.attention_start_s(heads, latent=latent, cache_bits=cache_bits, kv_heads=kv_heads),
                ),
                pair_s=pair_s,
                query_s=pair_s * listed.query + listed.passed * moved / self.gpu.memory_bytes_per_s,
                key_s=pair_s * alone / heads * listed.alone,
                rows=curve.rows,
                heads=heads,
                sms=self.gpu.sm_count,
                tail=listed.tail,
            )
        pair_s = 2.0 * heads * (qk_dim + v_dim) / float(self.attention_flops_per_s * curve.of_width(qk_dim))
        return PromptAttention(
            start_s=self.start_s,
            pair_s=pair_s,
            query_s=pair_s * curve.ramp_s / 2,
            key_s=pair_s * alone / heads,
            rows=curve.rows,
            heads=heads,
            sms=self.gpu.sm_count,
            grid=1 + 2 * alone / FULL_GRID,
        )

    def cached_key_s(
        self, flops: float, nbytes: float, *, width: float = 128, listed: AnswerKernels | None = None
    ) -> float:
        """Return the seconds of attention of one query over one cached key, given its operations and bytes."""
        rate = by_width(listed.read, width) * self.gpu.memory_bytes_per_s if listed else self.bytes_per_s
        return max(flops / self.attention_flops_per_s, nbytes / rate)

    def latent_key_s(self, heads: float, flops: float, nbytes: float, bits: int) -> float:
        """Return the seconds of latent attention of `heads` query heads over one cached key, given all their operations
        and the key's bytes, in a cache of so many bits.
        """
        listed = LATENT_READ.get((self.generation, bits))
        if listed is None:
            return self.cached_key_s(flops, nbytes)
        most = max(listed)
        share = listed[min((count for count in listed if count >= heads), default=most)] / max(1.0, heads / most)
        return nbytes / (share * self.gpu.memory_bytes_per_s)


def token_grid(most: int) -> Floats:
    """Return the token counts to tabulate: all small ones, where tiles decide, then about eight per doubling."""
    small = np.arange(1.0, SINGLE + 1.0)
    large = np.unique(np.rint(np.geomspace(SINGLE, max(most, 2 * SINGLE), 64) / 64) * 64)
    return np.concatenate([small, large[large > SINGLE]])
