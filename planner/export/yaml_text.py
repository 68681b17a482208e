"""YAML that people read: keys in our order, scripts as blocks."""

from __future__ import annotations

from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Safe types only, as `yaml.safe_dump`; the emitter falls back to quotes where a block could not hold the text."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def yaml_text(document: Any) -> str:
    """Return plain data as YAML that `yaml.safe_load` reads back unchanged."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False)
