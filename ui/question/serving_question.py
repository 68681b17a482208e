"""The question of the serving page, stored in the link as the question of training is."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import streamlit as st

from planner.requests.flag import shell_line
from planner.requests.serving import Engine, Load, Task
from planner.requests.training import Objective, Suggest
from planner.serving import ServingFlags, flags_of_search
from simulator.serving.deployment import CACHE_BYTES, WEIGHT_BYTES
from simulator.serving.engine import engines
from topology import codec
from ui.question import state


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingInputs:
    """The flags of `planner suggest --task serve`; model, cluster and GPUs are those of the sidebar. Targets in ms."""

    about: state.Inputs
    isl: int
    osl: int
    clients: int | None
    rate: int | None
    engine: str
    weights: str
    cache: str
    aim: str
    price: float | None
    ttft: int | None
    tpot: int | None

    @property
    def key(self) -> str:
        """Return a fingerprint of the question."""
        return codec.fingerprint(asdict(self))

    def request(self, *, by_name: bool = False) -> Suggest:
        """Return what `planner suggest --task serve` is asked, as `Inputs.request`."""
        about = self.about
        return Suggest(
            task=Task.SERVE,
            model=state.file_name(about.model) if by_name else about.model_source,
            cluster=state.file_name(about.cluster) if by_name else about.cluster_source,
            gpu=about.gpu,
            gpus=None if about.gpus is None else str(about.gpus),
            objective=Objective(self.aim),
            gpu_price=self.price,
            load=Load(
                isl=self.isl,
                osl=self.osl,
                concurrency=self.clients,
                request_rate=self.rate,
                ttft=None if self.ttft is None else f"{self.ttft}ms",
                tpot=None if self.tpot is None else f"{self.tpot}ms",
            ),
            engine=Engine(
                engine=self.engine,
                weights=None if self.weights == state.AS_STORED else self.weights,
                kv_cache=self.cache,
            ),
            said=frozenset({"objective"}),
        )

    def flags(self) -> ServingFlags:
        """Return the question as it is looked up."""
        return flags_of_search(self.request())

    def command(self) -> str:
        """Return the command line that gives the same answer in a terminal."""
        return shell_line("suggest", self.request(by_name=True), always=("model", "cluster", "objective"))


def ask(about: state.Inputs) -> ServingInputs:
    """Draw the question of the page and return it."""
    first = st.columns(4, gap="small")
    with first[0]:
        isl = state.number("Prompt, tokens", "isl", state.MAX_SEQ, "", "On average.") or 1024
    with first[1]:
        osl = state.number("Answer, tokens", "osl", state.MAX_SEQ, "", "On average.") or 256
    with first[2]:
        clients = state.number(
            "Clients", "clients", state.MAX_CLIENTS, "8 a GPU", "A closed loop: each asks again when answered."
        )
    with first[3]:
        rate = state.number("Requests/s", "rate", state.MAX_CLIENTS, "none", "Poisson arrivals, instead of clients.")
    kept = [str(st.session_state[key]) for key in ("engine", "weights", "cache", "aim")]
    with st.expander(f"Engine, formats, price, targets: {', '.join(kept)}"):  # a phone sees the answer first
        formats, bounds = st.columns(4, gap="small"), st.columns(3, gap="small")
    with formats[0]:
        engine = state.choice("Engine", list(engines()), "engine", "Its scheduler, its limits, its host time.")
    with formats[1]:
        weights = state.choice(
            "Weights", [state.AS_STORED, *WEIGHT_BYTES], "weights", "Their format; as stored: the checkpoint's."
        )
    with formats[2]:
        cache = state.choice("KV cache", list(CACHE_BYTES), "cache", "The format of keys and values.")
    with formats[3]:
        aim = state.choice(
            "Objective", list(state.SERVING_OBJECTIVES), "aim", "Output tokens a GPU, whole answers, or their price."
        )
    with bounds[0]:
        price = state.price("Price of a GPU hour")
    with bounds[1]:
        ttft = state.number("First token, ms at most", "ttft", state.MAX_TARGET_MS, "no target", "On average.")
    with bounds[2]:
        tpot = state.number("Further token, ms at most", "tpot", state.MAX_TARGET_MS, "no target", "On average.")
    found = {"isl": isl, "osl": osl, "clients": clients, "rate": rate, "engine": engine, "weights": weights}
    state.write_link(**found, cache=cache, aim=aim, price=price, ttft=ttft, tpot=tpot)
    return ServingInputs(
        about=about,
        isl=isl,
        osl=osl,
        clients=clients,
        rate=rate,
        engine=engine,
        weights=weights,
        cache=cache,
        aim=aim,
        price=price,
        ttft=ttft,
        tpot=tpot,
    )
