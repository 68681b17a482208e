"""From samples of single kernels to `MeasuredOperators`: curves through products, attention and what moves memory.

Only valid, sustained samples are used; samples from inside steps only for shapes not measured alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from simulator.calibration.kernel_samples import MOVEMENTS, UPDATES, movement_of
from simulator.calibration.measured_operators import MeasuredOperators
from simulator.calibration.operator_curves import MatmulCurve, MoveCurve
from simulator.config.runtime import DTYPE_BYTES
from simulator.fitting.operator_fit import by_key, fit_attention, fit_matmul, fit_move
from simulator.fitting.step_samples import StandaloneTimes, exact_key, standalone_from_steps
from simulator.kernels.efficiency import efficiency
from simulator.kernels.operators import FIXED_DTYPE_BYTES, OperatorSpec, Work, backward_work, forward_work
from simulator.kernels.roofline import GATHER_PACK, PACKING, Roofline
from simulator.runtimes.library import RuntimeSpec, runtime_names, runtime_spec
from simulator.step.update import ADAM_BYTES, CLIP_BYTES
from topology.cluster import GpuKind
from topology.profile.samples import OperatorSample

SHAPES_DIFFER = 0.02  # relative, by which an update's time of one parameter differs between shapes of large layers
# Small kernels next to those that move a layer's parameters: one counts steps; seven end the norms of tensors, stack
# and sum them, and make the factor to scale by (torch/optim/adam.py, torch/nn/utils/clip_grad.py of torch 2.11).
SMALL_KERNELS = {"adamw": 1, "clip": 7}
MOVING = 0.5  # share of an update's time that is surely not small kernels, whatever a profile says


def measured_operators(every: Sequence[OperatorSample], kind: GpuKind) -> MeasuredOperators:
    """Return the measured operators from samples of one software, taken on GPUs of `kind`."""
    samples = [s for s in every if not s.invalid and s.regime == "sustained" and s.seconds > 0]
    bandwidth = _copy_rate(samples) or kind.memory_bytes_per_s * 0.9
    matmuls = {
        str(dtype): curve
        for (kind_of, dtype), group in by_key(samples, "kind", "dtype").items()
        if kind_of == "matmul"
        and (
            curve := fit_matmul(
                group,
                sms=float(kind.sm_count),
                bytes_per_s=bandwidth,
                element_bytes=float(DTYPE_BYTES.get(str(dtype), 2)),
            )
        )
        is not None
    }
    widths: dict[tuple[str, int, str], list[OperatorSample]] = {}
    for sample in samples:
        if sample.kind == "attention":
            widths.setdefault((sample.dtype, sample.shape["d"], sample.direction), []).append(sample)
    attention = {key: found for key, group in widths.items() if (found := fit_attention(group)) is not None}
    counter = _Counter(kind)
    exact = {exact_key(s): s.seconds for s in samples if s.kind in {"matmul", "attention"}}
    seen = standalone_from_steps(every, StandaloneTimes(exact=exact, matmuls=matmuls, attention=attention))
    return MeasuredOperators(
        exact={**seen, **exact},
        matmuls=matmuls,
        attention=attention,
        moves=_moves(samples, counter),
        stream=counter.copies(samples),
        packing=_packing(samples, kind),
        update_rates=_update_rates(samples, counter.launch_s),
    )


def burst_over_sustained(samples: Sequence[OperatorSample], matmuls: Mapping[str, MatmulCurve]) -> float | None:
    """Return the time of products on a rested GPU over that of the same products on a busy one, at most 1; None where
    not measured.
    """
    ratios = []
    for s in samples:
        curve = matmuls.get(s.dtype)
        if s.regime == "burst" and s.kind == "matmul" and not s.invalid and curve is not None:
            sizes = [np.array([float(s.shape.get(axis, 1))]) for axis in ("m", "n", "k", "batch")]
            ratios.append(s.seconds / float(curve.seconds(sizes[0], sizes[1], sizes[2], sizes[3], s.direction)[0]))
    return min(float(np.median(ratios)), 1.0) if ratios else None


def _copy_rate(samples: list[OperatorSample]) -> float | None:
    """Return the bytes read plus written per second by the largest copy."""
    copies = [s for s in samples if s.name == "copy"]
    largest = max(copies, key=lambda s: s.shape["bytes"], default=None)
    return None if largest is None else 2 * largest.shape["bytes"] / largest.seconds


class _Counter:
    """Counts a measured kernel as the descriptions do: bytes over the datasheet's rate, plus launches."""

    def __init__(self, kind: GpuKind) -> None:
        self.roofline = Roofline(gpu=kind)
        self.launch_s = efficiency(kind.architecture).kernel_s

    def copies(self, samples: list[OperatorSample]) -> MoveCurve | None:
        mine = [s for s in samples if s.name == "copy"]
        sizes = [2.0 * s.shape["bytes"] for s in mine]
        counted = [size / self.roofline.memory_bytes_per_s + self.launch_s for size in sizes]
        # A repeated copy smaller than the second-level cache finds its data there, unlike a step's data.
        kept = [i for i, size in enumerate(sizes) if size > 2 * self.roofline.gpu.l2_bytes]
        return fit_move([sizes[i] for i in kept], [counted[i] for i in kept], [mine[i].seconds for i in kept])

    def works(self, specs: list[OperatorSpec], shape: Mapping[str, int], *, backward: bool) -> list[Work]:
        sizes = {axis: np.array([float(size)]) for axis, size in shape.items()}
        for axis in _MOVE_AXES:
            sizes.setdefault(axis, np.ones(1))
        sizes |= {"one": np.ones(1), "qkv": sizes["q"] + 2 * sizes["kv"], "gf": 2 * sizes["f"], "hr": sizes["h"]}

        def width(name: str) -> float:
            return FIXED_DTYPE_BYTES.get(name, 2.0)

        found: list[Work] = []
        for spec in specs:
            found += backward_work(spec, sizes, width) if backward else forward_work(spec, sizes, width)
        return found

    def seconds(self, works: list[Work]) -> float:
        return sum(float(np.asarray(self.roofline.seconds(work)).flat[0]) for work in works)


