"""A rollout draws the same answers on every mesh, and its loop moves nothing between data shards."""

from functools import cache

import jax
import numpy as np
import pytest
from support.harness import program

from tunix.costs import rollout as rollout_sizes
from tunix.costs.hlo import read_collectives
from tunix.costs.rollout import derive_rollout_costs
from tunix.inference.sampling import PromptBatch, Request, Sampler, Sampling
from tunix.sharding.arrays import bytes_per_device
from tunix.sharding.table import data_axes
from tunix.training.program import assemble

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 320, length).tolist() for length in (5, 20, 3, 9)]
STOP = tuple(range(0, 320, 16))  # most answers end early, at different lengths; some do not
HOW = Sampling(40, temperature=1.3, stop=STOP)
ALONE, PURE_TP = "[[1],[fsdp]]", "[[2],[tp]]"
MESHES = (PURE_TP, "[[8],[fsdp]]", "[[4,2],[fsdp,tp]]", "[[2,2,2],[fsdp,cp,tp]]", "[[2,2],[pp,fsdp]]")
WORDS = ["model.num_layers=2", "model.global_every=2", "distributed.allow_idle_devices=true"]


class Rollout:
    """A sampler on a mesh, and its answers: 8 to each of 4 prompts."""

    def __init__(self, mesh, *words):
        self.program = program(*WORDS, f"model.mesh_shape={mesh}", *words)
        self.mesh, self.params = self.program.mesh, self.program.state["params"]
        self.sampler = Sampler(self.program.arch, 128, self.mesh)
        take, self.halved = self.sampler.take, []  # rows that went on, each time that ended ones were let go

        def take_and_note(rows, places):
            self.halved.append(len(places))
            return take(rows, places)

        self.sampler.take = take_and_note
        self.answers = self.draw(PROMPTS)

    def draw(self, prompts, sampling=HOW, seed=1, first_row=5, answers_per_prompt=8, prompts_at_once=None):
        with jax.set_mesh(self.mesh):
            request = Request(prompts, answers_per_prompt, seed, first_row)
            return self.sampler.rollout(self.params, request, sampling, prompts_at_once)


@pytest.fixture(scope="module")
def rollout_on():
    return cache(Rollout)


@pytest.fixture
def alone(rollout_on):
    return rollout_on(ALONE)


def test_answers_differ_and_rows_of_ended_ones_are_dropped(alone):
    assert len({tuple(answer.tokens) for answer in alone.answers}) == len(alone.answers)
    assert alone.halved[:2] == [16, 8]  # of 32 rows on a device


@pytest.mark.nightly(but=[PURE_TP, "[[8],[fsdp]]", "[[4,2],[fsdp,tp]]"])
@pytest.mark.parametrize("mesh", MESHES)
def test_same_answers_on_every_mesh(mesh, alone, rollout_on):
    """Where rows are halved when half of them have ended (one shard), and where a shard has too few rows for that."""
    other = rollout_on(mesh)
    assert [answer.tokens for answer in other.answers] == [answer.tokens for answer in alone.answers]
    for one, same in zip(alone.answers, other.answers, strict=True):
        np.testing.assert_allclose(one.sampled_log_probabilities, same.sampled_log_probabilities, atol=1e-5)
    # On other meshes than PURE_TP each device has 8 rows or fewer.
    assert other.halved[:2] == ([16, 8] if mesh == PURE_TP else [])


def test_an_answer_ends_at_its_first_stop_id_or_at_its_length(alone):
    assert {answer.stopped for answer in alone.answers} == {True, False}
    for answer in alone.answers:
        assert [token in STOP for token in answer.tokens] == [False] * (len(answer.tokens) - 1) + [answer.stopped]
        assert answer.stopped or len(answer.tokens) == HOW.max_new_tokens
        assert len(answer.tokens) == len(answer.log_probabilities) == len(answer.sampled_log_probabilities)


def test_log_probabilities_are_those_of_the_distribution_drawn_from(alone):
    answer, prompt = alone.answers[0], PROMPTS[0]
    with jax.set_mesh(alone.mesh):
        logits = np.asarray(alone.program.arch.module(alone.params)(np.array([prompt + answer.tokens])), np.float64)[0]
    for temperature, given in ((1.3, answer.sampled_log_probabilities), (1.0, answer.log_probabilities)):
        tempered = logits[len(prompt) - 1 : -1] / temperature
        requested = tempered - np.log(np.exp(tempered).sum(-1, keepdims=True))
        np.testing.assert_allclose(given, requested[np.arange(len(answer.tokens)), answer.tokens], atol=1e-5)


