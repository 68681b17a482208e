"""One file a page. Streamlit runs them; nothing imports them: what they compute is in `ui.rows` and `ui.data`."""
