"""Draw a sharding plan: operators from top to bottom, the placements of their results, and the collectives between
them.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.pictures.palette import BROWN, GREEN, ORANGE, PURPLE, SKY, VERMILION, WINE
from planner.pictures.svg import LETTER_PX, MARGIN, Picture, legend, shortened
from planner.sharding.layouts import collectives
from planner.sharding.layouts.layout import Layout, placements_of
from planner.sharding.plans.plan import ShardingPlan, TensorMove
from planner.sharding.problem.problem import ShardingProblem
from topology.errors import Infeasible

ROW = 26.0
WIDTH = 980.0
MAX_STEPS = 400
_LANES = 12  # columns next to the operators for lines from results to their uses
_LANE = 9.0
_COLOURS = {
    collectives.ALL_GATHER: SKY,
    collectives.REDUCE_SCATTER: GREEN,
    collectives.ALL_REDUCE: ORANGE,
    collectives.ALL_TO_ALL: PURPLE,
    collectives.ALL_TO_ALL_V: WINE,
    collectives.PERMUTE: BROWN,
    collectives.SEND_RECV: VERMILION,
}


def sharding_picture(problem: ShardingProblem, plan: ShardingPlan, *, title: str) -> Picture:
    """Return the picture of `plan`. Raises Infeasible if it would be too long to be useful."""
    rows = _rows(problem, plan)
    if len(rows) > MAX_STEPS:
        raise Infeasible(
            f"a picture of {len(rows)} rows",
            why=f"at most {MAX_STEPS} are drawn",
            remedy="one layer instead of the model",
        )
    kinds = {kind for row in rows for kind in row.kinds}
    colours = {kind: colour for kind, colour in _COLOURS.items() if kind in kinds}
    top = 74.0
    picture = Picture(
        WIDTH,
        top + ROW * len(rows) + MARGIN,
        title,
        "Operators from top to bottom with the placements of what they read and make; coloured bars are collectives.",
    )
    axes = ", ".join(f"{name} of {size}" for name, size in zip(problem.mesh.names, problem.mesh.shape, strict=True))
    picture.write(MARGIN, 50, f"mesh: {axes}", kind="quiet")
    legend(picture, MARGIN + 300, 50, list(colours.items()))
    _lines(picture, rows, top)
    left = MARGIN + _LANES * _LANE + 10
    for number, row in enumerate(rows):
        y = top + ROW * number
        if row.kinds:
            picture.box(left + 40, y + 3, WIDTH - left - 40 - MARGIN, ROW - 8, colours[row.kinds[0]], row.about)
            picture.write(left + 50, y + 16, shortened(row.text, WIDTH - left - 70 - MARGIN))
        else:
            picture.box(left, y + 1, WIDTH - left - MARGIN, ROW - 4, about=row.about)
            room = WIDTH - left - MARGIN - len(row.placed) * LETTER_PX - 30
            picture.write(left + 8, y + 16, shortened(row.text, room))
            picture.write(WIDTH - MARGIN - 8, y + 16, row.placed, kind="quiet", anchor="end")
    return picture


class _Row:
    """A row: an operator with its result's placement, or the collectives of one redistribution."""

    def __init__(
        self,
        text: str,
        about: str,
        *,
        makes: str = "",
        reads: tuple[str, ...] = (),
        placed: str = "",
        kinds: tuple[str, ...] = (),
    ) -> None:
        self.text, self.about, self.makes, self.reads, self.placed, self.kinds = (
            text,
            about,
            makes,
            reads,
            placed,
            kinds,
        )


def _rows(problem: ShardingProblem, plan: ShardingPlan) -> list[_Row]:
    def tokens(layout: Layout) -> str:
        return " ".join(placements_of(layout, problem.mesh))

    rows: list[_Row] = []
    shown: set[str] = set()
    for step in plan.steps:
        if isinstance(step, TensorMove):
            if step.tensor in problem.inputs and step.tensor not in shown:
                rows.append(_input(problem, step.tensor, tokens(plan.choice.layouts[step.tensor])))
                shown.add(step.tensor)
            if step.collectives:
                one = step.collectives[0]
                times = f"{len(step.collectives)} x " if len(step.collectives) > 1 else ""
                total = sum(c.bytes_in for c in step.collectives)
                text = f"{times}{one.kind} over {one.mesh_dim}: {step.tensor}, {_size(total)} to {tokens(step.target)}"
                about = f"{step.tensor} from {tokens(step.source)} to {tokens(step.target)}"
                kinds = tuple(dict.fromkeys(c.kind for c in step.collectives))
                rows.append(_Row(text, about, reads=(step.tensor,), kinds=kinds))
            continue
        operator = problem.operators[step.operator]
        for name, layout in step.option.operands:
            if name in problem.inputs and name not in shown:
                rows.append(_input(problem, name, tokens(layout)))
                shown.add(name)
        rows += [_Row(f"{c.kind} over {c.mesh_dim}, {c.note}", c.note, kinds=(c.kind,)) for c in step.collectives]
        name = operator.result.name
        text = f"{name} = {operator.text}" if "=" not in operator.text.split("(")[0] else operator.text
        reads = tuple(operand for operand, _ in operator.operands)
        rows.append(
            _Row(
                text,
                f"{name} {list(operator.result.shape)}",
                makes=name,
                reads=reads,
                placed=tokens(step.option.result),
            )
        )
    return rows


def _input(problem: ShardingProblem, name: str, placed: str) -> _Row:
    tensor = problem.tensors[name]
    kind = "parameter" if name in problem.graph.parameters else "input"
    return _Row(f"{kind} {name} {list(tensor.shape)}", tensor.origin or name, makes=name, placed=placed)


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}"


def _lines(picture: Picture, rows: list[_Row], top: float) -> None:
    """Draw a line from each result to the rows that read it, in lanes next to the operators, the longest outermost."""
    made: Mapping[str, int] = {row.makes: number for number, row in enumerate(rows) if row.makes}
    spans = [
        (made[name], number)
        for number, row in enumerate(rows)
        for name in row.reads
        if made.get(name, number) < number - 1
    ]
    left = MARGIN + _LANES * _LANE + 10
    free = [-1] * _LANES
    for start, end in sorted(spans, key=lambda span: (span[0], span[1] - span[0])):
        lane = next((k for k in range(_LANES) if free[k] <= start), _LANES - 1)
        free[lane] = end
        x = left - 8 - lane * _LANE
        y0, y1 = top + ROW * start + ROW / 2, top + ROW * end + ROW / 2
        picture.line([(left, y0), (x, y0), (x, y1), (left, y1)], "", 1.0, about=f"{rows[start].makes}")
