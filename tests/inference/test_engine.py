"""Rows of the engine: turns with observations between them, rows that wait, and models with caches of every kind."""

import json
import shutil
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from support.harness import ROOT
from support.rollouts import TASK

import tunix
from tunix.base.errors import UserError
from tunix.inference import kv_cache
from tunix.inference.engine import Engine
from tunix.inference.page_pool import PagePool
from tunix.inference.rollout import Request
from tunix.inference.sampling import NO_TOKEN, Sampling, select
from tunix.models import paged_attention

PARITY = ROOT / "tests" / "models" / "parity"
# Drawn by the sampler that answered prompts in waves (commit b0fcd05).
EXPECTED = json.loads((ROOT / "tests" / "inference" / "expected_tokens.json").read_text())
FAMILIES = sorted(set(EXPECTED) - {"rollout"})


def make_prompts(vocab_size: int, lengths=(3, 20, 9)) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, min(vocab_size, 60), length).tolist() for length in lengths]


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_waves(name):
    """Two answers to each of three prompts, on four rows: the last ones take rows of others."""
    model = tunix.load_pretrained(PARITY / name)
    sampling = Sampling(24, temperature=1.3, stop=tuple(range(0, model.cfg.vocab_size, 24)))
    prompts = make_prompts(model.cfg.vocab_size)
    answers = model.rollout(Request(prompts, 2, seed=7, first_row=5), sampling, rows_at_once=4)
    assert [answer.tokens for answer in answers] == EXPECTED[name]


