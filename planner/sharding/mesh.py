"""The mesh: named axes of ranks, first axis major, as in `init_device_mesh`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from topology.errors import BadInput

MAX_AXES = 4
MAX_RANKS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Axis names and sizes, major first: rank = row-major index of the coordinates."""

    names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return prod(self.shape)

    def size(self, axes: str | Iterable[str]) -> int:
        """Return the ranks of a group over `axes` (one name or several)."""
        names = (axes,) if isinstance(axes, str) else axes
        return prod(self.shape[self.names.index(name)] for name in names)

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return `axes` in mesh order."""
        return tuple(sorted(axes, key=self.names.index))

    def group_name(self, axes: Sequence[str]) -> str:
        """Return what a collective over `axes` is called: `dp`, or `dp+tp` for a flattened group."""
        return "+".join(self.ordered(axes))


def mesh_of(names: Sequence[str], shape: Sequence[int]) -> Mesh:
    """Return the mesh, checked. Raises BadInput."""
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
