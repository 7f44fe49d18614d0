"""Models that see: what transformers says of images, on every mesh, in training and in generation."""

import json
import math
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image
from safetensors.numpy import load_file, save_file
from support.harness import ROOT
from support.images import squares
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import tunix
from tunix.base.errors import UserError
from tunix.config import Export, Generate
from tunix.config.command_line import read_settings
from tunix.config.compose import compose
from tunix.config.vision import check_vision
from tunix.data.batches import IMAGE_FIELDS
from tunix.data.chat import ChatTemplate
from tunix.data.image_processors import SquareProcessor
from tunix.export import Exporter, _find_dtype, export
from tunix.generate import generate
from tunix.huggingface.config_json import read_config
from tunix.huggingface.table import find_family
from tunix.huggingface.weights import save_weights
from tunix.inference.gathered import gather
from tunix.inference.lm_eval import TokenScorer
from tunix.inference.pretrained import load_init_from, load_pretrained
from tunix.inference.sampling import Sampling
from tunix.models.layers import named
from tunix.models.table import CP_EXCHANGES
from tunix.models.vision import Images
from tunix.sharding.arrays import to_global
from tunix.training.choices import build_layout, build_mesh
from tunix.training.loss import next_token_loss
from tunix.training.state import describe
from tunix.training.train_spec import assemble

SEEING = ROOT / "tests/models/parity/gemma3_vision"
WORDS = [
    f"model.init_from={SEEING}", "training.seq_len=24", "training.loss_chunk_size=24", "training.micro_batch_size=2",
    "training.images_per_row=2", "model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true",
]  # fmt: skip


@pytest.fixture(scope="module")
def expected():
    return load_file(SEEING / "expected.safetensors")


@pytest.fixture(scope="module")
def model():
    return tunix.load_pretrained(SEEING, mesh_shape=((2, 2), ("fsdp", "tp")))


