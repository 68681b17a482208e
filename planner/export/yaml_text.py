"""YAML for people: keys in the given order, multi-line text as blocks."""

from __future__ import annotations

from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Writes safe types only, as `yaml.safe_dump`, and quotes text that a block cannot represent."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def yaml_text(document: Any) -> str:
    """Return plain data as YAML that `yaml.safe_load` reads back unchanged."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False)
