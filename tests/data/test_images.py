"""Images of rows: pixels as transformers has them, places in the text, slots in a batch, and what is refused."""

import base64
import io
import json
import struct
import zlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image
from support.harness import SMALL
from support.images import GOLDENS, PATCHES, SEES, SIZE, TILES, TOWER, digest, draw, list_images, save

from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.data.chat import PLAIN, ChatTemplate
from tunix.data.dataset import load_corpus
from tunix.data.documents import read_prompt
from tunix.data.files import BadRow
from tunix.data.image_processors import PatchProcessor, SquareProcessor, TileProcessor
from tunix.data.image_slots import ImagePrompts, ImageSlots, place_images
from tunix.data.images import ImageReader, keep_image, map_ahead, take_images
from tunix.data.prompts import load_prompts

pytestmark = pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # as tunix has it
IMAGES = list_images()
FORM, SEEN = SquareProcessor(TOWER["image_size"], TOWER["tokens_per_image"]), SquareProcessor(SIZE, 4)
ANSWERS = ["one", "two", "three"]
# As the chat template of gemma-3-it writes the parts of a turn.
GEMMA_PARTS = (
    "{{ bos_token }}{%- for message in messages -%}{{ '<start_of_turn>' + message.role + '\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}"
    "{%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}"
    "{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}"
    "{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{ '<end_of_turn>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{'<start_of_turn>model\n'}}{%- endif -%}"
)


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize(
    "processor", [SEEN, PatchProcessor(*PATCHES), TileProcessor(*TILES)], ids=lambda processor: processor.kind
)
def test_pixels_are_those_of_transformers(processor, name):
    expected = json.loads(GOLDENS.read_text())[processor.kind][name]
    seen = processor.decode(IMAGES[name])
    assert digest(seen.units) == expected
    assert processor.find_grid(IMAGES[name]) == seen.grid
    assert (processor.split(processor.join(seen.units, seen.grid)) == seen.units).all()
    kept = keep_image(IMAGES[name], name, processor, 10_000)
    assert digest(processor.decode(kept).units) == expected


def test_narrow_images_are_refused():
    """As transformers refuses them, or where its patches would be more than max_pixels."""
    for size, message in (
        ((201, 1), "201 x 1 pixels, whose longer side is more than 200 times"),
        ((5, 900), "so narrow that"),
    ):
        with pytest.raises(BadRow, match=message):
            keep_image(save(Image.new("RGB", size)), "it", PatchProcessor(*PATCHES), 10_000)
    # One that gets narrower when it is kept in its new size is read again.
    processor = PatchProcessor(4, 2, 64, 16384)
    kept = keep_image(save(Image.new("RGB", (1780, 9)), "BMP"), "it", processor, 100_000)
    with Image.open(io.BytesIO(kept)) as image:
        assert image.size == (1776, 8)
    assert processor.find_grid(kept) == processor.decode(kept).grid == (2, 444)


def test_references_and_what_their_messages_name(tmp_path):
    """A URL of a file has %20 for a space; an image in memory is bounded as a file is; generate has keys of its own."""
    (tmp_path / "a cat.png").write_bytes(IMAGES["rgb"])
    reader = ImageReader(SEEN, "/", 100_000, 10_000)
    assert reader.read([(tmp_path / "a cat.png").as_uri()]) == [keep_image(IMAGES["rgb"], "", SEEN, 10_000)]
    with pytest.raises(BadRow, match="has an image of more than 8 bits a channel, of Pillow"):
        reader.read([GRAYS])
    prompts, turns = ImagePrompts(SEEN, 4, 500), [{"role": "user", "content": "?"}]
    for reference, message in (
        ("https://a.org/a.png", "the prompt names an image at an address; download it, and name its file"),
        (IMAGES["rgb"], "the prompt has an image of more than max_image_pixels=500 pixels"),
    ):
        with pytest.raises(UserError, match=message):
            prompts.read([dict(turn) for turn in turns], [reference], "")


def test_a_large_image_is_kept_in_the_size_of_the_tower():
    assert keep_image(IMAGES["rgb"], "", SquareProcessor(100, 4), 10_000) == IMAGES["rgb"]
    kept = keep_image(IMAGES["wide"], "", SEEN, 10_000)
    with Image.open(io.BytesIO(kept)) as image:
        assert (image.format, image.size) == ("PNG", (SIZE, SIZE))


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, depth=8):
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


