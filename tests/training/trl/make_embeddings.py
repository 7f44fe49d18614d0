"""Make embeddings.json: what sentence-transformers says of a tiny Llama, its vectors and its losses.

    python tests/training/trl/make_embeddings.py        with a Python that has torch, transformers, trl, sentence-transformers

The model is that of tests/models/parity.
"""

import json
import tempfile
from pathlib import Path

import sentence_transformers
import torch
import transformers
from make import MODEL, make_pairs, measure
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import Tokenizer
from tokenizers import models as kinds
from transformers import AutoModel, PreTrainedTokenizerFast

HERE = Path(__file__).parent
PAD, TEMPERATURE, SIZES = 96, 0.1, [8]
POOLINGS = {"last": "lasttoken", "mean": "mean"}


def make_model(pooling: str, folder: str) -> sentence_transformers.SentenceTransformer:
    AutoModel.from_pretrained(MODEL, dtype=torch.float32).save_pretrained(folder)
    words = Tokenizer(kinds.WordLevel({f"t{number}": number for number in range(97)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token=f"t{PAD}").save_pretrained(folder)
    modules = [Transformer(folder, model_kwargs={"dtype": torch.float32}), Pooling(32, POOLINGS[pooling]), Normalize()]
    return sentence_transformers.SentenceTransformer(modules=modules, device="cpu").eval()


def features(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    length = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (length - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def main() -> None:
    groups = [
        [[token % PAD for token in pair[name]] for name in ("prompt_ids", "chosen_ids", "rejected_ids")]
        for pair in make_pairs()
    ]
    results = {
        "versions": {
            "sentence_transformers": sentence_transformers.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
        "temperature": TEMPERATURE,
        "sizes": SIZES,
        "groups": groups,
        "cases": {},
    }
    for pooling in POOLINGS:
        for count in (2, 3):
            for sizes in (None, SIZES):
                with tempfile.TemporaryDirectory() as folder:
                    model = make_model(pooling, folder)
                    loss = MultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE)
                    columns = [features([group[number] for group in groups]) for number in range(count)]
                    vectors = model(dict(columns[0]))["sentence_embedding"].tolist()
                    if sizes:
                        loss = MatryoshkaLoss(model, loss, [32, *sizes])
                    name = f"{pooling}-{count}-{'sizes' if sizes else 'whole'}"
                    results["cases"][name] = measure(model, loss(columns, None)) | {"vectors": vectors}
    (HERE / "embeddings.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
