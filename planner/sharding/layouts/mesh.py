"""The mesh: named axes of ranks, first axis major, as in `init_device_mesh`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from topology.errors import BadInput

MAX_AXES = 4
MAX_RANKS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Axis names and sizes, major first: a rank is the row-major index of its coordinates."""

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
    by `tp`, which stands for both. `mesh` is the fine mesh; `parts` maps each original axis to its parts.
    """

    mesh: Mesh
    parts: Mapping[str, tuple[str, ...]]

    def parts_of(self, axis: str) -> tuple[str, ...]:
        """Return the fine axes that a name stands for."""
        return self.parts.get(axis, (axis,))

    def expand_placements(self, placements: Sequence[str]) -> list[str]:
        """Return one placement per fine axis, repeating those that are given per original axis."""
        if len(placements) != len(self.parts):
            return list(placements)
        return [placement for placement, parts in zip(placements, self.parts.values(), strict=True) for _ in parts]


def split_mesh(coarse: Mesh, split: Mapping[str, Mapping[str, int]]) -> SplitMesh:
    """Return `coarse` with axes split into named parts. Raises BadInput where the parts do not multiply to the axis."""
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
