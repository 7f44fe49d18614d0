"""SmolVLM: what transformers says of images in tiles, and its gradients, on several meshes."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.harness import ROOT
from support.image_parity import check_logits_and_gradients
from support.images import SEES_TILES

import tunix
from tunix.base.errors import UserError
from tunix.config import Export
from tunix.config.command_line import read_settings
from tunix.config.compose import compose
from tunix.export import export
from tunix.huggingface.config_json import read_config
from tunix.inference.sampling import Sampling
from tunix.models.vision import Images

SEEING = ROOT / "tests/models/parity/smolvlm"
GRIDS = np.array([[[1, 1], [1, 1]], [[1, 1], [0, 0]]], np.int32)  # tiles of the images of each row, down and across
MESHES = [((2, 2), ("fsdp", "tp")), ((2, 2), ("dp", "cp"))]


@pytest.fixture(scope="module")
def expected():
    return load_file(SEEING / "expected.safetensors")


@pytest.mark.nightly(but=["fsdp-tp"])
@pytest.mark.parametrize("mesh_shape", MESHES, ids=["fsdp-tp", "dp-cp"])
def test_logits_and_gradients_are_those_of_transformers(mesh_shape, expected, tmp_path):
    model = tunix.load_pretrained(SEEING, mesh_shape=mesh_shape)
    images = {"images": expected["images"], "image_index": expected["image_index"], "image_grids": GRIDS}
    check_logits_and_gradients(model, images, expected, tmp_path, atol=1e-5)


def test_greedy_generation_behind_an_image(expected):
    model = tunix.load_pretrained(SEEING)
    whole = expected["image_greedy"].tolist()
    images = [Images(expected["images"][1, :1], expected["image_index"][1, :19], GRIDS[1, :1])]
    (answer,) = model.sample([whole[:19]], Sampling(max_new_tokens=16, temperature=0.0), images=images)
    assert answer.tokens == whole[19:]


def test_an_export_keeps_the_tower_and_says_how_images_are_cut(tmp_path):
    source, output = tmp_path / "model", tmp_path / "out"
    shutil.copytree(SEEING, source)
    file = source / "preprocessor_config.json"
    published = {"do_image_splitting": True, "max_image_size": {"longest_edge": 26}, "size": {"longest_edge": 78}}
    file.write_text(json.dumps(published))
    assert read_config(source)["vision"]["tiles_per_side"] == 3
    for wrong, message in (
        ({"do_image_splitting": False}, "do_image_splitting=False is not supported"),
        ({"max_image_size": {"longest_edge": 24}}, "max_image_size=24 must be the 26 pixels of the tower"),
        ({"size": {"longest_edge": 79}}, "size.longest_edge=79 a multiple"),
    ):
        file.write_text(json.dumps(published | wrong))
        with pytest.raises(UserError, match=f"preprocessor_config.json: {message}|{message}"):
            read_config(source)
    file.unlink()
    # As transformers 5 writes it.
    file = source / "processor_config.json"
    file.write_text(json.dumps({"image_seq_len": 9, "image_processor": published}))
    assert read_config(source)["vision"]["tiles_per_side"] == 3
    file.unlink()
    export(read_settings(Export, [f"checkpoint={source}", f"output={output}"]))
    before, after = (load_file(folder / "model.safetensors") for folder in (SEEING, output))
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
    # What ends an answer stands in the source's text_config.
    assert [
        json.loads((output / f"{name}config.json").read_text())["eos_token_id"] for name in ("", "generation_")
    ] == [2, 2]
    processor = json.loads((output / "preprocessor_config.json").read_text())
    assert (processor["size"], processor["max_image_size"]) == ({"longest_edge": 104}, {"longest_edge": 26})
    assert json.loads((output / "processor_config.json").read_text())["image_seq_len"] == 9
    assert read_config(output)["vision"]["tiles_per_side"] == 4


def test_files_as_they_were_published(tmp_path):
    """config.json of SmolVLM has names of its own code, and leaves out what transformers has as a default."""
    text = {
        "architectures": ["VLlama3ForCausalLM"], "head_dim": 64, "hidden_size": 576, "intermediate_size": 1536,
        "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama", "neftune_noise_alpha": 0.0,
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2,
        "pixel_shuffle_factor": 4, "qk_layer_norms": False, "rms_norm_eps": 1e-05, "rope_interleaved": False,
        "rope_theta": 100000, "torch_dtype": "bfloat16", "use_resampler": False, "vocab_size": 49280,
    }  # fmt: skip
    tower = {
        "hidden_size": 768, "image_size": 512, "max_image_size": {"longest_edge": 512}, "model_type": "idefics3",
        "num_attention_heads": 12, "patch_size": 16, "size": {"longest_edge": 2048}, "tie_word_embeddings": False,
        "use_base_siglip": True,
    }  # fmt: skip
    whole = {
        "architectures": ["Idefics3ForConditionalGeneration"], "image_token_id": 49190, "model_type": "idefics3",
        "pad_token_id": 128002, "scale_factor": 4, "text_config": text, "tie_word_embeddings": False,
        "use_reentrant_checkpointing": False, "vision_config": tower, "vocab_size": 49280,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(whole))
    words = ["training.seq_len=64", "model.vision.tiles_per_side=1"]
    found = compose([f"model.init_from={tmp_path}", *words]).config.model
    named = compose(["model=smolvlm_256m", "model.init_from=null", *words]).config.model
    assert found.model_dump(exclude={"init_from"}) == named.model_dump(exclude={"init_from"})


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("merge_size=3", "model.vision.merge_size=3 must divide the 2 patches in a row of a tile"),
        ("image_size=9", "model.vision.image_size=9 must be even"),
    ],
)
def test_towers_that_are_refused(word, message):
    with pytest.raises(UserError, match=message):
        compose(["model=tiny", *SEES_TILES, f"++model.vision.{word}"])