GRAYS = Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64))
FRAMES = [Image.fromarray(draw(9, 9, seed=n)) for n in range(3)]
BAD = {
    "empty": (b"", "an image that is none of JPEG, "),
    "text": (b"not an image", "an image that is none of JPEG, "),
    "cut off": (IMAGES["rgb"][:400], "a broken image, "),
    "cut off in its head": (IMAGES["rgb"][:20], "a broken image, |an image that is none of"),
    "animated": (save(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), "an animation, "),
    "16 bits": (save(GRAYS), "an image of more than 8 bits a channel, "),
    "a bomb": (png(150, 100), "an image of more than data.max_image_pixels=10000 pixels, it, 150 x 100"),
    "a larger bomb": (png(60_000, 60_000), "an image of more than data.max_image_pixels=10000 pixels, it"),
    "of no size": (png(0, 5), "a broken image, |an image that is none of"),
    "of another format": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "an image that is none of"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_images_that_are_refused(name):
    data, message = BAD[name]
    with pytest.raises(BadRow, match=f"^has ({message})") as error:
        keep_image(data, "it", SEEN, 10_000)
    assert "\n" not in str(error.value)
    assert "0x" not in str(error.value)  # an object's address


@pytest.fixture
def folder(tmp_path):
    """Three images."""
    (tmp_path / "photos").mkdir()
    for number in range(3):
        (tmp_path / "photos" / f"{number}.png").write_bytes(save(Image.fromarray(draw(20 + number, 30, seed=number))))
    return tmp_path


def turn(content, answer):
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def load(folder, rows, *words, name="rows.jsonl", source=None):
    """Load rows of a file, or those of another `source`, given as words."""
    (folder / name).write_text("\n".join(map(json.dumps, rows)))
    source = source or ["data=jsonl", f"data.paths=['{folder}/{name}']", "data.held_out_fraction=0"]
    return load_corpus(
        compose(
            [*SMALL, *SEES, "task=sft", "tokenizer=bytes", "training.seq_len=64", f"loading.cache_dir='{folder}/cache'",
             *source, *words]
        ).config
    )  # fmt: skip


def describe(corpus):
    """Return the text and the pixels of each document, in the order of the texts."""
    (packed,) = corpus.train.values()
    found = []
    for row in map(packed.__getitem__, range(len(packed))):
        index = row["image_index"]
        for segment in range(1, row["segment_ids"].max() + 1):
            here = row["segment_ids"] == segment
            tokens = [*row["tokens"][here], row["targets"][here][-1]]
            slots = sorted({int(each) // FORM.tokens_per_image for each in index[here] if each >= 0})
            image_spans = np.flatnonzero(here & (index >= 0))
            assert (row["tokens"][image_spans] == TOWER["image_token"]).all()
            assert (row["loss_mask"][image_spans] == 0).all()
            assert index[image_spans].tolist() == [4 * slot + k for slot in slots for k in range(4)]
            text = corpus.tokenizer.decode(tokens, skip_special_tokens=False)
            found.append((text, [row["images"][slot].tobytes() for slot in slots]))
    return sorted(found)


def write_parquet(folder):
    import pyarrow
    from pyarrow import parquet

    rows = [
        {"messages": turn("what?", ANSWERS[n]),
         "image": {"bytes": (folder / f"photos/{n}.png").read_bytes(), "path": f"{n}.png"}} for n in range(3)
    ]  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")


def write_feature(folder):
    """As the library `datasets` writes a column of lists of images, with its type."""
    import datasets

    images = [[str(folder / f"photos/{n}.png")] for n in range(3)]
    rows = datasets.Dataset.from_dict({"messages": [turn("what?", answer) for answer in ANSWERS], "images": images})
    rows.cast_column("images", datasets.List(datasets.Image())).to_parquet(folder / "feature.parquet")
    return f"'{folder}/feature.parquet'"


def make_forms(folder):
    """The same three conversations in the forms that are read."""
    paths = [f"photos/{n}.png" for n in range(3)]
    urls = ["data:image/png;base64," + base64.b64encode((folder / path).read_bytes()).decode() for path in paths]

    def part(n):
        return [
            {"type": "image", "image": paths[n]},
            {"type": "image", "path": str(folder / paths[n])},
            {"type": "image_url", "image_url": {"url": urls[n]}},
        ]

    text = {"type": "text", "text": "what?"}
    return {
        "parts": [{"messages": turn([part(n)[0], text], ANSWERS[n])} for n in range(3)],
        "absolute": [{"messages": turn([part(n)[1], text], ANSWERS[n])} for n in range(3)],
        "data URLs": [{"messages": turn([part(n)[2], text], ANSWERS[n])} for n in range(3)],
        "parts and a column": [
            {"messages": turn([{"type": "image"}, text], ANSWERS[n]), "images": [paths[n]]} for n in range(3)
        ],
        "column": [{"messages": turn("what?", ANSWERS[n]), "images": paths[n]} for n in range(3)],
        "column image": [  # beside an empty column, as joined tables have one
            {"messages": turn("what?", ANSWERS[n]), "image": {"path": paths[n]}, "images": None} for n in range(3)
        ],
        "placeholder": [{"messages": turn("<start_of_image>what?", ANSWERS[n]), "image": paths[n]} for n in range(3)],
        "messages as text": [
            {"messages": json.dumps(turn([part(n)[0], text], ANSWERS[n])), "images": "[]"} for n in range(3)
        ],
    }  # fmt: skip


def test_every_form_gives_the_same_conversations(folder):
    found = {name: describe(load(folder, rows, name=f"{name}.jsonl")) for name, rows in make_forms(folder).items()}
    write_parquet(folder)
    file, whole = f"'{folder}/rows.parquet'", "data.held_out_fraction=0"
    found["parquet"] = describe(load(folder, [], source=["data=parquet", f"data.paths=[{file}]", whole]))
    words = ["data=hf", "data.path=parquet", f"data.data_files=[{file}]", whole]
    found["hf"] = describe(load(folder, [], source=words))
    found["image feature"] = describe(
        load(folder, [], source=[*words[:2], f"data.data_files=[{write_feature(folder)}]", whole])
    )
    soft = "<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>"
    expected = [
        (f"<bos>user:\n\n\n{soft}\n\nwhat?\nassistant:\n{answer}<eos>",
         [FORM.decode((folder / f"photos/{n}.png").read_bytes()).units[0].tobytes()])
        for n, answer in enumerate(ANSWERS)
    ]  # fmt: skip
    for name, each in found.items():
        assert each == sorted(expected), name


def test_templates_with_parts_and_without():
    tokens = {"bos_token": "<bos>", "eos_token": "<eos>"}
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " a "}, {"type": "image"}]}]
    gemma, plain = (ChatTemplate(source, tokens, FORM.mark) for source in (GEMMA_PARTS, PLAIN))
    assert (gemma.supports_parts, plain.supports_parts) == (True, False)
    mark = "<start_of_image>"
    assert gemma.render(messages) == f"<bos><start_of_turn>user\n{mark}a{mark}<end_of_turn>\n"
    assert plain.render(messages) == f"<bos>user:\n{mark} a {mark}"
    # What Gemma3Processor of transformers makes of a text with an image.
    assert FORM.expand([f"a{mark}b"], [IMAGES["rgb"]])[0] == f"a\n\n{mark}{'<image_soft_token>' * 4}<end_of_image>\n\nb"


