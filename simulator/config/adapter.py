"""Which parts of a model are trained: adapters next to frozen weights, or some modules; and the format of frozen
weights.

LoRA adds to a frozen product the product of two thin matrices of `rank` (Hu et al., arXiv 2106.09685); DoRA scales the
sum by a trained vector (Liu et al., arXiv 2402.09353); IA3 scales keys, values and the feed-forward's inner activations
(Liu et al., arXiv 2205.05638). QLoRA keeps the frozen weights in NF4 (Dettmers et al., arXiv 2305.14314).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from topology.errors import BadPlan

if TYPE_CHECKING:
    from simulator.config.model import Model

LORA, DORA, IA3, FROZEN = "lora", "dora", "ia3", "frozen"
KINDS = (LORA, DORA, IA3, FROZEN)
ALL_LINEAR = "all-linear"
MOST_RANK = 1 << 16

# Bytes of a frozen weight by its format. NF4 has a float8 scale for each block of 64 and a float32 one for each 256 of
# those (double quantisation; arXiv 2305.14314, section 3). GPTQ, and int4 of torchao, have 16-bit scales and 4-bit
# zeros for each group of 128 (AutoGPTQ's default group_size). Float8 has one scale a tensor.
BASE_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "float8": 1.0,
    "nf4": 0.5 + 1 / 64 + 4 / (64 * 256),
    "int4": 0.5 + 2.5 / 128,
    "gptq": 0.5 + 2.5 / 128,
}
PACKED = ("float8", "nf4", "int4", "gptq")  # formats that products cannot read without unpacking
# Kernels that make 16-bit copies of a packed weight: NF4 first unpacks its scales and adds their mean
# (bitsandbytes/functional.py, dequantize_4bit of a nested state).
UNPACKING_LAUNCHES = {"float8": 1.0, "nf4": 3.0, "int4": 1.0, "gptq": 1.0}

_KINDS_BY_WORD = {"qlora": (LORA, "nf4"), "gptq-lora": (LORA, "gptq"), "qdora": (DORA, "nf4")}
# Short names that tools have for types of numbers.
TYPES_BY_WORD = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8", "fp4": "float4"}
_BASES_BY_WORD = {"gptq-4bit": "gptq", **TYPES_BY_WORD}

# Matrices of a layer that can have adapters, by our names, and the modules of frameworks that consist of one or several
# of them. A fused module has one adapter: `qkv` and `gate_up` are that.
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down", "qkv", "gate_up", "q_a", "q_b", "kv_a", "kv_b", "router")
_ONE = {
    "q": ("q_proj", "wq", "query"),
    "k": ("k_proj", "wk", "key"),
    "v": ("v_proj", "wv", "value"),
    "o": ("o_proj", "wo", "out_proj", "output_proj", "dense", "linear_proj"),
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "w3", "c_fc", "dense_h_to_4h"),
    "down": ("down_proj", "w2", "dense_4h_to_h", "linear_fc2"),
    "qkv": ("c_attn", "query_key_value", "qkv_proj", "wqkv", "linear_qkv"),
    "gate_up": ("gate_up_proj", "linear_fc1"),
    "q_a": ("q_a_proj",),
    "q_b": ("q_b_proj",),
    "kv_a": ("kv_a_proj_with_mqa",),
    "kv_b": ("kv_b_proj",),
}
MODULES = {word: (name,) for name, words in _ONE.items() for word in (name, *words)} | {"c_proj": ("o", "down")}
# Families with one attention matrix for queries, keys and values; their modules do not have the names used by others.
FUSED_FAMILIES = frozenset({"gpt", "gpt2", "gpt_bigcode", "gpt_neox", "falcon"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """`target_modules` are names of `PROJECTIONS`, or `all-linear`; with kind `frozen` they are patterns of modules
    that are not trained. `base_weights` is the format of the layers' frozen matrices (`BASE_BYTES`); empty: that of
    parameters. `dropout` is the share of an adapter's inputs that are dropped.
    """

    kind: str = LORA
    rank: int = 0
    target_modules: tuple[str, ...] = ()
    base_weights: str = ""
    dropout: float = 0.0

    @property
    def packed(self) -> bool:
        """Whether frozen matrices of layers are unpacked before products read them."""
        return self.base_weights in PACKED

    @property
    def freezes_all(self) -> bool:
        """Whether none of the model's own weights is trained."""
        return self.kind != FROZEN

    @property
    def title(self) -> str:
        """The usual name: `QLoRA of rank 16 on q, v`."""
        named = {LORA: "LoRA", DORA: "DoRA", IA3: "IA3", FROZEN: "frozen"}[self.kind]
        if self.kind in {LORA, DORA}:
            named = ("Q" if self.base_weights == "nf4" else "") + f"{named} of rank {self.rank}"
        where = ", ".join(self.target_modules)
        base = f" over {self.base_weights}" if self.base_weights and self.base_weights != "nf4" else ""
        return f"{named} {'' if self.kind == FROZEN else 'on '}{where}{base}"


