"""The explorer. Streamlit is imported here and nowhere below; charts, layouts and aggregation are pure functions."""
