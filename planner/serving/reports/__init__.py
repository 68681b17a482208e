"""A serving answer as text and as JSON: tables, sentences, documents."""
