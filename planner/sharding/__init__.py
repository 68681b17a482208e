"""Sharding as a language: named axes, one rule per operator, redistributions planned, placements chosen.

Reading order, which is also the order of the work:

    problem.py        a file of cases becomes a mesh, operators and given placements (untrusted, bounded)
    mesh.py           mesh axes, and which of them a device mesh was refined into
    layout.py         where the pieces of one tensor lie: tensor dim -> ordered mesh axes, and pending reductions
    notation.py       `t h+, f h+ -> t f`: which named axes an operator has, and what it does to each
    expression.py     what the formula beside it says: in which operands it is linear, what it reduces with
    operator.py       the two bound to tensors of known sizes
    rule.py           the one rule: axes -> mesh axes gives what operands must look like and what comes out
    collectives.py    the bytes of every primitive
    redistribute.py   shortest path from one layout to another
    choose.py         the cheapest consistent choice for a whole graph, proved (LP, then CP-SAT)
    schedule.py       whole, ring or in pieces: how a planned collective is carried out
    steps.py          the result in program order
"""
