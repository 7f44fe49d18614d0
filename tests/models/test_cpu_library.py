"""Products and attention in the forms of XLA's library for CPUs: the sums of equations, on every mesh, and no others."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.test_every_axis import config
from support.decoding import compile_decode
from support.harness import SMALL, batch

from tunix.config.compose import compose
from tunix.inference.rollout import Sampler
from tunix.inference.sampling import Sampling
from tunix.models import attention, cpu_library
from tunix.models.kernels import has_product_library
from tunix.models.matmul import product
from tunix.sharding.arrays import to_global
from tunix.sharding.table import Equation
from tunix.training.choices import build_layout, build_mesh
from tunix.training.train_spec import assemble

SIZES = {"D": 16, "N": 4, "H": 8, "F": 32, "V": 48, "r": 8}
LENGTH = 128  # the fewest queries that take the library


@pytest.fixture
def every_product(monkeypatch):
    """Let small products take the library too."""
    monkeypatch.setattr(cpu_library, "MANY_MULTIPLICATIONS", 0)


def list_dots(compiled: str) -> list[tuple[str, str, set[str | None]]]:
    """Return the products of a program: the name of the computation, the line, and the dtypes of the factors."""
    found = []
    for part in re.split(r"\n(?=%|ENTRY)", compiled):
        dtypes = dict(re.findall(r"(%[\w.\-]+)(?: =|:) (\w+)\[", part))
        for line in part.splitlines():
            if factors := re.search(r" dot\((%[\w.\-]+), (%[\w.\-]+)\)", line):
                found.append((part.split(" ")[0], line, {dtypes.get(factor) for factor in factors.groups()}))
    return found


def list_slow_dots(compiled: str) -> list[str]:
    """Return the products of 16-bit factors outside of the library: XLA has no loop for them, so they fail in a run."""
    in_library = set(re.findall(r"calls=(%[\w.\-]+).*__ynn_fusion", compiled))
    dots = [dot for dot in list_dots(compiled) if dot[0] not in in_library]
    return [line for _, line, dtypes in dots if dtypes & {"bf16", "f16", None}]


@pytest.mark.parametrize(
    ("mesh_shape", "sequences"),
    [("[[4,2],[fsdp,tp]]", 8), ("[[4,2],[fsdp,cp]]", 4), ("[[2,2,2],[dp,fsdp,tp]]", 4), ("[[1],[fsdp]]", 1)],
)
def test_results_and_gradients_are_those_of_the_equation(mesh_shape, sequences, every_product):
    """Sequences are split so that a device has several of them, or one, whose tokens become two dimensions."""
    cfg = compose([*SMALL, f"model.mesh_shape={mesh_shape}", "distributed.allow_idle_devices=true"]).config
    mesh = build_mesh(cfg)
    layout, rng, sizes = build_layout(cfg, mesh), np.random.default_rng(0), SIZES | {"B": sequences, "T": 32}
    with jax.set_mesh(mesh):
        for text in ("BTD,DNH->BTNH", "BTNH,NHD->BTD", "BTD,DF->BTF", "BTD,VD->BTV"):
            equation = Equation(text)
            arrays = [
                rng.normal(size=[sizes[dim_name] for dim_name in dim_names]).astype("float32")
                for dim_names in (equation.x, equation.w, equation.y)
            ]
            specs = layout.activation(equation.x), layout.stored(equation), layout.activation(equation.y)
            placed = [jax.device_put(x, jax.NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]

            def both(x, w, g, equation=equation):
                y, back = jax.vjp(lambda x, w: product(equation, x, layout.gather(w, equation), layout), x, w)
                return y, *back(g)

            x, w, g = arrays
            of_w = f"{equation.x},{equation.y}->{equation.w}"
            expected = np.einsum(text, x, w), np.einsum(equation.transposed().text, g, w), np.einsum(of_w, x, g)
            for found, value in zip(jax.jit(both)(*placed), expected, strict=True):
                np.testing.assert_allclose(found, value, rtol=1e-5, atol=2e-5, err_msg=text)


@pytest.mark.parametrize(("heads", "cap"), [((4, 1), None), ((4, 2), 5.0)])
def test_attention_and_its_gradients_are_those_of_autodiff(heads, cap):
    """Also those of the logs of sums, and where values are wider than keys."""
    rng, (num_heads, kv_heads) = np.random.default_rng(0), heads
    shapes = (num_heads, 8), (kv_heads, 8), (kv_heads, 12), (num_heads, 12), (num_heads,)
    q, k, v, g, g_sums = (rng.normal(size=(2, LENGTH, *shape)).astype(np.float32) for shape in shapes)
    mask = np.tril(np.ones((2, 1, LENGTH, LENGTH), bool))

    @partial(jax.jit, static_argnums=0)
    def run(weigh, q, k, v):
        results, back = jax.vjp(lambda q, k, v: weigh(q, k, v, mask, cap, True), q, k, v)
        return *results, *back((g, g_sums))

    # Without a mesh `_weigh_values` does not know that it is on a CPU.
    both = (run(weigh, q, k, v) for weigh in (cpu_library.weigh_values, attention._weigh_values))
    for found, value in zip(*both, strict=True):
        np.testing.assert_allclose(found, value, rtol=2e-5, atol=2e-5)


def test_attention_of_float32_takes_the_library_on_cpus_alone():
    for platform, dtypes, expected in (
        ("cpu", ("float32", "float32"), True),
        ("cpu", ("bfloat16", "bfloat16"), True),
        ("cpu", ("bfloat16", "float32"), False),
        ("cpu", ("float16", "float16"), False),
        ("gpu", ("bfloat16", "bfloat16"), False),
    ):
        device = jax.sharding.AbstractDevice(device_kind=platform, num_cores=None, platform=platform)
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
            assert has_product_library(*map(jnp.dtype, dtypes)) == expected


def assemble_in_16_bits(family: str, rank: int):
    """Return a mesh of one device, and the program of a tiny model in bfloat16."""
    cfg = config(family)
    lora = cfg.model.lora.model_copy(update={"rank": rank})
    model = {"mesh_shape": ((1,), ("fsdp",)), "context_length": max(LENGTH, cfg.model.context_length), "lora": lora}
    training = {"seq_len": LENGTH, "micro_batch_size": 2, "mixed_precision": "bf16"}
    parts = {"model": cfg.model.model_copy(update=model), "training": cfg.training.model_copy(update=training)}
    cfg = cfg.model_copy(update=parts)
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        return mesh, assemble(cfg, mesh)


def gradients_of(family: str, rank: int):
    """Return the mesh, the compiled gradients of a tiny model in bfloat16 on one device, and their arguments."""
    mesh, program = assemble_in_16_bits(family, rank)
    with jax.set_mesh(mesh):
        rows = to_global(batch(2, length=LENGTH, vocab=min(program.cfg.model.vocab_size, 96)), mesh)
        arguments = program.new_params(0), rows, jnp.zeros(1, jnp.int32)
        return mesh, jax.jit(program.gradients()).lower(*arguments).compile(), arguments


@pytest.mark.nightly(but=["llama, lora"])
@pytest.mark.parametrize(
    "name", ["llama, lora", "gemma2", "gemma3", "gpt2", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next"]
)
def test_no_product_of_16_bits_stands_outside_of_the_library(name, every_product):
    """Forward and backward, of attention, experts, latent and linear attention, low-rank updates, logits."""
    family, *lora = name.split(", ")
    mesh, compiled, arguments = gradients_of(family, rank=8 if lora else 0)
    text = compiled.as_text()
    assert "__ynn_fusion" in text
    assert not list_slow_dots(text)
    with jax.set_mesh(mesh):
        grads, _, sums = compiled(*arguments)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((grads, sums)))


@pytest.mark.nightly(but=["llama-16"])
@pytest.mark.parametrize("num_rows", [1, 8, 16])
@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "gemma3", "gpt2", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next"]
)
def test_decoding_in_16_bits_takes_the_library_and_widens_no_cache(family, num_rows):
    """Of the compiled loop over tokens; and answers are drawn."""
    mesh, program = assemble_in_16_bits(family, rank=0)
    with jax.set_mesh(mesh):
        params = program.new_params(0)
        sampler = Sampler(program.arch, LENGTH, mesh)
    text = compile_decode(sampler, params, num_rows, LENGTH, Sampling(4)).as_text() or ""
    assert any(dtypes == {"bf16"} for _, _, dtypes in list_dots(text)), "weights are widened"
    assert not list_slow_dots(text)
    # Latents are joined to keys for each token, in float32.
    widened = rf"= f32\[{num_rows},(?:(?:\d+,)?128,\d+\]\S* scatter|\d+,128,\d+\]\S* convert)\("
    assert not re.findall(widened, text), "the cache is widened"
    answers = sampler(params, [[1, 2, 3]] * num_rows, Sampling(4))
    assert np.isfinite([answer.log_probabilities for answer in answers]).all()


def test_a_product_outside_of_the_library_is_found():
    """XLA folds the turn of a result into its product, which the library does not take then."""
    x, w = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((256, 128), (128, 512)))
    compiled = jax.jit(lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32).T).lower(x, w).compile()
    assert list_slow_dots(compiled.as_text())


def test_sine_and_cosine_are_computed_once_for_each_rotation():
    """Gemma 3 has one of global and one of local layers."""
    cfg = config("gemma3")
    cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"mesh_shape": ((1,), ("fsdp",))})})
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        program = assemble(cfg, mesh)
        seeds = jax.ShapeDtypeStruct((1,), jnp.int32)
        traced = jax.jit(program.gradients()).trace(program.abstract["params"], program.abstract_batch, seeds)
    assert len(re.findall(r"= sin\b", str(traced.jaxpr))) == 2