@pytest.mark.nightly(but=["gpt2"])
@pytest.mark.parametrize("name", ["gemma4_small", "qwen3_5", "deepseek_v3", "llama4", "gpt_oss", "gpt2"])
def test_guesses_change_no_token(name, monkeypatch):
    """Rows guess what followed the two newest tokens earlier; here a prompt repeats itself, so that many are right. There
    are slots for all that a row draws until it waits for the others."""
    model = tunix.load_pretrained(PARITY / name)
    sampling = Sampling(24, temperature=0.2, stop=(0,), guess=3)
    prompts = [prompt * 2 for prompt in make_prompts(model.cfg.vocab_size)]
    lengths, resize, guess = [], Engine._resize, model.sampler.programs.guess

    def guess_and_note(weights, cache, rows, *arguments, **keywords):
        results = guess(weights, cache, rows, *arguments, **keywords)
        counts = (np.asarray(results[1].tokens) != NO_TOKEN).sum(1)
        lengths[-1] = lengths[-1], (np.asarray(rows.length) + counts).max(), counts.max()
        return results

    monkeypatch.setattr(
        Engine, "_resize", lambda self, rows, length: lengths.append(length) or resize(self, rows, length)
    )
    monkeypatch.setattr("tunix.inference.engine.CHUNK", 4)
    model.sampler.programs.guess = guess_and_note
    guessed, plain = (model.sample(prompts, each, seed=7) for each in (sampling, replace(sampling, guess=0)))
    assert [answer.tokens for answer in guessed] == [answer.tokens for answer in plain]
    asked, longest, counts = zip(*(each for each in lengths if isinstance(each, tuple)), strict=True)
    assert max(counts) > 4
    assert all(length <= most for length, most in zip(longest, asked, strict=True))
    for one, other in zip(guessed, plain, strict=True):
        np.testing.assert_allclose(one.sampled_log_probabilities, other.sampled_log_probabilities, atol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gemma3", "deepseek_v3", "gemma4_small", "gpt_oss", "gpt2"])
def test_a_cache_of_8_bits_is_near(name, tmp_path):
    """Log-probabilities of tokens are nearly those of the model; the cache is of int8, with a scale for each vector.

    Tokens of gpt_oss go to all of its experts: with random weights, rounding would send some to another expert, whose
    result is quite another (docs/log/inference.md). Sinks and windows are in force.
    """
    folder = shutil.copytree(PARITY / name, tmp_path / name)
    info = json.loads((folder / "config.json").read_text())
    if "num_local_experts" in info:
        (folder / "config.json").write_text(json.dumps(info | {"num_experts_per_tok": info["num_local_experts"]}))
    model = tunix.load_pretrained(folder)
    sampling = Sampling(16, temperature=1.0, cache_dtype="int8")
    prompts = make_prompts(model.cfg.vocab_size)
    answers = model.sample(prompts, sampling, seed=7, rows_at_once=2)
    assert [a.tokens for a in model.sample(prompts, sampling, seed=7)] == [a.tokens for a in answers]
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = np.asarray(model(np.array([prompt + answer.tokens])), np.float64)[0]
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = [log_probs[len(prompt) - 1 + n, token] for n, token in enumerate(answer.tokens)]
        np.testing.assert_allclose(answer.log_probabilities, expected, atol=0.1)
        assert np.abs(np.array(answer.log_probabilities) - expected).max() > 1e-6  # it is rounded


PAGED = ["gemma3", "gemma4_small", "qwen3_5", "llama4", "gpt_oss", "gpt2", "phi3_short"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", PAGED)
def test_pages_change_no_token(name):
    """Three answers to each prompt share its full pages; with few pages rows wait for those of others.

    In 8 bits a number that is nearly between two codes may take the other one.
    """
    model = tunix.load_pretrained(PARITY / name)
    prompts = make_prompts(model.cfg.vocab_size, (3, 20, 9, 17))
    stop = tuple(range(0, model.cfg.vocab_size, 24))
    for sampling, num_pages in (
        (Sampling(24, 1.3, stop=stop), 9),  # a row of the longest length has 4
        (Sampling(24, 0.0, guess=3), None),
        (Sampling(24, 1.3, cache_dtype="int8"), 9),
    ):
        model.sampler.num_pages = num_pages
        request = Request(prompts, 3, seed=7, first_row=5)
        drawn = [model.rollout(request, replace(sampling, cache=cache), 5) for cache in ("slots", "pages")]
        assert [answer.tokens for answer in drawn[0]] == [answer.tokens for answer in drawn[1]]
        for one, other in zip(*drawn, strict=True):
            atol = 0.01 if sampling.cache_dtype else 1e-5
            np.testing.assert_allclose(one.log_probabilities, other.log_probabilities, atol=atol)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "sampling"),
    [("llama", Sampling(6, 1.3)), ("gemma3", Sampling(12, 0.0, guess=3))],
    ids=["sampled", "guessed"],
)
def test_the_kernel_of_gpus_changes_no_token(name, sampling, monkeypatch):
    """The engine with the kernel that GPUs have, which is interpreted here: rows come and go."""
    model = tunix.load_pretrained(PARITY / name)
    monkeypatch.setattr(kv_cache, "branches_are_cheap", lambda: False)
    monkeypatch.setattr(paged_attention, "attend_to_pages", partial(paged_attention.attend_to_pages, interpret=True))
    request = Request(make_prompts(model.cfg.vocab_size), 2, seed=7)
    slots, pages = (model.rollout(request, replace(sampling, cache=cache), 4) for cache in ("slots", "pages"))
    assert [answer.tokens for answer in slots] == [answer.tokens for answer in pages]


def test_a_model_without_such_layers_keeps_slots():
    for name, part in (("deepseek_v3", "model.latent keeps latents"), ("mistral", "no layer of the model keeps all")):
        model = tunix.load_pretrained(PARITY / name)
        assert not any(model.sampler.programs.find_paged(Sampling(4, cache="auto")))
        with pytest.raises(UserError, match=f"sampling.cache=pages: {part}"):
            model.sample([[5, 6]], Sampling(4, cache="pages"))
    words = [*TASK, "model.sliding_window=8", "model.global_every=9", "dry_run=true"]
    for key in ("sampling.cache", "evaluation.sampling.cache"):
        with pytest.raises(UserError, match=rf"^{key}=pages: no layer of the model keeps .* set {key}=auto"):
            tunix.train([*words, f"{key}=pages"])


OBSERVATIONS = [[41, 42], [43] * 13, [44, 45, 46]]  # a short one, and one that is longer than the windows
TURN = 6  # tokens of a turn at most
LENGTHS = 3, 14, 9  # of the prompts


