"""The rule book, a file a topic; `book` says which rule applies where."""
