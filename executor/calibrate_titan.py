"""torchtitan's own trainer with a model of one or two layers, as a step that can be timed.

Nothing of torchtitan is copied: its Trainer builds the model, applies the parallelisms and runs `train_step`, with its
logging at every step as its users see it. Ours is only the shape of the model and, unless a text is given, the data:
random tokens, so that no data set has to be on the machine. With `text`, its own tokenizer and loader run, which is
host time that a step waits for.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from simulator.model import Model
from simulator.plan import Plan
from simulator.runtime import Runtime
from simulator.workload import Workload
from topology import codec
from topology.errors import BadPlan

FLAVOR = "calibration"
SPEC = "meshwright_calibration"
STEPS = 100000  # of the learning-rate schedule; steps are taken one by one from outside
SELECTIVE = {"selective-op": "op", "selective": "2"}

_meshes: dict[tuple[int, ...], Any] = {}
_registered: set[str] = set()


def titan_step(
    model: Model, plan: Plan, workload: Workload, runtime: Runtime, device: Any, *, text: str = ""
) -> Callable[[], dict[str, float]]:
    """Return a function that takes one step of torchtitan. Raises BadPlan for what torchtitan cannot run."""
    if model.moe is not None or model.latent is not None or not model.gated_mlp:
        raise BadPlan(f"{model.name} is no Llama", why="only torchtitan's llama3 model is calibrated so far")
    import torch  # noqa: PLC0415 - only workers have it
    from torchtitan.config import ConfigManager  # noqa: PLC0415 - may be absent
    from torchtitan.train import Trainer  # noqa: PLC0415 - as above

    logging.getLogger().setLevel(logging.WARNING)
    name = _register(model, text=bool(text))
    config = ConfigManager().parse_args(list(flags(name, plan, workload, runtime, text)))
    trainer = _with_known_meshes(Trainer, plan)(config)
    data = trainer.batch_generator(trainer.dataloader)
    seen: dict[str, float] = {}
    processor = trainer.metrics_processor
    log = processor.log

    def watched(*arguments: Any, **named: Any) -> None:
        """Read what torchtitan is about to print and forget."""
        seen["reserved_bytes"] = float(torch.cuda.max_memory_reserved(device)) if device.type == "cuda" else 1.0
        seen["data_s"] = max(sum(processor.data_loading_times), 1e-9)
        log(*arguments, **named)

    processor.log = watched

    def step() -> dict[str, float]:
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(data)
        return dict(seen)

    return step


def flags(name: str, plan: Plan, workload: Workload, runtime: Runtime, text: str) -> Iterator[str]:
    """Yield torchtitan's command line for a plan; `name` is of the registered shape."""
    yield from ("--metrics.log_freq=1", "--metrics.disable_color_printing", f"--model.name={name}")
    yield from (f"--model.flavor={FLAVOR}", "--job.dump_folder=/tmp/meshwright-titan")
    if text:
        yield from (f"--model.hf_assets_path={Path(text) / 'tokenizer'}", "--training.dataset=c4_test")
        yield f"--training.dataset_path={Path(text) / 'c4_test'}"
    yield from (f"--training.seq_len={workload.seq_len}", f"--training.steps={STEPS}")
    pipelined = plan.pp > 1
    local = workload.global_batch_size // plan.data_parallel if pipelined else plan.micro_batch_size
    yield f"--training.local_batch_size={local}"
    yield f"--training.global_batch_size={workload.global_batch_size}"
    yield f"--training.dtype={runtime.param_dtype}"
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
    }
    yield from (f"--parallelism.{name}={degree}" for name, degree in degrees.items())
    if pipelined:
        yield f"--parallelism.pipeline_parallel_microbatch_size={plan.micro_batch_size}"
        yield f"--parallelism.pipeline_parallel_schedule={plan.schedule or '1F1B'}"


def _register(model: Model, *, text: bool) -> str:
    """Tell torchtitan of the shape, and of random data where no text is given; return the name it goes by."""
    from torchtitan.models.llama3 import get_train_spec  # noqa: PLC0415 - may be absent
    from torchtitan.models.llama3.model.args import TransformerModelArgs  # noqa: PLC0415 - as above
    from torchtitan.protocols.train_spec import register_train_spec  # noqa: PLC0415 - as above

    name = f"{SPEC}_{codec.fingerprint(model)}{'_text' if text else ''}"
    if name in _registered:
        return name
    _registered.add(name)
    shape = TransformerModelArgs(
        dim=model.hidden,
        n_layers=model.layers,
        n_heads=model.heads,
        n_kv_heads=model.kv_heads,
        vocab_size=model.vocab,
        # The width is rounded up to a multiple of the width: whatever the factor, the result is the width itself.
        ffn_dim_multiplier=0.01,
        multiple_of=model.ffn,
        rope_theta=500000,
    )
    spec = dataclasses.replace(get_train_spec(), model_args={FLAVOR: shape}, build_validator_fn=None)
    if not text:
        spec = dataclasses.replace(
            spec,
            build_tokenizer_fn=None,
            build_dataloader_fn=lambda **named: _RandomTokens(model.vocab, named["job_config"]),
        )
    register_train_spec(name, spec)
    return name


class _RandomTokens:
    """An endless loader of random tokens, a batch made once: what a step costs without its data."""

    def __init__(self, vocab: int, config: Any) -> None:
        import torch  # noqa: PLC0415 - only workers have it

        size = (config.training.local_batch_size, config.training.seq_len + 1)
        self.tokens = torch.randint(vocab, size)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        while True:
            yield {"input": self.tokens[:, :-1]}, self.tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


def _with_known_meshes(trainer: type, plan: Plan) -> type:
    """Return the trainer with the meshes of an earlier one of the same degrees: groups cost seconds to make."""
    key = (plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp, plan.pp)

    class Known(trainer):  # type: ignore[misc]  # torchtitan is not there when types are checked
        def init_distributed(self) -> Any:
            if key not in _meshes:
                _meshes[key] = super().init_distributed()
            return _meshes[key]

    return Known
