"""Descriptions of runtimes: the kernels that a framework runs for a layer, the tensors it saves, its host costs; one
TOML file per runtime.

May import `config`, `columns` and `kernels`.
"""
