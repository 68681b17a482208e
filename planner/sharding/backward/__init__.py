"""The backward pass of a graph, derived from its formulas: transposed products, and a rule a function.

Gradients are operators of the same kind as all others, so what is pending after them, and what collectives they take,
follows from the same rules. Imports `planner.sharding.operators.graph` and `planner.sharding.operators`.

    formulas.py     formulas in single steps: one function each, or one elementwise expression, or a chain of views
    elementwise.py  the derivative of an elementwise expression
    views.py        a chain of views taken back
    rules.py        the gradient of every other function
    derive.py       a graph with its backward pass
"""
