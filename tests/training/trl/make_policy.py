"""Make policy.json: what TRL's GRPOTrainer says of some answers; with a Python that has torch, transformers and trl.

    python tests/training/trl/make_policy.py

The policy is that of make.py. Probabilities of the sampler and of the reference are those of the policy with noise.
"""

import json
import random
import tempfile
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from make import HERE, make_models, make_tokenizer, measure

ADVANTAGES = [1.0, -0.5, 0.7, -1.2, 0.3, -0.3]
TEMPERATURE, MAX_NEW_TOKENS, CLIP_LOW, CLIP_HIGH, KL, DELTA, CAP = 0.8, 16, 0.2, 0.28, 0.1, 1.3, 1.4
# Losses by name: keys of GRPOConfig. Of those that share rollouts, the old policy is the sampler.
SHARED = {
    "tokens": {"loss_type": "dapo"},
    "answers": {"loss_type": "grpo"},
    "constant": {"loss_type": "dr_grpo"},
    "divergence": {"loss_type": "grpo", "beta": KL, "use_bias_correction_kl": False},
    "weighted": {"loss_type": "grpo", "beta": KL},
    "bounded": {"loss_type": "dapo", "delta": DELTA},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1 + CLIP_HIGH},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "gspo_tokens": {"loss_type": "dapo", "importance_sampling_level": "sequence"},
    "sapo": {"loss_type": "sapo"},
}
# With one step a rollout, the ratio of training and sampling is a weight.
WEIGHED = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def make_answers(seed: int = 3) -> list[dict[str, list[int]]]:
    rng = random.Random(seed)
    lengths = [(rng.randint(2, 6), rng.randint(1, 9)) for _ in ADVANTAGES]
    return [
        {"prompt": [rng.randrange(97) for _ in range(prompt)], "answer": [rng.randrange(97) for _ in range(answer)]}
        for prompt, answer in lengths
    ]


def make_trainer(keys: dict[str, Any]) -> trl.GRPOTrainer:
    unread = Dataset.from_list([{"prompt": "t1 t2"}] * 2)
    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            folder, **{"epsilon": CLIP_LOW, "epsilon_high": CLIP_HIGH} | keys, temperature=TEMPERATURE,
            max_completion_length=MAX_NEW_TOKENS, num_generations=2, per_device_train_batch_size=2, report_to=[],
            use_cpu=True, bf16=False, disable_dropout=True,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            make_models()[0], lambda completions, **_: [0.0] * len(completions), config, train_dataset=unread,
            processing_class=make_tokenizer(),
        )  # fmt: skip
    trainer.model.eval()
    return trainer


def pad(answers: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Return the ids and masks of prompts, padded on the left, and of answers, padded on the right."""
    fields = {}
    for name, part in (("prompt", "prompt"), ("completion", "answer")):
        longest = max(len(answer[part]) for answer in answers)
        pads = [[1] * (longest - len(answer[part])) for answer in answers]
        ids = [answer[part] for answer in answers]
        rows = [(p + i, [0] * len(p) + [1] * len(i)) for p, i in zip(pads, ids, strict=True)]
        if name == "completion":
            rows = [(i + p, [1] * len(i) + [0] * len(p)) for p, i in zip(pads, ids, strict=True)]
        fields[f"{name}_ids"], fields[f"{name}_mask"] = (torch.tensor([row[n] for row in rows]) for n in (0, 1))
    return fields


def score(trainer: trl.GRPOTrainer, fields: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the log-probabilities [B, T] of the tokens of answers."""
    ids, mask = (torch.cat([fields[f"prompt_{kind}"], fields[f"completion_{kind}"]], 1) for kind in ("ids", "mask"))
    with torch.no_grad():
        keep = fields["completion_ids"].size(1)
        return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, keep)[0]


def weigh(mode: str, gaps: torch.Tensor) -> torch.Tensor:
    """Return the weights of log p / q, [B, T], as `_generate_and_score_completions` makes them."""
    weights = torch.exp(gaps.sum(-1, keepdim=True) if mode.startswith("sequence") else gaps)
    if mode.endswith("truncate"):
        return torch.clamp(weights, max=CAP)
    return weights.masked_fill(weights > CAP, 0.0)


def measure_loss(trainer: trl.GRPOTrainer, fields: dict[str, torch.Tensor]) -> dict[str, float]:
    trainer._metrics["eval"].clear()
    found = measure(trainer.model, trainer._compute_loss(trainer.model, fields))
    numbers = {name: values[-1] for name, values in trainer._metrics["eval"].items()}
    # TRL's `kl` has the weights of its loss, and its shares of clipped answers are not those of their tokens.
    renamed = {} if trainer.args.use_bias_correction_kl else {"kl": "kl"}
    if trainer.importance_sampling_level == "token":
        renamed["clip_ratio/region_mean"] = "clipped"
    return found | {renamed[name]: value for name, value in numbers.items() if name in renamed}


def main() -> None:
    answers, generator = make_answers(), torch.Generator().manual_seed(0)
    fields = pad(answers)
    mask = fields["completion_mask"]
    fields |= {"advantages": torch.tensor(ADVANTAGES), "num_items_in_batch": mask.sum()}
    now = score(make_trainer({}), fields)
    sampled, reference = ((now + 0.4 * torch.randn(now.shape, generator=generator)) * mask for _ in range(2))
    fields["ref_per_token_logps"] = reference
    losses = {}
    for name, keys in SHARED.items():
        losses[name] = measure_loss(make_trainer(keys), fields | {"old_per_token_logps": sampled})
    losses["on_policy"] = measure_loss(make_trainer(SHARED["weighted"]), fields)
    for mode in WEIGHED:
        trainer = make_trainer({"loss_type": "dapo"})
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        losses[mode] = measure_loss(
            trainer, fields | {"importance_sampling_ratio": weigh(mode, (now - sampled) * mask)}
        )
    for answer, length, *numbers in zip(answers, mask.sum(1).tolist(), sampled, reference, strict=True):
        answer["sampled"], answer["reference"] = (row[:length].tolist() for row in numbers)
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    info = {"versions": versions, "temperature": TEMPERATURE, "max_new_tokens": MAX_NEW_TOKENS}
    info |= {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "kl_coefficient": KL, "delta": DELTA, "cap": CAP}
    info |= {"advantages": ADVANTAGES, "losses": losses, "answers": answers}
    (HERE / "policy.json").write_text(json.dumps(info, indent=1) + "\n")


if __name__ == "__main__":
    main()
