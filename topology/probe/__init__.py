"""Build a `Cluster` from what the readers returned: merge the sources, infer the links, list findings.

May import `readers`, `catalog`, `rates` and the modules at the top of `topology`.
"""
