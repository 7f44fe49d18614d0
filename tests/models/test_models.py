"""The decoder: the sizes of its families, and who attends to whom. What it computes is in test_parity.py."""

import re

import jax
import numpy as np
import pytest
from support.harness import ROOT, SGD, batch, program

from tunix.base.config_types import CONF
from tunix.config.compose import compose
from tunix.models.attention import Method, compute_attention
from tunix.models.attention_mask import row_mask_rule
from tunix.sharding.arrays import to_global
from tunix.training.choices import build_layout, build_mesh
from tunix.training.state import describe

SIZES = {
    "gemma3_270m": 268_098_176, "gemma3_1b": 999_885_952, "gemma3_4b": 3_880_263_168, "gemma3_12b": 11_766_034_176,
    "gemma3_27b": 27_009_346_304, "gemma3_4b_vision": 4_300_079_472, "gemma3_12b_vision": 12_187_325_040,
    "gemma3_27b_vision": 27_432_406_640, "llama3_1b": 1_235_814_400, "llama3_3b": 3_212_749_824, "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496, "llama3_405b": 405_853_388_800, "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976, "qwen3_4b": 4_022_468_096, "qwen3_8b": 8_190_735_360, "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264, "olmo2_1b": 1_484_916_736, "olmo2_7b": 7_298_617_344, "olmo2_13b": 13_716_198_400,
    "olmo2_32b": 32_234_279_936, "gpt2_124m": 124_439_808, "gpt2_355m": 354_823_168, "gpt2_774m": 774_030_080,
    "gpt2_1_5b": 1_557_611_200, "qwen2_5_0_5b": 494_032_768, "qwen2_5_1_5b": 1_543_714_304,
    "qwen2_5_3b": 3_085_938_688, "qwen2_5_7b": 7_615_616_512, "qwen2_5_14b": 14_770_033_664,
    "qwen2_5_32b": 32_763_876_352, "qwen2_5_72b": 72_706_203_648, "mistral_7b": 7_248_023_552,
    "smollm3_3b": 3_075_098_624, "olmo3_7b": 7_298_011_136, "olmo3_32b": 32_233_522_176, "phi3_mini": 3_821_079_552,
    "phi4_14b": 14_659_507_200, "seed_oss_36b": 36_151_104_512, "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560, "olmoe_7b_a1b": 6_919_161_856, "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112, "gemma2_2b": 2_614_341_888, "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320, "glm4_9b": 9_400_279_040, "minitron_4b": 4_190_509_056, "granite3_2b": 2_533_539_840,
    "granite3_8b": 8_170_864_640, "exaone4_1_2b": 1_279_391_488, "exaone4_32b": 32_003_216_384,
    "ministral3_8b": 8_489_553_920, "apertus_8b": 8_053_338_176, "apertus_70b": 70_599_864_480,
    "glm4_5_air": 106_852_251_264, "glm4_5": 352_797_829_024, "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672, "deepseek_v3": 671_026_419_200, "kimi_k2": 1_026_408_232_448,
    "llama4_scout": 107_769_861_120, "llama4_maverick": 400_711_848_960, "qwen3_5_9b": 8_953_803_264,
    "moonlight_16b_a3b": 15_960_110_208,
    "gemma4_31b": 30_697_345_340, "gemma4_12b": 11_907_350_320,  # with the scales of layers, transformers' buffers
    "qwen3_next_80b_a3b": 79_674_391_296, "qwen3_5_35b_a3b": 34_660_610_688,
    "qwen3_vl_2b": 2_127_532_032, "qwen3_vl_4b": 4_437_815_808, "qwen3_vl_8b": 8_767_123_696,
    "qwen3_vl_32b": 33_357_390_064,
    "gemma4_26b_a4b": 25_233_141_790, "gemma4_e2b": 4_628_569_379, "gemma4_e4b": 7_463_013_418,
    "smolvlm_256m": 256_484_928, "smolvlm_500m": 507_482_304, "smolvlm_2_2b": 2_246_272_880,
    "smolvlm2_2_2b": 2_246_784_880,
}  # fmt: skip


def test_every_size_is_counted():
    own = {"tiny", "tiny_moe", "tiny_vision", "adder", "pretrained"}
    assert {path.stem for path in (CONF / "model").glob("*.yaml")} - own == set(SIZES)


def test_every_size_is_in_the_table():
    page = (ROOT / "docs" / "models.md").read_text()
    assert [size for size in SIZES if f"`{size}`" not in page] == []  # `make docs` writes the table


