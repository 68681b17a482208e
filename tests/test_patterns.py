"""Regular expressions of the product take steps in proportion to their input, whatever it is.

Python's engine backtracks and does not count, so a small engine of the same kind does: it walks the parsed pattern, and
every character or position that it looks at is a step. Inputs are what makes each pattern go back: its repeats one at a
time, run long with spaces, tabs, digits, letters and what it repeats itself, then a character that ends the match.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from re import _constants as code  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import pytest

from topology.catalog.gpus import gpu_names

ROOT = Path(__file__).parents[1]
SHORT, LONG = 8, 24  # repeats
CALLS = {"compile", "search", "match", "fullmatch", "sub", "split", "findall", "finditer"}
SEARCHES = CALLS - {"compile", "match", "fullmatch"}
RUNS = (" ", "\t", "0", "a")
END = "\x01"
REPEATS = (code.MAX_REPEAT, code.MIN_REPEAT, code.POSSESSIVE_REPEAT)


class TooMany(Exception):
    """More steps than any linear walk takes."""


@dataclass(frozen=True)
class Pattern:
    """A pattern of the product; `whole` where some call needs all of its input to match, `anywhere` where some call
    looks for it from every character on.
    """

    where: str
    text: str
    whole: bool
    anywhere: bool = False


def test_every_pattern_is_linear_in_its_input():
    slow = [f"{pattern.where}: {pattern.text}" for pattern in patterns() if grows(pattern) or searches_grow(pattern)]

    assert not slow, "\n".join(slow)


@pytest.mark.parametrize("text", [r"(?m)^\s*--", r"(\w+)=", r"\s*[+,]\s*", r"\(.*?\)", r"x:.*?y"])
def test_the_count_sees_searches_that_begin_again_and_again(text):
    assert not grows(Pattern("here", text, whole=False, anywhere=True))
    assert searches_grow(Pattern("here", text, whole=False, anywhere=True))


@pytest.mark.parametrize("text", [r"(?m)^[ \t]*--", r"\b(\w+)=", r"[+,]", r"\([^()]*\)", r"x:(?:(?!x:).)*?y"])
def test_the_count_passes_searches_that_go_on(text):
    assert not searches_grow(Pattern("here", text, whole=False, anywhere=True))


@pytest.mark.parametrize("text", [r"\s*(.*?)\s*(?:x)?\s*", r"(a+)+b", r"\d+\.?\d*x", r"(?:a|a)*b", r".*?a.*?b"])
def test_the_count_sees_adjacent_and_nested_repeats(text):
    assert grows(Pattern("here", text, whole=True))


@pytest.mark.parametrize(
    "text", [r"\s*GPU [0-9]{1,4}: (\S.*)", r"[a-z]+=\d+", r"(?:GPU|NIC)[0-9]{1,4}", r"v?\d+(\.\d+)*"]
)
def test_the_count_passes_what_goes_forward(text):
    assert not grows(Pattern("here", text, whole=True))


def test_the_count_finds_the_matches_that_python_finds():
    for pattern in patterns():
        tree = parsed(pattern.text)
        sample = example(tree, {})
        assert (steps(pattern, sample) is not None) == (re.match(pattern.text, sample) is not None), pattern


# --- the patterns -------------------------------------------------------------------------------------------------


@cache
def patterns() -> tuple[Pattern, ...]:
    """Return every pattern that a call of `re` in the product is given as text, and those that find GPUs by words."""
    files = {
        path: ast.parse(source)
        for package in ("topology", "simulator", "planner", "executor", "ui")
        for path in sorted((ROOT / package).rglob("*.py"))
        if "\nimport re\n" in (source := path.read_text("utf-8"))
    }
    shared: dict[str, str] = {}
    for tree in files.values():
        shared |= constants(tree, shared)
    found = [Pattern("topology/catalog", text, whole=False) for text, _ in gpu_names().words]
    for path, tree in files.items():
        words = shared | constants(tree, shared)
        names = {
            node.value: target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        source = path.read_text("utf-8")
        for node in ast.walk(tree):
            called = node.func if isinstance(node, ast.Call) and node.args else None
            if not (
                isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "re"
            ):
                continue
            text = text_of(node.args[0], words) if called.attr in CALLS else None
            if text is not None:
                used = {name for name in CALLS if f"{names.get(node)}.{name}(" in source} | {called.attr}
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                found.append(Pattern(where, text, whole="fullmatch" in used, anywhere=bool(used & SEARCHES)))
    return tuple(found)


@cache
def parsed(text: str) -> Any:
    return parser.parse(text)


def constants(tree: ast.Module, known: dict[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            text = text_of(node.value, known | found)
            if text is not None:
                found[node.targets[0].id] = text
    return found


def text_of(node: ast.expr, words: dict[str, str]) -> str | None:
    """Return a text literal with the constants in it, None where it depends on anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        return words.get(node.id)
    if isinstance(node, ast.JoinedStr):
        parts = [text_of(v.value if isinstance(v, ast.FormattedValue) else v, words) for v in node.values]
        return None if None in parts else "".join(part for part in parts if part is not None)
    return None


