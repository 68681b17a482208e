"""Which overlap mode runs at which communication of a block, written as one string in a plan.

A block with tensor and sequence parallelism has four sites where tokens move:

    attention_in    the gather before queries, keys and values
    attention_out   the scatter after the output projection
    mlp_in          the gather before up and gate
    mlp_out         the scatter after down

Backward each site's collective is its transpose, in the same mode. `Plan.tp_overlap` is either one word, which holds at
all of them, or names sites:

    attention_in=fused,attention_out=none,mlp_in=fused,mlp_out=chunked

A site that is not named runs none. One mode at all of them is the same as its word. The canonical text names all four
in the order above. Outside the four (embedding, head) only `async` has an effect, and only as the plan's one word,
since it is a pass over the whole graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from topology.errors import BadPlan

# What our executor runs; what each does: simulator.overlap.modes.
MODES = ("none", "chunked", "copy_engine", "fused")
# What `executor.overlap` calls an NCCL collective followed or preceded by the product.
EXECUTOR_NAMES = {"none": "nccl"}
# Modes that plans may name and our executor does not have: Transformer Engine's (`simulator.overlap.site_costs`)
# and torch's.
USERBUFFERS = "userbuffers"
ASYNC = "async"  # a pass of torch's compiler over a graph (`simulator.overlap.torch_async`)
WORDS = (*MODES, ASYNC, USERBUFFERS)
SITES = ("attention_in", "attention_out", "mlp_in", "mlp_out")
NONE = "none"


@lru_cache(maxsize=4096)
def modes_by_site(tp_overlap: str) -> tuple[str, ...]:
    """Return the mode at each of `SITES`. Raises BadPlan for text that names no mode, or a site twice."""
    if "=" not in tp_overlap:
        return (_mode(tp_overlap.strip(), tp_overlap),) * len(SITES)
    found: dict[str, str] = {}
    for part in tp_overlap.split(","):
        site, equals, mode = (word.strip() for word in part.partition("="))
        if site not in SITES or not equals:
            raise BadPlan(
                f"tp_overlap {tp_overlap!r} names no site in {part.strip()!r}",
                why=f"sites are {', '.join(SITES)}",
                remedy="write one mode for all of them, or SITE=MODE,SITE=MODE",
            )
        if site in found:
            raise BadPlan(f"tp_overlap {tp_overlap!r} names {site} twice", remedy="name each site once")
        found[site] = _mode(mode, tp_overlap)
    return tuple(found.get(site, NONE) for site in SITES)


def executor_name(mode: str) -> str:
    """Return the name that `executor.overlap` has for a mode of a plan."""
    return EXECUTOR_NAMES.get(mode, mode)


def canonical(tp_overlap: str) -> str:
    """Return the canonical text of `tp_overlap`. Raises BadPlan as `modes_by_site` does."""
    return written(dict(zip(SITES, modes_by_site(tp_overlap), strict=True)))


def written(modes: Mapping[str, str]) -> str:
    """Return the canonical text of modes by site, where sites left out run none. Raises BadPlan for an unknown site or
    mode.
    """
    text = ",".join(f"{site}={mode}" for site, mode in modes.items()) or NONE
    each = modes_by_site(text)
    if len(set(each)) == 1:
        return each[0]
    return ",".join(f"{site}={mode}" for site, mode in zip(SITES, each, strict=True))


def mode_at(tp_overlap: str, site: str) -> str:
    """Return the mode of a site; for "", the mode outside the four sites.

    Raises BadPlan as `modes_by_site` does.
    """
    each = modes_by_site(tp_overlap)
    if site:
        return each[SITES.index(site)]
    return each[0] if set(each) == {ASYNC} else NONE


def modes_in(tp_overlap: str) -> tuple[str, ...]:
    """Return the modes other than none that run somewhere, in order of first use. Raises BadPlan as `modes_by_site`
    does.
    """
    return tuple(dict.fromkeys(mode for mode in modes_by_site(tp_overlap) if mode != NONE))


def tp_overlap_label(tp_overlap: str) -> str:
    """Return the text for people: a word, or `fused (attention_in, mlp_in) chunked (mlp_out)`. Raises BadPlan."""
    each = modes_by_site(tp_overlap)
    if len(set(each)) == 1:
        return each[0]
    where = {mode: [site for site, runs in zip(SITES, each, strict=True) if runs == mode] for mode in each}
    return " ".join(f"{mode} ({', '.join(sites)})" for mode, sites in where.items() if mode != NONE)


def tp_overlap_slug(tp_overlap: str) -> str:
    """Return the text for names: a word, or the four modes as in `fused-none-fused-chunked`. Raises BadPlan."""
    each = modes_by_site(tp_overlap)
    return each[0] if len(set(each)) == 1 else "-".join(each)


def _mode(mode: str, tp_overlap: str) -> str:
    if mode not in WORDS:
        raise BadPlan(f"tp_overlap {tp_overlap!r} is unknown: {mode!r} is no mode", why=f"known: {', '.join(WORDS)}")
    return mode
