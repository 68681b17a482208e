"""Simulate symmetric ranks once: the coarsest grouping of ranks that provably behave alike.

Ranks of one *class* run the same code on the same kind of GPU, their groups have members of the same classes and the
same kind, their messages come from and go to the same classes, and the links they cross are crossed by the same
traffic. Found by colour refinement: start from code and kind, split classes until all of this holds. Such a partition
is equitable, and the engine's rules (rendezvous, streams, max-min fair links) look at nothing else, so by induction
over events every rank of a class has the timeline of its representative, exactly. An irregular placement splits
classes as far as it must, down to single ranks.

A 16,384-rank program with tensor, context, data and pipeline parallelism folds to its 16 pipeline stages.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.costs import CostModel, Ranks
from simulator.program import Collective, Program, RankCode, Recv, Send, Transfer

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Meeting:
    """A transfer as its class of instances sees it: who must arrive, what it costs, which links it loads.

    `channel` is equal for the two ends of a message and for all members of a group. `ranks` is the representative
    instance, `classes` the rank classes in it. `links` has, for each class of links, the share that all instances of
    this meeting together put on one link of that class, and `share` is the largest share of one instance on one link.
    """

    channel: Hashable
    ranks: Ranks
    classes: tuple[int, ...]
    links: tuple[tuple[int, float], ...] = ()
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks that behave alike, and the one that is simulated for them."""

    index: int
    ranks: Ranks
    code: RankCode
    meetings: dict[tuple[str, str, int, bool], Meeting]  # by endpoint(instruction)

    @property
    def representative(self) -> int:
        return self.ranks[0]


@dataclass(frozen=True, slots=True)
class Folding:
    classes: tuple[RankClass, ...]
    link_names: tuple[Hashable, ...]  # one link of each link class

    def class_of(self) -> dict[int, int]:
        """Return the class index of every rank."""
        return {rank: c.index for c in self.classes for rank in c.ranks}


def endpoint(instruction: Transfer) -> tuple[str, str, int, bool]:
    """Return whom an instruction talks to, as its code names them: the key of `RankClass.meetings`."""
    match instruction:
        case Collective():
            return "collective", instruction.group, 0, False
        case Send():
            return "send", instruction.group, instruction.peer, instruction.relative
        case Recv():
            return "recv", instruction.group, instruction.peer, instruction.relative


def meeting_keys(rank_class: RankClass) -> list[Hashable]:
    """Return for each instruction which transfer it is part of, None if it is no transfer.

    Members of a group meet in the order in which their hosts issue collectives on it, whatever the streams: a
    communicator is one queue. Messages between two ranks match in order, tag by tag.
    """
    turns: dict[Hashable, int] = {}
    keys: list[Hashable] = []
    for instruction in rank_class.code.instructions:
        if not isinstance(instruction, Collective | Send | Recv):
            keys.append(None)
            continue
        tag = "" if isinstance(instruction, Collective) else instruction.tag
        line = (rank_class.meetings[endpoint(instruction)].channel, tag)
        # Both ends of a message may be one class (a ring), so each end counts its own turns.
        end = (line, isinstance(instruction, Recv))
        turns[end] = turns.get(end, -1) + 1
        keys.append((line, turns[end]))
    return keys


@dataclass(slots=True)
class _Family:
    """The groups of one family as arrays: `table[g, k]` is the rank at position k of group g, -1 beyond its size."""

    groups: tuple[Ranks, ...]
    table: Ints
    sizes: Ints
    group_of: Ints  # by rank, -1 where a rank is in no group
    position: Ints


def fold(program: Program, costs: CostModel | None = None, *, enabled: bool = True) -> Folding:
    """Return the rank classes of `program`; one class a rank if not `enabled`. Without `costs`, all GPUs are alike.

    Takes O(rounds * (ranks * families + links)) time. Raises ValueError when ranks are not 0..n-1 exactly once, or
    when code names a family, group or position that is not there.
    """
    code_of = _code_of_rank(program)
    families = {name: _family(name, groups, len(code_of)) for name, groups in program.groups.items()}
    endpoints = [_endpoints(code) for code in program.codes]
    partners = _partners(program, endpoints, families, code_of)
    links = _Links()
    group_kinds = _group_kinds(families, endpoints, costs, links)
    pair_kinds = _pair_kinds(partners, costs, links)
    links.close(costs)
    colour = _number(np.column_stack([code_of, _rank_kinds(len(code_of), costs)]))
    if not enabled:
        colour = np.arange(len(code_of), dtype=np.int64)
    link_colour = links.first_colour(enabled=enabled)
    while True:
        group_colour = {
            name: _group_colours(families[name], colour, kinds, links.signature(name, link_colour))
            for name, kinds in group_kinds.items()
        }
        pair_colour = {
            key: _columns(colour[pairs[:, 0]], colour[pairs[:, 1]], pair_kinds[key], links.signature(key, link_colour))
            for key, pairs in partners.items()
        }
        new = _refine(colour, code_of, families, group_colour, pair_colour, partners, endpoints)
        new_link = links.refine(link_colour, {**group_colour, **{k: _number(v) for k, v in pair_colour.items()}})
        if new.max() == colour.max() and new_link.max(initial=-1) == link_colour.max(initial=-1):
            return _result(program, code_of, colour, families, group_colour, partners, endpoints, links, link_colour)
        colour, link_colour = new, new_link


