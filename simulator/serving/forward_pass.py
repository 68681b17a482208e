"""The cost of one step of an engine: all layers once over the tokens of a step, on the ranks of its stages.

It has three parts: one that grows with tokens (products, small kernels, collectives; tabulated once), attention over
prompts and attention of answers (`step_attention`).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from simulator.collectives.measured import MeasuredCollectives
from simulator.columns.plan_table import Floats
from simulator.config.model import LayerKind, MixtureOfExperts, Model
from simulator.serving.deployment import WEIGHT_BYTES, Deployment, Pool, attention_format, dense_format
from simulator.serving.engine import Engine, as_started
from simulator.serving.expert_choice import on_fullest_rank
from simulator.serving.expert_exchange import exchange_s
from simulator.serving.kernels import SINGLE, Kernels, token_grid
from simulator.serving.launches import TO_EXPERTS, Launches
from simulator.serving.linear_attention import delta_rule_s
from simulator.serving.measured import MeasuredSteps, Ratio, scaled
from simulator.serving.power import PowerLimit
from simulator.serving.step_attention import StepAttention
from simulator.serving.step_collectives import StepCollectives
from topology.cluster import Cluster


@dataclass(slots=True)
class ForwardPass:
    """Seconds of a step for one model on one engine of a deployment. `cluster` has its GPUs and links."""

    model: Model
    cluster: Cluster
    deployment: Deployment
    pool: Pool
    engine: Engine = field(init=False)
    kernels: Kernels = field(init=False)
    launches: Launches = field(init=False)
    attention: StepAttention = field(init=False)
    _collectives: StepCollectives = field(init=False)
    _tokens: Floats = field(init=False)
    _parts: dict[str, Floats] = field(init=False)  # seconds of everything that grows with tokens, by part
    _limited: Floats = field(init=False)  # seconds of products that a GPU's power limits where it does nothing else
    _delayed: Floats = field(init=False)  # by which they are longer than at full clocks
    _held_from: float = field(init=False)  # tokens up to which the power limit delays nothing
    _grid: list[float] = field(init=False)  # `_tokens`, and both at them, as Python numbers
    _held: list[tuple[float, float]] = field(init=False)
    _power: PowerLimit = field(init=False)
    _seconds: Floats = field(init=False)
    _rows: Floats = field(init=False)
    _head: Floats = field(init=False)  # seconds of the head and of sampling, by sequences that get a token
    _steps_s: list[float] = field(init=False)  # `_seconds` and `_head` as Python numbers, for single look-ups
    _heads_s: list[float] = field(init=False)
    _checked: int = field(init=False)  # tokens of an answer in a step, and by how many it continues
    _gained: float = field(init=False)
    _issue_s: float = field(init=False)  # the host's seconds to issue a step without any replay, and attention alone
    _issue_attention_s: float = field(init=False)
    _sum_ratios: tuple[Ratio, ...] = ()  # measured over modelled all-reduces

    def __post_init__(self) -> None:
        self.engine = as_started(
            self.deployment.engine,
            eager=self.deployment.eager,
            hybrid=self.model.linear is not None,
            alone=self.pool.gpus == 1,
        )
        gpu = self.cluster.slowest_kind
        self.kernels = Kernels(
            gpu=gpu,
            weights=self.deployment.weights,
            experts=self.engine.experts,
            program=self.engine.program,
            slower=self.engine.slower,
            apart=self.pool.dp_attention > 1 and self.deployment.prefill is None,
            attention=self.engine.attention,
        )
        self.launches = Launches(self.model, self.engine, self.pool, self.deployment.weights, self.kernels.generation)
        measured = self.deployment.measured
        timed = MeasuredCollectives(measured.collectives) if measured and measured.collectives else None
        self._collectives = StepCollectives(
            cluster=self.cluster,
            kernels=self.engine.all_reduce if self.deployment.custom_all_reduce else ("nccl",),
            generation=self.kernels.generation,
            timed=timed,
        )
        steps = measured.of(self.pool.tp) if measured else None
        most = (self.max_batched_tokens + self.max_sequences) * self.pool.dp_attention
        speculation = self.deployment.speculation
        self._checked, self._gained = (speculation.checked, speculation.gained) if speculation else (1, 1.0)
        self.attention = StepAttention(
            model=self.model,
            pool=self.pool,
            kernels=self.kernels,
            cache=self.deployment.kv_cache,
            checked=self._checked,
        )
        self._tokens = token_grid(most)
        self._power = PowerLimit.of(gpu, self.kernels.full_clocks)
        self._parts, self._limited, self._delayed = self._by_power(self._tokens)
        self._rows = token_grid(self.max_sequences * self.pool.dp_attention * self._checked)
        self._head = self._ends(np.ceil(self._rows / self.pool.dp_attention))
        if steps is not None:
            self._bend(steps)
        self._seconds = np.sum(list(self._parts.values()), axis=0)
        self._held_from = float(self._tokens[np.argmax(self._delayed > 0.0) - 1]) if np.any(self._delayed) else np.inf
        self._steps_s, self._heads_s = self._seconds.tolist(), self._head.tolist()
        self._grid = self._tokens.tolist()
        self._held = list(zip(self._limited.tolist(), self._delayed.tolist(), strict=True))
        self.launches = replace(self.launches, engine=self.engine)  # whose times may be measured ones by now
        self._issue_s, self._issue_attention_s = self.launches.seconds, self.launches.attention_s

    def _bend(self, steps: MeasuredSteps) -> None:
        """Scale kernel times to the measured steps of this engine."""
        by_tokens = (*self._of_answers(steps), *steps.by_tokens)
        of_tokens = scaled(by_tokens, self._tokens)
        if steps.tp == self.pool.tp:
            self._sum_ratios = steps.reduced
        ratios = {}
        if self._sum_ratios:  # sums larger than the timed ones are scaled like steps with as many tokens
            timed = self._tokens <= self._sum_ratios[-1].tokens
            ratios["all_reduce"] = np.where(timed, scaled(self._sum_ratios, self._tokens), of_tokens)
        self._parts = {name: seconds * ratios.get(name, of_tokens) for name, seconds in self._parts.items()}
        self._limited, self._delayed = self._limited * of_tokens, self._delayed * of_tokens
        self._head = self._head * scaled(by_tokens, self._rows)
        said = {name: getattr(steps, name) for name in ("host_step_s", "host_sequence_s", "host_launch_s")}
        self.engine = replace(self.engine, **{name: seconds for name, seconds in said.items() if seconds})
        self.attention.bend(steps)

    def _of_answers(self, steps: MeasuredSteps) -> list[Ratio]:
        """Return the ratios of measured to modelled time of steps by number of answers, for as many kernels as this
        model launches.
        """
        found = []
        for one in steps.by_answers:
            parts = {name: self._at(one.tokens, seconds) for name, seconds in self._parts.items()}
            if steps.tp == self.pool.tp and steps.reduced:
                parts.pop("all_reduce", None)
            priced = sum(parts.values()) + float(np.interp(one.tokens, self._rows, self._head))
            found.append(Ratio(one.tokens, 1 + one.late_s * self.launches.count / priced))
        return found

    @property
    def max_sequences(self) -> int:
        return self.deployment.max_num_seqs or self.engine.max_num_seqs

    @property
    def max_batched_tokens(self) -> int:
        return self.deployment.max_num_batched_tokens or self.engine.batched_tokens(
            self.cluster.slowest_kind.memory_bytes
        )

    # --- a step -------------------------------------------------------------------------------------------------

    def seconds(
        self,
        *,
        prompt_tokens: int,
        pairs: float,
        sequences: int,
        keys: float,
        readers: int = 1,
        resumes: bool = False,
        rested_s: float = 0.0,
    ) -> float:
        """Return the seconds of a step that reads `prompt_tokens` of `readers` prompts and continues `sequences`
        answers by a token.

        `pairs` counts the prompts' (query, key) pairs, `keys` the cached keys of all answers; one that `resumes` reads
        a prompt of which some is cached; `rested_s` are the seconds since a step last read.
        """
        if self._checked > 1 and sequences:
            found = self._speculative(prompt_tokens, pairs, sequences, keys, readers)
            here = sequences / self.pool.dp_attention
            if not prompt_tokens:
                return self.engine.step_s(sum(found.values()), here) / self._gained
            return self.engine.step_s(max(sum(found.values()), self._issued_s(prompt_tokens, sequences, 0)), here)
        ranks, captured = self.pool.dp_attention, 0
        if prompt_tokens:
            captured = self.engine.captured_tokens(prompt_tokens + sequences, readers, resumes=resumes)
        prompt_tokens = max(prompt_tokens, captured - sequences)
        if prompt_tokens and ranks > 1:
            time = sum(self._of_tokens(prompt_tokens, sequences, readers).values())
        else:  # the grids begin with consecutive counts, so most steps need no interpolation
            tokens, written = prompt_tokens + sequences, sequences + (readers if prompt_tokens else 0)
            time = self._steps_s[tokens - 1] if 0 < tokens <= SINGLE else self._at(tokens, self._seconds)
            single = 0 < written <= min(SINGLE, len(self._heads_s))
            time += self._heads_s[written - 1] if single else float(np.interp(written, self._rows, self._head))
        read_s = self.attention.read_s(prompt_tokens, pairs, readers)
        if sequences:
            time += self.attention.answers_s(sequences, keys)
        time += read_s + self._held_back_s(prompt_tokens, sequences, readers, time, read_s, rested_s)
        time = max(time, self._issued_s(prompt_tokens, sequences, captured)) + self.engine.inputs_s(prompt_tokens)
        return self.engine.step_s(time, sequences / ranks)  # with data-parallel attention each rank has a scheduler

    def _issued_s(self, prompt_tokens: float, sequences: float, captured: int) -> float:
        """Return the host's seconds to issue a step launch by launch; 0 if it is replayed from a graph."""
        if captured or not (prompt_tokens or sequences / self.pool.dp_attention > self.engine.graph_batch):
            return 0.0
        pieces = self.engine.compiled and prompt_tokens + sequences <= self.engine.graph_batch
        return self._issue_attention_s if pieces else self._issue_s

    def _speculative(
        self, prompt_tokens: int, pairs: float, sequences: float, keys: float, readers: int
    ) -> dict[str, float]:
        """Return a step's kernels where answers have drafted tokens to check, and those of drafting them (runs of one
        layer and of the head): for a step without prompts the whole step, else the share of one gained token.
        """
        share = 1 / self._gained if prompt_tokens else 1.0
        found = self._of_tokens(prompt_tokens, sequences * self._checked * share, readers)
        read_s = self.attention.read_s(prompt_tokens, pairs, readers)
        answers_s = self.attention.answers_s(sequences, keys) * share
        checked = sequences * self._checked * share
        found["power"] = self._held_back_s(
            prompt_tokens, checked, readers, sum(found.values()) + answers_s, read_s, 0.0
        )
        found["attention"] = answers_s + read_s
        layer = self._at(sequences, self._seconds) / self.model.layers
        once = layer + float(np.interp(sequences, self._rows, self._head))
        found["draft"] = (self._checked - 1) * once * share
        return found

    def parts(
        self, *, prompt_tokens: int, pairs: float, sequences: float, keys: float, readers: int = 1
    ) -> dict[str, float]:
        """Return the seconds of a step by part; the parts add up to `seconds` of the same step."""
        if self._checked > 1 and sequences and not prompt_tokens:
            found = self._speculative(0, 0.0, sequences, keys, readers)
            device = sum(found.values())
            found["host"] = self.engine.step_s(device, sequences / self.pool.dp_attention) - device
            return {name: value / self._gained for name, value in found.items() if value}
        captured = self.engine.captured_tokens(prompt_tokens + sequences, readers) if prompt_tokens else 0
        read = max(prompt_tokens, captured - sequences)
        found = self._of_tokens(read, sequences, readers)
        read_s = self.attention.read_s(read, pairs, readers)
        answers_s = self.attention.answers_s(sequences, keys) if sequences else 0.0
        found["power"] = self._held_back_s(read, sequences, readers, sum(found.values()) + answers_s, read_s, 0.0)
        found["attention"] = read_s + answers_s
        found["launches"] = max(0.0, self._issued_s(prompt_tokens, sequences, captured) - sum(found.values()))
        found["inputs"] = self.engine.inputs_s(prompt_tokens)
        device = sum(found.values())
        found["host"] = self.engine.step_s(device, sequences / self.pool.dp_attention) - device
        return {name: value for name, value in found.items() if value}

    def _of_tokens(self, prompt_tokens: float, sequences: float, readers: int) -> dict[str, float]:
        """Return the seconds that grow with tokens, by part, and of the head. With data-parallel attention a prompt is
        on one rank, and all parts wait for the rank with the most tokens, except experts, over whose ranks tokens are
        spread.
        """
        tokens, here = prompt_tokens + sequences, self._of_fullest(prompt_tokens, sequences, readers)
        found = {name: self._at(tokens if name == "experts" else here, part) for name, part in self._parts.items()}
        written = sequences + (readers if prompt_tokens else 0)
        return found | {"head": float(np.interp(written, self._rows, self._head))}

    def _of_fullest(self, prompt_tokens: float, sequences: float, readers: int) -> float:
        """Return the tokens of a whole engine as if all ranks had as many as that with the most prompts."""
        ranks = self.pool.dp_attention
        if not prompt_tokens or ranks == 1:
            return prompt_tokens + sequences
        return prompt_tokens * ranks * -(-readers // ranks) / max(1, readers) + sequences

    def _held_back_s(
        self, prompt_tokens: float, sequences: float, readers: int, others_s: float, read_s: float, rested_s: float
    ) -> float:
        """Return the seconds by which the power limit delays the products of a step, `rested_s` after the last one that
        read a prompt; all but its attention over prompts, `read_s`, takes `others_s` at full clocks.
        """
        tokens = self._of_fullest(prompt_tokens, sequences, readers)
        if tokens <= self._held_from:
            return 0.0
        place = min(bisect_left(self._grid, tokens), len(self._grid) - 1)
        part = (tokens - self._grid[place - 1]) / (self._grid[place] - self._grid[place - 1])
        (limited, delayed), (limited_more, delayed_more) = self._held[place - 1], self._held[place]
        return (delayed + part * (delayed_more - delayed)) * self._power.held_back(
            limited + part * (limited_more - limited), moving_s=others_s, attending_s=read_s, before_s=rested_s
        )

    def _at(self, tokens: float, seconds: Floats) -> float:
        """Return tabulated seconds at `tokens`; beyond a full step they grow in proportion."""
        return float(np.interp(tokens, self._tokens, seconds)) * max(1.0, tokens / float(self._tokens[-1]))

    # --- what grows with tokens ---------------------------------------------------------------------------------

    def _by_tokens(self, tokens: Floats) -> dict[str, Floats]:
        """Return the seconds of everything except attention over keys, for `tokens` of a whole engine, by part.

        With two batches, the compute of one half hides the other's exchanges with experts, except the first and the
        last of a layer, at the cost of smaller products; attention over keys does not count as hiding them.
        """
        whole = self._at_once(tokens)
        if not self.deployment.two_batches or "expert_exchange" not in whole:
            return whole
        halves = {name: 2 * seconds for name, seconds in self._at_once(np.ceil(tokens / 2)).items()}
        sent = halves.pop("expert_exchange")
        hidden = np.minimum(sent * (1 - 0.5 / self.model.layers), sum(halves.values()))
        return {
            name: np.where(tokens > 1, (halves | {"expert_exchange": sent - hidden})[name], seconds)
            for name, seconds in whole.items()
        }

    def _by_power(self, tokens: Floats) -> tuple[dict[str, Floats], Floats, Floats]:
        """Return what `_by_tokens` does with products at full clocks; the seconds of products that power limits, which
        half of it would add; and by how much these are longer.
        """
        if self._power.least == 1.0:
            return self._by_tokens(tokens), np.zeros_like(tokens), np.zeros_like(tokens)
        kernels, powered = self.kernels, np.array([[np.inf], [1.0], [0.5]])
        self.kernels = replace(kernels, powered=powered)
        shape = (len(powered), len(tokens))
        found = {name: np.broadcast_to(seconds, shape) for name, seconds in self._by_tokens(tokens).items()}
        self.kernels = kernels
        rested, alone, half = np.sum(list(found.values()), axis=0)
        return {name: seconds[0] for name, seconds in found.items()}, half - alone, alone - rested

    def _at_once(self, tokens: Floats) -> dict[str, Floats]:
        local = np.ceil(tokens / self.pool.dp_attention)
        total: dict[str, Floats] = {}
        for sparse in (False, True):
            layers = sum(kind.sparse == sparse for kind in self.model.layer_kinds)
            if layers:
                for name, seconds in self._layer(LayerKind(sparse=sparse, window=0), tokens, local).items():
                    total[name] = total.get(name, np.zeros_like(tokens)) + layers * seconds
        if self.pool.pp > 1:
            sent = 2.0 * local * self.model.hidden
            total["between_stages"] = (self.pool.pp - 1) * self._collectives.between_stages(sent, self.pool)
        return total

    def _layer(self, kind: LayerKind, tokens: Floats, local: Floats) -> dict[str, Floats]:
        # Norms with residuals, rotations, casts; and two kernels for parts of attention and their sum.
        small = 2.0 * local * self.model.hidden * 10
        apart = self.launches.small_kernels(kind) - (TO_EXPERTS if kind.sparse and self.kernels.experts_route else 0.0)
        if self.kernels.listed_products(dense_format(self.deployment.weights)):
            apart -= self.launches.casts
        block = {
            "attention_products": self._attention_products(local),
            "small_kernels": self.kernels.moved(small, apart) + self.attention.start_s,
        }
        if kind.sparse:
            block["experts"] = self._experts(tokens, local)
        else:
            block["feed_forward"] = self._mlp(local, self.model.ffn)
        return block | self._block_collectives(tokens, local, sparse=kind.sparse)

    def _attention_products(self, rows: Floats) -> Floats:
        model, tp = self.model, self.pool.tp
        stored = attention_format(self.deployment.weights, latent=model.latent is not None)
        product = partial(self.kernels.product, stored=stored)
        h, heads = model.hidden, model.heads / tp
        if model.latent:
            m = model.latent
            down = product(rows, m.q_lora_rank + m.kv_lora_rank + m.qk_rope_head_dim, h)
            queries = product(rows, heads * model.qk_dim, m.q_lora_rank or h)
            expand = product(rows, heads * (m.qk_nope_head_dim + m.v_head_dim), m.kv_lora_rank, stored="bfloat16")
            out = self.kernels.product(rows, h, heads * m.v_head_dim, stored=dense_format(self.deployment.weights))
            whole = down + queries + expand + out
            if m.indexer is None:
                return whole
            whole = whole + product(rows, m.indexer.heads * m.indexer.width, m.q_lora_rank)
            return whole + product(rows, m.indexer.width + m.indexer.heads, h)
        kv = max(1.0, model.kv_heads / tp)
        gated = (2 if model.attention_gate else 1) * heads
        full = product(rows, (gated + 2 * kv) * model.head_dim, h) + product(rows, h, heads * model.head_dim)
        linear = model.linear
        if linear is None:
            return full
        inner = linear.value_heads * linear.value_dim / tp
        mixed = product(rows, linear.mixed / tp + inner, h) + product(rows, h, inner)
        mixed = mixed + product(rows, 2 * linear.value_heads / tp, h, stored="bfloat16")
        mixed = mixed + rows * delta_rule_s(self.kernels, linear, tp)
        return (full * (model.layers - linear.layers) + mixed * linear.layers) / model.layers

    def _mlp(self, rows: Floats, width: float) -> Floats:
        """Return the seconds of the products of a feed-forward, and of what its activation reads and writes."""
        h, f, ups = self.model.hidden, width / self.pool.tp, 2 if self.model.gated_mlp else 1
        product = partial(self.kernels.product, stored=dense_format(self.deployment.weights))
        return product(rows, ups * f, h) + self.kernels.moved(2.0 * rows * (ups + 1) * f, 0.0) + product(rows, h, f)

    def _experts(self, tokens: Floats, local: Floats) -> Floats:
        model, pool = self.model, self.pool
        moe = model.moe
        if moe is None:
            return np.zeros_like(tokens)
        h, f = model.hidden, moe.ffn / pool.expert_tp
        here = pool.experts_here(moe.experts)
        visited, rows = on_fullest_rank(moe, tokens, pool.ep, here)
        routed = self.kernels.experts_s(rows, visited, here, h, f, 2 if model.gated_mlp else 1)
        if not self._sends_rows:  # all tokens come to all ranks
            routed = routed + self.kernels.passed_by_s(tokens * (1 - 1 / pool.ep), h)
        time = self.kernels.product(local, moe.experts, h, stored="bfloat16") + routed
        return time + self._shared_experts(local, moe) if moe.shared_ffn else time

    def _shared_experts(self, rows: Floats, moe: MixtureOfExperts) -> Floats:
        """Return what shared experts add: a sum, and what they read where they run next to routed ones, else all."""
        gate = 3.0 if moe.shared_gate else 0.0  # a product, its sigmoid, and what it multiplies
        apart = self._mlp(rows, moe.shared_ffn) + gate * self.kernels.start_s
        weights = (3 if self.model.gated_mlp else 2) * self.model.hidden * moe.shared_ffn / self.pool.tp
        reading = weights * WEIGHT_BYTES[dense_format(self.deployment.weights)] / self.kernels.bytes_per_s
        summed = self.kernels.moved(6.0 * rows * self.model.hidden, 1.0)
        return summed + np.where(rows <= self.engine.shared_beside, np.minimum(reading, apart), apart)

    @property
    def _sends_rows(self) -> bool:
        """Whether tokens are sent to the ranks of their experts alone, instead of all to all ranks."""
        moe = self.model.moe
        return self.pool.dp_attention > 1 and moe is not None and self.pool.ep > moe.experts_per_token

    def _block_collectives(self, tokens: Floats, local: Floats, *, sparse: bool) -> dict[str, Floats]:
        """Return the seconds of a layer's collectives: an all-reduce after each half, or exchanges of tokens with
        experts.
        """
        pool, h, moe = self.pool, self.model.hidden, self.model.moe
        reduced = self._collectives.all_reduce(2.0 * local * h, pool.tp)
        if pool.dp_attention == 1 or not sparse:
            return {"all_reduce": 2 * reduced}
        if moe is not None and self._sends_rows:
            sent = exchange_s(
                partial(self._collectives.run, "all_to_all"),
                local,
                hidden=h,
                chosen=moe.experts_per_token,
                held=pool.ep,
                ranks=pool.ranks,
                node=self.cluster.gpus_per_node,
                there_bytes=min(2.0, WEIGHT_BYTES[dense_format(self.deployment.weights)]),
            )
            return {"all_reduce": reduced, "expert_exchange": sent}
        everywhere = 2.0 * tokens * h
        gather = self._collectives.run("all_gather", everywhere, pool.ranks)
        sent = gather + self._collectives.run("reduce_scatter", everywhere, pool.ranks)
        return {"all_reduce": reduced, "expert_exchange": sent}

    def _ends(self, rows: Floats) -> Floats:
        """Return the seconds of the head for one token per sequence, and of sampling from its scores."""
        columns = self.model.vocab / self.pool.tp
        head = self.kernels.product(rows, columns, self.model.hidden, stored="bfloat16")
        scores = self._collectives.run("all_gather", 2.0 * rows * self.model.vocab, self.pool.tp)
        return head + scores + self.kernels.moved(4.0 * rows * self.model.vocab * 3, 10.0)

    def reductions(self) -> int:
        """Return the number of all-reduces in a step: one after each half of a layer."""
        return 2 * self.model.layers if self.pool.tp > 1 else 0

    def reduced_s(self, sequences: int) -> float:
        """Return the seconds of all all-reduces of a step with this number of answers."""
        nbytes = np.array([2.0 * sequences * self.model.hidden])
        ratio = float(scaled(self._sum_ratios, np.array([float(sequences)]))[0])
        return self.reductions() * ratio * float(self._collectives.all_reduce(nbytes, self.pool.tp)[0])
