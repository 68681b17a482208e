"""meshwright's own executor under torchrun: a script that contains the request and starts the ranks.

`planner apply` does the same on this machine, with a budget and a report; the script is for machines where processes
are started with torchrun only.
"""

from __future__ import annotations

from planner.export.degrees import to_fsdp_degrees
from planner.export.draft import Draft, Target
from planner.export.job import ExportJob, require_legal
from planner.export.script import command, started_script
from simulator.runtimes.environment import Variable
from topology import codec
from topology.codec import JsonObject

VERSION = "2.13"
REQUEST_VERSION = 1
STEPS, WARM_UP = 10, 3
MULTICAST = "NVLink multicast stays off: in virtual machines and on shared hosts it can hang the fabric"
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
DELIMITER = "REQUEST"  # one line of JSON cannot contain this line


def request(job: ExportJob) -> JsonObject:
    """Return the executor's request, as of `planner apply`; the environment determines the GPUs."""
    return {
        "schema_version": REQUEST_VERSION,
        "plan": codec.to_builtins(job.plan),
        "model": codec.to_builtins(job.question.model),
        "workload": codec.to_builtins(job.question.workload),
        "runtime": codec.to_builtins(job.question.runtime),
        "device": "cuda",
        "steps": STEPS,
        "warm_up": WARM_UP,
    }


def write(job: ExportJob) -> Draft:
    """Return a shell script that contains its request file. Raises Infeasible."""
    title, named = "meshwright's executor", job.plan_hash
    fsdp, sharding_notes = to_fsdp_degrees(job.plan, title)
    job = job.with_plan(fsdp)
    notes = require_legal(job, "meshwright", title)
    hosts = job.hosts()
    folder = f"meshwright-{named}"
    worker = ["-m", "executor.run.worker", f"--request={folder}/request.json", f"--out={folder}/records"]
    body = (
        f"{command(['mkdir', '-p', f'{folder}/records'])}\n"
        f"cat > {folder}/request.json <<'{DELIMITER}'\n{codec.to_json(request(job), indent=None)}\n{DELIMITER}\n"
    )
    shared = (
        ("each host keeps the records of its own ranks; several hosts were tried on CPU processes only",)
        if hosts.count > 1
        else ()
    )
    settings: JsonObject = {"--nproc-per-node": str(hosts.ranks_per_host), "--max-restarts": 0}
    if hosts.count > 1:
        settings["--nnodes"] = str(hosts.count)
    predicted = job.question.runtime.name
    other = (
        f"predicted for {predicted}, whose kernels are others than the executor's: steps and memory will differ;"
        " planner suggest --framework meshwright"
    )
    draft = Draft(
        body=body,
        settings=settings,
        not_expressed=sharding_notes,
        needed=('torch and meshwright on every host: pip install "meshwright[exec]"',),
        notes=(*((other,) if predicted != "meshwright" else ()), *notes, *shared),
        environment=tuple(Variable(name=n, value=v, reason=MULTICAST) for n, v in ENVIRONMENT.items()),
    )
    return started_script(job, worker, draft)


TARGET = Target(
    name="torchrun",
    version=VERSION,
    title="meshwright's executor under torchrun",
    file_name="torchrun.sh",
    write=write,
    first_line="#!/bin/sh",
    run="sh torchrun.sh",
)