# --- reading the program ----------------------------------------------------------------------------------------------


def _code_of_rank(program: Program) -> Ints:
    ranks = np.concatenate([np.asarray(code.ranks, dtype=np.int64) for code in program.codes])
    if len(ranks) == 0 or not np.array_equal(np.sort(ranks), np.arange(len(ranks))):
        raise ValueError("the codes of a program must hold ranks 0..n-1, each once")
    code_of = np.empty(len(ranks), dtype=np.int64)
    for index, code in enumerate(program.codes):
        code_of[list(code.ranks)] = index
    return code_of


def _family(name: str, groups: tuple[Ranks, ...], ranks: int) -> _Family:
    sizes = np.fromiter((len(group) for group in groups), dtype=np.int64, count=len(groups))
    table = np.full((len(groups), int(sizes.max(initial=1))), -1, dtype=np.int64)
    inside = np.arange(table.shape[1]) < sizes[:, None]
    table[inside] = np.fromiter((rank for group in groups for rank in group), dtype=np.int64, count=int(sizes.sum()))
    members = table[inside]
    if len(np.unique(members)) != len(members) or (len(members) and not 0 <= members.min() <= members.max() < ranks):
        raise ValueError(f"groups of family {name!r} overlap or hold ranks outside 0..{ranks - 1}")
    group_of = np.full(ranks, -1, dtype=np.int64)
    position = np.full(ranks, -1, dtype=np.int64)
    where = np.nonzero(inside)
    group_of[members], position[members] = where[0], where[1]
    return _Family(groups, table, sizes, group_of, position)


def _endpoints(code: RankCode) -> tuple[tuple[str, str, int, bool], ...]:
    transfers = (i for i in code.instructions if isinstance(i, Collective | Send | Recv))
    return tuple(dict.fromkeys(endpoint(i) for i in transfers))


PairKey = tuple[int, tuple[str, str, int, bool]]  # (code index, endpoint)


def _partners(
    program: Program,
    endpoints: list[tuple[tuple[str, str, int, bool], ...]],
    families: dict[str, _Family],
    code_of: Ints,
) -> dict[PairKey, Ints]:
    """Return for every message endpoint of every code the pairs (from, to), one row a rank of that code."""
    partners: dict[PairKey, Ints] = {}
    for index, code in enumerate(program.codes):
        mine = np.nonzero(code_of == index)[0]
        for key in endpoints[index]:
            kind, name, peer, relative = key
            if name not in families or (families[name].group_of[mine] < 0).any():
                raise ValueError(f"code {code.name!r} talks in {name!r}, but not all of its ranks are in such a group")
            if kind == "collective":
                continue
            family = families[name]
            groups, sizes = family.group_of[mine], family.sizes[family.group_of[mine]]
            at = (family.position[mine] + peer) % sizes if relative else np.full(len(mine), peer)
            if ((at < 0) | (at >= sizes)).any():
                raise ValueError(f"code {code.name!r} names position {peer} of {name!r}: there is none")
            other = family.table[groups, at]
            partners[index, key] = np.column_stack([mine, other] if kind == "send" else [other, mine])
    return partners


# --- costs that may differ --------------------------------------------------------------------------------------------


def _rank_kinds(ranks: int, costs: CostModel | None) -> Ints:
    return _hashed([costs.kind((rank,)) for rank in range(ranks)] if costs else [0] * ranks)


def _group_kinds(
    families: dict[str, _Family],
    endpoints: list[tuple[tuple[str, str, int, bool], ...]],
    costs: CostModel | None,
    links: _Links,
) -> dict[str, Ints]:
    used = dict.fromkeys(key[1] for keys in endpoints for key in keys if key[0] == "collective")
    for name in used:
        if costs:
            links.add(name, [costs.routes(group) for group in families[name].groups])
    return {
        name: _hashed([costs.kind(group) if costs else len(group) for group in families[name].groups]) for name in used
    }


