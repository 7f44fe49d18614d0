"""Make losses.json: what TRL's trainers say of some pairs; with a Python that has torch, transformers and trl.

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
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "models" / "parity" / "llama"
HEAD, BETA, SMOOTHING, GAMMA = 1.2, 0.3, 0.2, 0.5
# Of KTO. With a flatter policy than the reference, the divergence is above 0, where it is not cut off.
FLAT_HEAD, UNDESIRABLE_WEIGHT, LABELS = 0.9, 1.5, [True, False, True, True, False]
# TRL has no smoothed labels for its sigmoid loss. Those of `aot` are the same where a batch is one pair: nothing is sorted.
LOSSES = {
    "sigmoid": "sigmoid",
    "ipo": "ipo",
    "length_normalized": "sigmoid_norm",
    "smoothed": "aot",
    "robust": "robust",
}
# Losses without a reference: trainer, its config, keys of its config.
FREE = {
    "simpo": (CPOTrainer, CPOConfig, {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": GAMMA}),
    "orpo": (ORPOTrainer, ORPOConfig, {}),
}


def make_pairs(seed: int = 0) -> list[dict[str, list[int]]]:
    """Pairs of tokens of unequal lengths."""
    rng = random.Random(seed)

    def tokens(longest: int) -> list[int]:
        return [rng.randrange(97) for _ in range(rng.randint(2, longest))]

    return [{"prompt_ids": tokens(6), "chosen_ids": tokens(7), "rejected_ids": tokens(9)} for _ in range(5)]


def make_models(head: float = HEAD) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return the policy and the reference."""
    policy, reference = (AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32) for _ in range(2))
    with torch.no_grad():
        policy.lm_head.weight.mul_(head)
    return policy, reference


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(97)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t1", eos_token="t1", pad_token="t1")


def make_trainer(folder: str, loss_type: str) -> trl.DPOTrainer:
    (policy, reference), tokenizer = make_models(), make_tokenizer()
    unread = Dataset.from_list([{"prompt": "t1 t2", "chosen": " t3", "rejected": " t4"}] * 2)
    config = trl.DPOConfig(
        folder, loss_type=loss_type, beta=BETA, label_smoothing=SMOOTHING if loss_type in ("aot", "robust") else 0.0,
        report_to=[], use_cpu=True, bf16=False, disable_dropout=True,
    )  # fmt: skip
    return trl.DPOTrainer(policy, reference, config, train_dataset=unread, processing_class=tokenizer)


def measure(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, float]:
    """Return a loss and the norm of its gradient."""
    model.zero_grad()
    loss.backward()
    squares = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
    return {"loss": loss.item(), "grad_norm": squares**0.5}


def measure_free(name: str, pairs: list[dict[str, list[int]]]) -> dict[str, float]:
    """Return the loss without a reference, a mean over pairs, each a batch of its own."""
    trainer_class, config_class, keys = FREE[name]
    unread = Dataset.from_list([{"prompt": "t1 t2", "chosen": " t3", "rejected": " t4"}] * 2)
    with tempfile.TemporaryDirectory() as folder:
        config = config_class(folder, beta=BETA, report_to=[], use_cpu=True, bf16=False, disable_dropout=True, **keys)
        model = make_models()[0]
        trainer = trainer_class(model, config, train_dataset=unread, processing_class=make_tokenizer())
    model.eval()
    losses = []
    for pair in pairs:
        batch = {}
        for side in ("chosen", "rejected"):
            tokens, prompt = pair["prompt_ids"] + pair[f"{side}_ids"], len(pair["prompt_ids"])
            batch[f"{side}_input_ids"] = torch.tensor([tokens])
            batch[f"{side}_attention_mask"] = torch.ones(1, len(tokens), dtype=torch.long)
            batch[f"{side}_labels"] = torch.tensor([[-100] * prompt + tokens[prompt:]])
        losses.append(trainer.get_batch_loss_metrics(model, batch)[0])
    return measure(model, sum(losses) / len(pairs))


def measure_kto(pairs: list[dict[str, list[int]]], head: float) -> dict[str, float]:
    """Return the loss of the chosen answers with LABELS as one batch; the divergence comes from the answer before."""
    policy, reference = make_models(head)
    unread = Dataset.from_list([{"prompt": "t1 t2", "completion": " t3", "label": label} for label in LABELS])
    with tempfile.TemporaryDirectory() as folder:
        config = trl.KTOConfig(
            folder, beta=BETA, undesirable_weight=UNDESIRABLE_WEIGHT, report_to=[], use_cpu=True, bf16=False,
            disable_dropout=True, per_device_train_batch_size=len(LABELS),
        )  # fmt: skip
        trainer = trl.KTOTrainer(policy, reference, config, train_dataset=unread, processing_class=make_tokenizer())
    trainer.model.eval()
    answers = [pair["chosen_ids"] for pair in pairs]
    examples = [
        {"prompt_ids": pair["prompt_ids"], "completion_ids": own, "KL_completion_ids": other, "label": label}
        for pair, own, other, label in zip(pairs, answers, answers[-1:] + answers[:-1], LABELS, strict=True)
    ]
    loss = trainer._compute_loss(trainer.model, DataCollatorForUnpairedPreference(pad_token_id=1)(examples), False)
    return measure(trainer.model, loss) | {"head": head, "kl": trainer._metrics["eval"]["kl"][-1]}


def main() -> None:
    pairs, results = make_pairs(), {}
    collate = DataCollatorForPreference(pad_token_id=1)
    for name, loss_type in LOSSES.items():
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(folder, loss_type)
        trainer.model.eval()
        loss = sum(trainer._compute_loss(trainer.model, collate([pair]), False) for pair in pairs) / len(pairs)
        results[name] = measure(trainer.model, loss)
    results |= {name: measure_free(name, pairs) for name in FREE}
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    info = {"versions": versions, "head": HEAD, "beta": BETA, "label_smoothing": SMOOTHING}
    info["simpo_gamma"] = GAMMA
    info["kto"] = {
        "undesirable_weight": UNDESIRABLE_WEIGHT,
        "labels": LABELS,
        "losses": [measure_kto(pairs, head) for head in (HEAD, FLAT_HEAD)],
    }
    (HERE / "losses.json").write_text(json.dumps(info | {"losses": results, "pairs": pairs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
