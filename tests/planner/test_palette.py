"""Colours: apart for every kind of sight, visible on both papers, one for each category that the estimates name."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from planner.pictures import palette
from planner.pictures.palette import DARK, FAMILIES, LIGHT, MEMORY, TIME
from planner.question.cases import named_case
from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from topology.cluster import LinkKind, Source

# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency" (2009),
# table 1, severity 1.0, on linear RGB.
SIGHT = {
    "all cones": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
# Ottosson, "A perceptual color space for image processing" (2020): linear sRGB to LMS, and its cube root to Lab.
TO_LMS = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
TO_LAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]
NOTICEABLE = 0.02  # about one just noticeable difference in that space
ROOT = Path(__file__).resolve().parents[2]


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def seen(colour: str, sight: str) -> np.ndarray:
    return np.array(TO_LAB) @ np.cbrt(np.array(TO_LMS) @ np.clip(np.array(SIGHT[sight]) @ linear(colour), 0, 1))


def contrast(a: str, b: str) -> float:
    """WCAG 2.2's contrast ratio."""
    one, two = sorted(float(np.array([0.2126, 0.7152, 0.0722]) @ linear(c)) + 0.05 for c in (a, b))
    return two / one


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("family", FAMILIES)
def test_categories_of_a_picture_stay_apart(family: str, sight: str) -> None:
    colours = sorted(set(FAMILIES[family].values()))

    assert len(colours) == len(FAMILIES[family]), "two categories of one picture share a colour"
    for a, b in combinations(colours, 2):
        assert np.linalg.norm(seen(a, sight) - seen(b, sight)) > 3 * NOTICEABLE, (a, b)


@pytest.mark.parametrize("paper", [LIGHT, DARK], ids=["light", "dark"])
def test_text_is_readable_and_shapes_are_visible(paper: palette.Paper) -> None:
    assert contrast(paper.ink, paper.page) > 7
    assert contrast(paper.quiet, paper.page) > 4.5
    for family in FAMILIES.values():
        for colour in family.values():
            assert contrast(colour, paper.page) > 1.8


def test_every_category_of_an_estimate_has_a_colour() -> None:
    case = named_case(ROOT / "examples" / "plans" / "qwen3_8b_tp2_fsdp4.json", None)
    estimate = estimate_plans(
        Scenario(
            model=case.question.model,
            cluster=case.question.cluster,
            workload=case.question.workload,
            runtime=case.question.runtime,
        ),
        [case.plan],
    ).estimate(0)

    assert set(estimate.breakdown_s) <= set(TIME)
    assert set(estimate.memory.by_category) <= set(MEMORY)
    assert {str(kind) for kind in LinkKind} == set(palette.LINKS)
    assert {str(source) for source in Source} == set(palette.SOURCES)
