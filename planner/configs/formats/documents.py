"""Texts of configurations as settings by key, and edits that change no other character.

TOML, YAML and JSON give their scalars by dotted path. An edit replaces the characters of one value, removes its line,
or adds a line next to its neighbours; comments, order and layout stay. Nothing is executed: YAML is composed into
nodes, never constructed, and aliases are refused.
"""

from __future__ import annotations

import json
import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import tomlkit
import tomlkit.exceptions
import yaml

from topology.errors import BadInput

MAX_CHARACTERS = 1 << 20
MAX_DEPTH = 32
MAX_BRACKETS = 2 * MAX_DEPTH  # some are inside texts
MAX_KEYS = 20_000
MAX_PARTS = 2 * MAX_KEYS
MERGE = "tag:yaml.org,2002:merge"

# A variable as shells, OmegaConf and NeMo AutoModel (components/config/loader.py) write it, maybe with a default.
VARIABLE = re.compile(
    r"\$\{(?:oc\.env:|env:)?(?P<braced>[\w.]+)(?:(?::-|,)(?P<default>[^${}]*))?\}|\$(?P<plain>\w+)", re.ASCII
)

Settings = dict[str, Any]  # values by key, as a format has them


class Document(ABC):
    """A text with settings. `edited` returns a new text; the document does not change."""

    text: str
    settings: Settings

    @abstractmethod
    def edited(self, changes: Settings) -> str:
        """Return the text with other values; None removes a key. Raises BadInput where the text cannot hold one."""

    def fill(self, variables: Mapping[str, str]) -> None:
        """Replace variables in settings by their value, else by the default written with them; others stay."""

        def value_of(found: re.Match[str]) -> str:
            return variables.get(found["braced"] or found["plain"], (found["default"] or found[0]).strip())

        for key, value in self.settings.items():
            if isinstance(value, str) and "$" in value:
                self.settings[key] = VARIABLE.sub(value_of, value)


def bounded(text: str, where: str) -> str:
    """Return `text`. Raises BadInput when it is larger than any configuration."""
    if len(text) > MAX_CHARACTERS:
        raise BadInput(f"{where} is larger than {MAX_CHARACTERS >> 20} MiB", remedy="pass a configuration file")
    return text


def _refuse_slow(text: str, where: str) -> None:
    """Raise BadInput for more parts, or more open brackets, than any configuration has.

    PyYAML takes some 20 us per part, and more with many open brackets.
    """
    depth = 0
    for parts, mark in enumerate(re.findall(r"[][{},\n]", text), start=1):
        depth = depth + 1 if mark in "[{" else max(0, depth - 1) if mark in "]}" else depth
        if depth > MAX_BRACKETS or parts > MAX_PARTS:
            raise BadInput(
                f"{where} is larger or deeper than any configuration",
                why=f"at most {MAX_PARTS:,} lines, commas and brackets, {MAX_BRACKETS} of them open at once",
            )


class TomlDocument(Document):
    """TOML: tables become the first part of a key."""

    def __init__(self, text: str, where: str) -> None:
        self.text = bounded(text, where)
        try:
            found = tomllib.loads(text)  # and Python's error for integers with thousands of digits
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{where} is not TOML", why=str(error)[:200]) from error
        self.settings = dict(_leaves(found, "", 0))

    def edited(self, changes: Settings) -> str:
        document = tomlkit.parse(self.text)
        for key, value in changes.items():
            section, _, name = key.rpartition(".")
            table: Any = document
            for part in filter(None, section.split(".")):
                if part not in table:
                    table[part] = tomlkit.table()
                table = table[part]
            if value is not None:
                table[name] = value
            elif name in table:
                del table[name]
        return tomlkit.dumps(document)


def _leaves(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > MAX_DEPTH:
        raise BadInput(f"{path[:80]} is nested deeper than {MAX_DEPTH}")
    if isinstance(value, dict) and (value or not path):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key), depth + 1)
    else:
        yield path, value


