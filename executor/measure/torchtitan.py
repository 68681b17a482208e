"""torchtitan's own trainer with a model of one or two layers, as a step that can be timed.

torchtitan's Trainer builds the model, applies the parallelism and runs `train_step`, with logging at every step. Only
the shapes of the model are ours and, unless `text` is given, the data: random tokens, so that no data set is needed.
With `text`, torchtitan's own tokenizer and data loader run, which costs host time in a step.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from executor.launch.request import Request
from executor.parallel.train_step import StepResult
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.legality.frameworks import torchtitan_family
from topology.errors import BadPlan

FLAVOR = "calibration"  # the name of the only size of a registered model
STEPS = 100000  # steps of the learning-rate schedule; the caller takes steps one by one
SELECTIVE = {"selective-op": "op", "selective": "2"}

_meshes: dict[tuple[int, ...], Any] = {}


def titan_step(
    model: Model, plan: Plan, workload: Workload, runtime: Runtime, device: Any, *, text: str = ""
) -> Callable[[], dict[str, float]]:
    """Return a function that takes one step of torchtitan. Raises BadPlan for what torchtitan cannot run."""
    family = torchtitan_family(model)
    from executor.measure import titan_models  # noqa: PLC0415 - the one place that loads torchtitan: it may be absent

    logging.getLogger().setLevel(logging.WARNING)
    name = titan_models.register(model, family, flavor=FLAVOR, text=bool(text))
    config = titan_models.ConfigManager().parse_args(list(flags(name, plan, workload, runtime, text)))
    trainer = _reusing_meshes(titan_models.Trainer, plan)(config)
    data = trainer.batch_generator(trainer.dataloader)
    seen: dict[str, float] = {}
    processor = trainer.metrics_processor
    log = processor.log

    def log_and_keep(*arguments: Any, **named: Any) -> None:
        """Record peak memory and data-loading time before torchtitan logs and resets them."""
        seen["reserved_bytes"] = float(torch.cuda.max_memory_reserved(device)) if device.type == "cuda" else 1.0
        seen["data_s"] = max(sum(processor.data_loading_times), 1e-9)
        _, seen["loss"], _, seen["gradient_norm"] = (float(value) for value in arguments[:4])
        log(*arguments, **named)

    processor.log = log_and_keep

    def step() -> dict[str, float]:
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(data)
        return dict(seen)

    return step


@cache
def _private_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for what torchtitan writes during training, removed when this process ends."""
    return tempfile.TemporaryDirectory(prefix="meshwright-")


def flags(name: str, plan: Plan, workload: Workload, runtime: Runtime, text: str) -> Iterator[str]:
    """Yield torchtitan's command line for a plan; `name` is that of the registered model."""
    yield from ("--metrics.log_freq=1", "--metrics.disable_color_printing", f"--model.name={name}")
    yield from (f"--model.flavor={FLAVOR}", f"--job.dump_folder={_private_folder().name}")
    if text:
        yield from (f"--model.hf_assets_path={Path(text) / 'tokenizer'}", "--training.dataset=c4_test")
        yield f"--training.dataset_path={Path(text) / 'c4_test'}"
    yield from (f"--training.seq_len={workload.seq_len}", f"--training.steps={STEPS}")
    pipelined = plan.pp > 1
    local = workload.global_batch_size // plan.data_parallel if pipelined else plan.micro_batch_size
    yield f"--training.local_batch_size={local}"
    yield f"--training.global_batch_size={workload.global_batch_size}"
    yield f"--training.dtype={runtime.param_dtype}"
    yield f"--training.mixed_precision_param={runtime.compute_dtype}"
    yield f"--training.mixed_precision_reduce={runtime.reduce_dtype}"
    mode = plan.recompute
    yield f"--activation_checkpoint.mode={'selective' if mode in SELECTIVE else mode}"
    if mode in SELECTIVE:
        yield f"--activation_checkpoint.selective_ac_option={SELECTIVE[mode]}"
    if runtime.compile:
        yield "--compile.enable"
    degrees = {
        "data_parallel_replicate_degree": plan.dp_replicate,
        "data_parallel_shard_degree": plan.dp_shard,
        "tensor_parallel_degree": plan.tp,
        "context_parallel_degree": plan.cp,
        "pipeline_parallel_degree": plan.pp,
        "expert_parallel_degree": plan.ep,
    }
    yield from (f"--parallelism.{name}={degree}" for name, degree in degrees.items())
    if plan.reshard_after_forward is not None:
        yield f"--parallelism.fsdp_reshard_after_forward={'always' if plan.reshard_after_forward else 'never'}"
    if pipelined:
        yield f"--parallelism.pipeline_parallel_microbatch_size={plan.micro_batch_size}"
        yield f"--parallelism.pipeline_parallel_schedule={plan.schedule_name}"


def _reusing_meshes(trainer: type, plan: Plan) -> type:
    """Return a trainer class that reuses the meshes of an earlier trainer with the same degrees, since creating them
    takes seconds.
    """
    key = (plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp, plan.pp, plan.ep)

    class ReusedMeshes(trainer):  # type: ignore[misc]  # torchtitan is not there when types are checked
        def init_distributed(self) -> Any:
            if key not in _meshes:
                _meshes[key] = super().init_distributed()
            return _meshes[key]

    return ReusedMeshes


class TitanTrainer:
    """One of torchtitan's Trainers, on random tokens. Building it is a collective call.

    `peak_reserved_bytes` is the largest that a step has reserved: torchtitan resets torch's own count with each step.
    """

    def __init__(self, request: Request, device: Any) -> None:
        """Raises BadPlan for a model that torchtitan does not have, and if ranks share a GPU."""
        if request.gpus and tuple(request.gpus) != tuple(range(len(request.gpus))):
            raise BadPlan("torchtitan runs rank r on GPU r", why=f"the plan places ranks on {list(request.gpus)}")
        self._step = titan_step(request.model, request.plan, request.workload, request.runtime, device)
        self.peak_reserved_bytes = 0

    def step(self, index: int) -> StepResult:
        """Run one optimizer step; batches do not depend on `index`."""
        del index
        seen = self._step()
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, int(seen.get("reserved_bytes", 0)))
        return StepResult(loss=seen.get("loss", math.nan), gradient_norm=seen.get("gradient_norm", math.nan))
