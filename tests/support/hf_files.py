"""A model's folder as the Hugging Face hub would give it."""

import json
from pathlib import Path

import jax
from support.harness import program
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tunix.huggingface.config_json import write_config
from tunix.huggingface.weights import save_weights

WORDS = 300
TEMPLATE = (
    "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant:{% endif %}"
)


def write_hf_dir(folder: Path) -> Path:
    """A Llama in several bfloat16 files, with a tokenizer and its chat template, as the hub would give it."""
    small = program(
        "model=llama3_1b", "model.vocab_size=320", "model.embed_dim=32", "model.mlp_dim=64", "model.num_layers=3",
        "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=8", "model.context_length=64", "model.tied_head=false",
        "model.sliding_window=null", "model.global_every=1", "model.mesh_shape=[[1],[fsdp]]",
        "distributed.allow_idle_devices=true", fresh=True,
    )  # fmt: skip
    with jax.set_mesh(small.mesh):
        save_weights(folder, small.state["params"], small.cfg.model, small.arch.weights, "bfloat16", shard_gb=2e-5)
    config = write_config(small.cfg.model) | {"bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(
        ["a few words to be merged"] * 5,
        trainers.BpeTrainer(vocab_size=WORDS, special_tokens=["<pad>", "<bos>", "<eos>"], initial_alphabet=alphabet,
                            show_progress=False),
    )  # fmt: skip
    words.save(str(folder / "tokenizer.json"))
    info = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "chat_template": TEMPLATE,
             "tokenizer_class": "PreTrainedTokenizerFast"}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(info))
    return folder