_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|(?:#|//)[^\n]*|/\*.*?\*/', re.DOTALL)
_LAST_COMMA = re.compile(r'"(?:\\.|[^"\\])*"|,(?=\s*[}\]])')


def _without_comments(text: str) -> str:
    """Return a JSON text with spaces in the place of comments and of commas after a last value, as Hjson ignores."""
    for ignored in (_COMMENT, _LAST_COMMA):
        text = ignored.sub(lambda found: found[0] if found[0][0] == '"' else re.sub(r"[^\n]", " ", found[0]), text)
    return text


class YamlDocument(Document):
    """YAML, or JSON (YAML with braces): every scalar and list with its place.

    `repeated` are keys that stand more than once, of which the last counts. JSON may have comments where `commented`.
    """

    def __init__(self, text: str, where: str, *, is_json: bool = False, commented: bool = False) -> None:
        self.text, self.is_json = bounded(text, where), is_json
        self.repeated: list[str] = []
        _refuse_slow(text, where)
        try:
            if is_json:
                text = _without_comments(text) if commented else text
                json.loads(text)  # stricter, since YAML accepts more
            # A tab cannot indent YAML but may be in JSON; places do not change.
            root = yaml.compose(text.replace("\t", " ") if is_json else text, Loader=yaml.SafeLoader)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise BadInput(f"{where} is not {'JSON' if is_json else 'YAML'}", why=str(error)[:200]) from error
        if not isinstance(root, yaml.MappingNode):
            raise BadInput(f"{where} is not a mapping of keys")
        self.nodes: dict[str, tuple[yaml.Node, yaml.Node]] = {}  # path -> (key, value)
        self.maps: dict[str, yaml.MappingNode] = {"": root}
        self.settings = {}
        self._seen: set[int] = set()
        self._walk(root, "", where, 0)

    def _walk(self, node: yaml.MappingNode, path: str, where: str, depth: int) -> None:
        if depth > MAX_DEPTH or len(self.settings) > MAX_KEYS:
            raise BadInput(f"{where} is larger or deeper than any configuration")
        for key, value in node.value:
            if id(value) in self._seen or key.tag == MERGE or not isinstance(key, yaml.ScalarNode):
                raise BadInput(f"{where} has aliases or keys that are no text", remedy="write the values out")
            self._seen.add(id(value))
            name = f"{path}.{key.value}" if path else str(key.value)
            self.repeated += [name] if name in self.nodes else []
            self.nodes[name] = (key, value)
            if isinstance(value, yaml.MappingNode) and value.value:
                self.maps[name] = value
                self._walk(value, name, where, depth + 1)
            else:
                self.settings[name] = _plain(value, where, 0)

    def edited(self, changes: Settings) -> str:
        edits = [edit for key, value in changes.items() for edit in self._edit(key, value)]
        edits += self._added(
            {key: value for key, value in changes.items() if key not in self.nodes and value is not None}
        )
        text = self.text
        for start, end, instead in sorted(edits, key=lambda edit: edit[0], reverse=True):
            text = text[:start] + instead + text[end:]
        return text

    def _edit(self, key: str, value: Any) -> Iterator[tuple[int, int, str]]:
        if key not in self.nodes:
            return
        name, node = self.nodes[key]
        if value is not None:
            yield node.start_mark.index, node.end_mark.index, self._formatted(value)
            return
        yield self._removed(key, name.start_mark.index, node.end_mark.index)

    def _removed(self, key: str, start: int, end: int) -> tuple[int, int, str]:
        """Return the edit that removes a key with its value: its line, and inside braces one comma."""
        siblings = self.maps[key.rpartition(".")[0]]
        if siblings.flow_style:
            after = end
            while self.text[after : after + 1].isspace():
                after += 1
            if self.text[after : after + 1] == ",":
                end = after + 1
                while self.text[end : end + 1] in {" ", "\n", "\t", "\r"}:
                    end += 1
                return start, end, ""
            while start and self.text[start - 1] in " \n\t\r":
                start -= 1
            return (start - 1, end, "") if start and self.text[start - 1] == "," else (start, end, "")
        start = self.text.rfind("\n", 0, start) + 1
        line_end = self.text.find("\n", end)
        return start, len(self.text) if line_end < 0 else line_end + 1, ""

    def _added(self, new: Settings) -> Iterator[tuple[int, int, str]]:
        by_section: dict[str, Settings] = {}
        for key, value in new.items():
            section, _, name = key.rpartition(".")
            by_section.setdefault(section, {})[name] = value
        for section, values in by_section.items():
            outer, _, inner = section.rpartition(".")
            if section in self.maps:
                yield self._insertion(self.maps[section], values)
            elif outer in self.maps:
                yield self._insertion(self.maps[outer], {inner: values})
            else:
                raise BadInput(f"there is no {section} to add {', '.join(values)} to")

    def _insertion(self, within: yaml.MappingNode, values: Settings) -> tuple[int, int, str]:
        """Return the edit that adds keys after the last one of a mapping, in the same layout."""
        if not within.value:  # {}
            inner = ", ".join(f"{self._formatted(name)}: {self._formatted(value)}" for name, value in values.items())
            return within.start_mark.index + 1, within.start_mark.index + 1, inner
        key, last = within.value[-1]
        indent = " " * key.start_mark.column
        end = last.end_mark.index
        if within.flow_style:
            start = self.text.rfind("\n", 0, key.start_mark.index) + 1
            lead = self.text[start : key.start_mark.index]
            own_line = not lead.strip()
            glue = f",\n{lead}" if own_line else ", "
            return (
                end,
                end,
                "".join(f"{glue}{self._formatted(name)}: {self._formatted(value)}" for name, value in values.items()),
            )
        while end and self.text[end - 1] in " \n\t\r":  # a block ends where the next one begins
            end -= 1
        line_end = self.text.find("\n", end)
        line_end = len(self.text) if line_end < 0 else line_end
        lines = "".join(f"\n{indent}{self._block(name, value, indent)}" for name, value in values.items())
        return line_end, line_end, lines

    def _block(self, name: str, value: Any, indent: str) -> str:
        if isinstance(value, dict):
            return f"{name}:" + "".join(f"\n{indent}  {key}: {self._formatted(one)}" for key, one in value.items())
        return f"{name}: {self._formatted(value)}"

    def _formatted(self, value: Any) -> str:
        if self.is_json or isinstance(value, (dict, list, bool)):
            return json.dumps(value)
        word = str(value)
        return json.dumps(word) if isinstance(value, str) and not _reads_as_itself(word) else word


def _reads_as_itself(word: str) -> bool:
    """Return whether YAML reads bare text as just that text."""
    try:
        return bool(word) and yaml.safe_load(f"{{a: {word}}}") == {"a": word}
    except yaml.YAMLError:
        return False


def _plain(node: yaml.Node, where: str, depth: int) -> Any:
    """Return a scalar or a list as plain data; values with other than YAML's own tags stay text."""
    if depth > MAX_DEPTH:
        raise BadInput(f"{where} is nested deeper than {MAX_DEPTH}")
    if isinstance(node, yaml.SequenceNode):
        return [_plain(one, where, depth + 1) for one in node.value[:MAX_KEYS]]
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _plain(value, where, depth + 1) for key, value in node.value[:MAX_KEYS]}
    kind = node.tag.rpartition(":")[2]
    text = str(node.value)
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() in {"true", "yes", "on"}
    if kind == "int" and len(text) < 20 and (digits := text.replace("_", "")).lstrip("+-").isdecimal():
        return int(digits)  # 500_000 is a number of YAML 1.1, which these tools read
    if kind == "float":
        try:
            return float(text.replace("_", ""))
        except ValueError:
            return text
    return text
