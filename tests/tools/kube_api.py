"""An API server of Kubernetes for tests: what kubectl needs to create, show and delete jobs, and pods that run here.

    python -m tests.tools.kube_api FOLDER            starts it, prints how to use it, ends it with Ctrl-C

kubectl is a real one. Objects are checked against the API's own schemas (tests/data/kubernetes_schemas.json), as with
fieldValidation=Strict. What the controllers of Job, JobSet and TrainJob do is imitated: a process a pod, on one of two
nodes with networks of their own where root may make them, ended by SIGTERM; conditions with their reasons. Images,
volumes and GPUs are not looked at.

Sources: Kubernetes API conventions (Status, discovery); Job's conditions and pod failure policy; the environment that
Kubeflow Trainer gives to torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import psutil

from tests.tools import node_networks
from tests.tools.node_networks import Networks

SCHEMAS = Path(__file__).resolve().parents[1] / "data" / "kubernetes_schemas.json"
KINDS = {  # kind: (group and version, plural)
    "Service": ("v1", "services"),
    "Job": ("batch/v1", "jobs"),
    "JobSet": ("jobset.x-k8s.io/v1alpha2", "jobsets"),
    "TrainJob": ("trainer.kubeflow.org/v1alpha1", "trainjobs"),
}
GRACE_S = 10.0
PORT = 29500


@cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    """Return what judges an object of a kind."""
    document = json.loads(SCHEMAS.read_text())
    return jsonschema.Draft202012Validator({**document["kinds"][kind], "$defs": document["$defs"]})


def faults(manifest: dict[str, Any]) -> list[str]:
    """Return what the API does not take of a manifest."""
    found = validator(manifest["kind"]).iter_errors(manifest)
    return [f"{'.'.join(map(str, one.absolute_path))}: {one.message[:300]}" for one in found]


@dataclass
class KubeApi:
    """What a cluster holds, and the processes of its pods."""

    folder: Path
    networks: Networks | None
    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)  # by plural and name
    pods: dict[str, list[subprocess.Popen[bytes]]] = field(default_factory=dict)  # by name of the job
    created: int = 0
    limits: dict[str, float] = field(default_factory=dict)  # when a job's time is over, by its name
    resolves: bool = True  # whether names of pods lead anywhere

    @property
    def environment(self) -> dict[str, str]:
        return {"KUBECONFIG": str(self.folder / "kubeconfig")}

    def create(self, plural: str, manifest: dict[str, Any]) -> dict[str, Any]:
        name = manifest["metadata"]["name"]
        self.created += 1
        about = {"namespace": "default", "uid": f"uid-{self.created}", "resourceVersion": str(self.created)}
        manifest["metadata"] |= about
        self.objects[plural, name] = manifest
        if plural != "services":
            manifest["status"] = {"active": 1, "conditions": []}
            threading.Thread(target=self._run, args=(name, manifest), daemon=True).start()
        return manifest

    def delete(self, plural: str, name: str) -> dict[str, Any] | None:
        found = self.objects.pop((plural, name), None)
        if plural != "services":
            self.end(name)
        return found

    def active(self, name: str) -> bool:
        """Return whether a job has not ended."""
        found = [one for (_, job), one in self.objects.items() if job == name and "status" in one]
        return any(not one["status"]["conditions"] for one in found)

    def end(self, name: str) -> None:
        """End the pods of a job: SIGTERM, and SIGKILL after a while."""
        pods = self.pods.get(name, [])
        for one in pods:
            if one.poll() is None:
                one.terminate()
        for one in pods:
            try:
                one.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                _kill(one)

    def disrupt(self, name: str, number: int, *, lost: bool) -> None:
        """Take the node of a pod away: with a warning, as preemption does, or at once, as the loss of a node."""
        condition = f"Pod default/{name}-{number} has condition DisruptionTarget matching FailJob rule at index 0"
        self._fail(name, "PodFailurePolicy", condition)
        if lost:
            _kill(self.pods[name][number])
            time.sleep(1.0)
        self.end(name)

    def _run(self, name: str, manifest: dict[str, Any]) -> None:
        """Do what the controllers do until the job has ended."""
        words, names, environments, limit_s = _pods_of(manifest)
        with ExitStack() as undo:
            where = [*(self.networks.addresses if self.networks else ())]
            if self.networks is not None:
                addresses = [*self.networks.addresses.values()]
                known = {f"{pod} {pod}.{name}": addresses[one % 2] for one, pod in enumerate(names)}
                undo.enter_context(node_networks.named(known if self.resolves else {}))
            self.pods[name] = []
            for number, (pod, environment) in enumerate(zip(names, environments, strict=True)):
                inside = words
                if self.networks is not None:
                    inside = self.networks.inside(where[number % 2], words, host=pod)
                with (self.folder / f"{pod}.log").open("wb") as log:
                    self.pods[name].append(
                        subprocess.Popen(inside, stdout=log, stderr=log, env={**os.environ, **environment})
                    )
            self.limits[name] = time.monotonic() + limit_s
            while any(one.poll() is None for one in self.pods[name]):
                if any(one.poll() for one in self.pods[name]):
                    self._fail(name, "BackoffLimitExceeded", "Job has reached the specified backoff limit")
                    self.end(name)
                if time.monotonic() > self.limits[name]:
                    self._fail(name, "DeadlineExceeded", "Job was active longer than specified deadline")
                    self.end(name)
                time.sleep(0.3)
            if any(one.returncode for one in self.pods[name]):
                self._fail(name, "BackoffLimitExceeded", "Job has reached the specified backoff limit")
            else:
                self._condition(name, "Completed" if manifest["kind"] == "JobSet" else "Complete", "", "")

    def _fail(self, name: str, reason: str, message: str) -> None:
        self._condition(name, "Failed", reason, message)

    def _condition(self, name: str, kind: str, reason: str, message: str) -> None:
        """Add a condition to a job that has none: the first says how it ended."""
        for plural in ("jobs", "jobsets", "trainjobs"):
            found = self.objects.get((plural, name))
            if found is not None and not found["status"]["conditions"]:
                found["status"] = {
                    "conditions": [{"type": kind, "status": "True", "reason": reason, "message": message}]
                }


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(psutil.Error):
        top = psutil.Process(process.pid)
        for one in [*top.children(recursive=True), top]:
            with suppress(psutil.Error):
                one.kill()
    process.wait()


def _pods_of(manifest: dict[str, Any]) -> tuple[list[str], list[str], list[dict[str, str]], float]:
    """Return the command of the pods of a job, their names, the environment of each, and their seconds at most."""
    name, spec = manifest["metadata"]["name"], manifest["spec"]
    if manifest["kind"] == "TrainJob":
        trainer = spec["trainer"]
        names = [f"{name}-node-0-{number}" for number in range(trainer["numNodes"])]
        shared = {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_MASTER_ADDR": f"{names[0]}.{name}",
            "PET_MASTER_PORT": str(PORT),
        }
        return trainer["command"], names, [shared | {"PET_NODE_RANK": str(one)} for one in range(len(names))], 1e9
    prefix = name
    if manifest["kind"] == "JobSet":
        prefix, spec = f"{name}-node-0", spec["replicatedJobs"][0]["template"]["spec"]
    names = [f"{prefix}-{number}" for number in range(spec["completions"])]
    environments = [{"JOB_COMPLETION_INDEX": str(number)} for number in range(len(names))]
    command = spec["template"]["spec"]["containers"][0]["command"]
    return command, names, environments, float(spec["activeDeadlineSeconds"])


def discovery(path: str) -> dict[str, Any] | None:
    """Return what the API says of itself."""
    groups = sorted({version for version, _ in KINDS.values() if "/" in version})
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        listed = []
        for one in groups:
            version = {"groupVersion": one, "version": one.partition("/")[2]}
            listed.append({"name": one.partition("/")[0], "versions": [version], "preferredVersion": version})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
    if path == "/openapi/v3":
        roots = {f"apis/{one}" if "/" in one else f"api/{one}" for one, _ in KINDS.values()}
        return {"paths": {one: {"serverRelativeURL": f"/openapi/v3/{one}"} for one in sorted(roots)}}
    for kind, (version, plural) in KINDS.items():
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        group, _, short = version.rpartition("/")
        if path == root:
            verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
            one = {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
            return {"kind": "APIResourceList", "groupVersion": version, "resources": [one]}
        if path == f"/openapi/v3{root}":
            strict = {
                "parameters": [{"name": "fieldValidation", "in": "query"}],
                "x-kubernetes-group-version-kind": {"group": group, "version": short, "kind": kind},
            }
            return {"openapi": "3.0.0", "paths": {f"{root}/namespaces/{{namespace}}/{plural}": {"patch": strict}}}
    return None


def handler(api: KubeApi) -> type[BaseHTTPRequestHandler]:
    """Return what answers requests for `api`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def answer(self, code: int, document: dict[str, Any]) -> None:
            text = json.dumps(document).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def refuse(self, code: int, reason: str, message: str) -> None:
            about = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
            self.answer(code, {**about, "reason": reason, "message": message})

        def named(self) -> tuple[str, str]:
            """Return the plural and the name of the object that is asked for; no name for all of a kind."""
            parts = urlsplit(self.path).path.split("/")
            if "namespaces" not in parts:
                return "", ""
            rest = parts[parts.index("namespaces") + 2 :]
            return (rest[0], rest[1] if len(rest) > 1 else "") if rest else ("", "")

        def do_GET(self) -> None:
            known = discovery(urlsplit(self.path).path)
            plural, name = self.named()
            if known is not None:
                self.answer(200, known)
            elif (plural, name) in api.objects:
                self.answer(200, api.objects[plural, name])
            elif plural and not name:
                self.answer(
                    200, {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": []}
                )
            else:
                self.refuse(404, "NotFound", f'{plural} "{name}" not found')

        def do_POST(self) -> None:
            manifest = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            plural, _ = self.named()
            if wrong := faults(manifest):
                self.refuse(400, "BadRequest", "strict decoding error: " + "; ".join(wrong[:5]))
            else:
                self.answer(201, api.create(plural, manifest))

        def do_PATCH(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            plural, name = self.named()
            self.answer(200, api.objects[plural, name])

        def do_DELETE(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            plural, name = self.named()
            found = api.delete(plural, name)
            if found is None:
                self.refuse(404, "NotFound", f'{plural} "{name}" not found')
            else:
                self.answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success", "details": {"name": name}})

    return Handler


def missing() -> list[str]:
    """Return what keeps pods from having networks of their own here; nothing where they can."""
    return node_networks.missing(["kubectl"])


@contextmanager
def cluster(folder: Path, *, apart: bool = True) -> Iterator[KubeApi]:
    """Start an API server and yield it; `apart`: pods are on nodes that are apart, which root is needed for."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as undo:
        networks = Networks("mk", "10.213.9", 2)
        api = KubeApi(folder, undo.enter_context(node_networks.connected(networks)) if apart else None)
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler(api))
        undo.callback(server.server_close)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        undo.callback(server.shutdown)
        undo.callback(lambda: [api.end(name) for name in api.pods])
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}],
            "users": [{"name": "test", "user": {}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "current-context": "test",
        }
        (folder / "kubeconfig").write_text(json.dumps(config))
        yield api


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    if lacking := missing():
        print(f"cannot be started here: {', '.join(lacking)}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # and so undo what was changed
    with cluster(options.folder.absolute()) as running, suppress(KeyboardInterrupt):
        print("".join(f"export {name}={value}\n" for name, value in running.environment.items()), end="", flush=True)
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
