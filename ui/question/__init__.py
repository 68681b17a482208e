"""The question that pages answer: its fields, which are the URL, its files, and the links that hold them."""