# --- inputs -------------------------------------------------------------------------------------------------------


def grows(pattern: Pattern) -> bool:
    """Return whether the steps for a character of some input grow with the input."""
    tree = parsed(pattern.text)
    for make in inputs(tree):
        short, long = make(SHORT), make(LONG)
        few, many = counted(pattern, short), counted(pattern, long)
        if few is None or many is None or many / len(long) > 1.6 * few / len(short) + 1:
            return True
    return False


def searches_grow(pattern: Pattern) -> bool:
    """Return whether looking for it from every character on takes more steps for a character of a longer input.

    Inputs are runs, and beginnings of what matches, which promise a match again and again.
    """
    tree = parsed(pattern.text)
    open_ended = [value for value in repeats(tree) if value[1] is code.MAXREPEAT]
    if not (pattern.anywhere and open_ended):
        return False
    begun = (example(tree, {}, until=repeat) for repeat in open_ended)
    for unit in dict.fromkeys((*RUNS, "\n", "(", *begun)):
        times = 1 + SHORT // len(unit)
        few, many = (sum(searched(pattern, text)) / len(text) for text in (unit * times, unit * 3 * times))
        if many > 1.6 * few + 1:
            return True
    return False


def searched(pattern: Pattern, text: str) -> Iterator[int]:
    """Yield the steps of each attempt to find it, after what was found."""
    at, compiled = 0, re.compile(pattern.text)
    while at < len(text):
        yield counted(pattern, text, at) or 10**6
        found = compiled.match(text, at)
        at = max(found.end() if found else 0, at + 1)


def inputs(tree: Any) -> Iterator[Callable[[int], str]]:
    if not any(repeats(tree)):
        return
    for run in RUNS:
        yield lambda n, run=run: run * n + END
    own = example(tree, {})
    yield lambda n: own * n + END
    for chosen in repeats(tree):
        for run in (*RUNS, None):
            yield lambda n, chosen=chosen, run=run: example(tree, {id(chosen): (n, run)}) + END
            yield lambda n, chosen=chosen, run=run: example(tree, {id(chosen): (n, run)}, until=chosen) + END
    several = list(repeats(tree))
    for run in RUNS:
        yield lambda n, run=run: example(tree, {id(chosen): (n, run) for chosen in several}) + END


def repeats(tree: Any) -> Iterator[Any]:
    """Yield the repeats that can be as long as an input; the others are bounded by their pattern."""
    for op, value in tree:
        if op in REPEATS:
            if value[1] > LONG:
                yield value
            yield from repeats(value[2])
        elif op is code.SUBPATTERN:
            yield from repeats(value[3])
        elif op is code.BRANCH:
            for part in value[1]:
                yield from repeats(part)


class Reached(Exception):
    """The repeat after which an input ends."""


def example(tree: Any, runs: dict[int, tuple[int, str | None]], until: Any = None) -> str:
    """Return a text that a pattern matches, with the repeats of `runs` so often, of that character where it is one."""
    out: list[str] = []

    def add(part: Any) -> None:
        for op, value in part:
            if op is code.LITERAL:
                out.append(chr(value))
            elif op in (code.NOT_LITERAL, code.ANY, code.IN):
                out.append(next(c for c in map(chr, (*b"a0 ", *range(128))) if accepts(op, value, c)))
            elif op in REPEATS:
                low, high, body = value
                count, run = runs.get(id(value), (max(low, min(1, high)), None))
                single = len(body) == 1 and body[0][0] in (code.LITERAL, code.NOT_LITERAL, code.ANY, code.IN)
                for _ in range(count if high is code.MAXREPEAT else min(count, high)):
                    if run is not None and single and accepts(*body[0], run):
                        out.append(run)
                    else:
                        add(body)
                if value is until:
                    raise Reached
            elif op is code.SUBPATTERN:
                add(value[3])
            elif op is code.BRANCH:
                add(value[1][0])

    with suppress(Reached):
        add(tree)
    return "".join(out)


# --- the engine ---------------------------------------------------------------------------------------------------


CATEGORIES = {
    code.CATEGORY_DIGIT: str.isdigit,
    code.CATEGORY_NOT_DIGIT: lambda c: not c.isdigit(),
    code.CATEGORY_SPACE: str.isspace,
    code.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    code.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
    code.CATEGORY_NOT_WORD: lambda c: not (c.isalnum() or c == "_"),
}


