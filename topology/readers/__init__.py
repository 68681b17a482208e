"""Parsers of what a machine reports: nvidia-smi, NVML, NCCL's files, sysfs; one source per module, not interpreted.

May import the modules at the top of `topology` (cluster, codec, errors, finding).
"""
