"""Hugging Face: read and write the files of other libraries, and find them on the hub.

`table` lists the families of models. A family (`families`) says how the tensors in its files are called here; rows
like those of Llama are in `dense`, the others in `experts`, `gemma` and `qwen`. `config_json` and `rope_keys` read
and write the keys of config.json. `weights` reads tensors into sharded arrays, a slice at a time, `quantized_tensors`
those that files hold as codes, and `save_weights` writes them. `adapter` and `adapter_config` are for the files of
PEFT. `hub` finds a folder here or downloads it.
"""
