"""`--online`: the config.json of a model on the Hub, and nothing else, only where it is asked for. A stand-in for the
Hub.
"""

import json
import sys
from types import SimpleNamespace

import pytest

from planner.io.hub_file import MOST_BYTES, fetch_config, with_fetched_model
from simulator.config.hf_config import load_model
from simulator.config.hub_models import SHIPPED
from topology.errors import UserError


class Hub:
    """What of huggingface_hub is used, on files of this machine; `asked` lists what was fetched."""

    def __init__(self, folder, size=1000):
        self.folder, self.size, self.asked = folder, size, []

    def hf_hub_url(self, repository, file, *, revision):
        return f"{repository}@{revision}/{file}"

    def get_hf_file_metadata(self, _url):
        return SimpleNamespace(size=self.size, commit_hash="0a1b")

    def hf_hub_download(self, repository, file, *, revision):
        if repository.endswith("gated"):
            raise RuntimeError("401: ask for access\nmore lines")
        self.asked.append((repository, file, revision))
        path = self.folder / f"models--{repository.replace('/', '--')}" / "snapshots" / revision
        path.mkdir(parents=True)
        (path / file).write_text(json.dumps(json.loads((SHIPPED / "qwen3-8b.json").read_text())))
        return str(path / file)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    stand_in = Hub(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", stand_in)
    return stand_in


def test_online_fetches_one_file_at_one_commit(hub):
    values = with_fetched_model({"model": "org/new@main", "online": True, "gpus": 8})
    assert hub.asked == [("org/new", "config.json", "0a1b")]
    assert values.keys() == {"model", "gpus"}
    assert load_model(values["model"]).name == "org/new"


@pytest.mark.parametrize("name", ["llama3-8b", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-70B-Instruct", "microsoft/phi-2"])
def test_a_model_that_is_known_is_not_fetched(hub, name):
    assert with_fetched_model({"model": name, "online": True}) == {"model": name}
    assert hub.asked == []


def test_without_online_nothing_is_fetched(hub):
    assert with_fetched_model({"model": "org/new", "online": False}) == {"model": "org/new"}
    assert hub.asked == []


def test_a_large_file_is_refused_before_it_is_fetched(hub):
    hub.size = MOST_BYTES + 1
    with pytest.raises(UserError, match=str(MOST_BYTES + 1)):
        fetch_config("org/new")
    assert hub.asked == []


@pytest.mark.parametrize("name", ["../etc/passwd", "org", "a/b/c", "org/na me", "org/name@"])
def test_what_is_no_name_on_the_hub_is_refused(hub, name):
    with pytest.raises(UserError, match="no name on the Hub"):
        fetch_config(name)


def test_what_the_hub_refuses_is_said(hub):
    with pytest.raises(UserError, match="401: ask for access") as caught:
        fetch_config("org/gated")
    assert "more lines" not in str(caught.value)


def test_without_huggingface_hub_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="pip install huggingface_hub"):
        fetch_config("org/new")
