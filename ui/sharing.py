"""Files for others: a report as one HTML file, and all exports as one archive."""

from __future__ import annotations

import html
import io
import zipfile
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from planner.explain.answer_text import answer_sentence
from planner.explain.tables import basis_lines, cluster_line, model_line, workload_line
from planner.io.plan_words import plan_chips, plan_settings
from planner.pictures.memory import memory
from planner.pictures.topology import topology
from planner.pictures.waterfall import estimate_picture
from topology.errors import PlannerError
from ui import rows

if TYPE_CHECKING:
    from planner.export.draft import Exported, Target
    from planner.search.result import RankedPlan, SearchResult

DATED = (1980, 1, 1, 0, 0, 0)  # date of all files in an archive, so that equal content makes an equal archive

_STYLE = """
:root { color-scheme: light dark; font-family: system-ui, sans-serif; line-height: 1.5; }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { text-align: left; padding: 0.3rem 0.6rem; border-bottom: 1px solid #8886; }
div.wide { overflow-x: auto; }
svg { max-width: 100%; height: auto; }
pre { overflow-x: auto; padding: 0.6rem; border: 1px solid #8886; }
"""
_TABLE = (
    ("#", "place"),
    ("plan", "chips"),
    ("step", "step"),
    ("80 % range", "range"),
    ("memory", "memory"),
    ("fits", "fits"),
    ("tokens/s per GPU", "tokens"),
    ("MFU", "mfu"),
    ("settings", "policy"),
)


def report(result: SearchResult, chosen: RankedPlan, *, command: str) -> str:
    """Return a search result as an HTML page that refers to no other file; `chosen` is drawn in full."""
    question, estimate = result.question, chosen.estimate
    step, within = rows.step_figure(estimate)
    held, verdict = rows.memory_figure(estimate.memory)
    about = [model_line(question.model), cluster_line(question.cluster), workload_line(question.workload)]
    listed = rows.plan_rows(result)
    title = f"{question.model.name} on {question.cluster.name}"
    parts = [
        f"<h1>{_text(title)}</h1><p><strong>{_text(answer_sentence(result.plans[0]))}</strong></p>",
        _list([*about, question.framework.title]),
        f"<h2>{len(listed)} plans, best first</h2>",
        _table([name for name, _ in _TABLE], [[cells[key] for _, key in _TABLE] for cells in map(dict, listed)]),
        f"<h2>#{chosen.rank}: {_text(plan_chips(chosen.plan))}</h2>",
        (
            f"<p>{_text(plan_settings(chosen.plan))}."
            f" Step {_text(step)} (80 % range {_text(within)}, {_text(estimate.step_s.source)})"
        ),
        f"; memory {_text(held)}: {_text(verdict)}.</p>",
        estimate_picture(estimate, title="The step, term by term"),
        memory(estimate.memory, title="Memory by category"),
        "<h2>The machine</h2>",
        topology(question.cluster),
        "<h2>What this rests on</h2>",
        _list([*basis_lines(estimate, chosen.method, question, chosen.plan.gpus), *result.assumed]),
        f"<h2>The same in a terminal</h2><pre>{_text(command)}</pre>",
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{_text(title)}</title>'
    body = "".join(parts)
    return f'<!DOCTYPE html><html lang="en"><head>{head}<style>{_STYLE}</style></head><body>{body}</body></html>\n'


def archive(plan_file: str, targets: Iterable[Target], export: Callable[[Target], Exported]) -> bytes:
    """Return a zip of plan.json and of what every target writes; what a target cannot run is said in LEFT_OUT.txt."""
    held = io.BytesIO()
    left_out = []
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as kept:
        _add(kept, "plan.json", plan_file)
        for target in targets:
            try:
                done = export(target)
            except PlannerError as error:
                left_out.append(f"{target.title} {target.version}: {error}")
                continue
            _add(kept, f"{target.name}-{target.version}/{done.file_name}", done.text)
        if left_out:
            _add(kept, "LEFT_OUT.txt", "\n\n".join(left_out) + "\n")
    return held.getvalue()


def _add(kept: zipfile.ZipFile, name: str, text: str) -> None:
    kept.writestr(zipfile.ZipInfo(name, DATED), text)


def _text(value: object) -> str:
    return html.escape(str(value))


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(line)}</li>' for line in lines)}</ul>"


def _table(headings: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in headings)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in line)}</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
