"""Adapters of PEFT are gone on with: `adapters/make.py` made them, and what PEFT says of models that have them."""

import json
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from models.test_parity import PARITY
from safetensors.numpy import load_file, save_file
from support.harness import experts
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import tunix
from tunix.base import progress
from tunix.base.errors import UserError
from tunix.config import Export, Generate
from tunix.config.command_line import read_settings
from tunix.config.compose import compose
from tunix.export import export
from tunix.generate import generate
from tunix.huggingface.adapter import gather_adapter, remark_on_base
from tunix.huggingface.adapter_config import name_in_auto_model, read_adapter, write_adapter_config
from tunix.huggingface.sentence_vectors import list_files
from tunix.inference.pretrained import check_init_from, load_init_from
from tunix.models import lora
from tunix.models.layers import DropoutKey, named
from tunix.models.lora import LowRank
from tunix.sharding.arrays import to_global
from tunix.sharding.table import Equation
from tunix.training import train_spec as training
from tunix.training.choices import build_mesh

ADAPTERS = Path(__file__).parent / "adapters"
SHORT = [
    "training.seq_len=24", "training.loss_chunk_size=24", "training.mixed_precision=fp32", "tokenizer.vocab_size=300",
    "distributed.allow_idle_devices=true", "training.micro_batch_size=2", "training.remat=none",
]  # fmt: skip


def words(name: str) -> list[str]:
    return [f"model.init_from={PARITY / name}", f"model.init_adapter={ADAPTERS / name}", *SHORT]


def start(name: str, mesh_shape: str):
    """Return the program of a run that begins with an adapter, its mesh, and its first state."""
    cfg = compose([*words(name), f"model.mesh_shape={mesh_shape}", "optimizer.learning_rate=1e-2"]).config
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        built = training.assemble(cfg, mesh)
        check_init_from(cfg, built.arch)
        return built, mesh, built.new_state(0, load_init_from(built, mesh))


def logits(built, mesh, state, tokens) -> np.ndarray:
    with jax.set_mesh(mesh):
        rows = to_global({"tokens": tokens[None]}, mesh)["tokens"][0]
        return np.asarray(jax.jit(lambda params, rows: built.arch.module(params)(rows))(state["params"], rows))


def test_an_adapter_of_a_llama():
    """PEFT's logits, and PEFT's bits on the way out; alpha is divided by the root of the rank there."""
    built, mesh, state = start("llama", "[[2],[tp]]")
    assert built.cfg.model.lora.targets == "^(attention.q|attention.v|mlp.down)$"
    assert (built.cfg.model.lora.rank, built.cfg.model.lora.alpha, built.cfg.model.lora.scale) == (4, 6, 3)
    assert not built.cfg.model.keeps_base
    tokens = load_file(PARITY / "llama/expected.safetensors")["tokens"]
    expected = load_file(ADAPTERS / "llama/expected.safetensors")["logits"]
    np.testing.assert_allclose(logits(built, mesh, state, tokens), expected, atol=1e-4)
    with jax.set_mesh(mesh):
        tensors, modules = gather_adapter(state["params"], built.cfg.model, built.arch.weights, "float32")
    before = load_file(ADAPTERS / "llama/adapter_model.safetensors")
    assert tensors.keys() == before.keys()
    assert all(np.array_equal(tensors[name], before[name]) for name in before)
    assert modules == {"q_proj", "v_proj", "down_proj"}


