"""Memory savers that could be added to a run, each separately and all together, and paged states."""

from __future__ import annotations

from dataclasses import replace

from simulator.config.optimizers import OPTIMIZERS
from simulator.config.runtime import Runtime
from simulator.config.savers import CHUNKED_LOSS, LINEAR_LOSS
from simulator.runtimes.library import spec_for


def more_savers(runtime: Runtime) -> list[tuple[str, ...]]:
    """Return the savers that its software has and the run does not use; never both of two that replace the loss."""
    more = [word for word in spec_for(runtime).savers if word not in runtime.all_savers]
    if {CHUNKED_LOSS, LINEAR_LOSS} & {*runtime.all_savers}:
        more = [word for word in more if word not in {CHUNKED_LOSS, LINEAR_LOSS}]
    together = tuple(word for word in more if word != LINEAR_LOSS or CHUNKED_LOSS not in more)
    return [*((word,) for word in more), *([together] if len(together) > 1 else [])]


def paged_instead(runtime: Runtime) -> Runtime | None:
    """Return the runtime with the paged form of its optimizer, which makes the same updates; None if there is none."""
    paged = f"paged{runtime.optimizer}"
    alike = OPTIMIZERS[paged].states == OPTIMIZERS[runtime.optimizer].states if paged in OPTIMIZERS else False
    return replace(runtime, optimizer=paged) if alike else None
