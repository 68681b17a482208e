"""What is asked and answered, as values: the network, the workload, the plan, the software, the estimate.

The lowest package: may import `topology` only.
"""
