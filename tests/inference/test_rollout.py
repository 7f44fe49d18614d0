"""A rollout draws the same answers on every mesh, with any number of rows, and its loop moves no cache."""

import json
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.decoding import compile_decode
from support.harness import ROOT, experts, program

from tunix.costs import rollout as rollout_sizes
from tunix.costs.hlo import read_collectives
from tunix.costs.rollout import (
    CacheSpec,
    RolloutCosts,
    _count_cache_bytes,
    _count_weight_bytes,
    derive_rollout_costs,
)
from tunix.inference.engine import Engine
from tunix.inference.kv_cache import make_cache
from tunix.inference.rollout import Request, Sampler
from tunix.inference.sampling import Sampling
from tunix.sharding.arrays import bytes_per_device
from tunix.sharding.mesh import device_mesh, whole_sequences
from tunix.sharding.table import data_axes
from tunix.training.train_spec import assemble

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 320, length).tolist() for length in (5, 20, 3, 9)]
STOP = tuple(range(0, 320, 16))  # most answers end early, at different lengths; some do not
HOW = Sampling(40, temperature=1.3, stop=STOP)
ALONE, PURE_TP = "[[1],[fsdp]]", "[[2],[tp]]"
MESHES = (PURE_TP, "[[8],[fsdp]]", "[[4,2],[fsdp,tp]]", "[[2,2,2],[fsdp,cp,tp]]", "[[2,2],[pp,fsdp]]")
# Drawn by the sampler that answered prompts in waves (commit b0fcd05).
EXPECTED = json.loads((ROOT / "tests" / "inference" / "expected_tokens.json").read_text())["rollout"]
WORDS = ["model.num_layers=2", "model.global_every=2", "distributed.allow_idle_devices=true"]


class Rollout:
    """A sampler on a mesh, and its answers: 8 to each of 4 prompts."""

    def __init__(self, mesh, *words):
        self.program = program(*WORDS, f"model.mesh_shape={mesh}", *words)
        self.mesh, self.params = self.program.mesh, self.program.state["params"]
        self.sampler = Sampler(self.program.arch, 128, self.mesh)
        resize, self.resized = self.sampler.programs.resize, []  # rows that went on, each time that the cache changed

        def resize_and_note(cache, rows, windows):
            self.resized.append(len(rows))
            return resize(cache, rows, windows)

        self.sampler.programs.resize = resize_and_note
        self.answers = self.draw(PROMPTS)

    def draw(self, prompts, sampling=HOW, seed=1, first_row=5, answers_per_prompt=8, rows_at_once=None):
        with jax.set_mesh(self.mesh):
            request = Request(prompts, answers_per_prompt, seed, first_row)
            return self.sampler.rollout(self.params, request, sampling, rows_at_once)


@pytest.fixture(scope="module")
def rollout_on():
    return cache(Rollout)


@pytest.fixture
def alone(rollout_on):
    return rollout_on(ALONE)


def test_answers_are_those_of_waves_and_rows_of_ended_ones_are_dropped(alone):
    assert [answer.tokens for answer in alone.answers] == EXPECTED
    assert alone.resized == [8]  # of 32 rows on a device


@pytest.mark.nightly(but=["[[4,2],[fsdp,tp]]"])
@pytest.mark.parametrize("mesh", MESHES)
def test_same_answers_on_every_mesh(mesh, alone, rollout_on):
    """Where rows are halved when half of them have ended (one shard), and where a shard has too few rows for that."""
    other = rollout_on(mesh)
    assert [answer.tokens for answer in other.answers] == [answer.tokens for answer in alone.answers]
    for one, same in zip(alone.answers, other.answers, strict=True):
        np.testing.assert_allclose(one.sampled_log_probabilities, same.sampled_log_probabilities, atol=1e-5)
    # On other meshes than PURE_TP each device has 8 rows or fewer.
    assert other.resized == ([8] if mesh == PURE_TP else [])


