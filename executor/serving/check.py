"""Check of the served numbers: two layers of the model, compared with the training decoder on one process.

Prompts of several lengths are read, together and in parts with answers, and continued, step by step and from captured
graphs; after every step the scores of all ranks are compared with those of `executor.model.decoder.Decoder` over the
whole sequence, in float32 from the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from executor.measure.rank_group import max_over_ranks
from executor.model.decoder import Decoder, init_weights
from executor.serving.cache import PAGE, PagedCache, pages_of
from executor.serving.decoder import ServedDecoder, Spread
from executor.serving.engine import Engine
from executor.verify.kernels import KernelVerdict
from simulator.config.model import Model

PROMPTS = (5, PAGE, 2 * PAGE + 3)
CUT = PAGE + 6  # tokens of the last prompt's first part
ANSWER = 4
LAYERS = 2
# Tolerances in units in the last place: of the served type, since results are rounded to it several times per layer; of
# float32, for sums of up to thousands of numbers in another order.
UNITS, SUMMED_UNITS = 2.0**3, 2.0**5


def check(
    model: Model, spread: Spread, *, all_reduce: str, device: torch.device, dtype: torch.dtype, seed: int
) -> KernelVerdict:
    """Compare served scores with the training decoder's, relative to the largest score; a collective call."""
    small = replace(model, layers=LAYERS)
    room = max(PROMPTS) + ANSWER + 2
    served = ServedDecoder(small, spread, device=device, dtype=dtype, positions=room, seed=seed)
    served.all_reduce = all_reduce
    pages = 1 + len(PROMPTS) * pages_of(room)
    cache = PagedCache(LAYERS, pages, served.heads, device=device, dtype=dtype)
    engine = Engine(served, cache, max_sequences=len(PROMPTS), max_tokens=room)
    whole = _reference(small, device, dtype, seed)

    worst = _compare(engine, whole, seed)
    engine.capture()
    worst = max(worst, _compare(engine, whole, seed + 1))
    if spread.group is not None:
        (worst,) = max_over_ranks([worst], device=device, group=spread.group)
    return KernelVerdict(
        name=f"served scores, tp {spread.ranks}, {all_reduce}",
        dtype=str(dtype).removeprefix("torch."),
        difference=worst,
        tolerance=UNITS * torch.finfo(dtype).eps + SUMMED_UNITS * torch.finfo(torch.float32).eps,
    )


def _reference(model: Model, device: torch.device, dtype: torch.dtype, seed: int) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(model)
    decoder = decoder.to_empty(device=device).to(dtype)
    decoder.tie()
    init_weights(decoder, seed=seed)
    return decoder.float()


@torch.no_grad()
def _compare(engine: Engine, whole: Decoder, seed: int) -> float:
    """Serve every prompt and its answer; return the largest difference from the reference, which gets the served
    tokens.

    All prompts but the last are read together, the last one in two parts while the others continue; then all continue.
    """
    generator = torch.Generator().manual_seed(seed)
    device, vocab = engine.model.device, engine.model.model.vocab
    texts = [torch.randint(vocab, (length,), generator=generator).to(device) for length in PROMPTS]
    held = [engine.hold(length + ANSWER + 2) for length in PROMPTS]
    *early, late = range(len(PROMPTS))

    def differs(scores: Tensor, which: Sequence[int]) -> float:
        """Compare, and append the served tokens to the texts."""
        found = [_difference(engine.model, row, whole, texts[one]) for row, one in zip(scores, which, strict=True)]
        for one in which:
            texts[one] = torch.cat((texts[one], engine.tokens[held[one].slot, None]))
        return max(found)

    prompt, begun = texts[late], 0
    worst = differs(engine.read([(held[one], texts[one]) for one in early]), early)
    for part in (prompt[:CUT], prompt[CUT:]):
        scores = engine.mix([(held[late], part, begun)], [held[one] for one in early])
        begun += part.numel()
        worst = max(worst, differs(scores[1:], early))
    worst = max(worst, differs(scores[:1], [late]))
    for _ in range(ANSWER - 1):
        worst = max(worst, differs(engine.go_on(held), [*early, late]))
    for one in held:
        engine.release(one)
    return worst


def _difference(model: ServedDecoder, scores: Tensor, whole: Decoder, text: Tensor) -> float:
    whole.set_positions(torch.arange(text.numel(), device=text.device), torch.float32)
    expected = whole(text[None])[0, -1]
    here = expected.chunk(model.spread.ranks)[model.spread.rank]
    return float((scores.float() - here).abs().max() / expected.abs().max())