def words_of_the_vocabulary(folder: Path, count: int) -> None:
    """Give a folder a tokenizer of one token for each word w0, w1, ..."""
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(count)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_commands_take_a_loose_adapter(tmp_path, capsys, caplog, monkeypatch):
    """Generated words are PEFT's; an export has the adapter's bits, or the base with the updates added. What takes
    long says so.
    """
    monkeypatch.setattr(progress, "QUIET_S", 0.001)
    base, adapter = tmp_path / "base", ADAPTERS / "llama"
    shutil.copytree(PARITY / "llama", base)
    words_of_the_vocabulary(base, 97)
    tokens = load_file(base / "expected.safetensors")["tokens"]
    expected = load_file(adapter / "expected.safetensors")["logits"]
    beside = [f"checkpoint={base}", f"adapter={adapter}"]
    prompt = " ".join(f"w{token}" for token in tokens[0])
    words = [*beside, f"prompt={prompt}", "max_new_tokens=1", "temperature=0"]
    generate(read_settings(Generate, words))
    printed = capsys.readouterr()
    assert "the adapter was made for base_model_name_or_path=" in caplog.text
    assert printed.out == f" w{expected[0, -1].argmax()}\n"
    assert f"reading {base}: 0 s so far" in printed.err
    assert "answering prompts 1 to 1 of 1: 0 s so far" in printed.err
    export(read_settings(Export, [*beside, f"output={tmp_path / 'adapter'}"]))
    export(read_settings(Export, [*beside, f"output={tmp_path / 'merged'}", "merge_lora=true", "dtype=float32"]))
    assert f"writing {tmp_path / 'merged'}: 0 s so far" in capsys.readouterr().err
    np.testing.assert_allclose(tunix.load_pretrained(tmp_path / "merged")(tokens), expected, atol=1e-4)
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, tmp_path / "adapter"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(after[name], before[name]) for name in before)
    info = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (info["base_model_name_or_path"], info["r"]) == (str(base), 4)


