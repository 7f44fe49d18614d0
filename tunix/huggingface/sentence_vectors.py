"""Files beside a model's own with which sentence-transformers gives the vectors that task=embed trained.

Their keys are those of before version 6, which all versions read, and text-embeddings-inference, vLLM and llama.cpp.

modules.json                          the steps: model, pooling, length 1
sentence_bert_config.json             how many tokens of a text the first step takes
1_Pooling/config.json                 how the tokens of a text become one
config_sentence_transformers.json     how two vectors are compared: by their cosine
tokenizer.json                        adds what the texts of training began and ended with
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, processors

from tunix.base.files import write_tokenizer
from tunix.huggingface import hub

POOLINGS = {"last": "lasttoken", "mean": "mean_tokens"}  # task.pooling by the names of sentence-transformers
MODULES = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}


def list_files(pooling: str, width: int, length: int) -> dict[str, object]:
    """Return the content of each JSON file by its path; `pooling` is task.pooling, `width` that of the vectors, and
    `length` the most tokens of a text."""
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    return {
        "modules.json": [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for number, (path, kind) in enumerate(MODULES.items())
        ],
        "sentence_bert_config.json": {"max_seq_length": length, "do_lower_case": False},
        "1_Pooling/config.json": {
            "word_embedding_dimension": width,
            **{f"pooling_mode_{mode}": mode == POOLINGS[pooling] for mode in modes},
            "include_prompt": True,
        },
        "config_sentence_transformers.json": {
            "model_type": "SentenceTransformer",
            "prompts": {"document": "", "query": ""},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }


def has_files(folder: Path) -> bool:
    """Return whether the folder of a model or of an adapter has the files."""
    return (folder / "modules.json").is_file()


def copy_files(source: Path, folder: Path) -> None:
    """Copy the files from the folder of a model or of an adapter, if it has them, into that of an export."""
    hub.copy_files(source, (*list_files("last", 0, 0), "2_Normalize/config.json"), folder)


def write_files(
    folder: Path, pooling: str, width: int, length: int, tokenizer: Tokenizer, bos: str | None, eos: str, pad: str
) -> None:
    """Write the files into the folder of an exported model, which reads texts of `length` tokens.

    `bos` and `eos` are the first and the last token of a text in training. The library pads on the right, behind <eos>.
    """
    for name, content in list_files(pooling, width, length).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n")
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{'' if bos is None else bos + ' '}$A {eos}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token],
    )
    write_tokenizer(folder, tokenizer)
    config = {
        **({} if bos is None else {"bos_token": bos}),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "padding_side": "right",
        "eos_token": eos,
        "pad_token": pad,
        # Otherwise "<eos>" within a text would be that token, and not text as in training.
        "split_special_tokens": True,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
