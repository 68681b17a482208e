"""Read command lines and shell scripts as settings by flag. Nothing is run: text is split into words, and simple
variables are looked up.

A value may be a variable that the text assigns a literal (`TP=8`, `--tensor-model-parallel-size $TP`); then an edit
changes the assignment. Flags inside a quoted assignment (`GPT_ARGS="--num-layers 32 ..."`) and in arrays count as well.
What the shell would look up elsewhere is left as written: variables that the text does not set, or sets differently in
branches of a condition, and outputs of commands.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from planner.configs.formats.documents import Document, Settings, bounded
from topology.errors import BadInput

_BRACED = r"\$\{(?:[^{}]|\$\{[^{}]*\})*\}"
_INNER = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"  # parentheses two deep
WORD = re.compile(
    rf"""(?:'[^']*'|"(?:\\.|[^"\\])*"|`[^`]*`|\$\({_INNER}\)|{_BRACED}|\\.|[^\s'"\\#;&|()<>`]|(?<=\S)\#)+""", re.DOTALL
)
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?[-=]((?:[^{}]|\$\{[^{}]*\})*))?\})")
OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
SET_BY_DEFAULT = re.compile(r"\$\{(\w+):?=([^{}]*)\}")  # : ${TP:=8}
LISTS = re.compile(r"-(modules|scope)$")  # flags with several names as values, such as --recompute-modules
ARITHMETIC = re.compile(rf"\$\(\(({_INNER})\)\)")
MOST_OF_A_SUM = 200  # characters
HELD = re.compile(r"""\b(\w+)\+?=(\((?:[^()"']|"[^"]*"|'[^']*')*\)|"(?:\\.|[^"\\])*"|'[^']*')""")
PROGRAM = re.compile(r"[\w./${}-]*\.py['\"]?$")
SHELL_COMMAND = re.compile(r"-l?c")  # bash -c "...", bash -lc "..."
ALONE = frozenset({"--standalone", "--no-python", "--no_python", "-u", "-O", "--module"})  # before a program
DIRECTIVES = re.compile(r"^#SBATCH\b(.*)$", re.MULTILINE)  # of any number of options of sbatch
DIRECTIVE = re.compile(r"(?<=\s)(?:--([a-z-]+)(?:=|\s+)|-([A-Za-z])\s*)([^\s-]\S*)")
SHORT_DIRECTIVES = {"N": "nodes", "n": "ntasks"}
CONTINUED = re.compile(r"\\\r?\n")
COMMENT = re.compile(r"(?m)(^|(?<=\s))#.*$")
REDIRECTION = re.compile(r"(?<=\s)[\d&]?>{1,2}(&\d|[ \t]*[\w./:${}@%+~-]+)")  # 2>&1, > file
OPTION_OF_CASE = re.compile(r"(?m)^[ \t]*-[\w|-]+\)")  # `-h|--help)`, which reads arguments of the script itself
END = "\0"  # in place of the removed last line of a command, which then ends with the line before
MAX_WORDS = 20_000
DEPTH = 8  # depth of variables within variables
OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, slots=True)
class Word:
    """A word, its place, and whether it is inside a condition."""

    text: str
    start: int
    end: int
    conditional: bool = False


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag with the places of itself and of its value; without a value both are the same."""

    name: str
    start: int
    end: int
    value_start: int
    value_end: int


class CommandLine(Document):
    """`takes_value(flag)` is whether a value follows the flag: True, False, or None if unknown. `variables` are set
    outside the text and override those that it sets.

    `launcher` names the flags of programs that start the program: torchrun, srun, a profiler, numactl.
    """

    def __init__(
        self,
        text: str,
        where: str,
        takes_value: Callable[[str], bool | None],
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.text = bounded(text, where)
        # Continued lines become blanks of the same length, so that places do not change.
        plain = CONTINUED.sub(lambda found: " " * len(found[0]), text)
        for left_out in (COMMENT, REDIRECTION, OPTION_OF_CASE):
            plain = left_out.sub(lambda found: " " * len(found[0]), plain)
        self._plain, self._known = plain, takes_value
        self._outside = dict(variables)
        self.variables: dict[str, Word] = {}
        self._branching, self._branched = 0, set[str]()  # open conditions; variables set inside one and elsewhere
        self.words = list(self._scan(plain, 0, where))
        self.flags: dict[str, Flag] = {}
        self.settings = {}
        self._read_flags(takes_value)
        self.launcher = self._launchers()
        options = (option for line in DIRECTIVES.findall(text) for option in DIRECTIVE.findall(line))
        self.directives = {name or SHORT_DIRECTIVES.get(short, short): value for name, short, value in options}

    def _scan(self, text: str, offset: int, where: str) -> Iterator[Word]:
        before = ""
        for count, found in enumerate(WORD.finditer(text)):
            if count > MAX_WORDS:
                raise BadInput(f"{where} has more than {MAX_WORDS} words")
            last, before = before, found[0]
            word, start = found[0], offset + found.start()
            self._branching += (word in {"if", "case"}) - (word in {"fi", "esac"})
            for default in SET_BY_DEFAULT.finditer(word):
                at = start + default.start(2)
                self.variables.setdefault(default[1], Word(default[2], at, at + len(default[2])))
            assigned = ASSIGNMENT.fullmatch(word)
            if assigned:
                inner, at = assigned[3], start + assigned.start(3)
                bare, shift = _unquoted(inner)
                if "--" in bare and not offset and (inner[:1] in "\"'" or bare.startswith("--")):
                    yield from self._scan(bare, at + shift, where)
                    continue
                self._assign(assigned[1], Word(bare, at + shift, at + shift + len(bare)), longer=assigned[2] != "")
            elif word[0] in "\"'" and (SHELL_COMMAND.fullmatch(last) or _unquoted(word)[0].startswith("--")):
                # bash -c "torchrun ...", or "--fp8-format hybrid" as one element
                yield from self._scan(_unquoted(word)[0], start + 1, where)
                continue
            yield Word(word, start, start + len(word), self._branching > 0)

    def _assign(self, name: str, value: Word, *, longer: bool) -> None:
        """Keep the value of a variable; one that is made `longer` (+=) has no text of its own."""
        before = self.variables.get(name)
        if longer or (before is not None and before.text != value.text and self._branching > 0):
            self._branched.add(name)
        self.variables[name] = value

    def _launchers(self) -> frozenset[str]:
        """Return the flags before the program on its line, and in variables named there."""
        program = self._program()
        if program is None:
            return frozenset()
        start = self._plain.rfind("\n", 0, program.start) + 1
        before = self._plain[start : program.start]
        named = {found[1] or found[2] for found in re.finditer(r"\$(?:(\w+)|\{(\w+)[^}]*\})", before)}
        spans = [(start, program.start)]
        spans += [found.span() for found in HELD.finditer(self._plain) if found[1] in named]
        return frozenset(
            flag.name for flag in self.flags.values() if any(low <= flag.start < high for low, high in spans)
        )

    def _program(self) -> Word | None:
        """Return the last word that names a Python program and is not the value of an option."""
        found = None
        for before, word in pairwise((Word("", 0, 0), *self.words)):
            module = before.text == "-m" and not word.text.startswith("torch.distributed")
            option = before.text.startswith("--") and "=" not in before.text and before.text not in ALONE
            named = word.text if "$" not in word.text else self.expanded(word.text)
            if module or (PROGRAM.match(named) and not option and not ASSIGNMENT.match(word.text)):
                found = word
        return found

    def _read_flags(self, takes_value: Callable[[str], bool | None]) -> None:
        index = 0
        while index < len(self.words):
            word = self.words[index]
            index += 1
            short = word.text[:1] == "-" and takes_value(word.text) is not None
            if not short and not re.match(r"--[A-Za-z]", word.text):
                continue
            name, equals, value = word.text.partition("=")
            if equals:
                at = word.start + len(name) + 1
                self._keep(Flag(name, word.start, word.end, at, word.end), value)
                continue
            takes = takes_value(name)
            following = self.words[index] if index < len(self.words) else None
            value_like = following is not None and not following.text.startswith("--") and "[@]" not in following.text
            if takes is False or not value_like or following is None:
                self._keep(Flag(name, word.start, word.end, word.start, word.end), None)
                continue
            index += 1
            last, values = following, [following.text]
            while takes and index < len(self.words) and self._beside(name, last, self.words[index]):
                last = self.words[index]
                values.append(last.text)
                index += 1
            self._keep(Flag(name, word.start, last.end, following.start, last.end), " ".join(values))

    def _beside(self, name: str, before: Word, word: Word) -> bool:
        """Return whether a word is a further value of a flag: a number on the same line, as for --rampup-batch-size, or
        a further name of a list.
        """
        blank = self._plain[before.end : word.start]
        if LISTS.search(name):
            return blank != "" and re.fullmatch(r"[a-z]\w*", word.text) is not None
        return blank != "" and not blank.strip(" \t") and re.fullmatch(r"[\d.]+", word.text) is not None

    def _keep(self, flag: Flag, value: str | None) -> None:
        self.flags[flag.name] = flag  # the last of several counts, as in argparse
        self.settings[flag.name] = True if value is None else typed(self.expanded(value))

    def expanded(self, word: str, inside: frozenset[str] = frozenset()) -> str:
        """Return a word without quotes and with known variables replaced; others are left as written.

        `inside` are the variables being looked up: one that refers to itself is the environment's.
        """
        bare = _unquoted(word)[0]

        def known(found: re.Match[str]) -> str:
            name = found[1] or found[2]
            if name in self._outside:
                return self._outside[name]
            if name in self.variables and name not in inside and name not in self._branched and len(inside) < DEPTH:
                return self.expanded(self.variables[name].text, inside | {name})
            if found[3] is None or name in self._branched:
                return found[0]
            return self.expanded(found[3], inside | {name}).strip("\"'") if len(inside) < DEPTH else found[0]

        out = REFERENCE.sub(known, bare)[:4096]
        return ARITHMETIC.sub(lambda found: _computed(found[1], self, inside), out)

    def variable(self, *names: str) -> int | None:
        """Return the first of some variables whose value is a number."""
        for name in names:
            value = self.expanded(f"${name}")
            if value.isdecimal() and len(value) < 9:
                return int(value)
        return None

    def edited(self, changes: Settings) -> str:
        edits: list[tuple[int, int, str]] = []
        added = []
        for key, value in changes.items():
            if key not in self.flags:
                added += [] if value is None or value is False else [self._added(key, value)]
            else:
                edits.append(self._edit(self.flags[key], value))
        if added:
            gone = {key for key, value in changes.items() if value is None or value is False}
            edits.append(self._insertion(added, set(changes), gone))
        text = self.text
        for start, end, instead in sorted(set(edits), reverse=True):
            text = text[:start] + instead + text[end:]
        *ended, rest = text.split(END)
        return "".join(part.rstrip("\r\n").removesuffix("\\").rstrip(" ") for part in ended) + rest

    def _added(self, key: str, value: Any) -> str:
        return key if value is True else f"{key} {_words(key, value)}"

    def _edit(self, flag: Flag, value: Any) -> tuple[int, int, str]:
        if value is None or value is False:
            return self._removed(flag)
        if value is True:
            return flag.start, flag.start, ""
        said = self.text[flag.value_start : flag.value_end]
        reference = REFERENCE.fullmatch(_unquoted(said)[0])
        if (
            reference
            and (reference[1] or reference[2]) in self.variables.keys() - self._branched - self._outside.keys()
        ):
            assigned = self.variables[reference[1] or reference[2]]
            if not REFERENCE.search(assigned.text):
                return assigned.start, assigned.end, _word(value)
        if flag.value_start == flag.start:
            return flag.start, flag.end, f"{flag.name} {_words(flag.name, value)}"
        return flag.value_start, flag.value_end, _words(flag.name, value)

    def _removed(self, flag: Flag) -> tuple[int, int, str]:
        """Return the edit that removes a flag, and its line if nothing else is on it."""
        start, end = flag.start, flag.end
        line_start = self.text.rfind("\n", 0, start) + 1
        line_end = self.text.find("\n", end)
        line_end = len(self.text) if line_end < 0 else line_end
        rest = self.text[line_start:start] + self.text[end:line_end]
        alone = not rest.replace("\\", "").strip()
        if alone and "\\" not in rest and self._continues(line_start):
            return line_start, line_end, END
        if alone and line_end < len(self.text):
            return line_start, line_end + 1, ""
        if not self.text[line_start:start].strip():  # for the first flag of its line, the next one takes its place
            while self.text[end : end + 1] == " ":
                end += 1
            return start, end, ""
        while start > line_start and self.text[start - 1] == " ":
            start -= 1
        return start, end, ""

    def _continues(self, line_start: int) -> bool:
        """Return whether the line that starts there goes on with the command of the line before."""
        return self.text[:line_start].endswith(("\\\n", "\\\r\n"))

    def _insertion(self, added: list[str], near: set[str], gone: set[str]) -> tuple[int, int, str]:
        """Return the edit that adds flags after a related one, on lines of their own if that one is on its own line;
        not after one that is removed.
        """
        stay = [flag for flag in self.flags.values() if flag.name not in gone] or list(self.flags.values())
        own = [flag for flag in stay if flag.name not in self.launcher]
        known = [flag for flag in own if self._known(flag.name) is not None or "." in flag.name] or own
        if not known:
            raise BadInput("the text has no flag that others could be added to")
        related = [flag for flag in known if flag.name in near and "parallel" in flag.name]
        anchor = max(related or known, key=lambda flag: flag.end)
        line_start = self.text.rfind("\n", 0, anchor.start) + 1
        line_end = self.text.find("\n", anchor.end)
        line_end = len(self.text) if line_end < 0 else line_end
        lead, tail = self.text[line_start : anchor.start], self.text[anchor.end : line_end]
        if not lead.strip() and tail.strip().startswith("#"):
            return line_end, line_end, "".join(f"\n{lead}{one}" for one in added)
        if not lead.strip() and tail.strip() in {"", "\\"}:
            goes_on = tail if tail.strip() else " \\" * self._continues(line_start)
            return anchor.end, anchor.end, "".join(f"{goes_on}\n{lead}{one}" for one in added)
        return anchor.end, anchor.end, "".join(f" {one}" for one in added)


class Overrides(CommandLine):
    """A command whose program takes `key=value` words, as Hydra and MaxText have them; keys with a dot are read
    anywhere, since scripts collect them in arrays, others only after the program or if they are in `plain`.

    Settings inside a condition are in `conditional` instead, since the branch taken is unknown.
    """

    def __init__(
        self, text: str, where: str, variables: Mapping[str, str], plain: frozenset[str] = frozenset()
    ) -> None:
        self._plain_keys = plain
        self.conditional: dict[str, None] = {}
        super().__init__(text, where, lambda _: None, variables)

    def _read_flags(self, takes_value: Callable[[str], bool | None]) -> None:
        super()._read_flags(takes_value)
        program = self._program()
        for word in self.words:
            bare, shift = _unquoted(word.text)
            found = OVERRIDE.fullmatch(bare)
            after = program is not None and word.start > program.end
            if found is None or not ("." in found[1] or after or found[1] in self._plain_keys):
                continue
            if word.conditional:
                self.conditional[found[1]] = None
                continue
            at = word.start + shift + found.start(2)
            self._keep(Flag(found[1], word.start, word.end, at, at + len(found[2])), found[2])
            self.settings[found[1]] = None if self.settings[found[1]] == "null" else self.settings[found[1]]

    def _added(self, key: str, value: Any) -> str:
        return f"{key}={_word(value)}"

    def edited(self, changes: Settings) -> str:
        return super().edited({key: str(value) if isinstance(value, bool) else value for key, value in changes.items()})


def _words(flag: str, value: Any) -> str:
    """Return a value of a flag as it is written in a shell: the names of a list one by one."""
    return " ".join(map(_word, value)) if isinstance(value, list) and LISTS.search(flag) else _word(value)


def _word(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return text if re.fullmatch(r"[\w./:,@%+=-]+", text) else "'" + text.replace("'", "'\\''") + "'"


def _unquoted(word: str) -> tuple[str, int]:
    """Return the text between the quotes of a word, and the number of characters before it; other words unchanged."""
    if len(word) > 1 and word[0] in "\"'" and word[-1] == word[0]:
        return word[1:-1], 1
    return word, 0


def typed(text: str) -> Any:
    """Return a word as a number or a truth value if it is one."""
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    return int(text) if re.fullmatch(r"-?\d{1,12}", text) else text


def _computed(expression: str, line: CommandLine, inside: frozenset[str]) -> str:
    """Return the value of an expression of whole numbers and variables; any other expression unchanged."""
    names = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda found: line.expanded(f"${found[1]}", inside), expression)
    try:
        if len(names) > MOST_OF_A_SUM:
            return f"$(({expression}))"
        return str(_value(ast.parse(names.strip(), mode="eval").body, 0))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return f"$(({expression}))"


def _value(node: ast.expr, depth: int) -> int:
    if depth < 20 and isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _value(node.left, depth + 1), _value(node.right, depth + 1)
        return OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 1 << 40:
        return node.value
    raise ValueError("not a sum of whole numbers")


def option_kinds(keys: Mapping[str, Mapping[str, Any]]) -> Callable[[str], bool | None]:
    """Return for the flags of a schema whether a value follows."""

    def takes(flag: str) -> bool | None:
        entry = keys.get(flag)
        return None if entry is None else entry.get("type") != "flag"

    return takes
