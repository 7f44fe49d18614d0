"""Make `expected.json`: what llama.cpp's converter writes of tiny models, in float32, but for the tokenizer.

    python tests/huggingface/gguf/make.py LLAMA_CPP        (a Python with torch, transformers and gguf; a checkout of llama.cpp)

Of each model: its keys, and for each tensor the shape and the digest of its bytes.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
PARITY = HERE.parents[1] / "models" / "parity"
MODELS = ("llama", "llama_linear", "mixtral", "qwen2", "qwen3", "gemma2")


def convert(folder: Path) -> dict:
    import gguf
    from conversion import get_model_class
    from conversion.base import ModelBase, ModelType, get_model_architecture

    cls = get_model_class(get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT))
    with tempfile.TemporaryDirectory() as out:
        model = cls(folder, gguf.LlamaFileType.ALL_F32, Path(out) / "x.gguf")
        model.set_vocab = lambda: None
        if hasattr(model, "_create_vocab_sentencepiece"):
            model._create_vocab_sentencepiece = lambda: ([None] * 10**6,)
        model.write()
        reader = gguf.GGUFReader(Path(out) / "x.gguf")
        keys = {
            name: field.contents()
            for name, field in reader.fields.items()
            if not name.startswith(("general.", "GGUF."))
        }
        tensors = {
            each.name: [each.data.shape, hashlib.sha256(np.asarray(each.data).tobytes()).hexdigest()]
            for each in reader.tensors
        }
    return {"keys": keys, "tensors": tensors}


def main() -> None:
    sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/gguf-py"]
    expected = {name: convert(PARITY / name) for name in MODELS}
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
