"""The layout of one tensor on a mesh, and its two notations: a spec per tensor dim, and a placement per mesh axis.

A `Layout` has one `DimSpec` per tensor dim: an ordered tuple, major first, of mesh axes (names) and block counts
(numbers). A mesh axis shards the dim at that position; a block count splits it into blocks that every rank keeps.
`("tp", "dp")` is a weight sharded by tp first and then by dp; `(2, "tp")` on a fused gate|up dim shards each of its two
halves. Mesh axes that no spec names hold replicas or, if `pending`, partial values of a reduction yet to be performed.

The placement notation has one token per mesh axis, as DTensor has: `R`, `S(k)`, `P(op)`, and `SS(k,f)` for DTensor's
`_StridedShard` (view what earlier mesh axes left of dim k as [f, n, rest] and take index r of n). Both say the same;
specs are used inside because the spec of a dim made of two axes is the concatenation of theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from topology.errors import BadInput

MAX_AXES = 4
MAX_RANKS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Axis names and sizes, major first; a rank is the row-major index of its coordinates."""

    names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return prod(self.shape)

    def size(self, axes: str | Iterable[str]) -> int:
        """Return the number of ranks in a group over `axes` (one name or several)."""
        if isinstance(axes, str):
            return self.shape[self.names.index(axes)]
        return prod(self.shape[self.names.index(name)] for name in axes)

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return `axes` in mesh order."""
        return tuple(sorted(axes, key=self.names.index))

    def group_name(self, axes: Sequence[str]) -> str:
        """Return the name of the group over `axes`: `dp`, or `dp+tp` for a flattened group."""
        return "+".join(self.ordered(axes))


def make_mesh(names: Sequence[str], shape: Sequence[int]) -> Mesh:
    """Return a mesh of at most MAX_AXES axes and MAX_RANKS ranks. Raises BadInput."""
    if len(names) != len(shape) or not names:
        raise BadInput(f"the mesh names {len(names)} axes and gives {len(shape)} sizes", remedy="one size per name")
    if len(set(names)) != len(names):
        raise BadInput(f"the mesh names an axis twice: {', '.join(names)}", remedy="distinct names")
    if len(names) > MAX_AXES:
        raise BadInput(f"a mesh of {len(names)} axes", why=f"at most {MAX_AXES} are searched exactly")
    bad = [name for name in names if not name.isidentifier() or len(name) > 64]
    if bad:
        raise BadInput(f"{bad[0][:64]!r} is no name for a mesh axis", remedy="letters, digits and _")
    if any(size < 1 for size in shape) or prod(shape) > MAX_RANKS:
        raise BadInput(f"a mesh of shape {list(shape)}", why=f"sizes are positive, and at most {MAX_RANKS:,} ranks")
    return Mesh(names=tuple(names), shape=tuple(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitMesh:
    """A mesh some of whose axes were split into finer ones, major first: `tp` of 8 into `kv` of 2 and `rep` of 4.

    With fewer key-value heads than ranks, keys are sharded by `kv` and replicated over `rep`, while queries are sharded
    by `tp`, which means both. `mesh` is the fine mesh; `parts` maps each original axis to its parts.
    """

    mesh: Mesh
    parts: Mapping[str, tuple[str, ...]]

    def parts_of(self, axis: str) -> tuple[str, ...]:
        """Return the fine axes of an axis name."""
        return self.parts.get(axis, (axis,))

    def expand_placements(self, placements: Sequence[str]) -> list[str]:
        """Return one placement per fine axis, repeating placements given per original axis."""
        if len(placements) != len(self.parts):
            return list(placements)
        return [placement for placement, parts in zip(placements, self.parts.values(), strict=True) for _ in parts]


def split_mesh(coarse: Mesh, split: Mapping[str, Mapping[str, int]]) -> SplitMesh:
    """Return `coarse` with axes split into named parts. Raises BadInput unless the parts multiply to its size."""
    for axis, parts in split.items():
        if axis not in coarse.names or not parts or prod(parts.values()) != coarse.size(axis):
            raise BadInput(
                f"{axis[:40]!r} cannot be split into {dict(parts)}",
                why="the parts of an axis of the mesh multiply to its size",
                remedy='"split": {"tp": {"kv": 2, "rep": 4}} for tp of 8',
            )
    finer = {name: split.get(name, {name: size}) for name, size in zip(coarse.names, coarse.shape, strict=True)}
    names = [name for parts in finer.values() for name in parts]
    sizes = [size for parts in finer.values() for size in parts.values()]
    return SplitMesh(mesh=make_mesh(names, sizes), parts={axis: tuple(parts) for axis, parts in finer.items()})


DimSpec = tuple[str | int, ...]
REDUCERS = ("sum", "avg", "max", "min", "product", "mask")

_PLACEMENT = re.compile(r"R|S\((\d{1,3})\)|SS\((\d{1,3}),\s?(\d{1,12})\)|P(?:\((\w{1,16})\))?", flags=re.ASCII)


@dataclass(frozen=True, slots=True)
class Layout:
    """A spec per tensor dim, and (mesh axis, reducer) for every axis with a pending reduction, in mesh order."""

    dims: tuple[DimSpec, ...]
    pending: tuple[tuple[str, str], ...] = ()

    def axes(self) -> set[str]:
        """Return the mesh axes that shard some dim."""
        return {item for spec in self.dims for item in spec if isinstance(item, str)}


def normalize_spec(spec: Sequence[str | int]) -> DimSpec:
    """Return the canonical form of a spec: no block counts of 1, adjacent ones multiplied, none at the end."""
    out: list[str | int] = []
    for item in spec:
        if isinstance(item, int):
            if item == 1:
                continue
            if out and isinstance(out[-1], int):
                out[-1] *= item
                continue
        out.append(item)
    while out and isinstance(out[-1], int):
        out.pop()
    return tuple(out)


def num_pieces(spec: DimSpec, mesh: Mesh) -> int:
    """Return the number of shards over all ranks."""
    return prod(mesh.size(item) for item in spec if isinstance(item, str))


def divides_evenly(size: int, spec: DimSpec, mesh: Mesh) -> bool:
    """Return whether all shards of a dim of `size` elements are equal."""
    return size % prod(item if isinstance(item, int) else mesh.size(item) for item in spec) == 0


def local_size(size: int, spec: DimSpec, mesh: Mesh) -> int:
    """Return the size of the largest shard.

    Uneven sharding follows torch.chunk: all shards but the last ones are full.
    """
    if any(isinstance(item, int) for item in spec):
        return size // num_pieces(spec, mesh)
    for item in spec:
        size = -(-size // mesh.size(str(item)))
    return size


def has_empty_pieces(size: int, spec: DimSpec, mesh: Mesh) -> bool:
    """Return whether some ranks have no element of a dim: if pieces are uneven, the last ones are smaller, or empty."""
    for item in spec:
        ranks = 1 if isinstance(item, int) else mesh.size(item)
        size = size // item if isinstance(item, int) else size - (ranks - 1) * -(-size // ranks)
    return size <= 0


def local_shape(shape: Sequence[int], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of every rank's buffer, padded to the largest shard if sharding is uneven."""
    return tuple(local_size(size, spec, mesh) for size, spec in zip(shape, layout.dims, strict=True))