def test_an_adapter_of_vectors_is_read_and_written_as_that_of_auto_model(tmp_path):
    """As sentence-transformers has it: names without a head's class, and its files beside them; the merged model too."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(PARITY / "llama", base)
    words_of_the_vocabulary(base, 97)
    shutil.copytree(ADAPTERS / "llama", adapter)
    for name, content in list_files("mean", 32, 64).items():
        (adapter / name).parent.mkdir(exist_ok=True)
        (adapter / name).write_text(json.dumps(content))
    shutil.copy(base / "tokenizer.json", adapter)
    file = adapter / "adapter_model.safetensors"
    tensors = {name_in_auto_model(name): tensor for name, tensor in load_file(file).items()}
    assert "base_model.model.layers.0.self_attn.q_proj.lora_A.weight" in tensors
    save_file(tensors, file, metadata={"format": "pt"})

    tokens = load_file(base / "expected.safetensors")["tokens"]
    expected = load_file(ADAPTERS / "llama" / "expected.safetensors")["logits"]
    np.testing.assert_allclose(tunix.load_pretrained(base, adapter=adapter)(tokens), expected, atol=1e-4)
    for output, merged in (("again", "false"), ("merged", "true")):
        words = [f"checkpoint={base}", f"adapter={adapter}", f"output={tmp_path / output}", f"merge_lora={merged}"]
        export(read_settings(Export, words))
        for name in (*list_files("mean", 32, 64), "tokenizer.json"):
            assert (tmp_path / output / name).read_text() == (adapter / name).read_text()
    assert load_file(tmp_path / "again/adapter_model.safetensors").keys() == tensors.keys()
    info = json.loads((tmp_path / "again/adapter_config.json").read_text())
    assert info["task_type"] == "FEATURE_EXTRACTION"


def test_loose_adapters_that_do_not_fit(tmp_path):
    base = PARITY / "llama"
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("")
    shutil.copy(ADAPTERS / "llama/adapter_config.json", tmp_path)
    os.mkfifo(tmp_path / "adapter_model.safetensors")
    for source, adapter, message in (
        (base, "nowhere", "adapter=nowhere is neither a folder nor the ID of a model"),
        (base, PARITY / "llama", "has no adapter_config.json: it is no adapter of PEFT"),
        (base, tmp_path, "has no adapter_model.safetensors: it is no adapter of PEFT"),
        (base, ADAPTERS / "deepseek_v3", "is no low-rank update of a projection of a llama"),
        (PARITY / "llama_linear", ADAPTERS / "llama", "of a layer that the base does not have"),
        (tmp_path / "run", ADAPTERS / "llama", "is a run of tunix, which has updates of its own or none"),
    ):
        with pytest.raises(UserError, match=message) as error:
            tunix.load_pretrained(source, adapter=adapter)
        assert "\n" not in str(error.value)


def test_an_adapter_of_whole_numbers_is_refused(tmp_path):
    shutil.copy(ADAPTERS / "llama/adapter_config.json", tmp_path)
    tensors = load_file(ADAPTERS / "llama/adapter_model.safetensors")
    save_file({name: tensor.astype("int8") for name, tensor in tensors.items()}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"q_proj.lora_A.weight holds I8, not"):
        tunix.load_pretrained(PARITY / "llama", adapter=tmp_path)


@pytest.mark.parametrize("init", ["zero", "pissa"])
@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize(
    "mlp", [["model.lora.dropout=0.1"], [experts(), "model.lora.targets=mlp"]], ids=["dense", "experts"]
)
def test_peft_multiplies_updates_by_our_factor(init, use_rslora, mlp):
    """PEFT divides alpha by r, or by its square root; an update of PiSSA has twice our rank in the file."""
    keys = {"rank": 4, "alpha": 6, "init": init, "use_rslora": use_rslora}
    model = compose([*(f"model.lora.{key}={value}" for key, value in keys.items()), *mlp]).config.model
    info = write_adapter_config(model, {"q_proj"}, "logits")
    factor = info["lora_alpha"] / (info["r"] ** 0.5 if info["use_rslora"] else info["r"])
    assert factor == pytest.approx(6 / (2 if use_rslora else 4))
    assert info["r"] == (8 if init == "pissa" else 4)
    assert info["lora_dropout"] == model.lora.dropout


@pytest.mark.parametrize(("key", "value"), [
    ("r", -2), ("r", 0), ("r", True), ("r", "4"), ("lora_alpha", math.nan), ("lora_alpha", math.inf), ("lora_alpha", 10**400), ("lora_alpha", -1),
])  # fmt: skip
def test_numbers_of_an_adapter_that_are_none(key, value, tmp_path):
    """With alpha NaN a model answered, by logits that are none."""
    config = json.loads((ADAPTERS / "llama/adapter_config.json").read_text()) | {key: value}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"adapter_config\.json: r=.* and lora_alpha=.* must be numbers"):
        read_adapter(tmp_path, "llama")


@pytest.mark.nightly
def test_an_adapter_of_latents_learns():
    """From PEFT's loss on. Every factor moves; the base stays, and with it what follows the loads of experts."""
    built, mesh, state = start("deepseek_v3", "[[1],[fsdp]]")
    tokens = load_file(PARITY / "deepseek_v3/expected.safetensors")["tokens"]
    expected = load_file(ADAPTERS / "deepseek_v3/expected.safetensors")["logits"]
    before = {name: np.asarray(leaf) for name, leaf in named(state["params"])}
    rows, targets = batch_of(tokens)
    with jax.set_mesh(mesh):
        batch = to_global(rows, mesh)
        step = jax.jit(built.step([(100, 1000)])).lower(state, batch).compile()
        losses = []
        for _ in range(2):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    log_probs = np.asarray(jax.nn.log_softmax(expected))
    nll = -np.take_along_axis(log_probs, targets[..., None], -1)
    assert losses[0] == pytest.approx(float(nll.mean()), abs=1e-5)
    assert losses[1] < losses[0]
    for name, leaf in named(state["params"]):
        assert np.array_equal(before[name], np.asarray(leaf)) == (".lora." not in name), name


