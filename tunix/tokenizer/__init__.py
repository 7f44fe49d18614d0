"""Tokenizers: from text to token ids, and from conversations to text.

Read `vocabulary` first: it reads a tokenizer from a file or the hub, or trains one. `chat` has chat templates,
`sentencepiece` converts the models of that library.
"""
