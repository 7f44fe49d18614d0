"""Hugging Face: read and write the files of other libraries, and find them on the hub.

Read `names` first: a table for each family (Gemma 3, Llama 3, Qwen 3, ...) of the tensors in its files and our
parameters. `config_json` does the same for config.json, `weights` moves tensors between files and sharded arrays, a
slice at a time, and `hub` finds a folder here or downloads it.
"""