@pytest.mark.parametrize("size", SIZES)
def test_parameters_of_each_size(size):
    """As published, and as transformers counts them."""
    cfg = compose([f"model={size}", "model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true"]).config
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        assert describe(cfg.model, build_layout(cfg, mesh)).num_parameters == SIZES[size]


def small_logits(one, tokens, **more):
    with jax.set_mesh(one.mesh):
        return np.asarray(
            jax.jit(lambda params, *args: one.arch.module(params)(*args))(one.state["params"], tokens, *more.values())
        )


def test_packed_documents_do_not_see_one_another():
    """Logits of two documents in one row are those of each in a row of its own, and do not move with the other."""
    one = program("model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true")
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 320, (1, 12)), rng.integers(0, 320, (1, 20))
    packed = np.concatenate([first, second], 1)
    segments = np.array([[1] * 12 + [2] * 20])
    positions = np.array([[*range(12), *range(20)]])
    together = small_logits(one, packed, positions=positions, segments=segments)
    np.testing.assert_allclose(together[:, :12], small_logits(one, first), atol=1e-5)
    np.testing.assert_allclose(together[:, 12:], small_logits(one, second), atol=1e-5)
    apart = small_logits(one, packed)
    assert np.abs(apart[:, 12:] - together[:, 12:]).max() > 1e-3  # without the ids they do


def attend_alone(q, k, v, segments, window):
    cfg = compose(["model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true"]).config
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        layout = build_layout(cfg, mesh)
        dim_names = ("BTNH", "BTKH", "BTKH", "BS")
        laid_out = [
            jax.device_put(x, layout.activation(dims)) for x, dims in zip((q, k, v, segments), dim_names, strict=True)
        ]

        @jax.jit
        def attended(q, k, v, segments, window):
            return compute_attention(q, k, v, row_mask_rule(segments, window), layout, Method("xla", "none", {}))

        return np.asarray(attended(*laid_out, window))


def reference_attention(q, k, v, segments, window):
    """The definition, one query at a time."""
    out = np.zeros_like(q)
    batches, length, heads, _ = q.shape
    group = heads // k.shape[2]
    for b in range(batches):
        for n in range(heads):
            for t in range(length):
                is_near = t - np.arange(t + 1) < window
                seen = np.flatnonzero(is_near & (segments[b, : t + 1] == segments[b, t]))
                scores = k[b, seen, n // group] @ q[b, t, n]
                weights = np.exp(scores - scores.max())
                out[b, t, n] = (weights / weights.sum()) @ v[b, seen, n // group]
    return out


@pytest.mark.parametrize(
    ("length", "window"), [(24, 24), (24, 5), (24, 1), (1030, 40), (1030, 600)]
)  # the last two in blocks of queries, by both ways
def test_attention_is_causal_local_and_within_the_document(length, window):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, length, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    segments = np.sort(rng.integers(0, 3, (1, length)))
    found = attend_alone(q, k, v, segments, np.int32(window))
    np.testing.assert_allclose(found, reference_attention(q, k, v, segments, window), atol=2e-5)


@pytest.mark.nightly
def test_whole_logits_never_exist_and_chunks_leave_the_loss_unchanged():
    """No array of the program is as large as [B, T, V], nor by default; with one chunk there is one."""
    words = [*SGD, "model.mesh_shape=[[4,2],[fsdp,tp]]", "model.vocab_size=4096", "model.embed_dim=16", "model.num_layers=1",
             "model.global_every=1"]  # fmt: skip
    largest, numbers = {}, {}
    for chunk in (32, 8, "auto"):
        step, rows = program(*words, f"training.loss_chunk_size={chunk}"), batch(sequences=8)
        compiled = step.compile(rows)
        shapes = re.findall(r"f32\[([\d,]+)\]", compiled.as_text())
        largest[chunk] = max(int(np.prod([int(d) for d in dims.split(",")])) for dims in shapes)
        with jax.set_mesh(step.mesh):
            data = to_global(rows, step.mesh)
            for _ in range(2):
                step.state, numbers[chunk] = compiled(step.state, data)
    whole = 2 * 32 * (4096 // 2)  # of one device: two sequences, half of the vocabulary
    assert largest[32] >= whole
    assert max(largest[8], largest["auto"]) < whole
    for chunk in (8, "auto"):
        assert float(numbers[chunk]["loss"]) == pytest.approx(float(numbers[32]["loss"]), rel=1e-6)
        assert float(numbers[chunk]["grad_norm"]) == pytest.approx(float(numbers[32]["grad_norm"]), rel=1e-5)