def _pair_kinds(partners: dict[PairKey, Ints], costs: CostModel | None, links: _Links) -> dict[PairKey, Ints]:
    if costs is None:
        return {key: np.zeros(len(pairs), dtype=np.int64) for key, pairs in partners.items()}
    rows = {key: [(a, b) for a, b in pairs.tolist()] for key, pairs in partners.items()}
    for key, pairs in rows.items():
        # A message is one transfer: its sender's end carries the link use.
        links.add(key, [costs.routes(pair) if key[1][0] == "send" else () for pair in pairs])
    numbers: dict[Hashable, int] = {}
    return {
        key: np.array([numbers.setdefault(costs.kind(pair), len(numbers)) for pair in pairs], dtype=np.int64)
        for key, pairs in rows.items()
    }


class _Links:
    """Links and who crosses them: the third side of the refinement. Costs nothing when no link is shared."""

    def __init__(self) -> None:
        self.index: dict[Hashable, int] = {}
        self.names: list[Hashable] = []
        self.uses: dict[Hashable, list[list[tuple[int, float]]]] = {}  # by transfer key, then instance
        self.capacity: list[Hashable] = []

    def add(self, key: Hashable, routes: list[tuple]) -> None:  # type: ignore[type-arg]
        instances = []
        for route in routes:
            total: dict[int, float] = {}
            for use in route:
                link = self.index.setdefault(use.link, len(self.index))
                total[link] = total.get(link, 0.0) + use.share
            instances.append(list(total.items()))
        self.uses[key] = instances

    def close(self, costs: CostModel | None) -> None:
        self.names = list(self.index)
        self.capacity = [costs.link_bytes_per_s(name) for name in self.names] if costs else []

    def first_colour(self, *, enabled: bool) -> Ints:
        return _hashed(self.capacity) if enabled else np.arange(len(self.names), dtype=np.int64)

    def signature(self, key: Hashable, colour: Ints) -> Ints:
        """Return a number per instance of transfer `key` that tells link classes and shares apart."""
        instances = self.uses.get(key)
        if instances is None or not self.names:
            return np.zeros(1, dtype=np.int64)
        return _hashed([tuple(sorted((int(colour[link]), share) for link, share in uses)) for uses in instances])

    def refine(self, colour: Ints, transfers: dict[Hashable, Ints]) -> Ints:
        """Split link classes by the classes of the transfers that cross them."""
        if not self.names:
            return colour
        crossed: list[dict[tuple[int, int, float], int]] = [{} for _ in self.names]
        for number, (key, transfer_colour) in enumerate(transfers.items()):
            for instance, uses in enumerate(self.uses.get(key, [])):
                for link, share in uses:
                    seen = (number, int(transfer_colour[instance]), share)
                    crossed[link][seen] = crossed[link].get(seen, 0) + 1
        return _hashed([(int(colour[i]), tuple(sorted(seen.items()))) for i, seen in enumerate(crossed)])


# --- one round of refinement ------------------------------------------------------------------------------------------


def _group_colours(family: _Family, colour: Ints, kinds: Ints, link_signature: Ints) -> Ints:
    """Number the groups by the multiset of their members' colours, their kind and their links."""
    members = np.where(family.table >= 0, colour[family.table], -1)
    members.sort(axis=1)
    return _number(_columns(members, kinds, link_signature))


def _refine(
    colour: Ints,
    code_of: Ints,
    families: dict[str, _Family],
    group_colour: dict[str, Ints],
    pair_colour: dict[PairKey, Ints],
    partners: dict[PairKey, Ints],
    endpoints: list[tuple[tuple[str, str, int, bool], ...]],
) -> Ints:
    columns = [colour]
    for name, colours in group_colour.items():
        family = families[name]
        columns.append(np.where(family.group_of >= 0, colours[family.group_of], -1))
    # Positions tell apart ranks that name partners by position; ring neighbours are relative and need none.
    for name in dict.fromkeys(key[1] for _, key in partners if not key[3]):
        columns.append(families[name].position)
    width = max((len(keys) for keys in endpoints), default=0)
    block = np.full((len(colour), width), -1, dtype=np.int64)
    for (code, key), pairs in pair_colour.items():
        mine = np.nonzero(code_of == code)[0]
        block[mine, endpoints[code].index(key)] = _number(pairs)
    return _number(np.column_stack([*columns, block]))


def _columns(first: Ints, *more: Ints) -> Ints:
    return np.column_stack([first, *(np.broadcast_to(column, (len(first),)) for column in more)])