def processed(kind: str, images: np.ndarray, grids: np.ndarray, vision) -> dict[str, np.ndarray]:
    """Return what transformers' processor of a kind makes of the images [B, P, ...] uint8 of rows."""
    normalized = (images / np.float32(255) - np.float32(vision.image_mean[0])) / np.float32(vision.image_std[0])
    if kind == "qwen3_vl":  # patches of all rows, of each channel two equal frames
        counts = grids.prod(-1).sum(-1)
        patches = np.concatenate([row[:count] for row, count in zip(normalized, counts, strict=True)])
        whole = grids[grids.prod(-1) > 0]
        grid_thw = np.concatenate([np.ones((len(whole), 1), int), whole], 1)
        return {
            "pixel_values": np.repeat(patches[:, :, None], 2, 2).reshape(len(patches), -1),
            "image_grid_thw": grid_thw,
        }
    values = normalized.transpose(0, 1, 4, 2, 3) * (grids.prod(-1) > 0)[..., None, None, None]
    if kind == "smolvlm":  # rows with fewer tiles have zeros
        return {"pixel_values": values}
    return {"pixel_values": values[grids.prod(-1) > 0]}


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl", "smolvlm"])
def test_images_as_transformers_processes_them(kind):
    folder = ROOT / "tests/models/parity" / {"gemma3": "gemma3_vision"}.get(kind, kind)
    expected, model = load_file(folder / "expected.safetensors"), tunix.load_pretrained(folder)
    grids = expected.get("image_grids", np.array([[[1, 1], [1, 1]], [[1, 1], [0, 0]]]))
    count = len(expected["image_logits"])
    tokens, pixels = expected["image_tokens"][:count], expected["images"][:count]
    arrays = processed(kind, pixels, grids[:count], model.cfg.vision)
    np.testing.assert_allclose(model(tokens, **arrays), expected["image_logits"], atol=1e-4)
    for wrong, message in (
        (arrays | {"pixel_values": arrays["pixel_values"][..., :1]}, r"pixel_values of the shape .*: the model takes pixel_values "),
        (arrays | {"pixel_values": arrays["pixel_values"][:1]}, "the model takes as many patches as|tokens have 27 times .* for [12] "),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            model(tokens, **wrong)


def test_films_are_refused():
    model = tunix.load_pretrained(ROOT / "tests/models/parity/qwen3_vl")
    patches = np.zeros((8, 3 * 2 * model.cfg.vision.patch_size**2), np.float32)
    for grids, message in (
        (None, r"image_grid_thw \[images, 3\]"),
        ([2, 2, 2], "images, 3"),
        ([[2, 2, 2]], "no films"),
    ):
        with pytest.raises(UserError, match=message):
            model([[1, 2]], patches, grids)


def test_keys_that_come_in_blocks_do_not_go_with_images(monkeypatch):
    """Of whichever exchange: a query of an image also sees later keys."""
    monkeypatch.setitem(CP_EXCHANGES, "another", CP_EXCHANGES["ring"])
    model = compose(["model=gemma3_12b_vision"]).config.model.model_copy(update={"cp_exchange": "another"})
    with pytest.raises(ValueError, match="model.cp_exchange=another brings keys in blocks of earlier tokens"):
        check_vision(model, model.vision)


def test_a_model_of_text_takes_no_pixels():
    blind = tunix.load_pretrained(ROOT / "tests/models/parity/gemma3")
    with pytest.raises(UserError, match="this gemma3 is a model of text alone"):
        blind([[1, 2]], pixel_values=np.zeros((1, 3, 8, 8)))


def rows_of(model, expected) -> dict:
    return {name: model.rows(leaf) for name, leaf in host_rows(expected).items()}


def host_rows(expected) -> dict[str, np.ndarray]:
    tokens = expected["image_tokens"]
    targets = np.roll(tokens, -1, 1)
    mask = np.ones(tokens.shape, np.float32)
    mask[:, -1] = 0
    return {
        "tokens": tokens, "targets": targets, "loss_mask": mask, "images": expected["images"],
        "positions": np.tile(np.arange(tokens.shape[1], dtype=np.int32), (2, 1)), "segment_ids": np.zeros_like(tokens),
        "image_index": expected["image_index"], "image_grids": np.ones((2, 2, 2), np.int32),
    }  # fmt: skip


def test_logits_and_gradients_are_those_of_transformers(model, expected, tmp_path):
    """Two images in a row, windows that are shorter than an image, and the gradients of tower and projector."""

    def logits(params, rows):
        images = Images(*(rows[name] for name in IMAGE_FIELDS))
        return model.arch.module(params)(rows["tokens"], rows["positions"], rows["segment_ids"], images)

    def objective(params, rows):
        return next_token_loss(model.arch.module(params), rows, chunk_size=24, z_loss=0.0).objective

    with jax.set_mesh(model.mesh):
        rows = rows_of(model, expected)
        said, gradient = jax.jit(lambda params, rows: (logits(params, rows), jax.grad(objective)(params, rows)))(
            model.params, rows
        )
    np.testing.assert_allclose(said, expected["image_logits"], atol=1e-4)
    save_weights(tmp_path, gradient, model.cfg, model.arch.weights, "float32", shard_gb=5)
    found = load_file(tmp_path / "model.safetensors")
    theirs = {name: value for name, value in expected.items() if name.startswith("image_gradient.")}
    assert len(theirs) == 39
    for name, value in theirs.items():
        ours = found[name.removeprefix("image_gradient.")]
        np.testing.assert_allclose(ours, value, atol=1e-4 * max(1, np.abs(value).max()), err_msg=name)


@pytest.mark.nightly
def test_greedy_generation_behind_a_image(model, expected):
    """Token for token, beside a prompt of text alone and one with two images."""
    whole, index, images = expected["image_greedy"].tolist(), expected["image_index"], expected["images"]
    prompts = [whole[:19], expected["image_tokens"][0].tolist(), whole[:3]]
    images = [squares(images[1, :1], index[1, :19]), squares(images[0], index[0]), None]
    answers = model.sample(prompts, Sampling(max_new_tokens=16, temperature=0.0), images=images)
    assert answers[0].tokens == whole[19:]
    assert answers[1].tokens[0] == expected["image_logits"][0, -1].argmax()


def test_scores_of_a_row_see_its_images(model, expected):
    """Those of tunix.serve for top_logprobs."""
    tokens, index = expected["image_tokens"][0].tolist(), expected["image_index"][0]
    scores = TokenScorer(model, num_top=2).score_with_top(tokens, squares(expected["images"][0], index))
    own = np.asarray(jax.nn.log_softmax(expected["image_logits"][0, :-1], -1))
    np.testing.assert_allclose(scores.log_probs, own[np.arange(len(own)), tokens[1:]], atol=1e-4)
    assert scores.top_tokens[:, 0].tolist() == own.argmax(-1).tolist()


def test_a_model_of_text_refuses_images(expected):
    text = tunix.load_pretrained(ROOT / "tests/models/parity/gemma3")
    with pytest.raises(UserError, match="a prompt has an image, and this gemma3 is a model of text alone"):
        text.sample([[1, 2]], Sampling(max_new_tokens=1), images=[squares(expected["images"][0], np.zeros(2))])


def test_both_layouts_of_names_are_read(expected, tmp_path):
    """Of transformers 5: files without `vision_model.`, and the names of its modules."""
    tensors = load_file(SEEING / "model.safetensors")
    (tmp_path / "config.json").write_text((SEEING / "config.json").read_text())
    first = tunix.load_pretrained(SEEING).params
    for begins in ({"vision_tower.vision_model.": "vision_tower."}, dict(find_family("gemma3_vision").modules)):

        def rename(name, begins=begins):
            return next((new + name.removeprefix(old) for old, new in begins.items() if name.startswith(old)), name)

        save_file({rename(name): value for name, value in tensors.items()}, tmp_path / "model.safetensors")
        again = tunix.load_pretrained(tmp_path).params
        assert jax.tree.all(jax.tree.map(np.array_equal, first, again))


def test_the_decoder_alone_of_a_model_that_sees():
    words = [f"model.init_from={SEEING}", "training.seq_len=32"]
    assert compose(words).config.model.vision.freeze_tower
    assert not compose([*words, "model.vision.freeze_tower=false"]).config.model.vision.freeze_tower
    assert compose([*words, "model.family=gemma3"]).config.model.vision is None
    with pytest.raises(UserError, match="model.vision.freeze_tower=False, but the model of .* does not see"):
        compose([f"model.init_from={ROOT}/tests/models/parity/gemma3", "model.vision.freeze_tower=false"])


# Numbers of projector, tower, and updates of rank 2 of the decoder and of the tower.
COUNTS = {
    "gemma3_vision": (528, 5312, 3360, 832), "qwen3_vl": (19008, 9968, 3360, 1664), "smolvlm": (2048, 5312, 2240, 832),
}  # fmt: skip


def count_trained(kind, *words):
    """Return how many numbers of projector, tower and decoder are trained, where some are."""
    cfg = compose([*WORDS, f"model.init_from={SEEING.parent / kind}", *words]).config
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        arch = describe(cfg.model, build_layout(cfg, mesh))
    counts: dict[str, int] = {}
    for name, weight in named(arch.trained_weights):
        assert not cfg.model.lora.rank or ".lora." in name
        part = name.split(".")[1] if name.startswith("vision.") else "decoder"
        counts[part] = counts.get(part, 0) + math.prod(weight.shape)
    return counts


@pytest.mark.parametrize("kind", COUNTS)
def test_parts_are_frozen(kind):
    projector, tower, _, _ = COUNTS[kind]
    usual = count_trained(kind)
    decoder = {"decoder": usual["decoder"]}
    assert usual == decoder | {"projector": projector}
    assert count_trained(kind, "model.vision.freeze_tower=false") == usual | {"tower": tower}
    assert count_trained(kind, "model.vision.freeze_projector=true") == decoder


@pytest.mark.parametrize("kind", COUNTS)
def test_weights_in_parts_are_those_of_one_device(kind):
    """Files have the squares of patches of a projector as one dimension, within which the tower's width is split."""
    one = load_pretrained(SEEING.parent / kind)
    split = load_pretrained(SEEING.parent / kind, mesh_shape=((2,), ("fsdp",)), strategy="full_shard")
    jax.tree.map(np.testing.assert_array_equal, split.params, one.params)


@pytest.mark.parametrize("kind", COUNTS)
def test_low_rank_updates_of_each_part(kind):
    def count(targets, freeze_tower="false"):
        words = ["model.lora.rank=2", f"model.lora.targets='{targets}'", f"model.vision.freeze_tower={freeze_tower}"]
        return count_trained(kind, *words)

    decoder, tower = ({part: number} for part, number in zip(("decoder", "tower"), COUNTS[kind][2:], strict=True))
    assert count("attention|mlp", freeze_tower="true") == decoder
    assert count("^attention|^mlp") == decoder
    assert count("tower") == tower
    assert count("attention|mlp") == decoder | tower


def test_generation_sees_by_a_tower_with_normalized_updates_as_training_does(expected):
    """Magnitudes of the decoder are divided by their norms before the first token, and those of the tower are not."""
    one = assembled(
        "model.lora.rank=2", "model.lora.use_dora=true", "model.lora.targets=tower", "model.vision.freeze_tower=false",
        "training.mixed_precision=fp32",
    )  # fmt: skip
    with jax.set_mesh(one.mesh):
        drawn = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
        params = jax.tree.map(lambda p: jax.device_put(np.resize(drawn, p.shape), p.sharding), one.abstract["params"])
        images = Images(*(host_rows(expected)[name] for name in IMAGE_FIELDS))
        see = jax.jit(lambda model: model.vision.tower(images, model.remat, None)[0])
        gathered = gather(one.arch, params, as_matrices=False)
        training, generation = (see(model) for model in (one.arch.module(params), gathered.module(one.arch)))
    np.testing.assert_allclose(generation, training, atol=1e-5)


def test_a_step_learns_from_images_and_leaves_a_frozen_tower_as_it_is(expected):
    """What is trained moves, by another way than without the images; what is frozen is the same to the last bit."""
    one = assembled("optimizer.learning_rate=0.1", "training.mixed_precision=fp32")
    batch = {name: np.asarray(leaf)[None] for name, leaf in host_rows(expected).items()}
    blind = batch | {"image_index": np.full_like(batch["image_index"], -1)}
    with jax.set_mesh(one.mesh):
        state = one.new_state(0, load_init_from(one, one.mesh))
        step = jax.jit(one.step([(10, 10)]))
        (after, said), (_, blindly) = (step(state, to_global(rows, one.mesh)) for rows in (batch, blind))
    assert abs(said["loss"] - blindly["loss"]) > 1e-3
    before = dict(named(state["params"]))
    for name, leaf in named(after["params"]):
        is_frozen = name.startswith("vision.tower.")
        assert np.array_equal(leaf, before[name]) == is_frozen, name


def assembled(*words):
    cfg = compose([*WORDS, *words]).config
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        return assemble(cfg, mesh)


def write_words(folder) -> Tokenizer:
    """Write and return a tokenizer of 96 words, of which three are those of images."""
    words, tokens = {f"w{n}": n for n in range(96)}, SquareProcessor(24, 9).tokens
    words = {name: n for name, n in words.items() if n not in (90, 91, 92)} | dict(
        zip(tokens, (90, 92, 91), strict=True)
    )
    tokenizer = Tokenizer(WordLevel(words, "w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(list(tokens))
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@pytest.mark.nightly
def test_generate_takes_files_of_images(model, expected, tmp_path, capsys):
    """An image before the text of `prompt=`, and images of the rows of a file, by paths beside it."""
    folder, image = tmp_path / "model", expected["images"][0, 0]
    shutil.copytree(SEEING, folder)
    tokenizer = write_words(folder)
    Image.fromarray(image).save(tmp_path / "a.png")
    row = {"prompt": "w5", "image": ["a.png"]}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps({'prompt': 'w5'})}\n")
    values = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/command/generate.yaml"))
    values |= {"checkpoint": str(folder), "temperature": 0.0, "max_new_tokens": 3}

    prompt = [90, *[92] * 9, 91, 5]
    images = [squares(image[None], np.array([-1, *range(9), -1, -1])), None]
    answers = model.sample([prompt, [5]], Sampling(max_new_tokens=3, temperature=0.0), images=images)
    said = [f" {tokenizer.decode(answer.tokens)}" for answer in answers]  # behind the last word of a prompt
    generate(Generate.model_validate(values | {"prompt": "w5", "image": str(tmp_path / "a.png")}))
    assert capsys.readouterr().out == f"{said[0]}\n"
    generate(Generate.model_validate(values | {"input": str(tmp_path / "rows.jsonl"), "image_column": "image"}))
    assert capsys.readouterr().out.split("\n---\n") == [said[0], said[1] + "\n"]
    with pytest.raises(UserError, match=r"image=.*none.png: the prompt has an image that is not there"):
        generate(Generate.model_validate(values | {"prompt": "w5", "image": str(tmp_path / "none.png")}))
    blind = values | {"prompt": "w5", "image": "a.png", "checkpoint": str(tmp_path / "blind")}
    shutil.copytree(ROOT / "tests/models/parity/gemma3", tmp_path / "blind")
    shutil.copy(folder / "tokenizer.json", tmp_path / "blind")
    with pytest.raises(UserError, match=r"image=a.png: checkpoint=.*blind is no model that sees images"):
        generate(Generate.model_validate(blind))


def test_an_export_keeps_the_tower_and_says_how_pixels_are_normalized(tmp_path):
    source, output = tmp_path / "model", tmp_path / "out"
    shutil.copytree(SEEING, source)
    (source / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.4, 0.5, 0.6]}))
    assert read_config(source)["vision"]["image_mean"] == [0.4, 0.5, 0.6]
    for wrong, message in (
        ({"do_normalize": False}, "do_normalize=False is not supported; it must be True"),
        ({"rescale_factor": 1}, "rescale_factor=1 is not supported; it must be 0.0039"),
        ({"resample": 3}, "resample=3 is not supported; it must be 2"),
        ({"do_pan_and_scan": True}, "do_pan_and_scan=True is not supported; it must be False"),
        ({"do_resize": "no"}, "preprocessor_config.json: a key has a value of the wrong type"),
        ({"image_mean": [0.5, 0.5, math.inf]}, "model.vision.image_mean.2=inf"),
    ):
        (source / "preprocessor_config.json").write_text(json.dumps(wrong))
        with pytest.raises(UserError, match=message):
            compose([f"model.init_from={source}", "training.seq_len=64"])
    (source / "preprocessor_config.json").unlink()
    export(read_settings(Export, [f"checkpoint={source}", f"output={output}"]))
    before, after = (load_file(folder / "model.safetensors") for folder in (SEEING, output))
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
    processor = json.loads((output / "preprocessor_config.json").read_text())
    assert (processor["image_mean"], processor["size"]) == ([0.5] * 3, {"height": 24, "width": 24})
    assert list(read_config(output)["vision"]["image_mean"]) == [0.5] * 3