def test_noise_is_where_rows_are():
    """With ep and cp, whole sequences need the devices of the caller's mesh in another order."""
    mesh = device_mesh(((2, 2), ("ep", "cp")), {"X": 2}, allow_idle=True)
    programs = SimpleNamespace(mesh=whole_sequences(mesh), num_shards=4, find_paged=lambda _: (False,))
    assert programs.mesh.devices.tolist() != mesh.devices.reshape(programs.mesh.devices.shape).tolist()
    with jax.set_mesh(mesh):  # that of a run
        engine = Engine(programs, None, HOW, seed=0, max_length=64, max_rows=None)
    with jax.set_mesh(engine.mesh):
        jax.jit(jax.random.bits)(engine.key)


@pytest.mark.nightly(but=["[[4,2],[fsdp,tp]]"])
@pytest.mark.parametrize("mesh", MESHES)
def test_pages_on_every_mesh(mesh, alone, rollout_on, monkeypatch):
    """Rows wait for pages: a data shard has 12, and a row of the longest length 5. At the end all are free."""
    rollout, engines = rollout_on(mesh), []
    make = lambda *given: engines.append(Engine(*given)) or engines[-1]  # noqa: E731
    monkeypatch.setattr("tunix.inference.rollout.Engine", make)
    rollout.sampler.num_pages = 12
    answers = rollout.draw(PROMPTS, replace(HOW, cache="pages"))
    rollout.sampler.num_pages = None
    assert {len(pool.free) for pool in engines[0].pools} == {12}
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in alone.answers]


def test_an_answer_ends_at_its_first_stop_id_or_at_its_length(alone):
    assert {answer.stopped for answer in alone.answers} == {True, False}
    for answer in alone.answers:
        assert [token in STOP for token in answer.tokens] == [False] * (len(answer.tokens) - 1) + [answer.stopped]
        assert answer.stopped or len(answer.tokens) == HOW.max_new_tokens
        assert len(answer.tokens) == len(answer.log_probabilities) == len(answer.sampled_log_probabilities)


def test_log_probabilities_are_those_of_the_distribution_drawn_from(alone):
    answer, prompt = alone.answers[0], PROMPTS[0]
    forward = jax.jit(lambda params, tokens: alone.program.arch.module(params)(tokens))
    with jax.set_mesh(alone.mesh):
        logits = np.asarray(forward(alone.params, np.array([prompt + answer.tokens])), np.float64)[0]
    for temperature, given in ((1.3, answer.sampled_log_probabilities), (1.0, answer.log_probabilities)):
        tempered = logits[len(prompt) - 1 : -1] / temperature
        requested = tempered - np.log(np.exp(tempered).sum(-1, keepdims=True))
        np.testing.assert_allclose(given, requested[np.arange(len(answer.tokens)), answer.tokens], atol=1e-5)


@pytest.mark.nightly
def test_an_answer_depends_on_its_prompt_its_number_and_the_seed_alone(alone, monkeypatch):
    tokens = [answer.tokens for answer in alone.answers]
    repeated = [prompt for prompt in PROMPTS for _ in range(8)]
    assert [answer.tokens for answer in alone.draw(repeated, answers_per_prompt=1)] == tokens
    # Each of five rows takes the next answer when its own has ended.
    assert [answer.tokens for answer in alone.draw(PROMPTS, rows_at_once=5)] == tokens
    assert [answer.tokens for answer in alone.draw(PROMPTS[1:2], first_row=5 + 8)] == tokens[8:16]
    for other in ({"seed": 2}, {"first_row": 6}):
        assert all(answer.tokens != before for answer, before in zip(alone.draw(PROMPTS, **other), tokens, strict=True))
    monkeypatch.setattr(rollout_sizes, "MIN_CACHE", 16)  # the cache grows while answers do
    monkeypatch.setattr(rollout_sizes, "PREFILL_TOKENS", 32)  # prompts are computed two at a time
    assert [answer.tokens for answer in alone.draw(PROMPTS[2:3], first_row=5 + 16)] == tokens[16:24]


