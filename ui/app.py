"""The frame of the explorer: the question in the sidebar, the search result a page needs, and the page itself.

Streamlit runs this file on every change. The pages are in `views/`, not in `pages/`: Streamlit would open a page in a
folder of that name directly, without this frame, when it is the first link followed.
"""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from topology.errors import BadCluster, PlannerError
from ui import data, panels
from ui.question import state, uploads

# Streamlit's margins of 6 rem at the top and 5 at the sides would take a fifth of a small screen, and its colours of
# code have contrasts below 4.5.
STYLE = """<style>
  .stMainBlockContainer { padding: 2.6rem 2.6rem 4rem; max-width: 1680px; }
  [data-testid="stSidebarUserContent"] { padding-top: 0; padding-bottom: 2rem; }
  [data-testid="stMetricLabel"] *, [data-testid="stMetricValue"] * {
    white-space: normal !important; overflow: visible;
  }
  [data-testid="stCode"] code span { color: inherit !important; }
  [data-testid="stStatusWidget"] button { display: none; }
  [class*="st-key-figures_"] { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); }
  [class*="st-key-figures_"] > div { width: auto; }
  .st-key-next { align-items: center; }
  /* Charts side by side need room: on a narrow page they stand below each other. */
  .stMainBlockContainer { container-type: inline-size; }
  @container (max-width: 860px) {
    [data-testid="stHorizontalBlock"]:has([data-testid="stVegaLiteChart"]) > [data-testid="stColumn"] {
      min-width: 100%;
    }
  }
  @media (max-width: 640px) {
    .stMainBlockContainer { padding: 2.6rem 1.2rem 3rem; }
    [data-testid="stMetricValue"] { font-size: 1.1rem; }
  }
  .st-key-last_answer { opacity: 0.45; pointer-events: none; }
</style>"""
HOME, SERVING = "home", "serving"
VIEWS = Path(__file__).parent / "views"
# name, title, icon, whether it shows a search result
PAGES = (
    ("home", panels.TITLE, ":material/home:", True),
    ("cluster", "Cluster", ":material/hub:", False),
    ("model", "Model and workload", ":material/deployed_code:", False),
    ("plans", "Plans", ":material/leaderboard:", True),
    ("detail", "Plan detail", ":material/troubleshoot:", True),
    ("curves", "What if", ":material/tune:", True),
    ("compare", "Compare", ":material/compare_arrows:", True),
    ("serving", "Serve a model", ":material/forum:", False),
    ("check", "Check a configuration", ":material/fact_check:", False),
    ("run", "Run", ":material/play_circle:", True),
    ("measured", "Measured", ":material/straighten:", False),
    ("tuning", "Tuning", ":material/science:", False),
    ("exports", "Exports", ":material/ios_share:", True),
)

st.set_page_config(
    page_title="meshwright",
    page_icon=str(Path(__file__).parent / "mark.svg"),  # an icon given by name would be fetched from the network
    layout="wide",
    initial_sidebar_state=290,
    menu_items={"about": "meshwright plans multi-GPU training. Everything runs on this machine; nothing is sent."},
)
pages = {
    name: st.Page(VIEWS / f"{name}.py", title=title, icon=icon, url_path=name, default=name == HOME)
    for name, title, icon, _ in PAGES
}
page = st.navigation(list(pages.values()), position="hidden")
st.html(STYLE)
st.title(page.title, anchor=False)
panels.take_files_of_link()
unknown = state.follow_link()
if unknown:
    panels.not_here(unknown)
    st.stop()
st.sidebar.markdown("**meshwright**")
navigation = st.sidebar.container(gap="xxsmall")
at_home = page.url_path == pages[HOME].url_path
if at_home:
    panels.purpose()


@panels.part(panels.PAGES)
def links() -> None:
    """Link to all pages, with the question."""
    for name, title, icon, _ in PAGES:
        st.page_link(pages[name], label=title, icon=icon, query_params=state.link(), width="stretch")


question: state.Inputs | None = None
try:
    question = state.ask(row=at_home, training=page.url_path != SERVING)
except PlannerError as error:  # a cluster or a model that is not known
    panels.failure(error)
if at_home:
    panels.bring_files()
with navigation:
    links()
if question is None:
    st.stop()
searched = {pages[name].url_path for name, _, _, needs in PAGES if needs}
try:
    answered = page.url_path not in searched or data.frame(question, choose=not at_home)
    state.results()["question"] = question if answered else state.results()["answer"].question
    with st.container(key="answer" if answered else "last_answer"):
        page.run()
except PlannerError as error:
    panels.failure(error)
    if isinstance(error, BadCluster) and question.gpu is None and uploads.find(question.cluster):
        st.info(
            "Choose the **GPU model** in the sidebar: the uploaded file does not name it.", icon=":material/arrow_back:"
        )
with st.sidebar:
    st.caption("Figures without a measurement are from datasheets and published efficiencies, and are marked so.")
