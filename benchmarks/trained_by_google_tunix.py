"""A side of peers.py: google-tunix trains the same decoder. Its Python has google-tunix.

Reads a question as JSON on stdin and writes an answer as JSON on stdout. It runs as a script: the package `tunix` of
its Python is that of google-tunix, and the folder of this project must not stand on the path.
"""

import importlib.metadata
import json
import resource
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.gemma3.model import Gemma3, ModelConfig
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
from tunix.sft.utils import build_positions_from_mask, make_causal_attn_mask


def train(config: dict[str, Any], rows: int, length: int, steps: int, warmup: int, param_dtype: str) -> dict[str, Any]:
    """Train on random tokens by the jitted step of `PeftTrainer`; return the seconds of a step and tokens/s.

    `config` has the keys of a config.json of Gemma 3. Weights and activations are of `param_dtype`: google-tunix has no
    mixed precision.
    """
    settings = ModelConfig(
        num_layers=config["num_hidden_layers"],
        num_embed=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        num_kv_heads=config["num_key_value_heads"],
        sliding_window_size=config["sliding_window"],
        global_base_frequency=1_000_000,
        param_dtype=getattr(jnp, param_dtype),
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=0.1))
    trainer = PeftTrainer(Gemma3(settings, rngs=nnx.Rngs(0)), optimizer, TrainingConfig(eval_every_n_steps=10**9))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, settings.num_embed, (rows, length)), jnp.int32)
    mask = jnp.ones(tokens.shape, bool)
    batch = {
        "input_tokens": tokens,
        "input_mask": mask,
        "positions": build_positions_from_mask(mask),
        "attention_mask": make_causal_attn_mask(mask),
    }
    step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)  # as `PeftTrainer.train` has it
    seconds = []
    for _ in range(warmup + steps):
        start_time, cpu = time.perf_counter(), time.process_time()
        value = float(step(batch)[0])
        jax.block_until_ready(nnx.state(trainer.model))
        seconds.append((time.perf_counter() - start_time, time.process_time() - cpu))
    step_s, cpu_s = (statistics.median(each) for each in zip(*seconds[warmup:], strict=True))
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("google-tunix", "jax", "flax"))
    return {
        "step_s": step_s,
        "cpu_s": cpu_s,
        "tokens_per_s": rows * length / step_s,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30,
        "loss": value,
        "versions": ", ".join(versions),
    }


if __name__ == "__main__":
    print(json.dumps(train(**json.load(sys.stdin))))
