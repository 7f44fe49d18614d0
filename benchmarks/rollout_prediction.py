"""Predicted tokens/s of a rollout on one H100, rows taken anew beside waves: `python -m benchmarks.rollout_prediction`.

Nothing runs on a GPU. An 8B with LoRA draws 1,024 answers of a mean of 1,472 and at most 8,192 tokens behind prompts of
256. The plan says how many rows fit and what a token reads: the weights, the logits, and all slots of all rows. A token
takes the time of its bytes at the H100's bandwidth. Words: `cache_dtype=int8`.
"""

import sys
from collections import deque

import numpy as np

from tunix.costs.rollout import CHUNK, count_slots, pad_rows, select_fewer_rows

ANSWERS, LONGEST, PROMPT, MEDIAN = 1024, 8192, 256, 1000
LOOK = 8  # tokens between two looks at how many rows are at work


def draw_lengths() -> np.ndarray:
    """Return log-normal lengths (sigma 1)."""
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), 1.0, ANSWERS)
    return np.clip(drawn, 16, LONGEST).astype(int)


def count_bytes(lengths: np.ndarray, most_rows: int, of_token: float, of_slot: float, waves: bool) -> tuple[float, int]:
    """Return the bytes that a rollout reads, and the tokens that it draws one after the other.

    Args:
        of_token: bytes that each token reads beside the cache.
        of_slot: bytes of a slot of one row.
        waves: rows are taken anew when all answers of a wave have ended, and the cache begins anew.
    """
    queue, rest, length = deque(lengths.tolist()), np.zeros(0, int), np.zeros(0, int)
    num_bytes, steps, rows, slots = 0.0, 0, 0, 0
    while queue or len(rest):
        if not (waves and len(rest)):
            slots = 0 if waves else slots
            new = [queue.popleft() for _ in range(min(len(queue), most_rows - len(rest)))]
            rest, length = np.append(rest, new).astype(int), np.append(length, [PROMPT] * len(new)).astype(int)
            rows = max(rows, min(most_rows, pad_rows(len(rest))))
        rows = select_fewer_rows(rows, len(rest))
        fewest, begun, count = len(rest) - max(1, len(rest) // 8) + 1, len(rest), 0
        slots = max(slots, count_slots(int(length.max()) + CHUNK, PROMPT + LONGEST))
        while count < CHUNK and (rest > count).sum() >= min(fewest, begun):
            count += LOOK
        num_bytes += count * (of_token + rows * slots * of_slot)
        steps += count
        going_on = rest > count
        rest, length = rest[going_on] - count, length[going_on] + count
    return num_bytes, steps


def main(words: list[str]) -> None:
    from tunix.config.compose import compose
    from tunix.costs.devices import read_topology
    from tunix.plan.ranking import rank

    given = {"cache_dtype": "null"} | dict(word.split("=") for word in words)
    cfg = compose([
        "model=qwen3_8b", "model.vocab_size=151936", "task=grpo", "data=arithmetic", "task.rewards=[exact_match]",
        "task.group_size=8", "model.lora.rank=32", f"sampling.max_new_tokens={LONGEST}", "tokenizer=bytes",
        f"training.seq_len={LONGEST + PROMPT}", f"training.global_batch_size={ANSWERS}", "training.micro_batch_size=1",
        "task.chat_template='{{ messages[0].content }}'", f"sampling.cache_dtype={given['cache_dtype']}",
        "training.remat=full", "training.param_dtype=bfloat16", "plan.num_compiled=0",
    ]).config  # fmt: skip
    cluster = read_topology("h100:1")
    (best, *_) = rank(cfg, cluster).fit
    assert best.rollout is not None
    parts, rows = best.rollout.costs.num_bytes, best.rollout.rows_at_once
    of_slot = parts["cache"] / best.rollout.costs.rows / (PROMPT + LONGEST)
    lengths, bandwidth = draw_lengths(), cluster.kind.hbm_gb_per_s * 1e9
    print(f"{ANSWERS} answers of mean {lengths.mean():.0f}, {rows} rows, {of_slot / 1e3:.0f} kB a slot")
    rates = {}
    for waves in (True, False):
        num_bytes, steps = count_bytes(lengths, rows, parts["gathered weights"] + parts["logits"], of_slot, waves)
        rates[waves] = lengths.sum() / num_bytes * bandwidth
        print(f"{'waves' if waves else 'taken anew'}: {steps:,} tokens in a row, {rates[waves]:,.0f} tokens/s")
    print(f"ratio {rates[False] / rates[True]:.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
