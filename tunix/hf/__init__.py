"""Hugging Face: read and write the files of other libraries, and find them on the hub.

Each file of `tunix.families` has a table of the tensors in a family's files and our parameters. `weights` moves tensors
between files and sharded arrays, a slice at a time. `config_json` reads and writes the keys of config.json, with
`pattern_keys`, `rope_keys`, `head_keys` and `layer_keys` for those about one part of a model. `hub` finds a folder here
or downloads it.
"""
