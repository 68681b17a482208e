"""Reasons for which candidates are left out are said in words."""

from __future__ import annotations

from planner.search.rule_words import RULE_WORDS, rejected_words
from simulator.legality.rule import Grade
from simulator.legality.rules import RULES


def test_every_rule_that_rejects_has_words():
    assert {rule.name for rule in RULES if rule.grade is Grade.ILLEGAL} <= set(RULE_WORDS)
    assert rejected_words({"ddp-alone": 3, "memory": 2}) == {
        "unsharded data parallelism with TP, CP or PP": 3,
        "does not fit into memory": 2,
    }
