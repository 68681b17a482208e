"""Known machines and GPUs: datasheets, shipped clusters, and cluster files that people write.

May import the modules at the top of `topology` (cluster, codec, errors, finding).
"""
