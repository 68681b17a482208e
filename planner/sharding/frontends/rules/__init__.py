"""ATen operators as the compiler's operators: a formula, an annotation of named axes, and the kernel a rank runs.

One function a family of operators; `table.py` says which. Operators that no rule knows are *opaque*: their operands are needed whole and their
results are whole, which is right for any operator and shards none. Axis names are local to an annotation; the name of an
axis that only the result has carries its size (`b64`), since nothing else gives it.
"""