QWEN_PARTS = (  # as the template of Qwen 3 VL writes the parts of a turn
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}{%- for content in message.content %}"
    "{%- if content.type == 'image' or 'image' in content %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif 'text' in content %}{{- content.text }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def test_soft_tokens_of_images_in_their_own_shape():
    """As many as the processor of transformers writes: rows times columns of patches, by merge_size squared."""
    processor = PatchProcessor(*PATCHES)
    template = ChatTemplate(QWEN_PARTS, {}, processor.mark)
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}]}]
    assert template.supports_parts
    text = template.render(turns)
    (whole,) = processor.expand([text], [IMAGES["wide"], IMAGES["rgb"]])
    counts = [processor.count(processor.find_grid(IMAGES[name])) for name in ("wide", "rgb")]
    assert counts == [3 * 20, 5 * 8]
    begin, soft, end = processor.tokens
    first, second = (begin + soft * count + end for count in counts)
    assert whole == f"<|im_start|>user\n{first}a{second}<|im_end|>\n"
    with pytest.raises(ValueError, match=r"2 times <\|vision_start\|><\|image_pad\|><\|vision_end\|> for 1 images"):
        processor.expand([text], [IMAGES["wide"]])
    ids = np.array([9, 1, *[2] * counts[0], 3, 7, 1, *[2] * counts[1], 3])
    found = processor.find(ids, 2, [IMAGES["wide"], IMAGES["rgb"]])
    assert found.tolist() == [[2, 2 + counts[0]], [len(ids) - 1 - counts[1], len(ids) - 1]]


