"""What leaves the machine under --redact names no host, user, folder, address or device."""

import getpass
import json
import platform

import pytest

from planner.runs.runs_store import save_run
from tests.planner.test_runs_store import document
from topology.catalog.cluster_file import save_cluster
from topology.catalog.clusters import cluster
from topology.cluster import NodeGroup
from topology.codec import write_text
from topology.redact import own_names, redact, redact_cluster

UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"
SECRETS = (
    UUID,
    "node-7.lab.example",
    "alice",
    "/data/alice/secret",
    "10.1.2.3",
    "00000000:1B:00.0",
    "0a:1b:2c:3d:4e:5f",
)


@pytest.fixture(autouse=True)
def somebody(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "node-7.lab.example")
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")


def test_texts_keep_their_sense_and_lose_their_names() -> None:
    said = redact(
        "alice@node-7: /data/alice/secret/run/run.json on 10.1.2.3, see https://ui.perfetto.dev and 3/4 of it"
    )

    assert said == "<host>@<host>: <path>/run.json on <address>, see https://ui.perfetto.dev and 3/4 of it"
    assert own_names() == ("node-7.lab.example", "node-7", "alice")


def secret_cluster():
    machine = cluster("h200x4")
    node = machine.groups[0].node
    gpus = tuple(
        type(gpu)(**{**{name: getattr(gpu, name) for name in gpu.__slots__}, "uuid": UUID[:-1] + str(gpu.index)})
        for gpu in node.gpus
    )
    from dataclasses import replace

    return replace(machine, name="node-7", groups=(NodeGroup(node=replace(node, gpus=gpus, name="node-7")),))


@pytest.mark.parametrize("command", ["probe --from", "doctor --cluster"])
@pytest.mark.parametrize("as_json", [True, False])
def test_machines_are_shown_and_saved_without_names(planner, tmp_path, command, as_json) -> None:
    save_cluster(secret_cluster(), tmp_path / "machine.json")
    out = tmp_path / "shared.json"

    done = planner(*command.split(), tmp_path / "machine.json", "--out", out, "--redact", *["--json"] * as_json)

    assert done.returncode in {0, 1}
    shown = done.stdout.replace(str(out), "") + out.read_text()
    assert [secret for secret in SECRETS if secret in shown] == []
    assert "GPU-01234567" not in shown


def test_runs_and_reports_are_shown_without_names(planner, monkeypatch, tmp_path) -> None:
    folder = tmp_path / "alice" / "secret"
    found = {**document(), "failure": {"message": f"rank 0 on node-7.lab.example: {UUID} at /data/alice/secret/x.py"}}
    key = save_run(found, folder)
    write_text(folder / "run.json", json.dumps(found))

    listed = planner("runs", "--redact", "--json").stdout
    reported = planner("report", key, "--redact", "--json").stdout
    page = tmp_path / "page.html"
    planner("report", key, "--redact", "--html", page)

    for text in (listed, reported, page.read_text()):
        assert [secret for secret in SECRETS if secret in text] == []
    assert key in listed


def test_a_redacted_cluster_still_plans_the_same() -> None:
    plain, bare = secret_cluster(), redact_cluster(secret_cluster())

    assert [link.bytes_per_s for link in bare.groups[0].node.links] == [
        link.bytes_per_s for link in plain.groups[0].node.links
    ]
    assert all(gpu.uuid is None and gpu.pci_bus_id is None for gpu in bare.groups[0].node.gpus)
