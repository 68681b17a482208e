"""nvFuser's notation: a tensor's loop domain, made of its logical axes by splits, some of them parallelized on devices.

A tensor starts with one loop axis for each logical axis. `outer_split(axis, n)` makes of one n pieces, the pieces
first; `inner_split(axis, n)` makes pieces of n elements, the pieces first as well; `parallelize(axis, DIDx)` gives an
axis to the devices of a mesh axis. As a text, one tensor is

    outer_split(0, 4); parallelize(0, DIDx)                 dim 0 in four pieces, one a device
    inner_split(0, 4); parallelize(1, DIDx)                 every fourth element of dim 0 on one device
    outer_split(0, 2); outer_split(1, 4); parallelize(1, DIDx)    a fused gate and up, each in four pieces

nvFuser's older spellings are the same calls: `split(axis, n)` is an inner split, `split(axis, n, inner_split=False)` an
outer one, and `axis(0).parallelize(ParallelType.mesh_x)` gives axis 0 to `DIDx`. Names of the mesh axes are those of
the mesh: `DIDx` (in nvFuser's mesh the innermost), `DIDy`, `DIDz`, or any other. Positions count the loop axes at that
moment. A device inside a split is DTensor's strided shard.

`parallelize(axis, Stream)` is about the loop alone, not about where elements lie: the operator that makes the tensor
runs in so many chunks, one on its way while the next is computed. With `swizzle1d(axis, DIDx)` before it, ranks take
the pieces in turns, each beginning with its own: a ring.

    outer_split(0, 4); parallelize(0, Stream)                         four chunks of dim 0
    outer_split(0, 2); swizzle1d(0, DIDx); parallelize(0, Stream)     a ring of the two devices of DIDx

`allocate(1, 0, 2)` is about memory alone, nvFuser's allocation domain: which dim of a rank's piece lies outermost,
which one inside it, and so on. Elements are where the loop axes say.

A split that does not divide its axis leaves the last pieces smaller, or empty, as nvFuser's and torch.chunk do: pieces
are of ceil(extent / n) elements. Its parts are given to devices or kept, and not split again: nvFuser would go on from
the padded extent, and DTensor from what a device has. (NVIDIA/Fuser, doc/reading/multigpu.md and
`TensorView.outer_split`.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from planner.sharding.layouts.layout import Layout, Mesh, normalize_spec, parse_placements, placements_of
from topology.errors import BadInput

MAX_CALLS = 64
_AXIS, _NUMBER, _DEVICE = r"(-?\d{1,4})", r"(\d{1,12})", r"(?:ParallelType\.)?([A-Za-z_]\w{0,31})"
_SPLIT = re.compile(
    rf"(outer_split|inner_split|split)\(\s*{_AXIS}\s*,\s*{_NUMBER}\s*(?:,\s*(?:inner_split\s*=\s*)?(True|False)\s*)?\)",
    flags=re.ASCII,
)
_PARALLELIZE = re.compile(
    rf"(?:parallelize\(\s*{_AXIS}\s*,|axis\(\s*{_AXIS}\s*\)\s*\.\s*parallelize\()\s*{_DEVICE}\s*\)", flags=re.ASCII
)
_SWIZZLE = re.compile(rf"swizzle1d\(\s*{_AXIS}\s*,\s*{_DEVICE}\s*\)", flags=re.ASCII)
_ALLOCATE = re.compile(r"allocate\(\s*(\d{1,3}(?:\s*,\s*\d{1,3})*)\s*(?:,\s*)?\)", flags=re.ASCII)
_MERGE = re.compile(rf"merge\(\s*{_AXIS}\s*\)", flags=re.ASCII)
STREAM = "Stream"
_DEVICES = {"mesh_x": "DIDx", "mesh_y": "DIDy", "mesh_z": "DIDz"}  # nvFuser's Python names for its parallel types


@dataclass(slots=True)
class _LoopAxis:
    """An axis of the loop domain: its logical dim, its extent, and the mesh axis that parallelizes it.

    `uneven` axes are parts of a split that does not divide. Pieces that are `swizzled` over a mesh axis begin with the
    rank's own.
    """

    dim: int
    extent: int
    device: str = ""
    uneven: bool = False
    swizzled: str = ""


@dataclass(frozen=True, slots=True)
class Streamed:
    """The loop over a dim of a tensor in `chunks`, or around a ring of ranks."""

    dim: int
    chunks: int
    ring: bool


@dataclass(slots=True)
class LoopDomain:
    """The loop domain of a tensor of `shape` on `mesh`."""

    shape: tuple[int, ...]
    mesh: Mesh
    name: str = "a tensor"
    allocation: tuple[int, ...] = ()  # dims in memory order, outermost first; empty if not stated
    axes: list[_LoopAxis] = field(init=False)

    def __post_init__(self) -> None:
        self.axes = [_LoopAxis(dim, size) for dim, size in enumerate(self.shape)]

    def outer_split(self, axis: int, pieces: int) -> LoopDomain:
        """Split a loop axis into `pieces` and the elements in each. Raises BadInput if that is not possible."""
        old = self._at(axis)
        self._split(axis, pieces, -(-old.extent // max(pieces, 1)))
        return self

    def inner_split(self, axis: int, elements: int) -> LoopDomain:
        """Split a loop axis into pieces of `elements`. Raises BadInput if that is not possible."""
        old = self._at(axis)
        self._split(axis, -(-old.extent // max(elements, 1)), elements)
        return self

    def merge(self, axis: int) -> LoopDomain:
        """Merge a loop axis with the next one, if both are parts of one dim. Raises BadInput otherwise."""
        outer, inner = self._at(axis), self._at(axis % len(self.axes) + 1)
        if outer.dim != inner.dim or outer.device or inner.device or outer.uneven or inner.uneven:
            raise BadInput(
                f"{self.name}: loop axes {axis} and the next one are not merged",
                why="a piece of two dims as one has no placement, nor has DTensor one: its shards are of one dim each"
                if outer.dim != inner.dim
                else "one of them is on devices, or a part of an uneven split",
                remedy="the tensor viewed with the two dims as one",
            )
        position = axis % len(self.axes)
        self.axes[position : position + 2] = [_LoopAxis(outer.dim, outer.extent * inner.extent)]
        return self

    def parallelize(self, axis: int, device: str) -> LoopDomain:
        """Assign a loop axis to the devices of a mesh axis. Raises BadInput if their sizes differ."""
        at, device = self._at(axis), self._device(device, STREAM)
        if any(one.device == device for one in self.axes):
            raise BadInput(f"{self.name}: two axes are given to {device}", remedy="each mesh axis once a tensor")
        if device != STREAM and at.extent != self.mesh.size(device):
            raise BadInput(
                f"{self.name}: an axis of {at.extent} is given to the {self.mesh.size(device)} devices of {device}",
                remedy=f"outer_split({axis}, {self.mesh.size(device)}) first",
            )
        at.device = device
        return self

    def swizzle(self, axis: int, device: str) -> LoopDomain:
        """Let each rank along a mesh axis begin with its own piece of a loop axis and go around. Raises BadInput if
        that is not possible.
        """
        at, device = self._at(axis), self._device(device)
        if at.device or at.uneven or at.extent != self.mesh.size(device):
            raise BadInput(
                f"{self.name}: {at.extent} pieces do not go around the {self.mesh.size(device)} devices of {device}",
                why=f"they are on {at.device}" if at.device else "each device has one piece of a ring, of equal sizes",
                remedy=f"outer_split({axis}, {self.mesh.size(device)}) first",
            )
        at.swizzled = device
        return self

    def allocate(self, order: Sequence[int]) -> LoopDomain:
        """Set the memory order of the dims, outermost first. Raises BadInput unless each dim appears once."""
        if sorted(order) != list(range(len(self.shape))):
            raise BadInput(
                f"{self.name}: {', '.join(map(str, order))} is no order of {len(self.shape)} dims",
                remedy=f"allocate({', '.join(map(str, range(len(self.shape))))}), each dim once",
            )
        self.allocation = tuple(order)
        return self

    @property
    def streamed(self) -> Streamed | None:
        """The loop that runs on streams. Raises BadInput if pieces are swizzled that do not run on streams."""
        for one in self.axes:
            if one.device == STREAM:
                return Streamed(one.dim, one.extent, ring=bool(one.swizzled))
            if one.swizzled:
                raise BadInput(f"{self.name}: swizzled pieces are on no stream", remedy="parallelize(axis, Stream)")
        return None

    def layout(self) -> Layout:
        """Return the layout of the loop domain; streams do not move elements. Raises BadInput if there is no such
        layout.
        """
        dims: list[list[str | int]] = [[] for _ in self.shape]
        for one in self.axes:
            if one.device == STREAM and any(other.device not in {"", STREAM} for other in self._later(one)):
                raise BadInput(
                    f"{self.name}: devices inside pieces of a stream",
                    why="each rank runs through its own elements",
                    remedy="devices first, then the stream inside their pieces",
                )
            if one.device != STREAM:
                dims[one.dim].append(one.device or one.extent)
        layout = Layout(tuple(normalize_spec(spec) for spec in dims))
        return parse_placements(placements_of(layout, self.mesh), self.shape, self.mesh, of=self.name)

    def _later(self, one: _LoopAxis) -> list[_LoopAxis]:
        """Return the loop axes inside `one`, of the same dim."""
        return [other for other in self.axes[self.axes.index(one) + 1 :] if other.dim == one.dim]

    def _device(self, name: str, *others: str) -> str:
        """Return a mesh axis by its own or nvFuser's name, or one of `others`. Raises BadInput for any other."""
        device = name if name in self.mesh.names else _DEVICES.get(name, name)
        if device not in {*self.mesh.names, *others}:
            raise BadInput(
                f"{self.name}: {device[:40]!r} is no axis of the mesh",
                remedy=f"one of {', '.join((*self.mesh.names, *others))}",
            )
        return device

    def _at(self, axis: int) -> _LoopAxis:
        if not -len(self.axes) <= axis < len(self.axes):
            raise BadInput(f"{self.name} has {len(self.axes)} loop axes, and no {axis}", remedy="positions from 0")
        return self.axes[axis]

    def _split(self, axis: int, outer: int, inner: int) -> None:
        old = self._at(axis)
        uneven = outer * inner != old.extent
        if why := self._refusal(old, outer, inner, uneven=uneven):
            raise BadInput(
                f"{self.name}: an axis of {old.extent} is not split into {outer} x {inner}",
                why=why,
                remedy="a number that divides, or one outer split of the whole dim",
            )
        position = axis % len(self.axes)
        parts = [_LoopAxis(old.dim, extent, uneven=uneven) for extent in (outer, inner)]
        self.axes[position : position + 1] = parts

    def _refusal(self, old: _LoopAxis, outer: int, inner: int, *, uneven: bool) -> str:
        """Return why a loop axis cannot be split so, or an empty string."""
        if old.device:
            return f"it is on {old.device} already"
        if outer < 1 or inner < 1:
            return "there are no such pieces"
        if old.uneven:
            return "it is a part of an uneven split"
        if uneven and sum(one.dim == old.dim for one in self.axes) > 1:
            return "pieces of a part of a dim are equal"
        if uneven and -(-old.extent // outer) != inner:
            return f"{outer} uneven pieces, as torch.chunk has them, are of {-(-old.extent // outer)} elements"
        return ""


def parse_schedule_of(text: str, shape: Sequence[int], mesh: Mesh, *, of: str) -> Layout:
    """Return the layout of a tensor after calls in nvFuser's notation. Raises BadInput."""
    domain = parse_domain(text, shape, mesh, of=of)
    layout = domain.layout()
    if domain.streamed is not None:
        raise BadInput(f"{of}: a stream", why="it says how a captured graph's products run", remedy="a `schedule`")
    if domain.allocation:
        raise BadInput(f"{of}: an allocation", why="it says how pieces of a captured graph lie in memory")
    return layout


def parse_domain(text: str, shape: Sequence[int], mesh: Mesh, *, of: str) -> LoopDomain:
    """Return the loop domain of a tensor after calls in nvFuser's notation. Raises BadInput."""
    domain = LoopDomain(tuple(shape), mesh, of)
    calls = [part for part in text.split(";") if part.strip()]
    if len(calls) > MAX_CALLS:
        raise BadInput(f"{of}: {len(calls)} calls", why=f"at most {MAX_CALLS} are read")
    for part in calls:
        _call(domain, part.strip(), of)
    return domain


def _call(domain: LoopDomain, text: str, of: str) -> None:
    """Apply one call of the notation. Raises BadInput."""
    if found := _SPLIT.fullmatch(text):
        call, axis, number, is_inner = found.groups()
        inner = call == "inner_split" if is_inner is None else is_inner == "True"
        if call != "split" and is_inner is not None:
            raise BadInput(f"{of}: {text[:60]!r} says twice which split it is", remedy=f"{call}({axis}, {number})")
        split = domain.inner_split if inner or (call == "split" and is_inner is None) else domain.outer_split
        split(int(axis), int(number))
    elif found := _PARALLELIZE.fullmatch(text):
        domain.parallelize(int(found[1] or found[2]), found[3])
    elif found := _SWIZZLE.fullmatch(text):
        domain.swizzle(int(found[1]), found[2])
    elif found := _ALLOCATE.fullmatch(text):
        domain.allocate([int(dim) for dim in found[1].split(",")])
    elif found := _MERGE.fullmatch(text):
        domain.merge(int(found[1]))
    else:
        raise BadInput(f"{of}: cannot read {text[:60]!r}", remedy="outer_split(0, 4); parallelize(0, DIDx)")


def loop_text(layout: Layout, shape: Sequence[int], mesh: Mesh, names: Sequence[str] = ()) -> str:
    """Return a tensor as nvFuser prints its domain: `[DIDx{4}, f/4, h, r{DIDy}]`, reductions pending at the end."""
    parts: list[str] = []
    for dim, spec in enumerate(layout.dims):
        name = names[dim] if dim < len(names) else str(shape[dim])
        parts += [f"{item}{{{mesh.size(item)}}}" if isinstance(item, str) else str(item) for item in spec]
        pieces = prod(item if isinstance(item, int) else mesh.size(item) for item in spec)
        parts.append(f"{name}/{pieces}" if pieces > 1 else name)
    parts += [f"r{{{axis}}}" for axis, _ in layout.pending]
    return f"[{', '.join(parts)}]"
