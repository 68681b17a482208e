"""Links that hold the whole question: uploaded files travel in them, compressed."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit, urlunsplit

import streamlit as st

from topology import codec
from topology.errors import BadInput
from ui.question import uploads

PARAMETER = "files"
MOST_CHARACTERS = 48_000  # servers and browsers take addresses of 64 KB
MOST_FILES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A file in a link."""

    kind: uploads.Kind
    name: str
    text: str


def packed(choices: Sequence[str]) -> str:
    """Return the uploads among `choices` as a word of a link; empty if there are none. Raises BadInput if too long."""
    found = [upload for choice in choices if (upload := uploads.find(choice))]
    if not found:
        return ""
    files = [Sent(kind=one.kind, name=one.name, text=codec.read_text(one.path)) for one in found]
    word = base64.urlsafe_b64encode(zlib.compress(codec.to_json(files, indent=None).encode(), level=9)).decode()
    if len(word) > MOST_CHARACTERS:
        raise BadInput(
            "the uploaded files are too long for a link",
            why=f"{len(word):,} characters, and {MOST_CHARACTERS:,} are sent at most",
            remedy="send the files with the link: it asks for them",
        )
    return word


def unpack(word: str) -> None:
    """Keep the files of a link as if they had been uploaded here. Raises PlannerError where they cannot be read."""
    if len(word) > MOST_CHARACTERS:
        raise BadInput("the files of this link are too long")
    reader = zlib.decompressobj()
    try:
        text = reader.decompress(base64.urlsafe_b64decode(word), MOST_FILES * uploads.MAX_BYTES)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise BadInput("the files of this link are damaged", why=str(error), remedy="copy the whole link") from error
    if reader.unconsumed_tail or not reader.eof:
        raise BadInput("the files of this link are too long, or cut off", remedy="copy the whole link")
    data = codec.parse_json(text.decode("utf-8", errors="replace"), where="the link")
    files = codec.convert(data, tuple[Sent, ...], where="the link")
    if len(files) > MOST_FILES:
        raise BadInput(f"a link has {MOST_FILES} files at most")
    for one in files:
        uploads.store(one.kind, one.name, one.text.encode())


def address(words: dict[str, str], choices: Sequence[str]) -> str:
    """Return the address of this page for a question, with the uploads among `choices`. Raises BadInput if too long."""
    sent = packed(choices)
    parts = urlsplit(st.context.url or "http://127.0.0.1:8501/")
    query = urlencode({**words, **({PARAMETER: sent} if sent else {})})
    return urlunsplit((parts.scheme, parts.netloc, parts.path, query, ""))
