"""Visits to the explorer over its WebSocket, as a browser makes them: open a page with a question, wait for it, leave.

    python tests/bench/visitor.py ADDRESS SECONDS OUT.json

writes how many pages were asked and finished, and the resident memory of the server and its children, in MiB, after
each visit: that of the first tenth of the visits and that of the last tenth tell whether it is bounded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import psutil
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

MODELS = ("llama3-8b", "llama3-70b", "qwen3-30b-a3b", "mixtral-8x7b", "llama2-7b")
PAGE_S = 60.0


async def visit(address: str, question: str) -> bool:
    """Open a page with a question; return whether its script ended within `PAGE_S`."""
    stream = f"ws://{urlsplit(address).netloc}/_stcore/stream"
    async with (
        asyncio.timeout(PAGE_S),
        connect(stream, origin=address, subprotocols=["streamlit"], max_size=2**28) as page,
    ):  # type: ignore[arg-type, list-item]  # plain texts
        asked = BackMsg()
        asked.rerun_script.query_string = question
        await page.send(asked.SerializeToString())
        async for message in page:
            reported = ForwardMsg()
            reported.ParseFromString(message if isinstance(message, bytes) else message.encode())
            if reported.WhichOneof("type") == "script_finished":
                return True
    return False


def resident_mib(server: psutil.Process) -> float:
    total = 0
    with suppress(psutil.Error):
        for process in (server, *server.children(recursive=True)):
            total += process.memory_info().rss
    return total / 2**20


def listening(port: int) -> psutil.Process:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in process.net_connections()):
                return process
    raise SystemExit(f"nobody listens on port {port}")


async def visits(address: str, seconds: float, out: Path) -> None:
    dice = random.Random(1)
    server = listening(int(urlsplit(address).port or 0))
    finished, asked, memory, until = 0, 0, [], time.monotonic() + seconds
    while time.monotonic() < until:
        question = {
            "model": dice.choice(MODELS),
            "gpus": str(2 ** dice.randint(2, 9)),
            "seq": str(2 ** dice.randint(11, 15)),
        }
        asked += 1
        with suppress(TimeoutError, OSError, WebSocketException):
            finished += await visit(address, urlencode(question))
        memory.append(round(resident_mib(server)))
        out.write_text(json.dumps({"asked": asked, "finished": finished, "resident_mib": memory}))  # noqa: ASYNC240 - nobody waits
        await asyncio.sleep(dice.uniform(0.0, 3.0))


def main(address: str, seconds: float, out: Path) -> None:
    with urllib.request.urlopen(f"{address}/_stcore/health", timeout=5) as answer:  # noqa: S310 - the explorer's own address
        answer.read()
    asyncio.run(visits(address, seconds, out))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("seconds", type=float)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    main(options.address, options.seconds, options.out)