_MOVE_AXES = ("t", "u", "h", "q", "kv", "f", "v", "d", "b", "s", "S", "a", "k", "w", "j")


def _eager(spec: RuntimeSpec) -> list[OperatorSpec]:
    """Return the operators of an eager, gated, rotary model in mixed precision, which are measured one by one."""
    refused = {"compiled", "autocast", "!gated", "!rotary", "dropout"}
    parts = (*spec.layer.attention, *spec.layer.mlp, *spec.layer.embedding, *spec.layer.head)
    return [operator for operator in parts if not refused & set(operator.when)]


def _moves(samples: list[OperatorSample], counter: _Counter) -> dict[tuple[str, str], MoveCurve]:
    """Return the curve of every operator of every runtime that a measured kernel stands for."""
    found: dict[tuple[str, str], MoveCurve] = {}
    grouped = by_key([s for s in samples if s.kind == "move"], "name", "direction")
    specs = [runtime_spec(name) for name in runtime_names()]
    for name in dict.fromkeys(spec.measured_as for spec in specs):
        alike = [spec for spec in specs if spec.measured_as == name]
        # First the operators of similar runtimes, then those of the runtime itself, which replace them.
        alike.sort(key=lambda spec: name in spec.names)
        operators = [operator for spec in alike for operator in _eager(spec)]
        for movement in MOVEMENTS:
            if movement.runtime not in {"", name}:
                continue
            mine = list({op.name: op for op in operators if movement_of(op.name, name) is movement}.values())
            for backward in (False, True):
                group = grouped.get((movement.name, "backward" if backward else "forward"), [])
                curve = _movement_curve(group, mine, counter, backward=backward)
                if curve is None:
                    continue
                for operator in mine:
                    found[name, f"{operator.name}.backward" if backward else operator.name] = curve
    return found


def _movement_curve(
    samples: list[OperatorSample], operators: list[OperatorSpec], counter: _Counter, *, backward: bool
) -> MoveCurve | None:
    if not samples or not operators:
        return None
    # The norms before attention and before the feed-forward part are the same kernel: count one.
    alike = len({(op.reads, op.writes) for op in operators}) == 1
    counted = operators[:1] if alike else _one_of_each(operators)
    works = [counter.works(counted, s.shape, backward=backward) for s in samples]
    return fit_move(
        [sum(float(np.asarray(w.bytes).flat[0]) for w in some) for some in works],
        [counter.seconds(some) for some in works],
        [s.seconds for s in samples],
    )


def _one_of_each(operators: list[OperatorSpec]) -> list[OperatorSpec]:
    """Return the operators of one call of the framework: three for a loss, one of several equal norms."""
    return (
        operators[:1]
        if any("norm" in op.name for op in operators) and operators[0].name != "log_softmax"
        else operators
    )


def layer_elements(shape: Mapping[str, int]) -> float:
    """Return the number of parameters in a layer's matrices of these shapes, for which packing and updates are
    measured.
    """
    h, q, kv, f = (float(shape[axis]) for axis in ("h", "q", "kv", "f"))
    return 2 * h * q + 2 * h * kv + 3 * h * f


def _packing(samples: list[OperatorSample], kind: GpuKind) -> dict[str, MoveCurve]:
    """Return the curve of each of FSDP's copies over its counted time, by the bytes of a layer's parameters in 16 bits.

    A rank casts its shard from float32, unpacks all parameters, and packs all gradients in float32.
    """
    rate = Roofline(gpu=kind).memory_bytes_per_s
    found = {}
    for kernel, width in zip(PACKING, (4.0 + 2.0, 2.0 + 2.0, 2.0 + 4.0), strict=True):
        mine = [s for s in samples if s.name == kernel]
        elements = [layer_elements(s.shape) for s in mine]
        shares = [1.0 / s.shape["ranks"] if kernel == GATHER_PACK else 1.0 for s in mine]
        counted = [count * share * width / rate for count, share in zip(elements, shares, strict=True)]
        curve = fit_move([2 * count for count in elements], counted, [s.seconds for s in mine])
        if curve is not None:
            found[kernel] = curve
    return found


def _update_rates(samples: list[OperatorSample], kernel_s: float) -> dict[str, float]:
    """Return the bytes/s of clipping and updating large layers, in terms of the bytes counted for them, by parameter
    dtype. A layer counts by how steady its calls were.
    """
    found: dict[str, dict[str, list[OperatorSample]]] = {}
    for s in samples:
        if s.name in UPDATES and layer_elements(s.shape) / s.shape["ranks"] > 2**24:
            found.setdefault(s.dtype, {}).setdefault(s.name, []).append(s)
    return {
        dtype: (ADAM_BYTES + CLIP_BYTES) / sum(_parameter_s(group, kernel_s) for group in by_name.values())
        for dtype, by_name in found.items()
        if len(by_name) == len(UPDATES)
    }


def _parameter_s(samples: list[OperatorSample], kernel_s: float) -> float:
    """Return the time of one parameter, from samples that count by how steady their calls were."""
    moving = [max(s.seconds - SMALL_KERNELS[s.name] * kernel_s, MOVING * s.seconds) for s in samples]
    each = [seconds * s.shape["ranks"] / layer_elements(s.shape) for seconds, s in zip(moving, samples, strict=True)]
    return float(np.average(each, weights=[1.0 / (SHAPES_DIFFER**2 + s.spread**2) for s in samples]))
