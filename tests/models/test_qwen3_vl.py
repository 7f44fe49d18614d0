"""Qwen 3 VL: what transformers says of images of several sizes in one row, and its gradients, on several meshes."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image
from safetensors.numpy import load_file
from support.harness import ROOT, SMALL
from support.image_parity import check_logits_and_gradients
from support.images import SEES_ANY_SIZE, draw, save
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import tunix
from tunix.base.errors import UserError
from tunix.config import Export, Generate
from tunix.config.command_line import read_settings
from tunix.config.compose import compose
from tunix.config.pretrained_config import trained_model
from tunix.data.image_processors import PatchProcessor
from tunix.data.image_slots import index_images
from tunix.export import export
from tunix.generate import generate
from tunix.huggingface.config_json import read_config
from tunix.inference.lm_eval import TokenScorer
from tunix.inference.sampling import Sampling
from tunix.models.vision import Images, find_places, find_positions

SEEING = ROOT / "tests/models/parity/qwen3_vl"
MESHES = [((1,), ("fsdp",)), ((2, 2), ("fsdp", "tp")), ((2, 2), ("dp", "cp"))]


@pytest.fixture(scope="module")
def expected():
    return load_file(SEEING / "expected.safetensors")


@pytest.mark.nightly
@pytest.mark.parametrize("mesh_shape", MESHES, ids=["one", "fsdp-tp", "dp-cp"])
def test_logits_and_gradients_are_those_of_transformers(mesh_shape, expected, tmp_path):
    model = tunix.load_pretrained(SEEING, mesh_shape=mesh_shape)
    images = {name: expected[name] for name in ("images", "image_index", "image_grids")}
    check_logits_and_gradients(model, images, expected, tmp_path, atol=1e-4)


def test_places_of_packed_patches():
    places = jax.jit(find_places, static_argnums=(1, 2))(np.array([[[2, 4], [2, 2], [0, 0]]]), 14, 2)
    assert places.image[0].tolist() == [0] * 8 + [1] * 4 + [3] * 2
    assert places.end[0].tolist() == [8] * 8 + [12] * 4 + [14] * 2
    assert places.row[0].tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0]
    assert places.column[0].tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 0, 1, 0, 1, 0, 0]


def test_positions_are_those_of_transformers_also_behind_another_document(expected):
    index, grids = expected["image_index"], expected["image_grids"]
    num_patches = expected["images"].shape[1]
    places = np.tile(np.arange(24, dtype=np.int32), (2, 1))
    find = jax.jit(find_positions, static_argnums=(3, 4))
    found = find(places, index, grids, num_patches, 2)
    np.testing.assert_array_equal(found, expected["image_positions"])
    # The second image alone, behind another document, has the positions that it has alone.
    places[0, 12:] -= 12
    alone = np.where(index[:1, 12:] >= 0, index[:1, 12:] - index[0, 12:].max() - 1 + 2, -1)
    packed = find(places, index, grids, num_patches, 2)
    own = find(places[:1, 12:], alone, grids[:1, 1:], num_patches, 2)
    np.testing.assert_array_equal(np.asarray(packed)[0, 12:], np.asarray(own)[0])


@pytest.mark.nightly
def test_greedy_generation_behind_images(expected):
    """Token for token, beside a prompt of text alone and one with two images."""
    model = tunix.load_pretrained(SEEING)
    whole, tokens = expected["image_greedy"].tolist(), expected["image_tokens"]
    images = [
        Images(expected["images"][row, :count], expected["image_index"][row, :length],
               expected["image_grids"][row, :num])
        for row, count, length, num in ((1, 16, 19, 1), (0, 32, 24, 2))
    ]  # fmt: skip
    prompts = [whole[:19], tokens[0].tolist(), whole[:3]]
    for sampling in (
        Sampling(max_new_tokens=16, temperature=0.0),
        Sampling(max_new_tokens=16, temperature=0.0, guess=2),
    ):
        answers = model.sample(prompts, sampling, images=[*images, None])
        assert answers[0].tokens == whole[19:]
        assert answers[1].tokens[0] == expected["image_logits"][0, -1].argmax()
    scores = TokenScorer(model).score_with_top(whole, images[0])
    np.testing.assert_allclose(scores.log_probs[18:], answers[0].log_probabilities, atol=1e-4)


def test_rows_of_text_alone(expected):
    model = tunix.load_pretrained(SEEING)
    with jax.set_mesh(model.mesh):
        said = jax.jit(lambda params, tokens: model.arch.module(params)(tokens))(
            model.params, model.rows(expected["tokens"])
        )
    np.testing.assert_allclose(said, expected["logits"], atol=1e-4)


def test_an_export_keeps_the_tower_and_writes_a_processor(tmp_path):
    export(read_settings(Export, [f"checkpoint={SEEING}", f"output={tmp_path / 'out'}"]))
    before, after = (load_file(folder / "model.safetensors") for folder in (SEEING, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
    theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in (SEEING, tmp_path / "out"))
    assert {**theirs["vision_config"], "initializer_range": 0} == {**ours["vision_config"], "initializer_range": 0}
    processor = json.loads((tmp_path / "out/preprocessor_config.json").read_text())
    assert processor["size"] == {"shortest_edge": 65536, "longest_edge": 1048576}
    source, again = read_config(SEEING), read_config(tmp_path / "out")
    assert again["vision"] == source["vision"] | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    assert again | {"vision": None} == source | {"vision": None}
    # A model is asked about images in the sizes of its processor.
    (tmp_path / "out/preprocessor_config.json").write_text(
        json.dumps(processor | {"size": {"shortest_edge": 64, "longest_edge": 2**24}})
    )
    vision = trained_model(tmp_path / "out", [[1], ["fsdp"]]).vision
    assert (vision.min_pixels, vision.max_pixels) == (64, 2**24)
    (tmp_path / "out/preprocessor_config.json").write_text(json.dumps(processor | {"size": 5}))
    with pytest.raises(UserError, match="preprocessor_config.json: a key has a value of the wrong type"):
        trained_model(tmp_path / "out", [[1], ["fsdp"]])


@pytest.mark.nightly
def test_generate_takes_images_in_their_own_shape(tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(SEEING, folder)
    size = {"shortest_edge": 64, "longest_edge": 256}
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": size}))
    processor = PatchProcessor(4, 2, *size.values())
    words = {f"w{n}": n for n in range(90)} | dict(zip(processor.tokens, (90, 92, 91), strict=True))
    tokenizer = Tokenizer(WordLevel(words, "w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(list(processor.tokens))
    tokenizer.save(str(folder / "tokenizer.json"))
    (tmp_path / "a.png").write_bytes(save(Image.fromarray(draw(23, 9))))
    values = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/command/generate.yaml"))
    values |= {"checkpoint": str(folder), "temperature": 0.0, "max_new_tokens": 5, "prompt": "w5"}
    generate(Generate.model_validate(values | {"image": str(tmp_path / "a.png")}))
    prompt = [90, *[92] * 3, 91, 5]  # 3 x 1 soft tokens of 8 x 8 pixels
    images = index_images(prompt, [(tmp_path / "a.png").read_bytes()], processor, 92)
    assert images.grids.tolist() == [[2, 6]]
    (answer,) = tunix.load_pretrained(folder).sample([prompt], Sampling(5, temperature=0.0), images=[images])
    assert capsys.readouterr().out.strip() == tokenizer.decode(answer.tokens)


def test_sizes_of_images_are_the_users_choice():
    words = ["training.seq_len=32", "model.vision.min_pixels=256", "model.vision.max_pixels=4096"]
    vision = compose([f"model.init_from={SEEING}", *words]).config.model.vision
    assert (vision.min_pixels, vision.max_pixels) == (256, 4096)
    with pytest.raises(UserError, match="unknown key model.vision.max_pixels: model.vision=gemma3 has none"):
        compose([f"model.init_from={SEEING.parent}/gemma3_vision", *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.rope_sections=null"], "kind=qwen3_vl needs model.rope_sections"),
        (["model.rope_sections=[2,1,2]"], "must be 4 pairs together"),
        (["++model.vision.max_pixels=200"], "less than four times model.vision.min_pixels=64"),
        (["++model.vision.deepstack_layers=[3]"], "names a layer that is not below model.vision.num_layers=1"),
        (["++model.vision.kind=siglip"], "model.vision.kind"),
    ],
)
def test_keys_that_do_not_go_together(words, message):
    with pytest.raises(UserError, match=re.escape(message)):
        compose([*SMALL, *SEES_ANY_SIZE, *words])
