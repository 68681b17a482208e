"""A shipped model's decoder as a case: the operators of its layers as text, forward and backward, without placements.

`planner shard` reads such cases from files, so it can be written to a file and changed. Weights and activations are
bf16.
"""

from __future__ import annotations

from collections.abc import Mapping

from simulator.config.model import Model
from topology.codec import JsonObject
from topology.errors import BadInput


def decoder_case(model: Model, mesh: Mapping[str, int], *, layers: int | None, batch: int, seq_len: int) -> JsonObject:
    """Return the case of the first `layers` layers of `model` on `batch` sequences; with None, of all layers, embedding
    and loss.

    Raises BadInput for experts, latent attention, sliding windows and learned positions.
    """
    strange = {
        "experts": model.moe is not None,
        "latent attention": model.latent is not None,
        "linear attention": model.linear is not None,
        "a sliding window": model.windowed_layers > 0,
        "learned positions": model.learned_positions > 0,
        "other than two norms a layer": model.norms_per_layer != (1 if model.parallel_residual else 2),
        "a layer norm without bias": model.norm == "layernorm" and not model.norm_bias,
        "a bias on its head": model.head_bias and layers is None,
    }
    found = [name for name, there in strange.items() if there]
    if found:
        raise BadInput(
            f"{model.name} has {found[0]}",
            why="its layers are not written as text here",
            remedy="capture the module with executor.sharding, or write the case by hand",
        )
    writer = _Writer(model, batch, seq_len)
    count = model.layers if layers is None else layers
    if count > model.layers:
        raise BadInput(f"{count} layers of {model.name}", why=f"it has {model.layers}", remedy="fewer --layers")
    return writer.case(mesh, count, whole=layers is None)


class _Writer:
    """Collects inputs and operators in order."""

    def __init__(self, model: Model, batch: int, seq_len: int) -> None:
        self.model, self.batch, self.seq_len = model, batch, seq_len
        self.inputs: dict[str, JsonObject] = {}
        self.parameters: list[str] = []
        self.ops: list[str] = []

    def case(self, mesh: Mapping[str, int], count: int, *, whole: bool) -> JsonObject:
        model, hidden = self.model, "x0"
        if whole:
            self.inputs["ids"] = {"shape": [self.batch, self.seq_len], "dtype": "i64"}
            self.ops.append(f"x0 = embedding(ids, {self._weight('table', model.vocab, model.hidden)})")
        else:
            self.inputs["x0"] = {"shape": [self.batch, self.seq_len, model.hidden]}
        if model.rotary:
            for name in ("cos", "sin"):
                self.inputs[name] = {"shape": [self.seq_len, model.head_dim]}
        for layer in range(count):
            hidden = self._layer(layer, hidden)
        seed = {"shape": [self.batch, self.seq_len, model.hidden]}
        if whole:
            if model.final_norm:
                hidden = self._norm("last", hidden)
            head = "table" if model.tied_embeddings else self._weight("head", model.vocab, model.hidden)
            self.inputs["targets"] = {"shape": [self.batch, self.seq_len], "dtype": "i64"}
            self.ops.append(f"logits = linear({hidden}, {head})")
            self.ops.append("loss = cross_entropy(logits, targets)")
            hidden, seed = "loss", {"shape": [self.batch, self.seq_len]}
        self.inputs["gradient"] = seed
        return {
            "id": f"{model.name}, {'whole' if whole else f'{count} of {model.layers} layers'}",
            "mesh": {"names": list(mesh), "shape": list(mesh.values())},
            "inputs": {name: one for name, one in self.inputs.items() if name != "gradient"},
            "parameters": self.parameters,
            "ops": self.ops,
            "backward": {hidden: "gradient"},
            "with_respect_to": [] if whole else ["x0"],
            "policy": "min_time",
        }

    def _weight(self, name: str, *shape: int) -> str:
        self.inputs[name] = {"shape": list(shape)}
        self.parameters.append(name)
        return name

    def _norm(self, name: str, x: str) -> str:
        model = self.model
        weight = self._weight(f"norm_{name}", model.hidden)
        if model.norm == "rmsnorm":
            self.ops.append(f"n_{name} = rms_norm({x}, {weight})")
        else:
            self.ops.append(f"n_{name} = layer_norm({x}, {weight}, {self._weight(f'norm_bias_{name}', model.hidden)})")
        return f"n_{name}"

    def _linear(self, name: str, x: str, rows: int, columns: int, *, bias: bool) -> str:
        weight = self._weight(name, rows, columns)
        return f"linear({x}, {weight}, {self._weight(f'{name}_bias', rows)})" if bias else f"linear({x}, {weight})"

    def _layer(self, n: int, x: str) -> str:
        model, b, s = self.model, self.batch, self.seq_len
        heads, kv, d = model.heads, model.kv_heads, model.head_dim
        norm = self._norm(f"attention_{n}", x)
        parts = {
            name: self._linear(f"w{name}_{n}", norm, count * d, model.hidden, bias=model.qkv_bias)
            for name, count in (("q", heads), ("k", kv), ("v", kv))
        }
        places = {
            "q": (heads, f"{kv}, {heads // kv}, {d}", "permute(0, 2, 3, 1, 4)"),
            "k": (kv, f"{kv}, {d}", "transpose(1, 2)"),
        }
        for name, (count, view, order) in places.items():
            text = parts[name]
            if model.qk_norm and model.qk_norm_wide:
                text = f"rms_norm({text}, {self._weight(f'norm_{name}_{n}', count * d)})"
            text = f"{text}.view({b}, {s}, {view})"
            if model.qk_norm and not model.qk_norm_wide:
                text = f"rms_norm({text}, {self._weight(f'norm_{name}_{n}', d)})"
            text = f"{text}.{order}"
            self.ops.append(f"{name}_{n} = " + (f"rope({text}, cos, sin)" if model.rotary else text))
        self.ops.append(f"v_{n} = {parts['v']}.view({b}, {s}, {kv}, {d}).transpose(1, 2)")
        self.ops.append(f"a_{n} = attn(q_{n}.flatten(1, 2), k_{n}, v_{n}, True)")
        joined = f"a_{n}.transpose(1, 2).reshape({b}, {s}, {heads * d})"
        out = self._linear(f"wo_{n}", joined, model.hidden, heads * d, bias=model.attention_out_bias)
        if model.parallel_residual:
            self.ops.append(f"o_{n} = {out}")
            self.ops.append(f"x{n + 1} = {x} + o_{n} + {self._feed_forward(n, norm)}")
        else:
            self.ops.append(f"m_{n} = {x} + {out}")
            self.ops.append(f"x{n + 1} = m_{n} + {self._feed_forward(n, self._norm(f'ffn_{n}', f'm_{n}'))}")
        return f"x{n + 1}"

    def _feed_forward(self, n: int, x: str) -> str:
        model = self.model
        up = self._linear(f"up_{n}", x, model.ffn, model.hidden, bias=model.mlp_bias)
        inner = f"gelu({up})"
        if model.gated_mlp:
            inner = f"silu({self._linear(f'gate_{n}', x, model.ffn, model.hidden, bias=model.mlp_bias)}) * {up}"
        return self._linear(f"down_{n}", inner, model.hidden, model.ffn, bias=model.mlp_bias)