def batch_of(tokens: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A microbatch of rows that learn the next token, the first one behind the last, and these targets."""
    targets = np.roll(tokens, -1, 1)
    rows = {
        "tokens": tokens, "targets": targets, "positions": np.tile(np.arange(tokens.shape[1], dtype=np.int32), (len(tokens), 1)),
        "segment_ids": np.zeros(tokens.shape, np.int32), "loss_mask": np.ones(tokens.shape, np.float32),
    }  # fmt: skip
    return {name: leaf[None] for name, leaf in rows.items()}, targets


FORMS = {
    "llama_dora": ["model.init_adapter=DIR", "model.lora.loraplus_lr_ratio=4"],
    "llama_pissa": ["model.lora.rank=4", "model.lora.alpha=6", "model.lora.init=pissa", "model.lora.targets='attention.[qv]|down'"],
}  # fmt: skip
ADAMW = [
    "optimizer.learning_rate=1e-2", "optimizer.b1=0.9", "optimizer.b2=0.95", "optimizer.eps=1e-8", "optimizer.weight_decay=0",
    "scheduler=constant", "scheduler.warmup_ratio=0", "training.max_grad_norm=null",
]  # fmt: skip


@pytest.mark.parametrize("mesh_shape", [pytest.param("[[1],[fsdp]]", marks=pytest.mark.nightly), "[[2,2],[fsdp,tp]]"])
@pytest.mark.parametrize("name", FORMS)
def test_forms_of_updates_learn_as_in_peft(name, mesh_shape):
    """rsLoRA with DoRA and LoRA+, and PiSSA: losses of four steps, logits behind them, and the adapter that is written."""
    words = [word.replace("DIR", str(ADAPTERS / name)) for word in FORMS[name]]
    cfg = compose(
        [f"model.init_from={PARITY / 'llama'}", *SHORT, *words, *ADAMW, f"model.mesh_shape={mesh_shape}"]
    ).config
    mesh, expected = build_mesh(cfg), load_file(ADAPTERS / name / "expected.safetensors")
    tokens = load_file(PARITY / "llama/expected.safetensors")["tokens"]
    with jax.set_mesh(mesh):
        built = training.assemble(cfg, mesh)
        state = built.new_state(0, load_init_from(built, mesh))
        start = {path: np.asarray(leaf) for path, leaf in named(state["params"])}
        batch = to_global(batch_of(tokens)[0], mesh)
        step = jax.jit(built.step([(100, 1000)])).lower(state, batch).compile()
        losses = []
        for _ in expected["losses"]:
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        tensors, _ = gather_adapter(state["params"], cfg.model, built.arch.weights, "float32")
    np.testing.assert_allclose(losses, expected["losses"], atol=2e-5)
    np.testing.assert_allclose(logits(built, mesh, state, tokens), expected["logits"], atol=2e-3)
    moved = {path for path, leaf in named(state["params"]) if not np.array_equal(start[path], np.asarray(leaf))}
    assert moved == {path for path in start if path.endswith((".lora.a", ".lora.b", ".lora.magnitude"))}
    theirs = load_file(ADAPTERS / name / "adapter_model.safetensors")
    assert tensors.keys() == theirs.keys()
    if name == "llama_pissa":  # as it ends; a singular vector and its partner may have the other sign
        for path in theirs:
            if ".lora_A." in path:
                ours, given = (each[path.replace("lora_A", "lora_B")] @ each[path] for each in (tensors, theirs))
                np.testing.assert_allclose(ours, given, atol=1e-3)


@pytest.mark.nightly(but=["mixtral"])
@pytest.mark.parametrize("name", ["olmoe", "mixtral"])
def test_each_expert_has_updates(name, tmp_path):
    """PEFT's logits of a file with factors for each expert, on a mesh that splits experts, and its bits on the way out."""
    built, mesh, state = start(name, "[[2,2],[ep,tp]]")
    tokens = load_file(PARITY / name / "expected.safetensors")["tokens"]
    expected = load_file(ADAPTERS / name / "expected.safetensors")["logits"]
    np.testing.assert_allclose(logits(built, mesh, state, tokens), expected, atol=1e-4)
    export(
        read_settings(
            Export, [f"checkpoint={PARITY / name}", f"adapter={ADAPTERS / name}", f"output={tmp_path / 'out'}"]
        )
    )
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (ADAPTERS / name, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(after[path], before[path]) for path in before)
    words = [f"checkpoint={PARITY / name}", f"adapter={ADAPTERS / name}", f"output={tmp_path / 'merged'}"]
    export(read_settings(Export, [*words, "merge_lora=true", "dtype=float32"]))
    np.testing.assert_allclose(tunix.load_pretrained(tmp_path / "merged")(tokens), expected, atol=1e-4)


def test_an_adapter_with_the_factors_of_all_experts_in_one_matrix(tmp_path):
    """PEFT's form of the updates above, where gates have twice the rank of the others. Updates of routers are refused."""
    folder = ADAPTERS / "mixtral/packed"
    model = tunix.load_pretrained(PARITY / "mixtral", mesh_shape=[[2, 2], ["ep", "tp"]], adapter=folder)
    assert (model.cfg.lora.rank, model.cfg.lora.alpha) == (4, 10)
    tokens = load_file(PARITY / "mixtral/expected.safetensors")["tokens"]
    expected = load_file(ADAPTERS / "mixtral/expected.safetensors")["logits"]
    np.testing.assert_allclose(model(tokens), expected, atol=1e-4)
    config = json.loads((folder / "adapter_config.json").read_text())
    changed: dict[str, Any]
    for changed in (
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 4}},
        {"target_parameters": ["down_proj", "gate_up_proj", "gate.weight"]},
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | changed))
        of_routers = "target_parameters=gate.weight is no matrix of experts"
        message = of_routers if "target_parameters" in changed else "_pattern=.* is not understood; give a folder of"
        with pytest.raises(UserError, match=message):
            read_adapter(tmp_path, "mixtral")


