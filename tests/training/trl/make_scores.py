"""Make scores.json: what transformers and TRL's RewardTrainer say of a tiny Llama with a head of scores.

    python tests/training/trl/make_scores.py        with a Python that has torch, transformers and trl

The model is that of tests/models/parity, with a head of numbers that NumPy draws.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
import trl
from datasets import Dataset
from make import MODEL, make_pairs, make_tokenizer, measure
from transformers import AutoModelForSequenceClassification
from trl.trainer.reward_trainer import DataCollatorForPreference

HERE = Path(__file__).parent
PAD, CENTER, CLASSES, NUMBERS = 96, 0.1, [2, 0, 1, 2, 0], [0.5, -1.0, 2.0, 0.0, 1.5]


def make_model(num_labels: int) -> torch.nn.Module:
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, dtype=torch.float32, num_labels=num_labels)
    model.config.pad_token_id = PAD
    head = np.random.default_rng(num_labels).normal(size=tuple(model.score.weight.shape)).astype(np.float32)
    with torch.no_grad():
        model.score.weight.copy_(torch.from_numpy(head))
    return model.eval()


def pad(rows: list[list[int]]) -> torch.Tensor:
    length = max(map(len, rows))
    return torch.tensor([row + [PAD] * (length - len(row)) for row in rows])


def measure_reward(pairs: list[dict[str, list[int]]], center: float | None) -> dict[str, float]:
    """Return the loss of the pairs as one batch."""
    unread = Dataset.from_list([{"chosen_ids": [1, 2], "rejected_ids": [1, 3]}] * 2)
    with tempfile.TemporaryDirectory() as folder:
        config = trl.RewardConfig(
            folder, center_rewards_coefficient=center, report_to=[], use_cpu=True, bf16=False, disable_dropout=True,
            max_length=None,
        )  # fmt: skip
        trainer = trl.RewardTrainer(make_model(1), config, train_dataset=unread, processing_class=make_tokenizer())
    trainer.model.config.pad_token_id = PAD
    trainer.model.eval()
    loss = trainer.compute_loss(trainer.model, DataCollatorForPreference(pad_token_id=PAD)(pairs))
    return measure(trainer.model, loss)


def main() -> None:
    pairs = [
        {side: [token % PAD for token in pair["prompt_ids"] + pair[side]] for side in ("chosen_ids", "rejected_ids")}
        for pair in make_pairs()
    ]
    rows = [pair["chosen_ids"] for pair in pairs]
    classifier, scorer = make_model(len(set(CLASSES))), make_model(1)
    results = {
        "versions": {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__},
        "center_coefficient": CENTER,
        "pairs": pairs,
        "classes": CLASSES,
        "numbers": NUMBERS,
        "scores": classifier(pad(rows)).logits.tolist(),
        "reward": measure_reward(pairs, None),
        "centered": measure_reward(pairs, CENTER),
        "classify": measure(classifier, classifier(pad(rows), labels=torch.tensor(CLASSES)).loss),
        "regression": measure(scorer, scorer(pad(rows), labels=torch.tensor(NUMBERS)).loss),
    }
    (HERE / "scores.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