def adapter_kind(word: str) -> tuple[str, str]:
    """Return the kind that a word means, and the format of frozen weights that it implies ("" for none). Raises
    BadPlan.
    """
    kind, base = _KINDS_BY_WORD.get(word.lower(), (word.lower(), ""))
    if kind not in KINDS:
        raise BadPlan(f"adapter.kind {word[:40]!r} is unknown", why=f"known: {', '.join((*KINDS, *_KINDS_BY_WORD))}")
    return kind, base


def base_type(word: str) -> str:
    """Return the format of frozen weights that a word means. Raises BadPlan."""
    name = _BASES_BY_WORD.get(word.lower(), word.lower())
    if name not in BASE_BYTES:
        raise BadPlan(f"adapter.base_weights {word[:40]!r} is unknown", why=f"known: {', '.join(BASE_BYTES)}")
    return name


def projections_named(words: Iterable[str], *, fused: bool) -> tuple[str, ...]:
    """Return the projections that the named modules consist of, each once; `fused`: the model has one attention matrix.

    Names that only other models have are ignored if at least one name matches, as PEFT does.
    """
    found: list[str] = []
    for word in words:
        if word == ALL_LINEAR:
            return (ALL_LINEAR,)
        found += MODULES[word.lower()]
    separate, together = {"q", "k", "v"} & set(found), "qkv" in found
    if separate and together:
        found = [name for name in found if (name not in {"q", "k", "v", "o"} if fused else name != "qkv")]
    return tuple(dict.fromkeys(found))


def frozen_parts(patterns: Iterable[str], model: Model) -> frozenset[str]:
    """Return the parts of a model that patterns of module names freeze: projections, `experts`, `norms`, `embedding`,
    `final_norm`, `head`. A pattern with wildcards must match a whole name; a pattern without matches any name that
    contains it.

    Raises BadPlan for a pattern that matches nothing, and where only some layers are frozen.
    """
    parts = _parts(model)
    found: set[str] = set()
    for pattern in patterns:
        matched: dict[str, int] = {}
        for part, names in parts.items():
            hits = sum(_matches(name, pattern) for name in names)
            if hits:
                matched[part] = hits
            if 0 < hits < len(names):
                raise BadPlan(
                    f"--freeze {pattern[:60]!r} freezes {hits} of {len(names)} layers",
                    why="layers that are frozen next to layers that are trained are not modelled",
                    remedy="freeze a module of every layer ('mlp', 'self_attn.k_proj'), or the embedding or the head",
                )
        if not matched:
            known = dict.fromkeys(names[0].replace(".0.", ".*.") for names in parts.values())
            raise BadPlan(f"--freeze {pattern[:60]!r} matches no module", why=f"modules: {', '.join(known)}")
        found |= matched.keys()
    return frozenset(found)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) if set("*?[") & set(pattern) else f".{pattern}" in f".{name}"


def _parts(model: Model) -> dict[str, list[str]]:
    """Return the module names of each part, as Hugging Face's decoders have them."""
    layer = {name: f"self_attn.{name}_proj" for name in "qkvo"} | {"norms": "input_layernorm"}
    layer |= {name: f"mlp.{name}_proj" for name in (("gate", "up", "down") if model.gated_mlp else ("up", "down"))}
    if model.moe:
        layer |= {"router": "mlp.gate", "experts": "mlp.experts"}
    if model.latent:
        layer |= {name: f"self_attn.{name}_proj" for name in ("q_a", "q_b", "kv_a", "kv_b")}
    names = {part: [f"model.layers.{i}.{module}" for i in range(model.layers)] for part, module in layer.items()}
    return {"embedding": ["model.embed_tokens"], "final_norm": ["model.norm"], "head": ["lm_head"], **names}
