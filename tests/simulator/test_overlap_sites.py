"""Overlap modes by site: one canonical text for what is said, and nothing read that was not said."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from simulator.config.overlap_sites import (
    MODES,
    SITES,
    canonical,
    mode_at,
    modes_by_site,
    modes_in,
    tp_overlap_label,
    tp_overlap_slug,
    written,
)
from topology.errors import BadPlan

modes = st.sampled_from(MODES)
chosen = st.dictionaries(st.sampled_from(SITES), modes)


@given(chosen, st.randoms())
def test_every_choice_is_read_back_in_any_order(said, rng) -> None:
    """Canonical text says the same as what it was made from, and is its own canonical text."""
    expected = tuple(said.get(site, "none") for site in SITES)
    parts = [f"{site}={mode}" for site, mode in said.items()]
    rng.shuffle(parts)
    text = written(said)

    assert modes_by_site(text) == expected
    assert canonical(text) == text
    assert canonical(", ".join(parts) or "none") == text
    assert [mode_at(text, site) for site in SITES] == list(expected)
    assert set(modes_in(text)) == set(expected) - {"none"}


@given(modes)
def test_one_mode_everywhere_is_its_word(mode: str) -> None:
    everywhere = dict.fromkeys(SITES, mode)

    assert written(everywhere) == canonical(mode) == tp_overlap_label(mode) == tp_overlap_slug(mode) == mode
    assert mode_at(mode, "") == (mode if mode == "async" else "none")


@given(chosen, chosen)
def test_different_choices_have_different_names(one, other) -> None:
    assert (tp_overlap_slug(written(one)) == tp_overlap_slug(written(other))) == (written(one) == written(other))
    assert (tp_overlap_label(written(one)) == tp_overlap_label(written(other))) == (written(one) == written(other))


@given(st.text(max_size=60))
@example("attention_in=fused,attention_in=fused")
@example("attention_in=fused,")
@example("=fused")
@example("mlp=fused")
@example("mlp_in=quick")
@example("mlp_in=")
@example("")
def test_other_text_is_refused_and_never_crashes(text: str) -> None:
    try:
        read = modes_by_site(text)
    except BadPlan:
        return
    assert set(read) <= set(MODES)
    assert canonical(canonical(text)) == canonical(text)


def test_a_plan_that_names_sites_says_nothing_of_the_rest() -> None:
    assert mode_at("attention_in=async,mlp_out=async", "") == "none"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("chunked", "chunked"),
        ("attention_in=fused,mlp_in=fused,mlp_out=chunked", "fused (attention_in, mlp_in) chunked (mlp_out)"),
    ],
)
def test_people_read_modes_before_sites(text: str, words: str) -> None:
    assert tp_overlap_label(text) == words
