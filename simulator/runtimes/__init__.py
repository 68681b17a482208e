"""Which kernels a framework runs for a layer, what it saves, what its host costs: one TOML file a runtime.

May import `config`, `columns` and `kernels`.
"""
