"""The value types of a question and its answer: model, workload, plan, runtime, estimate.

The lowest package: may import `topology` only.
"""
