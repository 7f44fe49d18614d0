"""Predicted tokens/s of a rollout on one H100, rows taken anew beside waves: `python -m benchmarks.rollout_prediction`.

Nothing runs on a GPU. An 8B with LoRA draws 1,024 answers of a mean of 1,472 and at most 8,192 tokens behind prompts of
256, eight to each. The plan says how many rows and pages fit and what a token reads: the weights, the logits, and all
slots of all rows, or the pages that the rows at work have. A token takes the time of its bytes at the H100's bandwidth.
Words: `cache_dtype=int8`.
"""

import sys
from collections import deque

import numpy as np

from benchmarks.arguments import read_values
from tunix.costs.rollout import CHUNK, PAGE, count_slots, pad_rows, select_fewer_rows
from tunix.inference.page_pool import PagePool

ANSWERS, GROUP, LONGEST, PROMPT, MEDIAN = 1024, 8, 8192, 256, 1000
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


def count_page_bytes(
    lengths: np.ndarray, most_rows: int, num_pages: int, of_token: float, of_slot: float
) -> tuple[float, int, int]:
    """Do as `count_bytes` with pages, as the engine gives them; return also the calls for which a row has waited."""
    pool = PagePool(PROMPT + LONGEST, num_pages)
    shared: tuple[int, ...] = ()
    length, rest = {}, {}  # of rows at work
    num_bytes, steps, waits, number = 0.0, 0, 0, 0
    while number < len(lengths) or rest:
        while number < len(lengths) and len(rest) < most_rows:
            begun = pool.begin(number, PROMPT, shared)
            if begun is None:
                break
            shared, length[number], rest[number] = begun, PROMPT, int(lengths[number])
            number += 1
            if number % GROUP == 0:
                pool.give_back(shared)
                shared = ()
        working = pool.extend({row: length[row] + min(CHUNK, rest[row]) for row in rest})
        waits += len(rest) - len(working)
        fewest, count = len(working) - max(1, len(working) // 8) + 1, 0
        while count < CHUNK and sum(rest[row] > count for row in working) >= min(fewest, len(working)):
            count += LOOK
        for row in working:
            drawn = min(count, rest[row])
            num_bytes += of_slot * PAGE * sum(-(-(length[row] + at + 1) // PAGE) for at in range(drawn))
            length[row], rest[row] = length[row] + drawn, rest[row] - drawn
            if not rest[row]:
                pool.release(row)
                del rest[row], length[row]
        num_bytes, steps = num_bytes + count * of_token, steps + count
    return num_bytes, steps, waits


def main(words: list[str]) -> None:
    from tunix.config.compose import compose
    from tunix.costs.devices import read_topology
    from tunix.plan.ranking import rank

    given = read_values(words, cache_dtype="null")
    cluster, plans = read_topology("h100:1"), {}
    for cache in ("slots", "pages"):
        cfg = compose([
            "model=qwen3_8b", "model.vocab_size=151936", "task=grpo", "data=arithmetic", "task.rewards=[exact_match]",
            f"task.group_size={GROUP}", "model.lora.rank=32", f"sampling.max_new_tokens={LONGEST}", "tokenizer=bytes",
            f"training.seq_len={LONGEST + PROMPT}", f"training.global_batch_size={ANSWERS}",
            "training.micro_batch_size=1", "task.chat_template='{{ messages[0].content }}'",
            f"sampling.cache_dtype={given['cache_dtype']}", f"sampling.cache={cache}", "training.remat=full",
            "training.param_dtype=bfloat16", "plan.num_compiled=0",
        ]).config  # fmt: skip
        plans[cache] = rank(cfg, cluster).fit[0].rollout
    slots, pages = plans["slots"], plans["pages"]
    assert slots is not None
    assert pages is not None
    of_slot = slots.costs.num_bytes["cache"] / slots.costs.rows / (PROMPT + LONGEST)
    lengths, bandwidth = draw_lengths(), cluster.kind.hbm_gb_per_s * 1e9
    print(f"{ANSWERS} answers of mean {lengths.mean():.0f}, {of_slot / 1e3:.0f} kB a token")
    rates = []
    for label, plan in (("waves", slots), ("taken anew", slots), ("pages", pages)):
        num_bytes, rows = plan.costs.num_bytes, plan.rows_at_once
        of_token = num_bytes["gathered weights"] + num_bytes["logits"]
        if plan.num_pages is None:
            read, steps = count_bytes(lengths, rows, of_token, of_slot, waves=label == "waves")
        else:
            read, steps, waits = count_page_bytes(lengths, rows, plan.num_pages, of_token, of_slot)
            label += f" for {plan.num_pages * PAGE:,} tokens, {waits:,} waits"
        rates.append(lengths.sum() / read * bandwidth)
        print(f"{label}: {rows} rows, {steps:,} tokens in a row, {rates[-1]:,.0f} tokens/s, {rates[-1] / rates[0]:.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