def _number(rows: Ints) -> Ints:
    """Return for each row the number of its value, numbered by sorted order."""
    if rows.ndim == 2 and rows.shape[1] > 1:
        # Fold columns pairwise into one: sorting plain integers is much faster than sorting rows.
        key = rows[:, 0]
        for column in range(1, rows.shape[1]):
            other = rows[:, column] - rows[:, column].min(initial=0)
            key = np.unique(key * (int(other.max(initial=0)) + 1) + other, return_inverse=True)[1]
        return key
    return np.unique(rows.reshape(-1), return_inverse=True)[1]


def _hashed(values: list) -> Ints:  # type: ignore[type-arg]
    """Number hashable values by first appearance."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)


# --- the result -------------------------------------------------------------------------------------------------------


def _result(
    program: Program,
    code_of: Ints,
    colour: Ints,
    families: dict[str, _Family],
    group_colour: dict[str, Ints],
    partners: dict[PairKey, Ints],
    endpoints: list[tuple[tuple[str, str, int, bool], ...]],
    links: _Links,
    link_colour: Ints,
) -> Folding:
    # Classes in order of their lowest rank, so that results do not depend on how colours were numbered.
    first = np.unique(colour, return_index=True)[1]
    order = np.argsort(first, kind="stable")
    renumber = np.empty(len(first), dtype=np.int64)
    renumber[order] = np.arange(len(first))
    index_of = renumber[colour]
    by_class = np.split(np.argsort(index_of, kind="stable"), np.cumsum(np.bincount(index_of))[:-1])
    link_sample = np.unique(link_colour, return_index=True)[1] if len(link_colour) else np.empty(0, dtype=np.int64)
    row_of = np.empty(len(colour), dtype=np.int64)  # position of a rank among the ranks of its code
    for code in range(len(program.codes)):
        mine = np.nonzero(code_of == code)[0]
        row_of[mine] = np.arange(len(mine))
    pair_links = _pair_links(partners, index_of)
    classes = []
    for index, members in enumerate(by_class):
        rank = int(members[0])
        code = int(code_of[rank])
        meetings = {}
        for key in endpoints[code]:
            kind, name, peer, relative = key
            family = families[name]
            if kind == "collective":
                group = int(family.group_of[rank])
                ranks = family.groups[group]
                number = int(group_colour[name][group])
                instances = np.nonzero(group_colour[name] == number)[0]
                use = _link_use(links, [(name, instances)], link_colour, link_sample)
                member_classes = tuple(dict.fromkeys(int(index_of[r]) for r in sorted(ranks)))
                meetings[key] = Meeting(("group", name, number), ranks, member_classes, *use)
                continue
            pair = tuple(partners[code, key][row_of[rank]].tolist())
            size = int(family.sizes[family.group_of[rank]])
            sender, receiver = (int(index_of[r]) for r in pair)
            if relative:
                step: Hashable = (peer if kind == "send" else -peer) % size
            else:
                step = (int(family.position[pair[0]]), int(family.position[pair[1]]))
            channel = ("pair", name, step, sender, receiver)
            if kind == "send":
                use = _link_use(links, pair_links[sender, key], link_colour, link_sample)
            else:
                use = ((), 0.0)
            meetings[key] = Meeting(channel, pair, tuple(dict.fromkeys((sender, receiver))), *use)
        classes.append(RankClass(index, tuple(members.tolist()), program.codes[code], meetings))
    return Folding(tuple(classes), tuple(links.names[i] for i in link_sample))


def _pair_links(
    partners: dict[PairKey, Ints], index_of: Ints
) -> dict[tuple[int, tuple[str, str, int, bool]], list[tuple[Hashable, Ints]]]:
    """Return by (sender class, endpoint) the instances of that message: which rows of which transfer key."""
    found: dict[tuple[int, tuple[str, str, int, bool]], list[tuple[Hashable, Ints]]] = {}
    for (code, key), pairs in partners.items():
        if key[0] == "send":
            senders = index_of[pairs[:, 0]]
            for sender in np.unique(senders):
                found[int(sender), key] = [((code, key), np.nonzero(senders == sender)[0])]
    return found


def _link_use(
    links: _Links, instances: list[tuple[Hashable, Ints]], link_colour: Ints, link_sample: Ints
) -> tuple[tuple[tuple[int, float], ...], float]:
    """Return the share of all instances together on one link of each class, and the largest share of one on one."""
    if not links.names:
        return (), 0.0
    total: dict[int, float] = {}
    largest = 0.0
    for key, rows in instances:
        for row in rows.tolist():
            for link, share in links.uses[key][row]:
                largest = max(largest, share)
                if link == link_sample[link_colour[link]]:
                    total[int(link_colour[link])] = total.get(int(link_colour[link]), 0.0) + share
    return tuple(sorted(total.items())), largest