PART = {"type": "image", "image": "photos/0.png"}
BAD_ROWS = [
    ({"messages": turn([{"type": "image", "image": "gone.png"}], "a")}, "has an image that is not there, {folder}/gone.png"),
    ({"messages": turn([{"type": "image", "image": "a\0b"}], "a")}, "has an image that is not there, '{folder}/a\\x00b'"),
    ({"messages": turn([{"type": "image", "image": "a" * 5000}], "a")}, "has an image that cannot be read, aaaa"),
    ({"messages": turn([{"type": "image", "image": "photos"}], "a")}, "has an image that is no file, {folder}/photos"),
    ({"messages": turn([{"type": "image", "image": "rows.jsonl"}], "a")}, "has an image that is none of JPEG"),
    ({"messages": turn([{"type": "image", "image": "https://example.org/a.png"}], "a")}, "has an image at https://example.org/a.png, which begins with none of data.image_addresses=[]"),
    ({"messages": turn([{"type": "image", "url": "data:image/png,AAAA"}], "a")}, "has a data URL that is not"),
    ({"messages": turn([{"type": "image", "url": "data:image/png;base64,A"}], "a")}, "has a data URL whose bytes are not base64"),
    ({"messages": turn([{"type": "image"}], "a")}, "has 1 places for images and 0 images"),
    ({"messages": turn([PART], "a"), "images": ["photos/1.png"]}, "has 1 places for images and 2 images"),
    ({"messages": turn("<start_of_image> a", "a"), "images": ["photos/1.png"] * 2}, "has 1 places for images and 2 images"),
    ({"messages": turn("<start_of_image> a", "a")}, "has <start_of_image> in its text where there is no image"),
    ({"messages": turn("<image_soft_token> a", "a")}, "has <image_soft_token> in its text"),
    ({"messages": turn("a", [PART])}, "has an image in an answer"),
    ({"messages": turn([{"type": "video", "video": "a"}], "a")}, "has a content with a part that is neither text nor an image: video"),
    ({"messages": turn("a", "a"), "images": [7]}, "has int in place of an image"),
    ({"messages": turn("a", "a"), "images": [{}]}, "has an image without any of"),
    ({"messages": turn("a", "a"), "images": "[1"}, "has no list of images in column images"),
    ({"messages": turn("a", "a"), "images": [{"url": {"url": {"url": "a"}}}]}, "has dict in place of an image"),
]  # fmt: skip


SMOL_PARTS = (  # as the template of SmolVLM: a content that is text alone would be lost
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def test_soft_tokens_of_images_in_tiles():
    """What Idefics3Processor of transformers makes of a text with an image in six tiles, and of one in one tile."""
    processor, one = TileProcessor(*TILES), TileProcessor(SIZE, 9, 1)
    template = ChatTemplate(SMOL_PARTS, {}, processor.mark)
    turns = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "b"},
    ]
    text = template.render(turns)
    assert text == "<|im_start|>User:<image>a<end_of_utterance>\nAssistant: b<end_of_utterance>\n"
    around, seen = "<fake_token_around_image>", "<image>" * 9
    rows = ["".join(f"{around}<row_{r}_col_{c}>{seen}" for c in (1, 2, 3)) + "\n" for r in (1, 2)]
    whole = f"{around}<global-img>{seen}{around}"
    begin, end = text.split("<image>")
    assert processor.expand([text], [IMAGES["rgb"]]) == [f"{begin}{''.join(rows)}\n{whole}{end}"]
    assert one.expand([text], [IMAGES["rgb"]]) == [f"{begin}{whole}{end}"]
    assert (processor.count(processor.find_grid(IMAGES["rgb"])), processor.max_tokens, processor.min_tokens) == (
        7 * 9,
        10 * 9,
        4 * 9,
    )
    # The tokens of an image are not one run.
    ids = np.array([5, 3, *[4] * 9, 3, *[4] * 54, 6])
    assert processor.find(ids, 4, [IMAGES["rgb"]]).tolist() == [[2, 66]]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS, ids=[message[:40] for _, message in BAD_ROWS])
