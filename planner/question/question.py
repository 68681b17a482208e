"""The question shared by all commands, the explorer and the exports: which plans are legal, and what do they cost?

`planner.question.cases` builds one from a case, a saved plan or flags; `planner.search.answer` from the flags of
`suggest`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from simulator.analytical.estimates import Counted, EstimateTable, estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.calibration.calibration import Calibration
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import DEFAULT_RUNTIME, Runtime
from simulator.config.workload import Workload
from simulator.kernels.low_precision import why_not
from simulator.legality.frameworks import ANY, Framework, framework_named
from simulator.legality.rule import Problem, RuleFacts
from simulator.legality.rules import is_legal, problems
from simulator.lowering.block_code import Detail
from simulator.lowering.simulation import Simulated, simulate_plan
from simulator.runtimes.stated import resolve
from topology.cluster import Cluster, LinkKind
from topology.errors import BadModel, Infeasible
from topology.rates.reach import reach, require_plannable


@dataclass(frozen=True, slots=True, kw_only=True)
class Question(Scenario):
    """A scenario under the rules of a framework. `gpus` is the number that a plan must use; None: the whole cluster."""

    framework: Framework
    gpus: int | None = None

    def __post_init__(self) -> None:
        """Raise BadCluster if rates of the GPUs are unknown, so that nothing can be predicted, and BadModel for a model
        whose training is not modelled.
        """
        require_plannable(self.cluster)
        latent = self.model.latent
        untrained = {
            "linear attention": self.model.linear is not None,
            "attention over keys that an indexer chooses": latent is not None and latent.indexer is not None,
        }
        for part, there in untrained.items():
            if there:
                raise BadModel(
                    f"{self.model.name} is described for serving only",
                    why=f"training of {part} is not modelled",
                    remedy="--task serve, or a model whose layers all have plain attention",
                )

    @property
    def software(self) -> str:
        """The name of what runs the plans: the framework, or the runtime if only the rules that all share apply."""
        return self.runtime.name if self.framework is ANY else self.framework.title

    @property
    def count(self) -> int:
        """The number of GPUs that a plan must use."""
        return self.gpus if self.gpus is not None else self.cluster.gpu_count

    def facts(self) -> RuleFacts:
        """Return the facts that the rules need."""
        return rule_facts(self.model, self.cluster, self.workload, self.framework, self.runtime, self.count)

    def problems(self, plan: Plan) -> tuple[Problem, ...]:
        """Return the problems of `plan` under every rule of the framework, worst first; empty if there are none."""
        return problems(plan, self.facts())

    def legal(self, plan: Plan) -> bool:
        """Return whether the framework runs `plan` on these GPUs at all."""
        return is_legal(self.problems(plan))

    def estimate(
        self, plans: Sequence[Plan], *, each_on: Sequence[Cluster] = (), each_with: Sequence[Calibration] = ()
    ) -> EstimateTable:
        """Return step time and memory of every plan by the analytical model.

        Raises Infeasible for types and optimizers that are not modelled, and if a plan needs GPUs that are not
        connected.

        `each_on` and `each_with` name the cluster and the calibration of each plan, as `estimate_plans` takes them.
        """
        self._require_modelled()
        table = estimate_plans(self, plans, each_on=each_on, each_with=each_with)
        if not np.isfinite(table.step_s).all():
            joined = reach(self.cluster)
            why = joined.why or "a rate that it rests on is zero"
            raise Infeasible(f"no time can be predicted on {self.cluster.name}", why=why, remedy="planner doctor")
        return table

    def simulate(
        self,
        plan: Plan,
        *,
        detail: Detail = Detail.LAYER,
        spans: bool = True,
        links: bool = True,
        micro_batches: int | None = None,
        counted: Counted | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> Simulated:
        """Return one step of `plan`, simulated; see `simulate_plan`. Raises Infeasible for types that are not
        modelled.
        """
        self._require_modelled()
        return simulate_plan(
            self,
            plan,
            detail=detail,
            spans=spans,
            links=links,
            micro_batches=micro_batches,
            counted=counted,
            progress=progress,
        )

    def _require_modelled(self) -> None:
        if reason := self.runtime.not_modelled:
            raise Infeasible(reason, remedy=self.runtime.modelled_instead)


def rule_facts(
    model: Model, cluster: Cluster, workload: Workload, framework: Framework, runtime: Runtime, gpus: int
) -> RuleFacts:
    """Return the facts that the rules need of a question's parts."""
    nodes = [group.node for group in cluster.groups]
    joined = reach(cluster)
    return RuleFacts(
        model=model,
        workload=workload,
        framework=framework,
        runtime=runtime,
        gpus=gpus,
        gpus_per_node=cluster.gpus_per_node,
        nvlink=all(any(link.kind in {LinkKind.NVLINK, LinkKind.NVSWITCH} for link in n.links) for n in nodes),
        reach=joined.gpus,
        reach_reason=joined.why,
        compute_capability=cluster.slowest_kind.compute_capability,
        by_amd=cluster.slowest_kind.by_amd,
        no_low_precision=why_not(runtime, cluster.slowest_kind),
    )


def question_of(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    *,
    framework: str | Framework = DEFAULT_RUNTIME,
    runtime: Runtime | None = None,
    calibration: Calibration | None = None,
    gpus: int | None = None,
) -> Question:
    """Return a question of its parts; without a `runtime` the framework's plans run in its own, at its defaults.

    Raises UserError for an unknown framework, BadPlan for a runtime without a description.
    """
    rules = framework_named(framework) if isinstance(framework, str) else framework
    return Question(
        model=model,
        cluster=cluster,
        workload=workload,
        runtime=runtime or default_runtime(rules),
        framework=rules,
        calibration=calibration,
        gpus=gpus,
    )


def default_runtime(framework: Framework) -> Runtime:
    """Return the runtime a framework's plans run in, at its defaults. Raises BadPlan if none is described."""
    return resolve({"name": framework.runtime_name})[0]
