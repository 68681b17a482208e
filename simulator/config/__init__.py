"""What is asked and answered, as values: the network, the workload, the plan, the software, the estimate.

The lowest room: may import `topology` only.
"""
