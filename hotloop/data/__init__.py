"""Text into bins: sources, download, documents, chat, tokenizer, encode, dataset. Imports no torch."""
