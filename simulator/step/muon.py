"""Muon: the hidden matrices of a model, and the time and traffic of orthogonalising their momentum.

torch.optim.Muon (torch/optim/_muon.py of 2.13) rounds the momentum of a matrix to bfloat16, transposes it so that it
has no more rows than columns, divides it by its norm, and runs five iterations of three products each: `A = X X'`,
`B = b A + c A A`, `X = a X + B X`. The rest is updated by AdamW (Jordan et al.,
https://kellerjordan.github.io/posts/muon/).

For a matrix divided over ranks, DTensor divides the products and communicates in every iteration. If the longer side is
divided, `X X'` is a partial sum, which is summed twice, for the second and the third product. If the shorter side is
divided, `X` is gathered for the first product and again for the third, and `A` for the second. FSDP divides rows,
tensor parallelism the side by which a layer is divided; a matrix divided by both is not modelled (rule `muon-tensor`).
FSDP divides a stack of experts between experts: a rank orthogonalises its own, and gathers only if there are fewer
experts than ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from simulator.columns.plan_table import Floats
from simulator.config.adapter import FUSED_FAMILIES
from simulator.config.model import Model
from simulator.config.optimizers import OPTIMIZERS
from simulator.config.runtime import Runtime
from simulator.kernels.operators import Work, WorkKind
from simulator.step.context import CostContext
from simulator.step.held import PARTS, Parameters, optimizer_bytes, state_bytes

ITERATIONS = 5  # DEFAULT_NS_STEPS
WIDTH = 2.0  # bytes of bfloat16
# Kernels for a matrix besides products: momentum, Nesterov's step, rounding, norm, its lower limit, division, decay,
# and the final addition. And kernels of an iteration.
OTHER_LAUNCHES, PRODUCTS = 8, 3
SCALED_BYTES = 3 * WIDTH  # bytes per element of a whole matrix: read for the norm, read and written for the division


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A hidden matrix of a layer, of `rows` and `columns` elements; `cut`: divided by tensor parallelism, by rows or by
    columns (`cut_rows`). `of_expert`: there is one for each routed expert.
    """

    rows: int
    columns: int
    cut: bool = True
    cut_rows: bool = True
    of_expert: bool = False

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    @property
    def short(self) -> int:
        """The rows of the orthogonalised matrix, and of its Gram matrix."""
        return min(self.rows, self.columns)

    @property
    def long(self) -> int:
        return max(self.rows, self.columns)

    def cut_along(self, *, rows: bool) -> str:
        """Return the side of the matrix that is divided when its rows, or its columns, are."""
        return "long" if rows == (self.rows > self.columns) else "short"

    @property
    def iteration_flops(self) -> float:
        """FLOPs of the three products of an iteration."""
        m, n = float(self.short), float(self.long)
        return 2 * m * m * n + 2 * m**3 + 2 * m * m * n


Moved = tuple[str, str, Floats, Floats]  # a collective, its group, bytes, and count


@dataclass(frozen=True, slots=True, kw_only=True)
class Orthogonal:
    """A rank's work on the hidden matrices of one layer besides moving momentum and parameters; arrays of shape
    (plans,).

    `shared` and `experts` are their elements on the rank before sharding, `seconds` the time of the kernels, `launches`
    their number. `gathers` are (collective, group, bytes of one, count). `made_bytes` is the temporary memory of the
    largest matrix.
    """

    shared: Floats
    experts: Floats
    seconds: Floats
    launches: Floats
    gathers: tuple[Moved, ...]
    made_bytes: Floats

    def products_s(self, context: CostContext) -> Floats:
        """Return the seconds of the kernels or of their launches on the host, whichever is more."""
        return np.asarray(np.maximum(self.seconds, self.launches * context.spec.host.launch_s))

    def gathers_s(self, context: CostContext) -> Floats:
        """Return the seconds of all gathers."""
        none = np.zeros(len(context.table))
        return sum((count * context.groups.time_s(op, family, size) for op, family, size, count in self.gathers), none)


def is_orthogonalised(runtime: Runtime) -> bool:
    """Return whether the optimizer orthogonalises hidden matrices."""
    return OPTIMIZERS[runtime.optimizer].matrices is not None