def parse_placements(placements: Sequence[str], shape: Sequence[int], mesh: Mesh, *, of: str) -> Layout:
    """Parse the placements of the tensor called `of`, one per mesh axis.

    Raises BadInput if they are not possible.
    """
    if len(placements) != len(mesh.names):
        raise BadInput(
            f"{of} has {len(placements)} placements on a mesh of {len(mesh.names)} axes",
            remedy="one token per mesh axis",
        )
    # A block count that a later mesh axis may still shard stays a number; the unsharded rest of a dim is left out.
    specs: list[list[str | int]] = [[] for _ in shape]
    pending = []
    for axis, ranks, placement in zip(mesh.names, mesh.shape, placements, strict=True):
        found = _PLACEMENT.fullmatch(placement)
        if found is None:
            raise BadInput(
                f"{of}: {placement[:40]!r} is no placement",
                remedy="R, S(dim), SS(dim,factor) or P(op), one per mesh axis",
            )
        plain, strided, factor, reducer = found.groups()
        if placement == "R":
            continue
        if placement.startswith("P"):
            if (reducer or "sum") not in REDUCERS:
                raise BadInput(f"{of}: unknown reduction {reducer!r}", remedy=f"one of {', '.join(REDUCERS)}")
            pending.append((axis, reducer or "sum"))
            continue
        dim = int(plain or strided)
        if dim >= len(shape):
            raise BadInput(f"{of}: {placement} on a tensor of {len(shape)} dims", remedy="dims count from 0")
        _apply_shard(specs[dim], axis, ranks, int(factor or 1), shape[dim], mesh, f"{of}: {placement} over {axis}")
    return Layout(tuple(normalize_spec(spec) for spec in specs), tuple(pending))


def _apply_shard(spec: list[str | int], axis: str, ranks: int, factor: int, size: int, mesh: Mesh, where: str) -> None:
    """Shard the part of a dim that earlier mesh axes left: split it into `factor` blocks, and each of those over
    `axis`.
    """
    if factor < 1:
        raise BadInput(f"{where}: a factor of {factor}", remedy="factors are positive")
    position = 0
    while position < len(spec):  # later mesh axes may shard the blocks of earlier ones
        block = spec[position]
        if isinstance(block, int):
            if factor == 1:
                if block % ranks:
                    raise BadInput(
                        f"{where} is not possible", why=f"a block of {block} is not cut by {ranks}", remedy="a factor"
                    )
                spec[position : position + 1] = [axis, *([block // ranks] if block > ranks else [])]
                return
            if factor % block:
                if block % factor or (block // factor) % ranks:
                    raise BadInput(f"{where} is not possible", why=f"it would split a block of {block} unevenly")
                spec[position : position + 1] = [
                    factor,
                    axis,
                    *([left] if (left := block // factor // ranks) > 1 else []),
                ]
                return
            factor //= block
        position += 1
    blocks = prod(item if isinstance(item, int) else mesh.size(item) for item in spec) * factor
    if (factor > 1 or any(isinstance(item, int) for item in spec)) and size % (blocks * ranks):
        why = f"{size} elements do not divide into {blocks} blocks and those by {ranks}"
        raise BadInput(f"{where} is not possible", why=why, remedy="a factor that divides")
    spec.extend([factor, axis] if factor > 1 else [axis])


def placements_of(layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    """Return `layout` as placements, one per mesh axis."""
    out = dict.fromkeys(mesh.names, "R")
    out.update({axis: f"P({reducer})" for axis, reducer in layout.pending})
    for dim, spec in enumerate(layout.dims):
        for position, axis in enumerate(spec):
            if isinstance(axis, str):
                # The major part that is not sharded yet at its turn: block counts, and later mesh axes.
                skipped = prod(
                    item if isinstance(item, int) else mesh.size(item)
                    for item in spec[:position]
                    if isinstance(item, int) or mesh.names.index(item) > mesh.names.index(axis)
                )
                out[axis] = f"S({dim})" if skipped == 1 else f"SS({dim},{skipped})"
    return tuple(out[name] for name in mesh.names)