@pytest.mark.nightly
def test_the_loop_moves_nothing_between_data_shards(rollout_on):
    """But for the number of rows at work, one number after every few tokens, in the outer one of two loops."""
    for mesh, kinds in (("[[8],[fsdp]]", set()), ("[[4,2],[fsdp,tp]]", {"all-reduce", "all-gather"})):
        rollout = rollout_on(mesh)
        sizes = dict(rollout.mesh.shape)
        with jax.set_mesh(rollout.mesh):
            compiled = compile_decode(rollout.sampler, rollout.params, 32, 72, HOW)
        outer = [each for each in read_collectives(compiled.as_text()) if "while" in each.scope]
        inside = [each for each in outer if each.scope.count("while") > 1]
        axes = {axis for each in inside for axis in each.find_axes(sizes)}
        assert not axes & set(data_axes()), mesh
        assert {each.kind for each in inside if each.find_axes(sizes)} == kinds
        (counted,) = [each for each in outer if set(each.find_axes(sizes)) & set(data_axes())]
        assert (counted.kind, counted.num_bytes) == ("all-reduce", 4)


def test_sizes():
    assert [rollout_sizes.pad_rows(n) for n in range(1, 14)] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
    assert [rollout_sizes.pad_batch(n) for n in range(1, 10)] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert [rollout_sizes.pad_prompt(n) for n in (1, 16, 17)] == [16, 16, 32]
    assert [rollout_sizes.pad_few(n) for n in (1, 2, 4, 5, 16, 17)] == [1, 4, 4, 16, 16, 64]
    assert rollout_sizes._list_slots(100, 1000) == [128, 256, 512, 1000]
    assert [rollout_sizes.count_prefill_prompts(n) for n in (1, 16, 17, 5000, 40_000)] == [1024, 1024, 512, 2, 1]
    assert [rollout_sizes.count_slots(n, 400) for n in (20, 128, 129, 257)] == [128, 128, 256, 400]
    assert [rollout_sizes.count_slots(n, 300) for n in (128, 129)] == [128, 300]  # 256 slots would be nearly all
    assert [rollout_sizes.select_fewer_rows(64, n) for n in (64, 33, 32, 17, 1, 0)] == [64, 64, 32, 32, 8, 8]
    assert [rollout_sizes.select_fewer_rows(256, n, 64) for n in (129, 128, 1)] == [256, 128, 64]


def test_other_rollouts_have_weights_and_caches_of_their_own():
    num_bytes = {"gathered weights": 5, "cache": 3, "other cache": 2, "logits": 1}
    costs = RolloutCosts(1, num_bytes, 1, 0.0, 0.0)
    assert costs.with_others(0) == costs
    assert costs.with_others(2).num_bytes == num_bytes | {"other rollouts": 2 * (5 + 3 + 2)}


