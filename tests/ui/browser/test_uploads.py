"""Files that people bring: a good one is used, any other is refused with the reason next to its field."""

from __future__ import annotations

import json
import random
import re
import time

import pytest

from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.browser.pages import settled
from tests.ui.conftest import ROOT

pytestmark = pytest.mark.browser
TOPO = (ROOT / "tests" / "data" / "topo" / "52_stas_h100_8gpu_52c.txt").read_bytes()
MODEL = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}
MODEL |= {"num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256}
CONFIG = b'[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n'
BINARY = random.Random(0).randbytes(200_000)
HUGE = bytes(100 << 20)
# Answers are not timed here, only printed: other work may have the cores.
FILES = [
    ("machine.txt", TOPO, "cluster=machine"),
    ("model.json", json.dumps(MODEL).encode(), "model=model"),
    ("model.json", b'{"model_type": "llama", "num_hidden_layers":', "is not valid JSON"),
    ("model.json", json.dumps(MODEL | {"num_hidden_layers": -3}).encode(), "it must lie between 1 and"),
    ("machine.txt", b"", "holds no table"),
    ("machine.txt", b"GPU0\tx y z\n" * 100_000, "shows no GPU"),
    ("machine.bin", BINARY, "is not text"),
    ("machine.bin", HUGE, "or smaller"),
]


@pytest.mark.parametrize(("name", "content", "said"), FILES, ids=[said for _, _, said in FILES])
def test_a_machine_or_a_model_is_used_or_refused_with_the_reason(page, address, tmp_path, name, content, said):
    page.goto(f"{address}/?model=llama3.2-1b&cluster=h200x4&batch=8")
    settled(page)
    page.get_by_role("button", name=re.compile("Paste or upload")).click()
    took = bring(page, tmp_path / name, content, said)
    print(f"{said}: {took:.1f} s")

    if "=" not in said:
        field = page.locator("[data-testid='stFileUploader']").bounding_box()
        reason = page.get_by_text(re.compile(re.escape(said))).last
        reason.wait_for()
        assert abs(reason.bounding_box()["y"] - field["y"]) < 400
        assert "cluster=h200x4" in page.url


@pytest.mark.parametrize(
    ("content", "said"),
    [(CONFIG, "Step as it is"), (b"[training\nx = = 3", "is not TOML"), (BINARY, "is not text"), (HUGE, "or smaller")],
    ids=["good", "broken", "binary", "huge"],
)
def test_a_configuration_is_answered_or_refused_with_the_reason(page, address, tmp_path, content, said):
    page.goto(f"{address}/check")
    settled(page)
    at_once = said in {"is not text", "or smaller"}
    took = bring(page, tmp_path / "train.toml", content, said if at_once else "train.toml")
    began = time.monotonic()
    if not at_once:
        page.locator("button:enabled").filter(has_text="Check").last.click()
        page.get_by_text(re.compile(re.escape(said))).first.wait_for()
    print(f"{said}: seen after {took:.1f} s, answered after {time.monotonic() - began:.1f} s")


def bring(page, path, content, said):
    """Upload a file, and return after how many seconds the page, or its address, says what follows from it."""
    path.write_bytes(content)
    field = page.locator("input[type='file']").first
    field.wait_for(state="attached")
    field.set_input_files(path)
    began = time.monotonic()
    page.wait_for_function("said => (location.href + document.body.innerText).includes(said)", arg=said, polling=20)
    return time.monotonic() - began
