"""The fields of a plan in words, and what changes from one plan to another."""

from __future__ import annotations

from dataclasses import fields

from simulator.config.plan import PLAN_FIELDS, Plan


def field_words(name: str) -> str:
    """Return the name of a plan's field in words: `dp_shard` is `sharded data parallel (FSDP)`."""
    return PLAN_FIELDS[name].words


def value_words(value: object) -> str:
    """Return the value of a plan's field in words: yes and no for what is on or off."""
    if value is None or value == ():
        return "framework default"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def changed_fields(before: Plan, after: Plan) -> list[tuple[str, str, str]]:
    """Return the fields in which two plans differ: what it is, before, after, all in words."""
    return [
        (field_words(field.name), value_words(old), value_words(new))
        for field in fields(before)
        if (old := getattr(before, field.name)) != (new := getattr(after, field.name))
    ]
