"""Notes of exports on memory savers without a key in the file; the program must be given them."""

from __future__ import annotations

from simulator.config.runtime import Runtime
from simulator.config.savers import ACTIVATION_OFFLOAD, CHUNKED_LOSS, LINEAR_LOSS, OPTIMIZER_IN_BACKWARD, TILED_MLP

_TRAINER = {
    LINEAR_LOSS: "TrainingArguments(use_liger_kernel=True)",
    ACTIVATION_OFFLOAD: 'TrainingArguments(gradient_checkpointing_kwargs={"offload": True})',
}
# By the first name of a description; others are built by the plain program.
_BY_RUNTIME = {
    "transformers": _TRAINER,
    "deepspeed": _TRAINER,
    "trl": {**_TRAINER, CHUNKED_LOSS: 'SFTConfig(loss_type="chunked_nll")'},
    "torchtune": {
        CHUNKED_LOSS: "loss._component_: torchtune.modules.loss.LinearCrossEntropyLoss",
        ACTIVATION_OFFLOAD: "enable_activation_offloading: True",
        OPTIMIZER_IN_BACKWARD: "optimizer_in_bwd: True, without clip_grad_norm",
    },
}
_PLAIN = {
    CHUNKED_LOSS: "head and loss computed for an eighth of the tokens at a time (torchtune's LinearCrossEntropyLoss)",
    LINEAR_LOSS: "liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss in the place of head and loss",
    ACTIVATION_OFFLOAD: "forward passes under torchtune.training.OffloadActivations()",
    TILED_MLP: "deepspeed.runtime.sequence_parallel.ulysses_sp.TiledMLP in the place of feed-forward networks",
    OPTIMIZER_IN_BACKWARD: "an optimizer for each parameter, stepped by register_post_accumulate_grad_hook",
}
# Savers that a target's own file or program already has.
_OWN = {
    "torchtitan": frozenset({OPTIMIZER_IN_BACKWARD, CHUNKED_LOSS}),
    "torchrun": frozenset({CHUNKED_LOSS, OPTIMIZER_IN_BACKWARD, ACTIVATION_OFFLOAD}),
}


def saver_needs(target: str, runtime: Runtime) -> tuple[str, ...]:
    """Return what must be added to the program of a target for the runtime's memory savers."""
    own = _OWN.get(target, frozenset()) if runtime.name in {"meshwright", "torchtitan"} else frozenset()
    words = {**_PLAIN, **_BY_RUNTIME.get(runtime.name, {})}
    asked = {*runtime.savers, *({LINEAR_LOSS} if "linear_loss" in runtime.fused else ())}
    return tuple(text for word, text in words.items() if word in asked and word not in own)
