"""The cluster in the formats of other tools: NCCL's topology file, ASTRA-sim, SimAI.

May import `catalog`, `readers`, `rates` and the modules at the top of `topology`.
"""