def accepts(op: Any, value: Any, c: str) -> bool:
    if op is code.LITERAL:
        return chr(value) == c
    if op is code.NOT_LITERAL:
        return chr(value) != c
    if op is code.ANY:
        return c != "\n"
    if op is code.CATEGORY:
        return CATEGORIES[value](c)
    if op is code.RANGE:
        return value[0] <= ord(c) <= value[1]
    negated = bool(value) and value[0][0] is code.NEGATE
    return any(accepts(*one, c) for one in value if one[0] is not code.NEGATE) != negated


def counted(pattern: Pattern, text: str, start: int = 0) -> int | None:
    """Return the steps from a character on; None for more than any linear walk of the pattern takes."""
    try:
        return steps(pattern, text, start, count=True)
    except (TooMany, RecursionError):
        return None


def steps(pattern: Pattern, text: str, start: int = 0, *, count: bool = False) -> int | None:
    taken = 0
    most = 60 * (len(text) + 20)

    def step() -> None:
        nonlocal taken
        taken += 1
        if taken > most:
            raise TooMany

    def walk(items: list[Any], at: int) -> Iterator[int]:
        if not items:
            yield at
            return
        (op, value), rest = items[0], items[1:]
        step()
        if op in (code.LITERAL, code.NOT_LITERAL, code.ANY, code.IN):
            if at < len(text) and accepts(op, value, text[at]):
                yield from walk(rest, at + 1)
        elif op in REPEATS:
            low, high, body = value
            yield from repeat(list(body), low, high, at, rest, greedy=op is not code.MIN_REPEAT)
        elif op is code.SUBPATTERN:
            yield from walk([*value[3], *rest], at)
        elif op is code.BRANCH:
            for part in value[1]:
                yield from walk([*part, *rest], at)
        elif op is code.AT:
            if holds(value, at):
                yield from walk(rest, at)
        elif op in (code.ASSERT, code.ASSERT_NOT):
            direction, body = value
            start = at if direction > 0 else at - body.getwidth()[0]
            inside = start >= 0 and any(True for _ in walk(list(body), start))
            if inside == (op is code.ASSERT):
                yield from walk(rest, at)
        else:
            raise NotImplementedError(f"{op} in {pattern.text}")

    def repeat(body: list[Any], low: int, high: Any, at: int, rest: list[Any], *, greedy: bool) -> Iterator[int]:
        if len(body) == 1 and body[0][0] in (code.LITERAL, code.NOT_LITERAL, code.ANY, code.IN):
            ends = [at]
            if not greedy:
                for here in lazily(body[0], low, high, at):
                    yield from walk(rest, here)
                return
            while len(ends) <= high and ends[-1] < len(text):
                step()
                if not accepts(*body[0], text[ends[-1]]):
                    break
                ends.append(ends[-1] + 1)
            first = rest[0] if rest else None
            for here in reversed(ends[low:]):
                step()
                if first is not None and first[0] is code.LITERAL and not text.startswith(chr(first[1]), here):
                    continue  # as Python's engine looks ahead
                yield from walk(rest, here)
            return
        yield from again(body, low, high, at, rest, 0, greedy=greedy)

    def lazily(one: Any, low: int, high: Any, at: int) -> Iterator[int]:
        done = 0
        while True:
            if done >= low:
                yield at
            step()
            if done >= high or at >= len(text) or not accepts(*one, text[at]):
                return
            at, done = at + 1, done + 1

    def again(
        body: list[Any], low: int, high: Any, at: int, rest: list[Any], done: int, *, greedy: bool
    ) -> Iterator[int]:
        if not greedy and done >= low:
            yield from walk(rest, at)
        if done < high:
            for here in walk(body, at):
                if here > at:
                    yield from again(body, low, high, here, rest, done + 1, greedy=greedy)
        if greedy and done >= low:
            yield from walk(rest, at)

    def holds(where: Any, at: int) -> bool:
        if where in (code.AT_BEGINNING, code.AT_BEGINNING_STRING):
            return at == 0 or (where is code.AT_BEGINNING and text[at - 1] == "\n")
        if where in (code.AT_END, code.AT_END_STRING):
            return at == len(text)
        word = [0 <= i < len(text) and (text[i].isalnum() or text[i] == "_") for i in (at - 1, at)]
        return (word[0] != word[1]) == (where is code.AT_BOUNDARY)

    for end in walk(list(parsed(pattern.text)), start):
        if not (count and pattern.whole) or end == len(text):
            return taken
    return taken if count else None
