"""The request with which a rank of a pool is started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """Settings shared by all pools of a calibration.

    `indices` are nvidia-smi's of the measured GPUs, `began` is time.monotonic() at the beginning, `text` a file that
    torchtitan reads as its data, `records` the file to which rank 0 appends its samples.
    """

    device: str = "cpu"
    records: str = ""
    began: float = 0.0
    indices: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest(PoolRequest):
    """The rank's number in its pool, the pool's `gpus` (indices among the measured GPUs), and the files to which it
    writes.
    """

    rank: int
    gpus: tuple[int, ...]
    folder: str