@pytest.mark.nightly
def test_a_dora_is_merged_and_generates(tmp_path, capsys):
    """The merged matrices give what the adapter gives; decoding, which divides by the norms once, too."""
    base = tmp_path / "base"
    shutil.copytree(PARITY / "llama", base)
    words_of_the_vocabulary(base, 97)
    tensors = load_file(ADAPTERS / "llama_dora/adapter_model.safetensors")
    rng = np.random.default_rng(0)
    changed = {path: value + rng.normal(size=value.shape).astype(np.float32) * 0.1 for path, value in tensors.items()}
    shutil.copytree(ADAPTERS / "llama_dora", tmp_path / "adapter")
    save_file(changed, tmp_path / "adapter/adapter_model.safetensors")
    tokens = load_file(base / "expected.safetensors")["tokens"]
    expected = np.asarray(tunix.load_pretrained(base, adapter=tmp_path / "adapter")(tokens))
    beside = [f"checkpoint={base}", f"adapter={tmp_path / 'adapter'}"]
    export(read_settings(Export, [*beside, f"output={tmp_path / 'merged'}", "merge_lora=true", "dtype=float32"]))
    np.testing.assert_allclose(tunix.load_pretrained(tmp_path / "merged")(tokens), expected, atol=1e-4)
    prompt = " ".join(f"w{token}" for token in tokens[0])
    for words in (beside, [f"checkpoint={tmp_path / 'merged'}"]):
        generate(
            read_settings(Generate, [*words, f"prompt={prompt}", "max_new_tokens=4", "temperature=0", "dtype=float32"])
        )
    one, other = capsys.readouterr().out.splitlines()
    assert one == other
    assert one.split()[0] == f"w{expected[0, -1].argmax()}"


def test_forms_that_do_not_go():
    base = words("llama")
    for more, message in (
        ([*base, "model.lora.init=pissa"], "model.lora.init=pissa: the updates start from model.init_adapter; leave one out"),
        ([*base, "model.lora.use_dora=true"], "model.lora.use_dora=True, but the adapter in .* has use_dora=False; leave it out"),
        ([f"model.init_from={PARITY / 'qwen3_moe'}", *SHORT, "model.lora.rank=2", "model.lora.use_dora=true"],
         "model.lora.use_dora=True: updates of experts have none, as in PEFT, and model.lora.targets=attention|mlp matches"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message.replace("attention|mlp", r"attention\|mlp")):
            compose(more)


@pytest.mark.parametrize(("name", "targets"), [("deepseek_v3", "mlp.gate"), ("glm4_moe", "mlp.down")])
def test_updates_that_peft_would_drop_are_not_written(name, targets):
    """PEFT takes modules with the names of those in experts for experts."""
    words = [f"model.init_from={PARITY / name}", *SHORT, "model.lora.rank=2", f"model.lora.targets={targets}"]
    cfg = compose([*words, "model.mesh_shape=[[1],[fsdp]]"]).config
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh), pytest.raises(UserError, match=r"drops those of its other MLPs; set merge_lora=true"):
        gather_adapter({}, cfg.model, training.assemble(cfg, mesh).arch.weights, "float32")


