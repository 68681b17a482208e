"""One file per page, run by Streamlit and imported by nothing: what pages show is computed in `ui.rows` and
`ui.data`.
"""
