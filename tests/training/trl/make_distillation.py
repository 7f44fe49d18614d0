"""Make distillation.json: what TRL says of a student and a teacher; with a Python that has torch, transformers and trl.

    python tests/training/trl/make_distillation.py

The student is the tiny Llama of tests/models/parity with its head times 1.2, the teacher the tiny GPT-2. TRL has the
divergence twice: of whole logits (GKD), and of chunks of hidden states (DistillationTrainer). Both must agree. It has it
a third time, of the likeliest tokens of a teacher that only tells these (ServerDistillationTrainer): `sparse`.
"""

import json
from pathlib import Path

import torch
import transformers
import trl
from make import HEAD, MODEL, make_pairs
from transformers import AutoModelForCausalLM
from trl.experimental.gkd import GKDTrainer
from trl.experimental.server_distillation.server_distillation_trainer import _add_tail_bucket, _jsd_divergence
from trl.trainer.distillation_trainer import _chunked_divergence_loss

HERE = Path(__file__).parent
BETAS, TEMPERATURES = (0.0, 0.3, 1.0), (1.0, 2.0)
TOP_K = 5


def read_models() -> tuple[torch.nn.Module, torch.nn.Module]:
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (MODEL, MODEL.parent / "gpt2")
    )
    with torch.no_grad():
        student.lm_head.weight.mul_(HEAD)
    return student, teacher


def make_batch(pairs: list[dict[str, list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts with their answers, [B, T + 1], filled up with token 1, and which tokens are answers."""
    rows = [(pair["prompt_ids"], pair["chosen_ids"]) for pair in pairs]
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens, mask = torch.ones(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length)
    for row, (prompt, answer) in enumerate(rows):
        tokens[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        mask[row, len(prompt) : len(prompt) + len(answer)] = 1
    return tokens, mask


def measure_sparse(student, teacher, tokens, mask, beta: float, temperature: float) -> dict[str, float]:
    """The mean over answers of the divergence of the teacher's likeliest tokens and of the rest, and its gradient."""
    own, others = (model(tokens).logits[:, :-1].div(temperature).log_softmax(-1) for model in (student, teacher))
    likeliest, ids = others.detach().topk(TOP_K, -1)
    valid = torch.ones_like(ids, dtype=torch.bool)
    (own, valid_with_tail), (likeliest, _) = (
        _add_tail_bucket(log_probs, valid) for log_probs in (own.gather(-1, ids), likeliest)
    )
    divergence = _jsd_divergence(own, likeliest, beta, valid_with_tail).sum(-1)
    loss = (divergence * mask[:, 1:]).sum() / mask[:, 1:].sum()
    student.zero_grad()
    loss.backward()
    squares = sum(float(p.grad.double().square().sum()) for p in student.parameters() if p.grad is not None)
    return {"loss": loss.item(), "grad_norm": squares**0.5}


def main() -> None:
    tokens, mask = make_batch(make_pairs())
    student, teacher = read_models()
    labels = torch.where(mask[:, 1:] > 0, tokens[:, 1:], -100)
    results = []
    for beta in BETAS:
        for temperature in TEMPERATURES:
            outputs = [model(tokens, output_hidden_states=True) for model in (student, teacher)]
            whole = GKDTrainer.generalized_jsd_loss(
                outputs[0].logits[:, :-1], outputs[1].logits[:, :-1].detach(), labels, beta, temperature
            )
            hidden = [output.hidden_states[-1][:, :-1] for output in outputs]
            heads = student.lm_head.weight, teacher.lm_head.weight.detach()
            loss, *_ = _chunked_divergence_loss(
                hidden[0], hidden[1].detach(), *heads, mask[:, 1:], beta, temperature=temperature
            )
            assert abs(loss.item() - whole.item()) < 1e-6 * abs(whole.item()) + 1e-7, (loss, whole)
            student.zero_grad()
            loss.backward()
            squares = sum(float(p.grad.double().square().sum()) for p in student.parameters() if p.grad is not None)
            results.append({"beta": beta, "temperature": temperature, "loss": loss.item(), "grad_norm": squares**0.5})
    sparse = [
        {"beta": beta, "temperature": temperature, **measure_sparse(student, teacher, tokens, mask, beta, temperature)}
        for beta in BETAS
        for temperature in TEMPERATURES
    ]
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    info = {"versions": versions, "head": HEAD, "losses": results, "top_k": TOP_K, "sparse": sparse}
    (HERE / "distillation.json").write_text(json.dumps(info, indent=1) + "\n")


if __name__ == "__main__":
    main()
