"""Tokens: documents (sources) become ids (tokenizer), shards on disk (prepare, format), batches (loader)."""
