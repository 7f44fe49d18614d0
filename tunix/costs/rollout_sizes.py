"""Sizes of a rollout: how its arrays are padded, and from this its compiled programs and its memory.

A rollout draws answers to many prompts at once. Shapes are rounded up, so that few programs serve all of them:

    prompts     padded on the left to a power of two
    rows        rounded up to 1, 2, 3, 4, 6, 8, 12, 16, ... prompts, times the answers to each
    slots       of the cache: a power of two, at most twice what is filled; it grows while the answers grow
    stretches   the host looks at the answers after 8, 16, 32, 64, 128, 192, ... tokens, and lets ended rows go
"""

import math

SMALLEST_PROMPT = 16  # tokens that a prompt is padded to, and more by powers of two
SMALLEST_CACHE = 128  # slots; below it, weights are nearly all that is read for a token
STRETCH = 64  # tokens between two looks at the answers
FIRST_STRETCH = 8
MATRIX_SHARE = 0.25  # of a device's memory: quantized weights that take more of it as matrices stay codes
FEWEST_ROWS = 8  # of a data shard, that are not halved again: reading the weights is most of the time


def pad_prompt(num_tokens: int) -> int:
    """Return the tokens that prompts of at most `num_tokens` are padded to."""
    return max(SMALLEST_PROMPT, 1 << (num_tokens - 1).bit_length())


def pad_prompts(num_prompts: int) -> int:
    """Return the number that so many prompts are filled up to: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    power = 1 << (num_prompts - 1).bit_length()
    return power * 3 // 4 if power >= 4 and num_prompts <= power * 3 // 4 else power


def count_prompts_at_once(rows_at_once: int | None, answers_per_prompt: int) -> int | None:
    """Return the prompts that are answered at one time, where so many answers are drawn; None for all."""
    return None if rows_at_once is None else max(1, rows_at_once // answers_per_prompt)


def spread_prompts(num_prompts: int, answers_per_prompt: int, num_shards: int) -> tuple[int, int]:
    """Return the number that so many prompts are filled up to, and how often each is computed.

    The data shards divide the product of both. Each prompt is computed once where the shards divide the prompts. Fewer
    prompts than shards are computed several times, and the answers to one are spread over several shards: with 8 shards
    and 8 answers to a prompt, 32 prompts are computed once, and each of 3 prompts 8 times, once for each answer.
    """
    count, best = pad_prompts(num_prompts), []
    for copies in range(1, answers_per_prompt + 1):
        if answers_per_prompt % copies == 0:
            multiple = num_shards // math.gcd(num_shards, copies)
            best.append((-(-count // multiple) * multiple, copies))
    return min(best)


def count_slots(num_times: int, last: int) -> int:
    """Return the slots of the cache for `num_times` times of rows that end at `last` times at the latest."""
    return min(last, max(SMALLEST_CACHE, 1 << (num_times - 1).bit_length()))


def find_next_look(number: int, last: int) -> int:
    """Return the number of tokens after which the host looks next, when it has `number` of at most `last`.

    It looks after 8, 16, 32, 64 tokens, and from then on after every 64.
    """
    if number < STRETCH:
        return min(last, max(FIRST_STRETCH, 1 << number.bit_length()))
    return min(last, (number // STRETCH + 1) * STRETCH)


def choose_fewer_rows(rows: int, going_on: int) -> int:
    """Return the rows of a data shard to go on with, of which `going_on` have no end yet: a half, a quarter, ..."""
    while rows % 2 == 0 and rows // 2 >= max(FEWEST_ROWS, going_on):
        rows //= 2
    return rows


def fit_as_matrices(num_bytes: int, device_bytes: int | None) -> bool:
    """Return whether quantized weights, `num_bytes` as matrices, are made matrices once and not at each use.

    `device_bytes` is the memory of a device; None, as of a CPU, sets no limit.
    """
    return device_bytes is None or num_bytes <= MATRIX_SHARE * device_bytes