def test_an_export_has_the_dtype_of_the_whole_source(tmp_path):
    """transformers leaves that of its decoder as it was: a model in float32 was rounded to bfloat16."""
    for keys, dtype in (
        ({"dtype": "float32", "text_config": {"dtype": "bfloat16"}}, "float32"),
        ({"torch_dtype": "float16", "text_config": None}, "float16"),
        ({"dtype": None, "text_config": {"torch_dtype": "bfloat16"}}, "bfloat16"),
        ({"text_config": {}}, "float32"),
        ({"torch_dtype": "auto"}, "float32"),  # a traceback
        ({"dtype": "float8_e4m3fn", "text_config": {"dtype": "bfloat16"}}, "bfloat16"),  # codes without their scales
    ):
        (tmp_path / "config.json").write_text(json.dumps(keys))
        assert _find_dtype(tmp_path) == dtype


def test_the_tokenizer_of_a_run_goes_out_with_the_names_of_its_tokens_of_images(tmp_path):
    """Without them the processor of transformers cannot be made. It does not read the tokenizer's chat template, and
    gives turns of parts to that of its own, where the run's knows texts alone."""
    tokenizer, source = write_words(tmp_path), "\n{{ messages[0].content }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w0", "chat_template": source}))
    model = replace(tunix.load_pretrained(SEEING), files=None, tokenizer=tokenizer, tokenizer_files=tmp_path)
    Exporter(lambda strategy: model, None, 5, False).write(str(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["extra_special_tokens"] == {
        "boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>",
    }  # fmt: skip
    template = (tmp_path / "out" / "chat_template.jinja").read_text()
    chat = ChatTemplate(template, {}, "<start_of_image>")
    assert chat.supports_parts
    assert chat.source_for_processors == template
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    assert chat.render([{"role": "user", "content": parts}]) == "\n<start_of_image>What?"
    assert chat.render([{"role": "user", "content": "What?"}]) == "\nWhat?"


@pytest.mark.parametrize(
    ("kind", "said", "changed"),
    [
        ("qwen3_vl", {"size": {"shortest_edge": 64, "longest_edge": 2**24}}, {"min_pixels": 256, "max_pixels": 4096}),
        ("smolvlm", {"max_image_size": {"longest_edge": 26}, "size": {"longest_edge": 104}}, {"tiles_per_side": 1}),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True], ids=["preprocessor_config", "processor_config"])
def test_an_export_says_what_images_the_run_saw(kind, said, changed, wrapped, tmp_path):
    """The files of its source where they say so; else its own. Both forms of files are read."""
    source = tmp_path / "model"
    shutil.copytree(SEEING.parent / kind, source)
    name, content = (
        ("processor_config.json", {"image_processor": said}) if wrapped else ("preprocessor_config.json", said)
    )
    (source / name).write_text(json.dumps(content | {"own": 1}))
    model = tunix.load_pretrained(source)
    model = replace(model, files=source)
    other = replace(model, cfg=model.cfg.model_copy(update={"vision": model.cfg.vision.model_copy(update=changed)}))
    for output, each in (("same", model), ("other", other)):
        Exporter(lambda strategy, each=each: each, None, 5, False).write(str(tmp_path / output))
        again = tunix.load_pretrained(tmp_path / output).cfg.vision
        assert again.model_dump() == each.cfg.vision.model_dump()
        assert ("own" in json.loads((tmp_path / output / name).read_text())) == (output == "same")
