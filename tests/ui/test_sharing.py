"""What is handed to others: a report without references to anything else, and an archive of what the tools read."""

from __future__ import annotations

import io
import json
import re
import zipfile
from html.parser import HTMLParser

import pytest

from tests.ui import needs  # noqa: F401 - skips where a package is missing

from planner.export.targets.registry import ALL_TARGETS  # isort: skip
from planner.question.flags import Flags  # isort: skip
from planner.search.answer import answer  # isort: skip
from planner.search.search import SearchOptions  # isort: skip
from ui import data, sharing  # isort: skip


@pytest.fixture(scope="module")
def result():
    return answer(
        Flags(model="llama3.2-1b", cluster="h200x4", gpus=(4,), global_batch=8), "torchtitan", SearchOptions()
    )


class Page(HTMLParser):
    """Collects tags with their attributes, and text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


def test_a_report_is_one_file_and_says_what_the_command_says(result):
    page = Page(sharing.report(result, result.plans[0], command="planner suggest --model '<b>&'"))

    refers = [
        v for _, attributes in page.tags for k, v in attributes.items() if k in {"src", "href", "data"} and v[:1] != "#"
    ]
    assert refers == []
    assert not {tag for tag, _ in page.tags} & {"script", "b", "link", "iframe"}
    text = " ".join(page.text)
    assert "planner suggest --model '<b>&'" in text
    assert str(result.question.model.name) in text
    assert sum(tag == "tr" for tag, _ in page.tags) == 1 + len(result.plans)
    assert sum(tag == "svg" for tag, _ in page.tags) >= 3  # step, memory, machine


def test_the_archive_holds_what_each_export_writes(result):
    ranked = result.plans[0]
    first, again = (data.export_archive(result, ranked) for _ in range(2))
    kept = zipfile.ZipFile(io.BytesIO(first))

    assert first == again
    assert json.loads(kept.read("plan.json"))["plan"]
    for target in ALL_TARGETS:
        inside = [name for name in kept.namelist() if name.startswith(f"{target.name}-{target.version}/")]
        if inside:
            assert kept.read(inside[0]).decode() == data.exported(result, ranked, target).text
        else:
            assert target.title in kept.read("LEFT_OUT.txt").decode()
    assert not [name for name in kept.namelist() if name.startswith("/") or re.search(r"(^|/)\\.\\.(/|$)", name)]