def hidden_matrices(model: Model) -> dict[str, tuple[Matrix, ...]]:
    """Return the hidden matrices of a layer, by kind of block: projections, routers and experts, all two-dimensional. A
    matrix of several fused projections is orthogonalised as one.
    """
    attention, h = _attention(model), model.hidden
    found = {"dense": (*attention, *_feed_forward(model, model.ffn))}
    if model.moe:
        moe = model.moe
        router = [Matrix(rows=moe.experts, columns=h, cut=False)]
        shared = _feed_forward(model, moe.shared_ffn, cut=False) if moe.shared_ffn else []
        gate = [Matrix(rows=1, columns=h, cut=False)] if moe.shared_gate else []
        routed = [replace(matrix, of_expert=True) for matrix in _feed_forward(model, moe.ffn)]
        found["moe"] = (*attention, *router, *shared, *gate, *routed)
    return found


def _attention(model: Model) -> list[Matrix]:
    h, queries = model.hidden, model.heads * model.qk_dim
    if model.latent:
        m = model.latent
        down = [(m.q_lora_rank, h), (queries, m.q_lora_rank)] if m.q_lora_rank else [(queries, h)]
        expanded = model.heads * (m.qk_nope_head_dim + m.v_head_dim)
        shapes = [*down, (m.kv_lora_rank + m.qk_rope_head_dim, h), (expanded, m.kv_lora_rank)]
        shapes.append((h, model.heads * m.v_head_dim))
    else:
        kv = model.kv_heads * model.head_dim
        fused = model.family in FUSED_FAMILIES
        shapes = [*([(queries + 2 * kv, h)] if fused else [(queries, h), (kv, h), (kv, h)]), (h, queries)]
    last = len(shapes) - 1  # the output projection, divided by its input side
    return [Matrix(rows=rows, columns=columns, cut_rows=at < last) for at, (rows, columns) in enumerate(shapes)]


def _feed_forward(model: Model, width: int, *, cut: bool = True) -> list[Matrix]:
    into = [Matrix(rows=width, columns=model.hidden, cut=cut)] * (2 if model.gated_mlp else 1)
    return [*into, Matrix(rows=model.hidden, columns=width, cut=cut, cut_rows=False)]


def with_matrices(parameters: Parameters, model: Model, context: CostContext) -> Parameters:
    """Return a rank's parameters with counts of those in hidden matrices, and of all in numbers with the state of the
    others.
    """
    if not is_orthogonalised(context.runtime):
        return parameters
    found, none = hidden_matrices(model), np.zeros(len(context.table))
    of: dict[str, Floats] = dict.fromkeys(PARTS, none)
    for block, matrices in found.items():
        for matrix in matrices:
            part = "experts" if matrix.of_expert else f"{block}_layer"
            of[part] = of[part] + _local(matrix, model, context) * matrix.elements
    less = 1.0 - matrix_state_bytes(context) / state_bytes(context)["optimizer"]
    kept = {part: getattr(parameters, part) - less * of[part] for part in PARTS}
    seconds: dict[str, Floats] = dict.fromkeys(PARTS, none)
    for block in found:
        if (one := orthogonalised(model, block, context)) is not None:
            seconds[f"{block}_layer"] = one.products_s(context) + one.gathers_s(context)
    own, held, taken = (Parameters(**each) for each in (of, kept, seconds))
    return replace(parameters, matrices=own, kept=held, orthogonal_s=taken)


def matrix_state_bytes(context: CostContext) -> float:
    """Return the bytes of optimizer state per element of a hidden matrix, before sharding."""
    chosen = OPTIMIZERS[context.runtime.optimizer]
    return optimizer_bytes(context, chosen.matrices or chosen)


def _local(matrix: Matrix, model: Model, context: CostContext) -> Floats:
    """Return how many such matrices a rank holds before data-parallel sharding; parts count as fractions."""
    table = context.table
    if matrix.of_expert and model.moe:
        return np.asarray(model.moe.experts / (table["ep"] * table["etp"]))
    return np.asarray(1.0 / table["tp"] if matrix.cut else np.ones(len(table)))


def orthogonalised(model: Model, block: str, context: CostContext) -> Orthogonal | None:
    """Return a rank's work on the hidden matrices of one layer of a block; None without hidden matrices, or if the
    optimizer does not orthogonalise.
    """
    matrices = hidden_matrices(model).get(block, ()) if is_orthogonalised(context.runtime) else ()
    if not matrices:
        return None
    none = np.zeros(len(context.table))
    local: dict[bool, Floats] = {False: none, True: none}
    seconds, launches, made = none, none, none
    gathers: list[Moved] = []
    for matrix in matrices:
        own, moved = _gathered(matrix, model, context)
        gathers += moved
        local[matrix.of_expert] = local[matrix.of_expert] + _local(matrix, model, context) * matrix.elements
        seconds = seconds + own * matrix_s(matrix, context)
        launches = launches + own * (OTHER_LAUNCHES + PRODUCTS * ITERATIONS)
        made = np.maximum(made, _made_bytes(matrix, context))
    return Orthogonal(
        shared=local[False],
        experts=local[True],
        seconds=seconds,
        launches=launches,
        gathers=tuple(gathers),
        made_bytes=made,
    )


