"""A configuration of another tool, of training or of serving, judged and improved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.configs.answer import Checked, check_document, check_text
from planner.configs.folder import CheckedFolder, check_folder
from planner.configs.formats.configuration import CheckFlags
from planner.configs.serving_start import serving_engine
from planner.configs.stated_rate import stated_rate
from planner.io.inputs import measurements
from planner.requests.flag import values_of
from planner.requests.serving import Task, refuse, stated
from planner.requests.tools import Check
from topology import codec
from topology.codec import JsonObject
from topology.errors import UserError
from topology.time_limit import limited

if TYPE_CHECKING:
    from planner.configs.serving import CheckedServing


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFile:
    """The answer of `planner check`: `file` is its name, `checked` the result for training or for serving."""

    file: str
    checked: Checked | CheckedServing

    @property
    def legal(self) -> bool | None:
        """Whether it runs; None where a verdict needs something that it leaves open."""
        return self.checked.legal

    @property
    def changes(self) -> Sequence[Any]:
        """Single changes that make it better, the best first, each with a diff of the file."""
        return self.checked.changes

    def to_dict(self) -> JsonObject:
        """Return the JSON document of the command."""
        if isinstance(self.checked, Checked):
            return check_document(self.checked)
        from planner.configs.serving_document import checked_serving_document  # noqa: PLC0415 - of servers only

        return checked_serving_document(self.file, self.checked)


def _variables(said: Sequence[str]) -> tuple[tuple[str, str], ...]:
    pairs = [one.partition("=") for one in said]
    for name, equals, _ in pairs:
        if not equals or not name:
            raise UserError(f"--set {name[:60]} has no value", remedy=f"--set {name[:60] or 'NAME'}=VALUE")
    return tuple((name, value) for name, _, value in pairs)


def check(asked: Check, progress: Callable[[str], None] = lambda _: None) -> CheckedFile | CheckedFolder:
    """Return the answer, for all configurations of a folder if `file` is one.

    Raises BadInput for a file that cannot be read, UserError for flags that have no meaning for it.
    """
    said = {one.name: getattr(asked, one.name) for one in fields(CheckFlags) if one.name != "variables"}
    flags = CheckFlags(**said, variables=_variables(asked.variable or ()))
    rate = stated_rate(asked.measured, asked.tokens_per_s)
    if asked.file != "-" and Path(asked.file).is_dir():
        _refuse_serving(asked)
        if rate is not None:
            raise UserError("--measured and --tokens-per-s are of one file", remedy="pass the file")
        return check_folder(
            Path(asked.file),
            flags,
            measured=measurements(asked.profile, strict=asked.strict),
            time_limit_s=asked.time_limit,
            progress=progress,
        )
    if asked.sarif:
        raise UserError("--sarif is for a folder", remedy="pass the folder of the file")
    text, where = codec.read_path_or_stdin(asked.file)
    return check_configuration(text, where, asked, flags, progress)


def check_configuration(
    text: str, where: str, asked: Check, flags: CheckFlags, progress: Callable[[str], None] = lambda _: None
) -> CheckedFile:
    """Return the answer for the text of one configuration, of training or of serving; `where` is its name.

    `flags` are what `asked` says of the question. Raises BadInput for a text that cannot be read, UserError for what
    means nothing for its kind.
    """
    rate = stated_rate(asked.measured, asked.tokens_per_s)
    if serving_engine(text):
        from planner.configs.serving import check_serving  # noqa: PLC0415 - of servers only
        from planner.serving.question.from_flags import ServingFlags  # noqa: PLC0415 - likewise

        others = {
            **{name: getattr(asked, name) for name in ("seq_len", "global_batch", "micro_batch", "profile", "strict")},
            "launch": asked.launch or None,
            "time_limit": asked.time_limit,
            "measured": asked.measured,
            "tokens_per_s": asked.tokens_per_s,
        }
        refuse(stated(others), Task.SERVE, instead="pass a configuration of training")
        load = ServingFlags(**values_of(asked.load))
        served = check_serving(text, where, flags, load, search=asked.search, progress=progress)
        return CheckedFile(file=where, checked=served)
    _refuse_serving(asked)
    if asked.time_limit is not None and not asked.search:
        raise UserError("--time-limit is for the search, which --no-search leaves out", remedy="leave out one of them")
    measured = measurements(asked.profile, strict=asked.strict)
    with limited(asked.time_limit or None):  # a limit of 0 still predicts what is configured
        checked = check_text(
            text,
            where,
            flags,
            measured=measured,
            stated_rate=rate,
            search=asked.search,
            time_limit_s=asked.time_limit,
            progress=progress,
        )
    return CheckedFile(file=where, checked=checked)


def _refuse_serving(asked: Check) -> None:
    """Raise UserError where something that is not the start of a server was given with options of serving."""
    options = stated({**values_of(asked.load), "release": asked.release or None})
    refuse(options, Task.TRAIN, instead="pass the command or script that starts the server")
