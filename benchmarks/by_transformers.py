"""The other side of models.py, rollouts.py and generation.py: transformers does the same, by torch and without jax."""

import json
import sys
import time

import torch
import transformers
from transformers import AutoModelForCausalLM


def load(folder: str, dtype: str) -> dict:
    start_time, start_cpu = time.perf_counter(), time.process_time()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    for weight in model.parameters():
        weight.detach().view(torch.int16).flatten()[::2048].sum()  # every page is there
    end_cpu = time.process_time()
    return {"seconds": time.perf_counter() - start_time, "cpu_s": end_cpu - start_cpu, "whole_cpu_s": end_cpu}


def decode(folder: str, batch: str, prompt: str, new: str, rounds: str) -> dict:
    """Seconds of each round, and the tokens, which tunix must give too."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = (torch.arange(int(batch) * int(prompt)) * 7919 % 32000).reshape(int(batch), int(prompt))
    options = {"do_sample": False, "use_cache": True, "min_new_tokens": int(new), "max_new_tokens": int(new)}
    seconds = []
    for _ in range(int(rounds) + 1):
        start_time = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(tokens, attention_mask=torch.ones_like(tokens), pad_token_id=0, **options)
        seconds.append(time.perf_counter() - start_time)
    return {"seconds": seconds[1:], "tokens": out[:, int(prompt) :].tolist()}


def rate(folder: str, batch: str, prompt: str, new: str) -> dict:
    """Seconds of a token of all rows after the first: the fastest of two calls, after one that is not counted."""
    counts = [int(new) + 1, 1]
    seconds = [min(decode(folder, batch, prompt, str(count), "2")["seconds"]) for count in counts]
    return {"seconds": (seconds[0] - seconds[1]) / int(new)}


def lengths(folder: str) -> dict:
    """CPU seconds of batches of answers, each row with a length of its own; stdin has what is asked (generation.py)."""
    question = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, question["dtype"]))

    def answer(lengths: list[int], prompts: list[list[int]]) -> float:
        tokens, wanted = torch.tensor(prompts), torch.tensor(lengths)
        ends = lambda ids, _: ids.shape[1] - tokens.shape[1] >= wanted  # noqa: E731
        start_time = time.process_time()
        with torch.inference_mode():
            model.generate(
                tokens, attention_mask=torch.ones_like(tokens), pad_token_id=0, do_sample=False, use_cache=True,
                max_new_tokens=max(lengths), eos_token_id=None, stopping_criteria=[ends],
            )  # fmt: skip
        return time.process_time() - start_time

    seconds = []
    for each, prompts in zip(question["lengths"], question["prompts"], strict=True):
        answer(each, prompts)
        seconds.append(min(answer(each, prompts) for _ in range(2)))
    return {"seconds": seconds}


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    answer = {"load": load, "decode": decode, "rate": rate, "lengths": lengths}[sys.argv[1]](*sys.argv[2:])
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    print(json.dumps(answer | {"peak_gib": peak / 2**20, "versions": versions}))
