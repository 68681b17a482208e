"""Rates of users against those of GPUs: a search's own numbers, none beaten that is marked, drawn and saved alike."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from defusedxml import ElementTree

from planner.serving.pareto import pareto, token_energy_j
from planner.serving.question.from_flags import ServingFlags, serving_question
from planner.serving.search import search_serving
from simulator.serving.deployment import Deployment, Pool
from tests.planner.conftest import Finished
from topology.catalog.clusters import cluster

QUICK = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 2, "isl": 128, "osl": 16, "concurrency": 8}


def test_the_best_are_those_that_none_beats_and_numbers_are_the_search_s():
    question = serving_question(ServingFlags(**QUICK))

    found = pareto(question, ("vllm", "sglang"))

    rates = [(point.user_tokens_per_s, point.gpu_tokens_per_s) for point in found.points]
    for point, mine in zip(found.points, rates, strict=True):
        beaten = any(one != mine and one[0] >= mine[0] and one[1] >= mine[1] for one in rates)
        assert point.best == (not beaten)
    searched = {plan.deployment: plan.estimate.tpot_s.value for plan in search_serving(question).plans}
    same = {
        point.plan.deployment: 1 / point.user_tokens_per_s
        for point in found.points
        if (point.engine, point.clients) == ("vllm", 8)
    }
    assert same == pytest.approx(searched)


def test_the_command_draws_and_saves_what_it_says(planner: Callable[..., Finished], tmp_path: Path) -> None:
    drawn, saved = tmp_path / "pareto.svg", tmp_path / "pareto.csv"
    words = [word for name, value in QUICK.items() for word in (f"--{name}", str(value))]
    asked = ("suggest", "--task", "serve", *words, "--objective", "pareto", "--engine", "sglang", "--gpu-price", "2")

    points = planner(*asked, "--svg", str(drawn), "--csv", str(saved), "--json").document["points"]

    rows = list(csv.DictReader(saved.open()))
    assert [float(row["user_tokens_per_s"]) for row in rows] == [point["user_tokens_per_s"] for point in points]
    for point in points:
        assert point["engine"] == "sglang"
        assert point["price_per_million_tokens"] == pytest.approx(2 / 3600 / point["gpu_tokens_per_s"] * 1e6)
    picture = ElementTree.fromstring(drawn.read_text())
    words_of_marks = [element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}title")]
    written = [
        (element.get("text-anchor"), element.text or "") for element in picture.iter("{http://www.w3.org/2000/svg}text")
    ]
    ticks = [float(text.replace(",", "")) for anchor, text in written if anchor == "middle"][:6]
    assert ticks == pytest.approx([ticks[1] * place for place in range(6)])
    assert max(point["user_tokens_per_s"] for point in points) < ticks[-1]
    assert sum("tokens/s a user" in text for text in words_of_marks) == 3 * len(points)
    assert planner(*asked, "--svg", str(drawn)).returncode == 2
    assert planner("suggest", "--task", "serve", *words, "--csv", str(saved), "--force").returncode == 2
    assert planner("suggest", "--csv", "a.csv").returncode == 2


def test_energy_is_power_over_tokens_and_only_where_it_is_published():
    one = Deployment(pool=Pool(engines=2))

    found = token_energy_j(cluster("dgx-h100", 8), one, 1000.0)

    assert found is not None
    assert 2 * 700 * 0.5 / 1000 < found.low < found.value < found.high < 2 * 700 / 1000
    assert token_energy_j(cluster("mi300x-x8", 8), one, 1000.0) is None