def test_an_answer_depends_on_its_prompt_its_number_and_the_seed_alone(alone, monkeypatch):
    tokens = [answer.tokens for answer in alone.answers]
    repeated = [prompt for prompt in PROMPTS for _ in range(8)]
    assert [answer.tokens for answer in alone.draw(repeated, answers_per_prompt=1)] == tokens
    assert [answer.tokens for answer in alone.draw(PROMPTS, prompts_at_once=2)] == tokens
    assert [answer.tokens for answer in alone.draw(PROMPTS[1:2], first_row=5 + 8)] == tokens[8:16]
    for other in ({"seed": 2}, {"first_row": 6}):
        assert all(answer.tokens != before for answer, before in zip(alone.draw(PROMPTS, **other), tokens, strict=True))
    monkeypatch.setattr(rollout_sizes, "SMALLEST_CACHE", 16)  # the cache grows while answers do
    assert [answer.tokens for answer in alone.draw(PROMPTS[2:3], first_row=5 + 16)] == tokens[16:24]


def test_the_loop_moves_nothing_between_data_shards(rollout_on):
    for mesh, kinds in (("[[8],[fsdp]]", set()), ("[[4,2],[fsdp,tp]]", {"all-reduce", "all-gather"})):
        rollout = rollout_on(mesh)
        with jax.set_mesh(rollout.mesh):
            compiled = rollout.sampler.compile_decode_chunk(rollout.params, 4, 8, 72, HOW)
        inside = [each for each in read_collectives(compiled.as_text()) if "while" in each.scope]
        axes = {axis for each in inside for axis in each.find_axes(dict(rollout.mesh.shape))}
        assert not axes & set(data_axes()), mesh
        assert {each.kind for each in inside if each.find_axes(dict(rollout.mesh.shape))} == kinds


def test_sizes():
    looks = [0]
    while looks[-1] < 200:
        looks.append(rollout_sizes.find_next_look(looks[-1], 200))
    assert looks[1:] == [8, 16, 32, 64, 128, 192, 200]
    assert [rollout_sizes.pad_prompts(n) for n in range(1, 14)] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
    spread = [rollout_sizes.spread_prompts(n, 8, 16) for n in (16, 20, 8, 3, 1)]
    assert spread == [(16, 1), (24, 2), (8, 2), (4, 4), (2, 8)]
    assert [rollout_sizes.count_slots(n, 300) for n in (20, 128, 129, 257)] == [128, 128, 256, 300]
    assert [rollout_sizes.select_fewer_rows(64, n) for n in (64, 33, 32, 17, 1, 0)] == [64, 64, 32, 32, 8, 8]


def test_memory_has_room_for_the_rows_that_go_on(alone):
    """They are taken out of the whole cache, which is there until then: 32 rows of one size, of which 16 go on."""
    with jax.set_mesh(alone.mesh):
        built = assemble(alone.program.cfg, alone.mesh)
        of_32, of_8 = (derive_rollout_costs(built, count, 8, 20, HOW.max_new_tokens).num_bytes for count in (4, 1))
    assert of_32["cache"] == 4 * of_8["cache"]
    assert (of_32["other cache"], of_8["other cache"]) == (of_32["cache"] // 2, 0)


def test_memory_is_that_of_the_arrays(rollout_on):
    """Weights, cache and programs as derived and as they are, on a mesh that splits rows and heads."""
    rollout = rollout_on("[[4,2],[fsdp,tp]]")
    mesh, sampler = rollout.mesh, rollout.sampler
    with jax.set_mesh(mesh):
        built = assemble(rollout.program.cfg, mesh)
        costs = derive_rollout_costs(built, len(PROMPTS), 8, 20, HOW.max_new_tokens)
        weights = sampler.gather(rollout.params)
        wave = PromptBatch(PROMPTS, list(range(8 * len(PROMPTS))), 0)
        rows, *_ = sampler._begin(weights, wave, HOW, jax.random.key(0))
    assert costs.num_bytes["gathered weights"] == bytes_per_device(weights)
    assert costs.num_bytes["cache"] == bytes_per_device(rows.cache)
    assert costs.rows == len(rows.token) // 4
    assert sampler.run_decode_chunk._cache_size() + sampler.begin._cache_size() < costs.num_programs
