"""The answer to the question of a link, in the page that a browser gets before it runs a script of it."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from planner.explain.answer_text import LEAST_GAIN, answer_sentence, may_fit_sentence
from ui import panels
from ui.background import waiting
from ui.question import state

# It covers the page until, a second or two later, the page has drawn the same, and is then removed.
_STYLE = """<style>
  #at_once { position: fixed; inset: 0 0 0 290px; z-index: 100; padding: 2.6rem; background: #FFFFFF; color: #0B0F14;
    font: 15px/1.6 "Source Sans", sans-serif; }
  #at_once h1 { margin: .9rem 0 .6rem; font-size: 1.9rem; line-height: 1.2; }
  #at_once h4 { margin: 1.4rem 0 .8rem; font-size: 1.4rem; line-height: 1.3; font-weight: 600; }
  @media (prefers-color-scheme: dark) { #at_once { background: #0E1117; color: #E6EDF3; } }
  @media (max-width: 768px) { #at_once { left: 0; padding: 2.6rem 1.2rem; } }
</style>"""
_GOES = """<script>{
  const ours = document.getElementById("at_once"), drawn = ".st-key-answer h4, .st-key-last_answer, [role=dialog]";
  new MutationObserver((_, seen) => { if (document.querySelector(drawn)) { ours.remove(); seen.disconnect(); } })
    .observe(document, { childList: true, subtree: true });
}</script>"""


def block(words: Mapping[str, str]) -> str:
    """Return HTML for the first page; empty if the question is not answered yet."""
    question = state.of_link(words)
    result = None if question is None else waiting.finished("search", question.key)
    if question is None or result is None:
        return ""
    said = [f"<h4>{escape(answer_sentence(result.plans[0]))}</h4>"]
    if result.may_fit is not None and result.may_fit.faster >= LEAST_GAIN:
        said.append(f"<p>{escape(may_fit_sentence(result.may_fit, result.plans[0]))}</p>")
    what, _, rest = panels.PURPOSE.strip("*").partition("** ")
    about = f"<h1>{escape(panels.TITLE)}</h1><p><b>{escape(what)}</b> {escape(rest)}</p>"
    asked = f"<p>{escape(state.file_name(question.model))} on {escape(state.file_name(question.cluster))}</p>"
    follows = "<p>The plans and pictures follow …</p>"
    return f'{_STYLE}<div id="at_once" role="status">{about}{asked}{"".join(said)}{follows}</div>{_GOES}'