def converse(model, sampling, rows, waits, fixed_shapes=False):
    """Three turns of each of three conversations; conversation n waits `waits[n]` calls of `run` for each observation."""
    engine = model.sampler.engine(model.params, sampling, 3, 64, rows, fixed_shapes)
    for number, prompt in enumerate(make_prompts(model.cfg.vocab_size, LENGTHS)):
        engine.admit(prompt, [number], TURN)
    turns, due, calls = {0: [], 1: [], 2: []}, {}, 0
    while engine.is_busy:
        for number, answer in engine.run():
            turns[number].append(answer)
            due[number] = calls + waits[number]
        for number in [each for each, call in due.items() if call <= calls]:
            del due[number]
            if len(turns[number]) == 3:
                engine.release(number)
            else:
                engine.extend(number, OBSERVATIONS[(number + len(turns[number])) % 3], TURN)
        calls += 1
    return turns


def check_against_one_pass(model, turns, temperature):
    """Tokens and log-probabilities of all turns are those of one pass over the whole conversation, drawn with noise that
    depends on how many tokens were drawn before."""
    for number, prompt in enumerate(make_prompts(model.cfg.vocab_size, LENGTHS)):
        text, places, found = list(prompt), [], []
        for count, answer in enumerate(turns[number], 1):
            places += range(len(text), len(text) + len(answer.tokens))
            found += answer.sampled_log_probabilities
            text += answer.tokens + (OBSERVATIONS[(number + count) % 3] if count < 3 else [])
        logits = np.asarray(model(np.array([text + [0] * (64 - len(text))])), np.float64)[0] / temperature
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = [log_probs[place - 1, text[place]] for place in places]
        np.testing.assert_allclose(found, expected, atol=2e-5)
        keys = jax.vmap(partial(jax.random.fold_in, jax.random.fold_in(jax.random.key(3), number)))(
            np.arange(len(places))
        )
        drawn = jax.jit(select, static_argnums=2)(log_probs[np.array(places) - 1], keys, Sampling(TURN))
        assert drawn.tokens.tolist() == [text[place] for place in places]


@pytest.mark.nightly(but=["gpt2"])
@pytest.mark.parametrize(
    "name",
    ["gemma4_small", "qwen3_5", "qwen3_next", "deepseek_v3", "llama4", "gpt_oss", "gpt2", "gemma2", "phi3_short"],
)
def test_turns_continue_the_cache(name):
    """Observations stand behind the turns, whatever the kinds of layers, the number of rows, and who waits for whom."""
    model = tunix.load_pretrained(PARITY / name)
    sampling = Sampling(TURN, temperature=1.3, stop=tuple(range(0, model.cfg.vocab_size, 24)))
    turns = converse(model, sampling, None, (0, 0, 0))
    assert {len(each) for each in turns.values()} == {3}
    assert len({answer.stopped for each in turns.values() for answer in each}) == 2
    check_against_one_pass(model, turns, 1.3)
    for cache in ("slots", "pages") if model.cfg.find_page_problem() is None else ("slots",):
        model.sampler.num_pages = 8  # as few as there may be
        other = converse(model, replace(sampling, cache=cache), 2, (0, 3, 1))
        assert [[a.tokens for a in turns[number]] for number in turns] == [
            [a.tokens for a in other[number]] for number in other
        ]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gemma4_small", "qwen3_5", "gpt2", "deepseek_v3"])
def test_with_fixed_shapes_waits_change_no_bit(name):
    """Who waits for whom decides which rows are computed together; log-probabilities are the same to the last bit."""
    model = tunix.load_pretrained(PARITY / name)
    sampling = Sampling(TURN, temperature=1.3)
    turns = converse(model, sampling, 3, (0, 0, 0), fixed_shapes=True)
    check_against_one_pass(model, turns, 1.3)
    for waits in ((0, 3, 1), (2, 0, 2)):
        assert converse(model, sampling, 3, waits, fixed_shapes=True) == turns
    if model.cfg.find_page_problem() is None:
        paged = replace(sampling, cache="pages")
        turns = converse(model, paged, 3, (0, 0, 0), fixed_shapes=True)
        model.sampler.num_pages = 9  # so that rows wait for pages, too
        assert converse(model, paged, 3, (0, 3, 1), fixed_shapes=True) == turns