@pytest.mark.parametrize(("targets", "written"), [("attention", (True, 6)), ("attention|mlp.expert", (False, 12))])
def test_the_factor_of_updates_of_experts_is_that_of_peft(targets, written):
    words = [f"model.init_from={PARITY / 'olmoe'}", *SHORT, "model.lora.rank=4", "model.lora.alpha=6"]
    model = compose([*words, "model.lora.use_rslora=true", f"model.lora.targets='{targets}'"]).config.model
    info = write_adapter_config(model, {"q_proj"}, "logits")
    assert (info["use_rslora"], info["lora_alpha"]) == written


REFUSED = {
    "modules_to_save": (
        ["lm_head"],
        r"modules_to_save=\['lm_head'\] is not understood; .* merge_lora=true, PEFT with merge_and_unload",
    ),
    "rank_pattern": ({"q_proj": 8}, r"rank_pattern={'q_proj': 8} is not understood"),
    "layers_to_transform": ([0], r"layers_to_transform=\[0\] is not understood"),
    "init_lora_weights": ("pissa", "init_lora_weights=pissa is not supported; it must be True or False or gaussian"),
    "bias": ("all", "bias=all is not supported; it must be none, or give a folder of the whole model"),
    "peft_type": ("LOHA", "peft_type=LOHA is not supported; it must be LORA"),
    "invented_by_peft_1": (0.5, "invented_by_peft_1=0.5 is not understood"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_understood_is_named(key, tmp_path):
    value, message = REFUSED[key]
    shutil.copytree(ADAPTERS / "llama", tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(UserError, match=message):
        read_adapter(tmp_path / "adapter", "llama")


@pytest.mark.parametrize(
    ("made_for", "base", "is_other"),
    [
        ("meta-llama/Llama-3.2-1B", "unsloth/llama-3.2-1b-bnb-4bit", False),
        ("meta-llama/Llama-3.2-1B", "/models/Llama-3.2-1B/", False),
        ("meta-llama/Llama-3.2-1B", "/hub/models--meta-llama--Llama-3.2-1B/snapshots/4e20de3", False),
        ("/hub/models--Qwen--Qwen3-4B/snapshots/1cfa9a7", "Qwen/Qwen3-4B", False),
        ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B", True),
        ("Qwen/Qwen3-4B", "/models/base", True),
        (None, "/models/base", False),
    ],
)
def test_an_adapter_of_another_base_is_named(made_for, base, is_other):
    assert bool(remark_on_base(made_for, base)) == is_other


def test_tensors_that_do_not_fit(tmp_path):
    shutil.copytree(ADAPTERS / "llama", tmp_path / "adapter")
    path, tensors = (
        tmp_path / "adapter/adapter_model.safetensors",
        load_file(ADAPTERS / "llama/adapter_model.safetensors"),
    )
    head = {"base_model.model.lm_head.lora_A.weight": np.ones((4, 32), np.float32)}
    save_file(tensors | head, path)
    with pytest.raises(
        UserError, match=r"lm_head.lora_A.weight is no low-rank update of a projection of a llama; give"
    ):
        read_adapter(tmp_path / "adapter", "llama")
    cfg = compose(words("llama")).config
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        arch = training.assemble(cfg, mesh).arch
    cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"init_adapter": str(tmp_path / "adapter")})})
    last = "base_model.model.model.layers.2.mlp.down_proj.lora_B.weight"
    for changed, message in (
        (
            {name: value for name, value in tensors.items() if name != last},
            "lacks model.layers.2.mlp.down_proj.lora_B.*the same updates, or give",
        ),
        (
            tensors | {last.replace("2", "3"): tensors[last]},
            "has model.layers.3.*of a layer that the base does not have; give the base .* base_model_name_or_path=llama$",
        ),
        (
            tensors | {last: tensors[last][:, :3].copy()},
            r"down_proj.lora_B.weight has shape \[32, 3\], but the base weight needs \[32, 4\]; is it an adapter of",
        ),
    ):
        save_file(changed, path)
        with pytest.raises(UserError, match=message):
            check_init_from(cfg, arch)


