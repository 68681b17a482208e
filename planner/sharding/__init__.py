"""Plan the sharding of a graph of operators: named axes, one annotation per operator, redistributions, chosen
placements.

Answers: how is every tensor of this graph sharded over the mesh, and which collectives does that take? `shard_case`
(`answer.py`) answers a case, which is text or a captured graph. Imports
`topology.errors` everywhere; `simulator` and the rest of `topology` where time is predicted; nothing else of `planner`.

Reading order, which is also the order of the work:

    layouts/              how one tensor is sharded
      layout.py           mesh axes; a spec per tensor dim (mesh axes and blocks), pending reductions; placements per
        mesh axis
      loop_domain.py      nvFuser's notation for layouts: splits of dims, given to devices
      collectives.py      the primitives and their bytes
      redistribution.py   shortest path from one layout to another
    ops/                  what operators are: one entry each, a file a family (`table.py` lists them)
    operators/            how one operator may be sharded
      formula.py          its formula, parsed
      roles.py            the annotation checked against what the formula does, or derived from it
      operator.py         annotation and formula bound to tensors
      options.py          all ways to shard an operator: the layouts of operands and result, and exchanges inside it
      graph.py            the computation as for one process: operators over tensors, in program order
      single_steps.py     formulas in single steps
      backward.py         the backward pass of a graph, derived from its formulas
    problem/              what is asked
      problem.py          a graph on a mesh, with given and pinned layouts; parsed from files (untrusted, bounded)
      deadline.py         when there has to be an answer
      schedule.py         whole, ring or chunked: how a planned collective is executed
      pipeline_stages.py  tensors sent between parts of the mesh
      token_routing.py    tokens routed to experts, by counts
    solver/               which option every operator takes, and which layout every tensor has
      pricing.py          what a choice costs: ring bytes, or time on a machine
      move_times.py       times of redistributions between all layouts of a tensor
      equivalence.py      layers that stand for one another
      message_passing.py  a lower bound of all choices, and what each alternative costs above it at least
      by_messages.py      the choice of least cost: that bound, and an exact solution of what it leaves
      integer_program.py  the choice as an integer program, built
      solvable_program.py and solved: linear relaxation, then branch and bound (HiGHS)
      candidates.py       options, layouts and redistributions of a whole graph, as the policy leaves them to the cost
      first_answer.py     an answer before the candidates are listed
      choose.py           the cheapest consistent choice, proved
    plans/                the answer
      plan.py             in program order
      lowering.py         as a program of the simulator, with its time on a cluster
      schedules.py        how its exchanges are carried out, as the simulation says
      report.py           as JSON
      explanation.py      why each exchange is there, and what would be next best
    frontends/            captured modules, shipped models and axis maps as problems
    backends/             plans as programs that ranks run, and as files for torch
    answer.py             a file asked, answered
"""
