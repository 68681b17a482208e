"""The question of the serving page, stored in the link as the question of training is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import streamlit as st

from planner.requests.flag import shell_line
from planner.requests.serving import Engine, Load, Task
from planner.requests.training import Objective, Suggest
from planner.serving import ServingFlags, flags_of_search
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
    found: dict[str, Any] = {}
    for column, key in zip(st.columns(4, gap="small"), ("isl", "osl", "clients", "rate"), strict=True):
        with column:
            found[key] = state.number(key) or state.FIELDS[key].default
    choices = ("engine", "weights", "cache", "aim")
    kept = ", ".join(str(st.session_state[key]) for key in choices)
    with st.expander(f"Engine, formats, price, targets: {kept}"):  # a phone sees the answer first
        formats, (of_price, *bounds) = st.columns(4, gap="small"), st.columns(3, gap="small")
    for column, key in zip(formats, choices, strict=True):
        with column:
            found[key] = state.choice(key)
    with of_price:
        found["price"] = state.price("Price of a GPU hour")
    for column, key in zip(bounds, ("ttft", "tpot"), strict=True):
        with column:
            found[key] = state.number(key)
    state.write_link(**found)
    return ServingInputs(about=about, **found)