def write_random_adapter(folder: Path, base: Path, modules: set[str]) -> None:
    """Write updates of rank 2 of the modules of layers that are named so, in each layer that has one."""
    before, rng, tensors = load_file(base / "model.safetensors"), np.random.default_rng(0), {}
    for name in before:
        module = name.removesuffix(".weight")
        if module.partition(".layers.")[2].partition(".")[2] in modules:
            for side, size in zip("AB", before[name].shape[::-1], strict=True):
                shape = (2, size) if side == "A" else (size, 2)
                tensors[f"base_model.model.{module}.lora_{side}.weight"] = rng.normal(size=shape).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))


@pytest.mark.parametrize(
    ("modules", "updated"),
    [
        ({"self_attn.q_proj", "self_attn.o_proj"}, {f"blocks.attention.{part}" for part in ("q", "gate", "o")}),
        ({"linear_attn.out_proj"}, {"linear_blocks_0.attention.o"}),
    ],
)
def test_layers_of_two_kinds_may_have_updates_of_their_own(modules, updated, tmp_path):
    """Of layers with attention alone, or of those with linear attention; the others have updates of 0."""
    base = PARITY / "qwen3_next"
    write_random_adapter(tmp_path, base, modules)
    params = dict(named(tunix.load_pretrained(base, adapter=tmp_path).params))
    found = {
        path.partition(".lora.")[0] for path, leaf in params.items() if ".lora." in path and np.asarray(leaf).any()
    }
    assert found == updated


def test_an_adapter_updates_the_tower_too(tmp_path):
    """PEFT's q_proj is a module of the tower and of the decoder; a run has a frozen tower unless it says otherwise."""
    base = PARITY / "smolvlm"
    write_random_adapter(tmp_path, base, {"self_attn.q_proj"})
    params = dict(named(tunix.load_pretrained(base, adapter=tmp_path).params))
    stacks = ("vision.tower.blocks", "blocks")
    assert all(np.asarray(params[f"{stack}.attention.q.lora.b"]).any() for stack in stacks)
    words = [f"model.init_from={base}", f"model.init_adapter={tmp_path}", *SHORT]
    with pytest.raises(UserError, match="freeze_tower=True, but the adapter in .* set model.vision.freeze_tower=false"):
        compose(words)
    assert "tower.attention.q" in compose([*words, "model.vision.freeze_tower=false"]).config.model.lora.targets


def test_keys_beside_an_adapter():
    assert (
        compose([*words("llama"), "model.lora.rank=4", "model.lora.targets='q$|v$|down'"]).config.model.lora.rank == 4
    )
    with pytest.raises(UserError, match="model.lora.rank=8, but the adapter in .*llama has rank=4; leave it out"):
        compose([*words("llama"), "model.lora.rank=8"])
    with pytest.raises(UserError, match=r"model.lora.targets=attention, but the adapter in .*leave it out"):
        compose([*words("llama"), "model.lora.targets=attention"])
    with pytest.raises(UserError, match=r"model.init_adapter=x updates the matrices of a base; give it too"):
        compose(["model.init_adapter=x"])
    with pytest.raises(UserError, match="has no adapter_config.json: it is no adapter of PEFT"):
        compose([*words("llama")[:1], f"model.init_adapter={PARITY / 'llama'}", *SHORT])