@pytest.mark.nightly
def test_rows_on_data_shards_are_the_same():
    """Turns on four devices: two data shards, whose devices share the heads."""
    words = {"mesh_shape": ((2, 2), ("fsdp", "tp"))}
    alone, split = (tunix.load_pretrained(PARITY / "gemma3", **more) for more in ({}, words))
    sampling = Sampling(TURN, temperature=1.3)
    one, other = (converse(model, sampling, None, waits) for model, waits in ((alone, (0, 0, 0)), (split, (2, 0, 1))))
    assert [[a.tokens for a in one[number]] for number in one] == [
        [a.tokens for a in other[number]] for number in other
    ]


def test_a_row_that_waits_holds_its_place_and_a_released_one_gives_it_up():
    model = tunix.load_pretrained(PARITY / "gpt2")
    engine = model.sampler.engine(model.params, Sampling(4), 0, 32, 2)
    engine.admit([5, 6, 7], range(4), 4)
    with jax.set_mesh(model.mesh):
        (first, _), (second, _) = engine.run()
    assert (first, second, engine.num_working) == (0, 1, 2)
    assert engine.run() == []  # two answers wait for the rows
    assert engine.count_remaining_tokens(0) == 32 - 3 - 4
    engine.release(0)
    assert [number for number, _ in engine.run()] == [2]
    engine.release(1)
    engine.release(2)
    assert [number for number, _ in engine.run()] == [3]
    engine.release(3)
    assert not engine.is_busy
    with pytest.raises(UserError, match="rows of 99999 tokens are longer than the model's context of"):
        model.sampler.engine(model.params, Sampling(4), 0, 99999)


@pytest.mark.parametrize("seed", range(4))
def test_rows_share_few_pages(seed):
    """Rows begin, grow, wait and end at random: no two write to one page, all can end, and no page is lost."""
    rng, pool = (
        np.random.default_rng(seed),
        PagePool(max_length=100, num_pages=1),
    )  # 7 pages of 16 tokens for a row, and at least two rows
    waiting = [(prompt, answer) for prompt in range(12) for answer in range(3)]
    lengths = rng.integers(1, 6, 12) * 16 - rng.integers(0, 2, 12)
    shared, sizes, ended = dict.fromkeys(range(12), ()), {}, 0

    def check():
        own = [page for number, table in pool.tables.items() for page in table[int(lengths[number // 3]) // 16 :]]
        assert len(own) == len(set(own))
        used = set(own).union(*shared.values(), *pool.tables.values())
        assert sorted([*pool.free, *used]) == list(range(14))

    while waiting or sizes:
        before = ended, len(waiting), sum(sizes.values())
        while waiting:
            prompt, answer = waiting[0]
            pages = pool.begin(3 * prompt + answer, int(lengths[prompt]), shared[prompt])
            if pages is None:
                break
            waiting.pop(0)
            sizes[3 * prompt + answer], shared[prompt] = int(lengths[prompt]), pages
            if answer == 2:
                pool.give_back(shared.pop(prompt))
                shared[prompt] = ()
            check()
        wanted = {number: min(100, size + int(rng.integers(1, 30))) for number, size in sizes.items()}
        for number in pool.extend(wanted):
            assert len(pool.tables[number]) * 16 >= wanted[number]
            sizes[number] = wanted[number]
        check()
        for number in [number for number, size in sizes.items() if size == 100 or rng.random() < 0.1]:
            pool.release(number)
            del sizes[number]
            ended += 1
        check()
        assert before != (ended, len(waiting), sum(sizes.values())), "all rows wait"
    assert ended == 36
    assert sorted(pool.free) == list(range(14))


def test_a_row_begins_only_where_all_rows_can_still_end():
    pool = PagePool(max_length=112, num_pages=14)  # two rows of the longest length
    # Of two prompts that have more answers: 5 full pages, which these share, and one.
    shared = [pool.begin(number, 80, ()) for number in (0, 1)]
    assert [len(pages) for pages in shared] == [5, 5]
    # A row that ends gives back one page, and no shared ones.
    assert pool.begin(2, 10, None) is None
    assert pool.begin(2, 20, ()) is None
    assert len(pool.free) == 2
    assert pool.extend({0: 112}) == {0}
    assert pool.begin(2, 16, None) is None  # one page is free, and its first drawn token needs a second one
    pool.release(0)
    pool.give_back(shared[0])  # the last answer to the first prompt has begun
    assert pool.begin(2, 16, None) == ()
