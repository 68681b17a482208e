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

from simulator.program.color_refinement import Ints, SharedLinks, columns, number_rows, number_values
from simulator.program.cost_model import CostModel, LinkUse, Ranks
from simulator.program.program import Collective, Copy, Program, RankCode, Recv, Send, Transfer

COPIES = ("copies",)  # key of copies among transfers; each rank has its own
Endpoint = tuple[str, str, int, bool]  # (collective or send or recv, family, peer, relative)
PairKey = tuple[int, Endpoint]  # (code index, endpoint of a message)


@dataclass(frozen=True, slots=True)
class Meeting:
    """A class of equal transfers: the ranks that must arrive, the cost, and the links used.

    `channel` is equal for the two ends of a message and for all members of a group. `ranks` is the representative
    instance, `classes` the rank classes in it. `links` has, for each class of links, the share that all instances
    together put on one link of that class; `share` is the largest share of one instance on one link.
    """

    channel: Hashable
    ranks: Ranks
    classes: tuple[int, ...]
    links: tuple[tuple[int, float], ...] = ()
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks with the same behaviour, and the one simulated for all of them."""

    index: int
    ranks: Ranks
    code: RankCode
    meetings: dict[Endpoint, Meeting]  # by endpoint(instruction)
    copy_links: tuple[tuple[int, float], ...] = ()  # as Meeting.links, for the copies of all ranks of the class
    copy_share: float = 0.0

    @property
    def representative(self) -> int:
        return self.ranks[0]


@dataclass(frozen=True, slots=True)
class Folding:
    classes: tuple[RankClass, ...]
    link_names: tuple[Hashable, ...]  # one link of each link class


def endpoint(instruction: Transfer) -> Endpoint:
    """Return the partner of an instruction as its code names it: the key of `RankClass.meetings`."""
    match instruction:
        case Collective():
            return "collective", instruction.group, 0, False
        case Send():
            return "send", instruction.group, instruction.peer, instruction.relative
        case Recv():
            return "recv", instruction.group, instruction.peer, instruction.relative


def meeting_keys(rank_class: RankClass) -> list[Hashable]:
    """Return for each instruction the key of the transfer that it is part of; None if it is no transfer.

    Members of a group meet in the order in which their hosts issue collectives on it, whatever the streams: a
    communicator is one queue. Messages between two ranks match in order, tag by tag.
    """
    turns: dict[Hashable, int] = {}
    keys: list[Hashable] = []
    for instruction in rank_class.code.instructions:
        if not isinstance(instruction, Transfer):
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
    """Return the rank classes of `program`; one class a rank if not `enabled`. Without `costs`, all GPUs are equal.

    Takes O(rounds * (ranks * families + links)) time. Raises ValueError when ranks are not 0..n-1 exactly once, or
    when code names a family, group or position that is not there.
    """
    return _Refinement(program, costs).run(enabled=enabled)


class _Refinement:
    """Colours of ranks, groups, messages and links, refined until none splits further."""

    def __init__(self, program: Program, costs: CostModel | None) -> None:
        self.program = program
        self.code_of = _code_of_rank(program)
        self.families = {name: _family(name, groups, len(self.code_of)) for name, groups in program.groups.items()}
        self.endpoints = [_endpoints(code) for code in program.codes]
        self.partners = self._find_partners()
        self.collective_families = dict.fromkeys(
            key[1] for keys in self.endpoints for key in keys if key[0] == "collective"
        )
        self.links = SharedLinks()
        self._ask(costs)

    def run(self, *, enabled: bool) -> Folding:
        if enabled:
            colour, link_colour = number_rows(columns(self.code_of, self.rank_kinds)), self.links.first_colour()
        else:
            colour, link_colour = np.arange(len(self.code_of)), np.arange(len(self.links.names))
        while True:
            group_colour = {name: self._colour_groups(name, colour, link_colour) for name in self.collective_families}
            pair_colour = {key: self._colour_pairs(key, colour, link_colour) for key in self.partners}
            new = self._refine(colour, group_colour, pair_colour, link_colour)
            new_link = self.links.refine(link_colour, [*group_colour.items(), *pair_colour.items(), (COPIES, colour)])
            # Colours only ever split, so equal counts mean no change.
            if new.max() == colour.max() and new_link.max(initial=-1) == link_colour.max(initial=-1):
                return self._result(colour, group_colour, link_colour)
            colour, link_colour = new, new_link

    # --- what is known before -----------------------------------------------------------------------------------

    def _find_partners(self) -> dict[PairKey, Ints]:
        """Return for every message endpoint of every code the pairs (from, to), one row for each rank with that
        code.
        """
        partners: dict[PairKey, Ints] = {}
        for index, code in enumerate(self.program.codes):
            mine = np.nonzero(self.code_of == index)[0]
            for key in self.endpoints[index]:
                kind, name, peer, relative = key
                if name not in self.families or (self.families[name].group_of[mine] < 0).any():
                    raise ValueError(
                        f"code {code.name!r} talks in {name!r}, but not all of its ranks are in such a group"
                    )
                if kind == "collective":
                    continue
                family = self.families[name]
                groups, sizes = family.group_of[mine], family.sizes[family.group_of[mine]]
                at = (family.position[mine] + peer) % sizes if relative else np.full(len(mine), peer)
                if ((at < 0) | (at >= sizes)).any():
                    raise ValueError(f"code {code.name!r} names position {peer} of {name!r}: there is none")
                other = family.table[groups, at]
                partners[index, key] = columns(mine, other) if kind == "send" else columns(other, mine)
        return partners

    def _ask(self, costs: CostModel | None) -> None:
        """Find from the cost model which ranks, groups and pairs are of the same kind, and which links they share."""
        groups = {name: self.families[name].groups for name in self.collective_families}
        pairs = {key: list(map(tuple, rows.tolist())) for key, rows in self.partners.items()}
        if costs is None:
            self.rank_kinds = np.zeros_like(self.code_of)
            self.group_kinds = {name: number_values([len(g) for g in groups[name]]) for name in groups}
            self.pair_kinds = {key: np.zeros(len(rows), dtype=np.int64) for key, rows in pairs.items()}
            return
        self.rank_kinds = number_values([costs.kind((rank,)) for rank in range(len(self.code_of))])
        self.group_kinds = {name: number_values([costs.kind(g) for g in groups[name]]) for name in groups}
        known: dict[Hashable, int] = {}
        self.pair_kinds = {
            key: number_values([costs.kind(pair) for pair in rows], known) for key, rows in pairs.items()
        }
        if any(isinstance(instruction, Copy) for code in self.program.codes for instruction in code.instructions):
            self.links.add(COPIES, [costs.routes((rank,)) for rank in range(len(self.code_of))])
        for name, members in groups.items():
            self.links.add(name, [_both_ways(costs, group) for group in members])
        for key, rows in pairs.items():
            if key[1][0] == "send":  # a message is one transfer: its sender's end carries the link use
                self.links.add(key, [costs.routes(pair) for pair in rows])
        self.links.close(costs)

    # --- one round ----------------------------------------------------------------------------------------------

    def _colour_groups(self, name: str, colour: Ints, link_colour: Ints) -> Ints:
        """Number the groups by the multiset of their members' colours, their kind and their links."""
        table = self.families[name].table
        members = np.where(table >= 0, colour[table], -1)
        members.sort(axis=1)
        return number_rows(columns(members, self.group_kinds[name], self.links.signature(name, link_colour)))

    def _colour_pairs(self, key: PairKey, colour: Ints, link_colour: Ints) -> Ints:
        """Number the messages by the colours of their ends, their kind and their links."""
        ends = colour[self.partners[key]]
        return number_rows(columns(ends, self.pair_kinds[key], self.links.signature(key, link_colour)))

    def _refine(
        self, colour: Ints, group_colour: dict[str, Ints], pair_colour: dict[PairKey, Ints], link_colour: Ints
    ) -> Ints:
        rows = [colour, self.links.signature(COPIES, link_colour)]
        for name, colours in group_colour.items():
            family = self.families[name]
            rows.append(np.where(family.group_of >= 0, colours[family.group_of], -1))
        # Ranks that name partners by position need positions of their own; for ring neighbours the length of the ring
        # is enough.
        for name, relative in dict.fromkeys((key[1], key[3]) for _, key in self.partners):
            family = self.families[name]
            rows.append(family.sizes[family.group_of] if relative else family.position)
        width = max((len(keys) for keys in self.endpoints), default=0)
        block = np.full((len(colour), width), -1, dtype=np.int64)
        for (code, key), colours in pair_colour.items():
            block[self.code_of == code, self.endpoints[code].index(key)] = colours
        return number_rows(columns(*rows, block))

    # --- the result ---------------------------------------------------------------------------------------------

    def _result(self, colour: Ints, group_colour: dict[str, Ints], link_colour: Ints) -> Folding:
        # Classes in order of their lowest rank, so that results do not depend on how colours were numbered.
        first = np.unique(colour, return_index=True)[1]
        renumber = np.empty(len(first), dtype=np.int64)
        renumber[np.argsort(first, kind="stable")] = np.arange(len(first))
        class_of = renumber[colour]
        members = np.split(np.argsort(class_of, kind="stable"), np.cumsum(np.bincount(class_of))[:-1])
        classes = []
        for index, ranks in enumerate(members):
            code = int(self.code_of[ranks[0]])
            meetings = {
                key: (
                    self._group_meeting(key, int(ranks[0]), class_of, group_colour[key[1]], link_colour)
                    if key[0] == "collective"
                    else self._pair_meeting(key, int(ranks[0]), class_of, link_colour)
                )
                for key in self.endpoints[code]
            }
            copies = self.links.total(COPIES, ranks, link_colour)
            classes.append(RankClass(index, tuple(ranks.tolist()), self.program.codes[code], meetings, *copies))
        return Folding(tuple(classes), self.links.samples(link_colour))

    def _group_meeting(
        self, key: Endpoint, rank: int, class_of: Ints, group_colour: Ints, link_colour: Ints
    ) -> Meeting:
        family = self.families[key[1]]
        group = int(family.group_of[rank])
        ranks, number = family.groups[group], int(group_colour[group])
        members = np.nonzero(group_colour == number)[0]
        classes = tuple(dict.fromkeys(int(class_of[member]) for member in sorted(ranks)))
        return Meeting(("group", key[1], number), ranks, classes, *self.links.total(key[1], members, link_colour))

    def _pair_meeting(self, key: Endpoint, rank: int, class_of: Ints, link_colour: Ints) -> Meeting:
        kind, name, peer, relative = key
        family = self.families[name]
        code = int(self.code_of[rank])
        rows = self.partners[code, key]
        source, target = rows[rows[:, 0 if kind == "send" else 1] == rank][0].tolist()
        sender, receiver = int(class_of[source]), int(class_of[target])
        if relative:
            step: Hashable = (peer if kind == "send" else -peer) % int(family.sizes[family.group_of[rank]])
        else:
            step = (int(family.position[source]), int(family.position[target]))
        members = np.nonzero(class_of[rows[:, 0]] == sender)[0]
        use = self.links.total((code, key), members, link_colour) if kind == "send" else ((), 0.0)
        channel = ("pair", name, step, sender, receiver)
        return Meeting(channel, (source, target), tuple(dict.fromkeys((sender, receiver))), *use)


def _both_ways(costs: CostModel, group: Ranks) -> tuple[LinkUse, ...]:
    """Return the links of a collective; for two ranks in both directions, since the cost model takes a pair for a
    message.
    """
    return costs.routes(group) if len(group) != 2 else (*costs.routes(group), *costs.routes(group[::-1]))


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
    if len(members) and (members.min() < 0 or members.max() >= ranks or np.bincount(members).max() > 1):
        raise ValueError(f"groups of family {name!r} overlap or hold ranks outside 0..{ranks - 1}")
    group_of = np.full(ranks, -1, dtype=np.int64)
    position = np.full(ranks, -1, dtype=np.int64)
    where = np.nonzero(inside)
    group_of[members], position[members] = where[0], where[1]
    return _Family(groups, table, sizes, group_of, position)


def _endpoints(code: RankCode) -> tuple[Endpoint, ...]:
    transfers = (i for i in code.instructions if isinstance(i, Transfer))
    return tuple(dict.fromkeys(endpoint(i) for i in transfers))