def single_device_mesh():
    return jax.set_mesh(jax.make_mesh((1,), ("x",), (AxisType.Explicit,), devices=jax.devices()[:1]))


def numbers(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def test_dropout_of_an_update_keeps_the_mean():
    own: Any = SimpleNamespace(dropout=0.25, index=3)
    with single_device_mesh():
        found = LowRank._drop(own, jnp.ones((2, 4000)), DropoutKey(jax.random.key(0)))
    assert {*np.unique(found).tolist()} == {0.0, float(np.float32(1 / 0.75))}
    assert float(found.mean()) == pytest.approx(1, abs=0.05)


def test_dropout_of_dora_leaves_out_inputs_of_the_update_alone(monkeypatch):
    """As in PEFT: the base sees every input, and its product with those that stay is taken out of the normalized sum."""

    class Update(SimpleNamespace):
        def __call__(self, x, key):
            return x + 7

    update: Any = Update(
        dropout=0.5, first=None, updated=None, layout=SimpleNamespace(as_matmul_input=lambda x, equation: x),
        _drop=lambda x, key: 2 * x, _multiply_by_gain=lambda y, w: 3 * y,
    )  # fmt: skip

    monkeypatch.setattr(lora, "product", lambda equation, x, w, *_: x * w)
    x, y, w, key = numbers(4), numbers(4), numbers(4), DropoutKey(jax.random.key(0))
    with_dropout, without = (LowRank.normalize(update, x, y, w, each, "plain") for each in (key, None))
    np.testing.assert_allclose(with_dropout, y + 3 * (2 * x * w + x + 7) - 2 * x * w, rtol=1e-5)
    np.testing.assert_allclose(without, 3 * (y + x + 7), rtol=1e-5)


def test_updates_of_pissa_are_added_without_those_that_they_started_from():
    factors = {"a": numbers(6, 2), "b": numbers(2, 4), "a_start": numbers(6, 2) / 3, "b_start": numbers(4, 2).T}
    w = numbers(6, 4)
    params = {"q": {"w": w, "lora": factors}}
    weights: Any = {"q": {"w": SimpleNamespace(equation=Equation("BTD,DF->BTF"))}}
    cfg: Any = SimpleNamespace(scale=2.0)
    layout: Any = None  # of matrices that rest as codes
    with single_device_mesh():
        (merged,) = lora.merge(params, weights, cfg, layout)["q"].values()
    expected = w + 2 * (factors["a"] @ factors["b"] - factors["a_start"] @ factors["b_start"])
    np.testing.assert_allclose(merged, expected, rtol=1e-5)
    removed = lora.remove_updates(params)["q"]["lora"]
    assert (removed["a"] is factors["a_start"], removed["b"] is factors["b_start"]) == (True, True)


def test_the_largest_singular_values_of_a_matrix_with_a_side_below_the_rank():
    w = numbers(6, 4)
    cfg: Any = SimpleNamespace(rank=5, scale=2.0)
    with single_device_mesh():
        a, b = lora._take_largest(w, Equation("BTD,DF->BTF"), cfg, [jax.P(None, None)] * 2)
    assert (a.shape, b.shape) == ((6, 5), (5, 4))
    np.testing.assert_allclose(2 * a @ b, w, atol=1e-5)


def test_what_an_adapter_brings_is_not_started_anew():
    """The magnitudes of a trained DoRA are not the norms of the base."""
    factors = {"a": numbers(6, 2), "b": numbers(2, 4), "magnitude": numbers(4)}
    params = {"q": {"w": numbers(6, 4), "lora": factors}}
    weights: Any = {"q": {"w": None, "lora": dict.fromkeys(factors)}}
    cfg: Any = SimpleNamespace(init="zero", use_dora=True)
    layout: Any = None  # of what is started
    started = lora.start_updates(params, params, weights, cfg, layout)
    assert started["q"]["lora"]["magnitude"] is factors["magnitude"]
