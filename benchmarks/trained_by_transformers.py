"""The other side of gpu.py and peers.py: transformers trains the same model. Its Python has torch and no jax.

Reads a question as JSON on stdin and writes an answer as JSON on stdout.
"""

import contextlib
import json
import resource
import statistics
import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM


def train(
    config: dict[str, Any],
    rows: int,
    length: int,
    steps: int,
    warmup: int,
    param_dtype: str,
    compiled: bool,
    checkpointed: bool,
    autocast: bool = True,
) -> dict[str, Any]:
    """Train on random tokens with AdamW and clipped gradients; return the seconds of a step and tokens/s."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    settings = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(settings, dtype=getattr(torch, param_dtype)).to(device).train()
    model.config.use_cache = False
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=device == "cuda")
    tokens = torch.randint(0, settings.vocab_size, (rows, length), device=device)
    mixed = autocast and param_dtype == "float32"
    seconds = []
    for _ in range(warmup + steps):
        start_time, cpu = time.perf_counter(), time.process_time()
        with torch.autocast(device, torch.bfloat16) if mixed else contextlib.nullcontext():
            loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        seconds.append((time.perf_counter() - start_time, time.process_time() - cpu))
    step_s, cpu_s = (statistics.median(each) for each in zip(*seconds[warmup:], strict=True))
    peak = (
        torch.cuda.max_memory_allocated()
        if device == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    return {
        "step_s": step_s,
        "cpu_s": cpu_s,
        "tokens_per_s": rows * length / step_s,
        "peak_gib": peak / 2**30,
        "loss": value,
        "versions": f"transformers {transformers.__version__}, torch {torch.__version__}",
    }


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    print(json.dumps(train(**json.load(sys.stdin))))
