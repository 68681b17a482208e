"""An export job: a plan, its question, a name, and an identifying hash."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.export.hosts import Hosts, hosts_of
from planner.export.mapping import Facts, facts_of
from planner.question.cases import Case
from planner.question.question import Question
from simulator.columns.experts import expert_split
from simulator.columns.plan_columns import plan_columns
from simulator.config.plan import Plan
from simulator.legality.frameworks import framework_named, framework_of_runtime
from simulator.legality.rule import Grade
from simulator.runtimes.environment import Variable, assumed_environment
from simulator.runtimes.library import spec_for
from topology import codec
from topology.errors import Infeasible


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob:
    """A plan to be written for a target. `name` is the user's name of the run, in any characters."""

    name: str
    plan: Plan
    question: Question

    @property
    def plan_hash(self) -> str:
        """The fingerprint of everything that decides what runs."""
        q = self.question
        return codec.fingerprint([self.plan, q.model, q.cluster, q.workload, q.runtime, q.framework.name])

    @property
    def micro_batches(self) -> int:
        """Micro batches per data-parallel rank and step; legality checks ensure that they divide."""
        return self.plan.micro_batches(self.question.workload.global_batch_size)

    def with_plan(self, plan: Plan) -> ExportJob:
        """Return the job with another plan."""
        return replace(self, plan=plan)

    def with_split_experts(self) -> ExportJob:
        """Return the job with the number of ranks that split each expert, which its plan may leave to its runtime."""
        plan, runtime = self.plan, self.question.runtime
        if self.question.model.moe is None or plan.etp is not None:
            return self
        split = expert_split(plan_columns([plan]), spec_for(runtime).splits_experts)
        return self.with_plan(plan.with_(etp=int(split[0])))

    def facts(self) -> Facts:
        """Return the facts that the tables of frameworks write."""
        q = self.question
        return facts_of(self.plan, q.workload, q.runtime, q.model.layers)

    def environment(self) -> tuple[Variable, ...]:
        """Return the variables that the prediction of the plan assumes, on every rank."""
        return assumed_environment(self.plan)

    def hosts(self) -> Hosts:
        """Return the hosts of all ranks, and their GPUs. Raises Infeasible."""
        return hosts_of(self.plan, self.question.cluster)


def export_job(case: Case, name: str | None = None) -> ExportJob:
    """Return the plan of a case as a job; the default name is the model's."""
    question = case.question
    return ExportJob(name=name if name is not None else question.model.name, plan=case.plan, question=question)


def require_legal(job: ExportJob, framework: str, title: str) -> tuple[str, ...]:
    """Return the warnings of `framework` on the plan. Raises Infeasible when the plan is not legal there."""
    target, question, plan = framework_named(framework), job.question, job.with_split_experts().plan
    if framework_of_runtime(question.runtime.name) is not target:
        runtime = replace(question.runtime, name=target.runtime_name, version=None)
        question = replace(question, runtime=runtime)
    problems = replace(question, framework=target, gpus=plan.gpus).problems(plan)
    refused = [problem.message for problem in problems if problem.grade is Grade.ILLEGAL]
    if refused:
        raise Infeasible(
            f"{title} cannot run this plan", why="; ".join(refused), remedy=f"planner suggest --framework {framework}"
        )
    return tuple(problem.message for problem in problems)
