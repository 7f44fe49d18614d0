"""Make losses.json: what TRL's DPOTrainer says of some pairs; with a Python that has torch, transformers and trl.

    python tests/training/trl/make.py

The reference is the tiny Llama of tests/models/parity, the policy the same model with its head times 1.2.
"""

import json
import random
import tempfile
from pathlib import Path

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl.trainer.dpo_trainer import DataCollatorForPreference

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "models" / "parity" / "llama"
HEAD, BETA, SMOOTHING = 1.2, 0.3, 0.2
# TRL has no smoothed labels for its sigmoid loss. Those of `aot` are the same where a batch is one pair: nothing is sorted.
LOSSES = {"sigmoid": "sigmoid", "ipo": "ipo", "length_normalized": "sigmoid_norm", "smoothed": "aot"}


def make_pairs(seed: int = 0) -> list[dict[str, list[int]]]:
    """Pairs of tokens of unequal lengths."""
    rng = random.Random(seed)

    def tokens(longest: int) -> list[int]:
        return [rng.randrange(97) for _ in range(rng.randint(2, longest))]

    return [{"prompt_ids": tokens(6), "chosen_ids": tokens(7), "rejected_ids": tokens(9)} for _ in range(5)]


def make_trainer(folder: str, loss_type: str) -> trl.DPOTrainer:
    policy, reference = (AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32) for _ in range(2))
    with torch.no_grad():
        policy.lm_head.weight.mul_(HEAD)
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(97)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1", pad_token="t1")
    unread = Dataset.from_list([{"prompt": "t1 t2", "chosen": " t3", "rejected": " t4"}] * 2)
    config = trl.DPOConfig(
        folder, loss_type=loss_type, beta=BETA, label_smoothing=SMOOTHING if loss_type == "aot" else 0.0,
        report_to=[], use_cpu=True, bf16=False, disable_dropout=True,
    )  # fmt: skip
    return trl.DPOTrainer(policy, reference, config, train_dataset=unread, processing_class=tokenizer)


def main() -> None:
    pairs, results = make_pairs(), {}
    collate = DataCollatorForPreference(pad_token_id=1)
    for name, loss_type in LOSSES.items():
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(folder, loss_type)
        trainer.model.eval()
        loss = sum(trainer._compute_loss(trainer.model, collate([pair]), False) for pair in pairs) / len(pairs)
        trainer.model.zero_grad()
        loss.backward()
        squares = sum(float(p.grad.double().square().sum()) for p in trainer.model.parameters() if p.grad is not None)
        results[name] = {"loss": loss.item(), "grad_norm": squares**0.5}
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    info = {"versions": versions, "head": HEAD, "beta": BETA, "label_smoothing": SMOOTHING}
    (HERE / "losses.json").write_text(json.dumps(info | {"losses": results, "pairs": pairs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
