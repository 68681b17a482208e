"""A deployment run by the executor: its request, its prediction, and the comparison."""