def _cuts(matrix: Matrix, context: CostContext) -> list[tuple[str, Floats, str]]:
    """Return the groups that divide a matrix outside experts: (group, ranks, side)."""
    table, ones = context.table, np.ones(len(context.table))
    shards = np.where(table.fully_sharded, context.groups.extent("fsdp")[0], 1.0)
    tp = table["tp"] * ones if matrix.cut else ones
    by_rows, by_layer = matrix.cut_along(rows=True), matrix.cut_along(rows=matrix.cut_rows)
    return [("fsdp", shards, by_rows), ("tp", tp, by_layer)]


def _gathered(matrix: Matrix, model: Model, context: CostContext) -> tuple[Floats, list[Moved]]:
    """Return how many such matrices a rank orthogonalises, and the collectives that this needs."""
    table, ones = context.table, np.ones(len(context.table))
    nbytes = ones * WIDTH * matrix.elements
    if not matrix.of_expert or not model.moe:
        moved: list[Moved] = []
        square = ones * WIDTH * matrix.short**2
        for family, ranks, along in _cuts(matrix, context):
            on = ranks > 1
            if along == "long":
                moved.append(("all_reduce", family, square * on, 2.0 * ITERATIONS * ones))
            else:
                moved.append(("all_gather", family, nbytes * on, 2.0 * ITERATIONS * ones))
                moved.append(("all_gather", family, square * on, 1.0 * ITERATIONS * ones))
        return ones, moved
    sharded = table.fully_sharded
    local = model.moe.experts / table["ep"]
    shards = np.where(sharded, context.groups.extent("expert_fsdp")[0], 1.0)
    whole = local >= shards
    own = np.where(whole, np.ceil(local / shards), local)
    over_shards = np.where(whole, 0.0, nbytes * local / table["etp"])
    over_parts = nbytes * own * (table["etp"] > 1)
    return own, [("all_gather", "expert_fsdp", over_shards, ones), ("all_gather", "etp", over_parts, ones)]


def matrix_s(matrix: Matrix, context: CostContext) -> Floats:
    """Return the seconds that one rank takes to orthogonalise one matrix, or its part of a divided one: the norm, and
    the products at their sustained rate.
    """
    roofline = replace(context.roofline, dtype="bfloat16", tf32=False, low=None)
    m, n = float(matrix.short), float(matrix.long)
    ones = np.ones(len(context.table))
    rows, long = m * ones, n * ones  # the rank's shares of the short and of the long side
    for _, ranks, along in () if matrix.of_expert else _cuts(matrix, context):
        rows, long = (rows, long / ranks) if along == "long" else (rows / ranks, long)
    # Products of `addmm` also read the addend.
    shapes = ((rows, m, long, 0.0), (rows, m, m, rows * m), (rows, long, m, rows * long))
    scaled = SCALED_BYTES * matrix.elements / roofline.memory_bytes_per_s
    total = np.zeros(len(context.table)) + scaled
    for height, width, depth, added in shapes:
        moved = WIDTH * (height * depth + depth * width + height * width + added)
        work = Work(
            kind=WorkKind.MATMUL,
            name="newton_schulz",
            flops=2.0 * height * width * depth,
            bytes=moved,
            m=height,
            n=width,
            k=depth,
        )
        total = total + ITERATIONS * roofline.seconds(work)
    return np.asarray(total)


def _made_bytes(matrix: Matrix, context: CostContext) -> Floats:
    """Return the bytes of the tensors that exist while a matrix is orthogonalised: its update on the rank, the matrix
    before and after an iteration's last product, the Gram matrix and its polynomial.
    """
    table, param = context.table, context.dtype_bytes("param")
    cut = table["etp"] if matrix.of_expert else table["tp"] if matrix.cut else np.ones(len(table))
    shards = np.where(table.fully_sharded & (not matrix.of_expert), context.groups.extent("fsdp")[0], 1.0)
    return np.asarray(param * matrix.elements / (cut * shards) + 2 * WIDTH * (matrix.elements + matrix.short**2))