def test_bad_rows_are_named_or_left_out(folder, row, message):
    good = {"messages": turn([PART, {"type": "text", "text": "?"}], "yes")}
    with pytest.raises(UserError) as error:
        load(folder, [good, row])
    assert f"data: {folder}/rows.jsonl, line 2, {message.format(folder=folder)}" in str(error.value)
    assert "\n" not in str(error.value)
    corpus = load(folder, [good, row], "data.bad_rows=skip")
    assert corpus.prepared["jsonl"].index["left_out"] == {"bad row": 1}
    assert len(describe(corpus)) == 1


def test_bounds_of_a_row(folder):
    big = {"messages": turn([PART], "a")}
    with pytest.raises(UserError, match="line 1, has an image of more than data.max_image_pixels=500 pixels"):
        load(folder, [big], "data.max_image_pixels=500")
    with pytest.raises(UserError, match="line 1, has images that are longer than data.max_document_bytes"):
        load(folder, [{"messages": turn([PART] * 2, "a")}], "data.max_document_bytes=1500")


def test_addresses_begin_as_one_that_is_allowed():
    reader = ImageReader(FORM, ".", 1000, 1000, ("https://a.org/photos",))
    for address in ("https://a.org/photos.evil/a.png", "https://a.org/photos/../b.png", "http://a.org/photos/a.png"):
        with pytest.raises(BadRow, match="which begins with none of"):
            reader.read([address])
    # Rows of a bucket may name what is beside them, and no file of this machine.
    for path in ("/etc/passwd", "../a.png", "~/a.png"):
        with pytest.raises(BadRow, match="names an image outside of s3://bucket/rows"):
            ImageReader(FORM, "s3://bucket/rows", 1000, 1000).read([path])


def test_images_beside_a_text_are_refused(folder):
    """A model that sees learnt the text without them; one of text alone has no use for the column."""
    rows = [{"text": "a photo", "image": "photos/0.png"}] * 9
    with pytest.raises(UserError, match="line 1, has images, and task=pretrain learns from texts: task=sft reads"):
        load(folder, rows, "task=pretrain")
    for words in (["data.columns.images=null"], ["training.images_per_row=0"]):
        assert load(folder, rows, "task=pretrain", *words).prepared["jsonl"].index["documents"] == 9


@pytest.mark.parametrize("words", [["model.vision=null"], ["training.images_per_row=0"]])
def test_a_model_of_text_refuses_images(folder, words):
    for row in ({"messages": turn([PART], "a")}, {"messages": turn("a", "a"), "image": "photos/0.png"}):
        with pytest.raises(UserError, match=r"line 1, has an image, and the model takes none \(model.vision=null"):
            load(folder, [row], *words)
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]
    corpus = load(folder, [{"messages": turn(texts, "c"), "image": "gone"}], *words, "data.columns.images=null")
    (packed,) = corpus.train.values()
    assert corpus.tokenizer.decode(packed[0]["tokens"]).startswith("user:\na b\nassistant:\nc")
    assert "images" not in packed[0]


