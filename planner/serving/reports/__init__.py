"""A serving answer for people and for programs: tables, sentences, documents."""