def test_memory_has_room_for_the_rows_that_go_on(alone):
    """They are taken out of the whole cache, which is there until then: 32 rows of one size, of which 16 go on."""
    with jax.set_mesh(alone.mesh):
        built = assemble(alone.program.cfg, alone.mesh)
        of_32, of_8 = (
            derive_rollout_costs(built.arch, alone.mesh, rows, 4, 8, 20, HOW.max_new_tokens).num_bytes
            for rows in (32, 8)
        )
    assert of_32["cache"] == 4 * of_8["cache"]
    assert (of_32["other cache"], of_8["other cache"]) == (of_32["cache"] // 2, 0)


def test_memory_is_that_of_the_arrays(rollout_on):
    """Weights, cache and programs as derived and as they are, on a mesh that splits rows and heads."""
    rollout = rollout_on("[[4,2],[fsdp,tp]]")
    mesh, sampler = rollout.mesh, rollout.sampler
    with jax.set_mesh(mesh):
        built = assemble(rollout.program.cfg, mesh)
        costs = derive_rollout_costs(built.arch, mesh, 32, len(PROMPTS), 8, 20, HOW.max_new_tokens)
        weights = sampler.gather(rollout.params)
        engine = sampler.engine(weights, HOW, 1, 72)
        for number, prompt in enumerate(PROMPTS):
            engine.admit(prompt, range(8 * number, 8 * number + 8), HOW.max_new_tokens)
        engine.run()
    assert costs.num_bytes["gathered weights"] == bytes_per_device(weights)
    assert costs.num_bytes["cache"] == bytes_per_device(engine.cache)
    assert costs.rows == engine.num_rows == 8
    assert sampler.programs.num_compiled < costs.num_programs


LATENT = "{query_dim: null, dim: 8, value_dim: 8}"
LINEAR = "{num_key_heads: 2, num_value_heads: 4, key_dim: 8, value_dim: 8, filter_size: 4}"
CACHES = {
    "windows": ([], CacheSpec()),
    "8 bits": ([], CacheSpec("int8")),
    "shared keys": (
        [
            "++model.global_heads={head_dim: 12, num_kv_heads: 1, values_are_keys: false}", "model.num_layers=6",
            "++model.shared_kv={layers: 2, mlp_dim: 128}", "model.mlp_dim=64", "model.local_rope_theta=1e4",
        ],
        CacheSpec(),
    ),
    "linear attention": (
        [f"++model.linear_attention={LINEAR}", "model.sliding_window=null", "model.attention_gate=true"],
        CacheSpec(),
    ),
    "latents of 8 bits": (
        [
            "model=deepseek_v3", "model.num_kv_heads=4", "model.head_dim=12", "model.rotated_dim=4", experts(),
            f"model.latent={LATENT}", "model.sliding_window=null", "model.global_every=1",
        ],
        CacheSpec("int8"),
    ),
    "guesses": (
        [
            "model=glm4_5_air", "model.rotated_dim=4", "model.sliding_window=null", "model.global_every=1", experts(),
            "model.mtp={loss_weight: 0.3}",
        ],
        CacheSpec(by_mtp=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CACHES)
def test_a_row_of_a_cache_has_the_bytes_that_are_derived(kind):
    words, spec = CACHES[kind]
    built = program(*WORDS, f"model.mesh_shape={ALONE}", *words).built
    sampler, model = Sampler(built.arch, 128, built.mesh), built.arch.model
    prefill = partial(sampler.programs.prefill, cache_dtype=spec.dtype, with_mtp=spec.by_mtp)
    with jax.set_mesh(built.mesh):
        weights = jax.eval_shape(partial(sampler.gathering, as_matrices=True), built.abstract["params"])
        tokens, counts = (
            jax.ShapeDtypeStruct(shape, np.int32, sharding=NamedSharding(built.mesh, PartitionSpec(data_axes())))
            for shape in ((2, 16), (2,))
        )
        entries = jax.eval_shape(prefill, weights, tokens, counts, counts)[1]
    windows = (*model.list_windows(48), *((48, 0) if spec.by_mtp else ()))
    cache = jax.eval_shape(partial(make_cache, num_rows=3, windows=windows), entries)
    found = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert found == 3 * _count_cache_bytes(built.arch, built.mesh, 48, spec)


@pytest.mark.parametrize("quantized", ["int8", "nf4"])
def test_gathered_weights_have_the_bytes_that_are_derived(quantized):
    """As matrices, where the devices' memory is four times as much or sets no limit, else as codes and scales."""
    lora = "model.lora.rank=2", f"model.lora.quantize_base={quantized}"
    built = program(*WORDS, f"model.mesh_shape={ALONE}", *lora).built
    gathering = Sampler(built.arch, 128, built.mesh).gathering
    with jax.set_mesh(built.mesh):
        matrices, codes = (
            sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))
            for weights in (
                jax.eval_shape(partial(gathering, as_matrices=as_matrices), built.abstract["params"])
                for as_matrices in (True, False)
            )
        )
    count = partial(_count_weight_bytes, built.arch, built.mesh)
    assert (count(None), count(4 * matrices), count(4 * matrices - 4)) == (matrices, matrices, codes)
