"""Which plan: legality, enumeration, search, and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.configs.answer import Checked
    from planner.configs.serving import CheckedServing

__all__ = ["check"]


def check(
    path: str | Path,
    *,
    model: str | None = None,
    cluster: str | None = None,
    gpus: int | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    launch: str = "",
    search: bool = True,
    **clients: float | str | None,
) -> Checked | CheckedServing:
    """Judge and improve a configuration of torchtitan, Megatron-LM, Megatron-Bridge, DeepSpeed, accelerate or Transformers,
    or a command that starts vLLM or SGLang.

    `model` and `cluster` are names or files, as on the command line; `gpus`, `seq_len` (tokens) and the batches
    (sequences) count where the file leaves them open, and `launch` is the line that starts it. `clients` are what a server is asked, by the fields of
    `planner.serving.question_from_flags.ServingFlags`: `isl=512, osl=64, concurrency=16`. Without `search` only single changes are tried.
    Raises BadInput for a file that cannot be read, UserError for what is stated and means nothing for it.
    """
    # What the answer needs is imported when it is asked for: `import planner` stays light.
    from planner.configs.any_kind import check_any  # noqa: PLC0415
    from planner.configs.configuration import CheckFlags  # noqa: PLC0415
    from topology.codec import read_text  # noqa: PLC0415

    flags = CheckFlags(
        model=model,
        cluster=cluster,
        gpus=gpus,
        seq_len=seq_len,
        global_batch=global_batch,
        micro_batch=micro_batch,
        launch=launch,
    )
    return check_any(read_text(path), str(path), flags, clients, search=search)
