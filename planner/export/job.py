"""What is exported: a plan with everything it was made for, a name, and a hash that says which plan it was."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.export.hosts import Hosts, hosts_of
from planner.legality import Grade, check
from simulator.model import Model
from simulator.plan import Plan
from simulator.runtime import Runtime
from simulator.workload import Workload
from topology import codec
from topology.cluster import Cluster
from topology.errors import Infeasible


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A plan to be written for a target. `name` is whatever the user calls the run, in any characters."""

    name: str
    plan: Plan
    model: Model
    cluster: Cluster
    workload: Workload
    runtime: Runtime
    framework: str

    @property
    def plan_hash(self) -> str:
        """The fingerprint of everything that decides what is run: equal hashes, equal runs."""
        return codec.fingerprint(
            [self.plan, self.model, self.cluster, self.workload, self.runtime, self.framework],
        )

    @property
    def micro_batches(self) -> int:
        """Micro batches of a data-parallel rank in a step. Legality has made sure that they divide."""
        return self.plan.micro_batches(self.workload.global_batch_size)

    def with_plan(self, plan: Plan) -> Job:
        """Return the same job with another plan, as a target will write it."""
        return replace(self, plan=plan)

    def hosts(self) -> Hosts:
        """Which ranks start on which host, and on which of its GPUs. Raises Infeasible."""
        return hosts_of(self.plan, self.cluster)


def require_legal(job: Job, framework: str, title: str) -> tuple[str, ...]:
    """Return what `framework` has to say about the plan short of refusing it. Raises Infeasible when it refuses."""
    problems = check(job.plan, job.model, job.cluster, job.workload, framework, runtime=job.runtime, gpus=job.plan.gpus)
    refused = [problem.message for problem in problems if problem.grade is Grade.ILLEGAL]
    if refused:
        raise Infeasible(
            f"{title} cannot run this plan", why="; ".join(refused), remedy=f"planner suggest --framework {framework}"
        )
    return tuple(problem.message for problem in problems)
