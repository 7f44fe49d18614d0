"""Hugging Face: read and write the files of other libraries, and find them on the hub.

`table` lists the families of models. A family says how the tensors in its files are called here: `family` has the
class, and the parts that rows share; the rows of Gemma are in `gemma`. `config_json`, `rope_keys` and `vision_keys`
read and write the keys of config.json. `weights` reads tensors into sharded arrays, a slice at a time, and writes them;
`quantized_tensors` reads those that files hold as codes. `adapter` and `adapter_config` are for the files of PEFT.
`gguf_file` writes the file of llama.cpp, `sentence_vectors` those of sentence-transformers; `tiny_by_transformers`
makes a tiny model to compare with. `hub` finds a folder here or downloads it, and sends one.
"""