def test_choices_that_do_not_go_with_images(folder):
    rows = make_forms(folder)["parts"]
    for words, message in (
        (["loading.packing=concat"], "loading.packing=concat cuts documents wherever a sequence is full"),
        (["training.seq_len=5", "training.loss_chunk_size=5"], "training.seq_len=5 is shorter than one image, which is 6 tokens"),
        (["model.vision.image_token=7"], "model.vision.image_token=7, and in the tokenizer <image_soft_token> is 4"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            load(folder, rows, *words)


def test_a_copied_folder_keeps_its_images(folder):
    corpus = load(folder, make_forms(folder)["parts"])
    words = ["data=tokens", f"data.paths=['{corpus.prepared['jsonl'].folder}']"]
    assert describe(load(folder, [], source=words)) == describe(corpus)
    for other, takes in (("model.vision=null", "none"), ("model.vision.image_size=16", "kind=gemma3, image_size=16")):
        with pytest.raises(
            UserError, match=rf"kind=gemma3, image_size=8, tokens_per_image=4\) than this one \({takes}"
        ):
            load(folder, [], other, source=words)


def test_documents_are_cut_before_a_image(folder):
    """Conversations of several images in sequences of 40 tokens, two slots each."""
    rows, pixels = [], {}
    for number in range(12):
        count = 1 + number % 5
        names = [f"{number}.{k}.png" for k in range(count)]
        for k, name in enumerate(names):
            (folder / name).write_bytes(save(Image.fromarray(draw(8, 8, seed=10 * number + k))))
            pixels[FORM.decode((folder / name).read_bytes()).units[0].tobytes()] = name
        content = [part for k, name in enumerate(names) for part in
                   ({"type": "image", "image": name}, {"type": "text", "text": "x" * ((7 * number + 3 * k) % 30)})]  # fmt: skip
        rows.append({"messages": turn(content, f"answer {number}")})
    corpus = load(folder, rows, "training.seq_len=40")
    (packed,) = corpus.train.values()
    found = []
    for row in map(packed.__getitem__, range(len(packed))):
        index = row["image_index"]
        used = np.unique(index[index >= 0] // 4)
        assert used.tolist() == list(range(len(used)))
        assert len(used) <= 2
        for slot in used:
            image_spans = np.flatnonzero(index // 4 == slot)
            assert image_spans.tolist() == list(range(image_spans[0], image_spans[0] + 4))  # whole
            assert len(np.unique(row["segment_ids"][image_spans])) == 1
            if image_spans[-1] + 1 < 40:
                assert row["targets"][image_spans[-1]] == TOWER["end_token"]
            found.append(pixels[row["images"][slot].tobytes()])
        assert not row["images"][len(used) :].any()
    assert sorted(found) == sorted(pixels.values())


def test_images_behind_the_last_answer_that_is_learnt_are_left_out(folder):
    """With the turns that they stand in. A template that shows fewer images than there are is refused all the same."""
    image = [[{"type": "image", "image": f"photos/{n}.png"}, {"type": "text", "text": "what?"}] for n in range(2)]
    for messages, learnt in (
        ([*turn(image[0], "one"), {"role": "user", "content": image[1]}], None),
        ([*turn(image[0], "one"), *turn(image[1], "two")], [False, True, False, False]),
    ):
        row = {"messages": messages} | ({} if learnt is None else {"learnt_turns": learnt})
        ((text, pixels),) = describe(load(folder, [row], "training.seq_len=128"))
        assert len(pixels) == text.count("<start_of_image>") >= 1
        assert pixels[0] == FORM.decode((folder / "photos/0.png").read_bytes()).units[0].tobytes()
    template = folder / "two_turns.jinja"
    template.write_text(
        "{% for each in messages[:2] %}{{ each.role }}: {{ each.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    messages = [*turn(image[0], "one"), {"role": "user", "content": image[1]}]
    with pytest.raises(UserError, match="line 1, .* refuses: it writes 1 times <start_of_image> for 2 images"):
        load(folder, [{"messages": messages}], f"task.chat_template='{template}'")


@pytest.mark.parametrize(
    ("token", "content", "times"),
    [("<start_of_image>", [PART], "2 times"), ("<image_soft_token>", "?", "1 times")],  # 1 took another's place
)
def test_a_thought_with_a_token_of_an_image_is_refused(folder, token, content, times):
    template = folder / "thoughts.jinja"
    template.write_text(PLAIN.replace("{{ message.content", "{{ message.reasoning_content }}{{ message.content"))
    words = [f"task.chat_template='{template}'", "data.bad_rows=skip"]
    good = {"messages": turn([PART, {"type": "text", "text": "?"}], "yes")}
    asked, answer = turn(content, "no")
    bad = {"messages": [asked, answer | {"reasoning_content": f"I see {token}"}]}
    with pytest.raises(UserError, match=f"line 2, .* refuses: it writes {times} {token} for"):
        load(folder, [good, bad], words[0])
    assert load(folder, [good, bad], *words).prepared["jsonl"].index["left_out"] == {"refused by task.chat_template": 1}


def test_pairs_have_their_images_in_both_halves(folder):
    rows = [
        {"prompt": "what?", "chosen": f"a {n}", "rejected": f"b {n}", "images": [f"photos/{n}.png"]} for n in range(3)
    ]
    source = ["data=pairs", f"data.paths=['{folder}/rows.jsonl']", "data.held_out_fraction=0", "task=dpo"]
    (packed,) = load(folder, rows, "training.seq_len=128", source=source).train.values()
    assert len(packed) == 3
    for row in map(packed.__getitem__, range(3)):
        assert row["images"][0].tobytes() == row["images"][1].tobytes()
        for segment, slot in ((1, 0), (2, 1)):
            here = row["segment_ids"] == segment
            index = row["image_index"][here]
            assert index[index >= 0].tolist() == [4 * slot + k for k in range(4)]
            assert (row["tokens"][here][index >= 0] == TOWER["image_token"]).all()
    with pytest.raises(UserError, match="3 of 3 pairs .*, or have more than training.images_per_row=1 images, both"):
        load(folder, rows, "training.images_per_row=1", "training.seq_len=128", source=source)


def test_images_of_a_column_stand_before_the_first_turn_of_the_user():
    """A turn of the system may come first; marks in a text say where they stand."""
    reader = SimpleNamespace(processor=SimpleNamespace(mark="<image>", tokens=["<soft>"]))
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    assert take_images(turns, ["a", "b"], reader) == ["a", "b"]
    assert [[part["type"] for part in turn["content"]] for turn in turns if isinstance(turn["content"], list)] == [
        ["image", "image", "text"]
    ]
    assert isinstance(turns[1]["content"], list)
    marked = [{"role": "system", "content": "S"}, {"role": "user", "content": "a<image>b"}]
    assert take_images(marked, ["a"], reader) == ["a"]
    assert [part.get("text") for part in marked[1]["content"]] == ["a", None, "b"]


@pytest.mark.parametrize("column", ["messages", "prompt"])
@pytest.mark.parametrize("form", [list, json.dumps])
@pytest.mark.parametrize("in_column", [None, "images", "image"])
def test_rewards_get_the_places_of_images_and_not_the_images(folder, column, form, in_column):
    """Whatever the column with the turns is, which are those of the row, and that of the images; a file of an image may
    have megabytes."""
    text, file = {"type": "text", "text": "what?"}, "photos/0.png"
    image = {"type": "image"} if in_column else {"type": "image", "image": file}
    answer = [{"role": "assistant", "content": "a"}] if column == "messages" else []
    turns = [{"role": "user", "content": [image, text]}, *answer]
    more = {in_column: [file] if in_column == "images" else file} if in_column else {}
    (folder / "rows.jsonl").write_text(json.dumps({column: form(turns), "answer": "a", "level": 3, **more}))
    words = [*SMALL, *SEES, "task=grpo", "task.rewards=[exact_match]", "task.group_size=2", "sampling.max_new_tokens=8",
             "training.global_batch_size=2", "training.seq_len=64", "tokenizer=bytes", "data=jsonl",
             f"data.paths=['{folder}/rows.jsonl']", "data.held_out_fraction=0", f"loading.cache_dir='{folder}/cache'",
             "model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true", "task.system=S"]  # fmt: skip
    words += ["data.columns.prompt=prompt", "data.columns.completion=answer"] if column == "prompt" else []
    (prompt,) = load_prompts(compose(words).config).spread("train", 1)
    places = [{"role": "user", "content": [{"type": "image"}, text]}]
    turns = [{"role": "system", "content": "S"}, *places]
    own = {"messages": turns} | {column: [*places, *answer]}
    assert prompt.columns == {**own, "answer": "a", "level": 3}
    assert prompt.question.messages == turns
    assert prompt.images.pixels.shape == (1, 8, 8, 3)


def test_an_answer_of_the_data_has_no_image():
    words = ["task=grpo", "task.rewards=[exact_match]", "sampling.max_new_tokens=8", "data=jsonl", "data.paths=[a]"]
    cfg = compose([*SMALL, *SEES, *words]).config
    with pytest.raises(BadRow, match="has an image in an answer, and a model answers with text"):
        read_prompt(cfg.data.columns, {"messages": [*turn("?", "yes"), *turn([PART], [PART])]}, cfg.task)


def test_cuts():
    lengths, starts, image_spans = (
        np.array([14]),
        np.array([0]),
        np.array([[4, 6], [10, 12]]),
    )  # a a a [ 1 1 ] b b [ 2 2 ] c
    for slots, seq_len, expected in (
        (2, 14, [[0, 13]]),
        (2, 11, [[0, 9], [9, 4]]),  # the second image would be cut
        (1, 14, [[0, 9], [9, 4]]),  # or has no slot
        (1, 8, [[0, 8], [8, 5]]),
        (1, 7, [[0, 7], [7, 6]]),  # it ends behind the first image
        (1, 6, [[0, 3], [3, 6], [9, 4]]),
    ):
        processor = ImageSlots(SquareProcessor(8, 2), slots, 4)
        assert processor.suffix == f"-2-{slots}"  # of plans in the cache
        pieces = processor.split_chunks(lengths, starts, image_spans, seq_len)
        assert pieces.tolist() == expected
        counts = [sum(first <= place < first + length for place, _ in image_spans) for first, length in expected]
        rooms = [max(length, -(-count * seq_len // slots)) for (_, length), count in zip(expected, counts, strict=True)]
        assert processor.weigh(pieces, image_spans, seq_len).tolist() == rooms


def test_rows_take_the_images_for_which_they_have_tokens():
    units, grids = np.arange(2 * 8 * 8 * 3, dtype=np.uint8).reshape(2, 8, 8, 3), np.array([[1, 1], [1, 1]])
    place = partial(place_images, units=units, grids=grids, processor=SquareProcessor(8, 2), soft_id=4)
    images = place(np.array([[4, 4, 0], [0, 0, 0], [0, 4, 4]]))
    assert images.image_index.tolist() == [[0, 1, -1], [-1, -1, -1], [-1, 0, 1]]
    assert np.array_equal(images.pixels, np.stack([units[0], np.zeros_like(units[0]), units[1]])[:, None])
    for tokens in ([[4, 0, 0], [4, 4, 4]], [[4, 4, 0], [0, 0, 0]]):  # a row ends within an image, or one is left
        with pytest.raises(ValueError, match="for 2 images"):
            place(np.array(tokens))


def test_questions_are_those_of_first_conversations_all_over_the_sequences():
    def example(number: int, segment: int = 1) -> dict[str, np.ndarray]:
        """An image of two soft tokens behind the number, and an answer of two tokens."""
        return {
            "tokens": np.array([number, 4, 4, 9, 7, 8]), "targets": np.array([4, 4, 9, 7, 8, 2]),
            "loss_mask": np.array([0, 0, 0, 0, 1, 1]), "segment_ids": np.full(6, segment),
            "image_index": np.array([-1, 0, 1, -1, -1, -1]), "image_grids": np.array([[1, 1]]),
            "images": np.full((1, 8, 8, 3), number, np.uint8),
        }  # fmt: skip

    slots = ImageSlots(SquareProcessor(8, 2), 1, 4)
    sequences: Any = [example(number) for number in range(10, 16)]
    found = slots.find_questions(sequences, 3, max_length=5)
    assert [(each.prompt, each.answer) for each in found] == [([n, 4, 4, 9, 7], [8, 2]) for n in (10, 12, 14)]
    assert [int(each.last_image[0, 0, 0]) for each in found] == [10, 12, 14]
    assert slots.find_questions(sequences, 3, max_length=4) == []
    assert slots.find_questions(cast("Any", [example(10, segment=2)]), 3, max_length=5) == []


def test_work_ahead_keeps_the_order_and_raises_in_its_turn():
    def work(item):
        if item == 30:
            raise ValueError("30")
        return item

    done = []
    with pytest.raises(ValueError, match="30"):
        done.extend(map_ahead(work, range(100), 3))
    assert done == list(range(30))


def test_two_runs_write_the_same_bytes(folder):
    rows = make_forms(folder)["parts"]
    made = [
        load(folder, rows, f"loading.cache_dir='{folder}/{name}'", f"loading.prepare_processes={n}").prepared["jsonl"]
        for name, n in (("a", 1), ("b", 2))
    ]
    assert made[0].fingerprint == made[1].fingerprint
    files = [
        {path.relative_to(each.folder): path.read_bytes() for path in Path(each.folder).rglob("*.npy")} for each in made
    ]
    assert files[0] == files[1]
    assert len(files[0]) > 8
