"""Vectors of texts: those, losses and gradients of sentence-transformers, data, runs, files for it."""

import json
from functools import partial

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.harness import ONE_DEVICE, ONE_LAYER, ROOT, RUN, SMALL, SPLIT_MESHES, metrics
from tokenizers import Tokenizer

import tunix
from tunix.average import average
from tunix.base.errors import UserError
from tunix.config import Average, Evaluate, Export
from tunix.config.command_line import read_settings
from tunix.config.compose import compose
from tunix.data.batches import stack_examples
from tunix.data.dataset import load_corpus
from tunix.data.packing import _fill_examples
from tunix.data.shards import Arrays
from tunix.data.tokenizer import train_vocab
from tunix.evaluate import evaluate
from tunix.export import export
from tunix.huggingface import sentence_vectors
from tunix.huggingface.sentence_vectors import list_files
from tunix.sharding.mesh import ONE_DEVICE as ONE_DEVICE_SHAPE
from tunix.sharding.mesh import device_mesh
from tunix.training.embeddings import compare, embedding_loss, hash_rows, make_gradients

REFERENCE = json.loads((ROOT / "tests" / "training" / "trl" / "embeddings.json").read_text())
LLAMA = ROOT / "tests" / "models" / "parity" / "llama"
EMBED = ("task=embed", "data=pairs", "data.paths=[none]")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The tiny Llama in float32, as sentence-transformers had it."""
    return tunix.load_pretrained(LLAMA)


def groups_shard(count):
    tokens, starts, ends = [], [], []
    for group in REFERENCE["groups"]:
        starts.append(len(tokens))
        for text in group[:count]:
            tokens += [*text, 0]
            ends.append(len(tokens) - 1)
    marks = np.zeros(len(tokens), bool)
    marks[ends] = True
    return Arrays(np.array(tokens), np.array(starts), marks, label_values=np.full(len(starts), count, np.float32))


def batch_of(shard, rows_of_microbatch):
    """One group a row, with a row of padding behind the five groups."""
    ends = [*shard.starts[1:], len(shard.tokens)]
    pieces = [[[int(start), int(end - start) - 1]] for start, end in zip(shard.starts, ends, strict=True)]
    rows = [_fill_examples(shard, piece, 32) for piece in (*pieces, [])]
    parts = [rows[at : at + rows_of_microbatch] for at in range(0, 6, rows_of_microbatch)]
    return {name: jnp.asarray(field) for name, field in stack_examples(parts).items()}


# Half of the cases have each pair of pooling, number of texts and sizes.
@pytest.mark.nightly(but=["mean-2-sizes"])
@pytest.mark.parametrize("case", REFERENCE["cases"])
def test_losses_gradients_and_vectors_are_those_of_sentence_transformers(case, llama):
    pooling, count, sizes = case.split("-")
    words = [
        f"task.pooling={pooling}",
        f"task.negatives={int(count) - 2}",
        f"task.temperature={REFERENCE['temperature']}",
    ]
    words += [f"task.sizes={REFERENCE['sizes']}"] * (sizes == "sizes")
    cfg, expected = compose([*EMBED, *words]).config, REFERENCE["cases"][case]

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def step(params, batch):
        parts = [
            embedding_loss(llama.arch.module(params), {name: x[n] for name, x in batch.items()}, task=cfg.task)
            for n in range(len(batch["tokens"]))
        ]
        losses = jax.tree.map(lambda *each: sum(each), *parts)
        return losses.objective / losses.weight, losses

    # The rows of a step are compared over microbatches.
    with jax.set_mesh(llama.mesh):
        batch = batch_of(groups_shard(int(count)), 3)
        filled = jax.jit(make_gradients(cfg, llama.arch.module))(llama.params, batch)
        (_, loss), grads = step(llama.params, filled)
    assert float(loss.weight) == 5
    assert float(loss.sums["loss"] / loss.weight) == pytest.approx(expected["loss"], rel=1e-5)
    assert float(jax.jit(optax.tree.norm)(grads)) == pytest.approx(expected["grad_norm"], rel=1e-5)
    vectors = llama.embed([group[0] for group in REFERENCE["groups"]], pooling)
    np.testing.assert_allclose(vectors, expected["vectors"], rtol=1e-5, atol=1e-5)
    texts = [text for group in REFERENCE["groups"] for text in group[1 : int(count)]]
    documents, own = np.asarray(llama.embed(texts, pooling)), np.arange(5) * (int(count) - 1)
    for name, size in {"accuracy": None, **{f"accuracy_{size}": size for size in cfg.task.sizes or ()}}.items():
        cut = documents[:, :size] / np.linalg.norm(documents[:, :size], axis=1, keepdims=True)
        hits = np.argmax(np.asarray(vectors)[:, :size] @ cut.T, 1) == own
        assert float(loss.sums[name]) == hits.sum(), name


@pytest.mark.parametrize(("pooling", "mode"), [("last", "lasttoken"), ("mean", "mean_tokens")])
def test_files_are_those_that_all_versions_of_sentence_transformers_read(pooling, mode):
    """What version 5.1.2 writes: it cannot read those of 6, and text-embeddings-inference wants its names of poolings."""
    files = list_files(pooling, 32, 64)
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    assert files["1_Pooling/config.json"] == {
        "word_embedding_dimension": 32, "include_prompt": True,
    } | {f"pooling_mode_{name}": name == mode for name in modes}  # fmt: skip
    assert [(each["path"], each["type"]) for each in files["modules.json"]] == [
        ("", "sentence_transformers.models.Transformer"),
        ("1_Pooling", "sentence_transformers.models.Pooling"),
        ("2_Normalize", "sentence_transformers.models.Normalize"),
    ]
    assert files["sentence_bert_config.json"] == {"max_seq_length": 64, "do_lower_case": False}


@pytest.mark.parametrize("bos", ["<bos>", None])
def test_the_tokenizer_of_an_export_reads_texts_as_the_training_did(bos, tmp_path):
    vocab = train_vocab(compose(["tokenizer=bytes", "tokenizer.vocab_size=259"]).config.tokenizer, [])
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    copy.mkdir()
    sentence_vectors.write_files(source, "mean", 32, 64, vocab.backend, bos, "<eos>", "<pad>")
    sentence_vectors.copy_files(source, copy)
    assert json.loads((copy / "1_Pooling" / "config.json").read_text())["pooling_mode_mean_tokens"]
    tokens = Tokenizer.from_file(str(source / "tokenizer.json")).encode("hi").tokens
    assert tokens == [*([bos] if bos else []), "h", "i", "<eos>"]
    config = json.loads((source / "tokenizer_config.json").read_text())
    assert config.pop("tokenizer_class")
    assert config == {
        **({"bos_token": bos} if bos else {}), "eos_token": "<eos>", "pad_token": "<pad>", "padding_side": "right",
        "model_max_length": 64, "split_special_tokens": True,
    }  # fmt: skip


def write_rows(path, count=24):
    rows = [
        {"prompt": f"what is {n}", "chosen": f"it is {n}", "rejected": ["not it", f"nor {n}"][: n % 3]}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


FULL = ("model.sliding_window=null", "model.local_rope_theta=null")


def test_a_row_twice_in_a_step_is_no_wrong_answer_to_itself():
    """As a step across the end of an epoch may hold it. Rows with the same tokens in another order are compared."""
    tokens = np.array([[[5, 1, 2], [5, 2, 1], [5, 1, 2]]], np.int32)
    vectors = np.random.default_rng(0).normal(size=(1, 3, 3, 4)).astype(np.float32)
    vectors[:, 2] = vectors[:, 0]
    is_text = np.ones((1, 3, 3), bool)
    with jax.set_mesh(device_mesh(ONE_DEVICE_SHAPE, {}, True)):
        compare_rows = jax.jit(lambda vectors, is_text, tokens: compare(vectors, is_text, hash_rows(tokens), 0.5))
        whole = compare_rows(vectors, is_text, tokens)
        parts = compare_rows(vectors[:, :2], is_text[:, :2], tokens[:, :2])
    (losses, hits), (alone, own_hits) = jax.device_get((whole, parts))
    np.testing.assert_allclose(losses[0, [0, 2]], alone[0, [0, 0]], rtol=1e-6)
    assert hits[0, [0, 2]].tolist() == own_hits[0, [0, 0]].tolist()
    assert losses[0, 1] > alone[0, 1]  # to it they are two rows
    with jax.set_mesh(device_mesh(ONE_DEVICE_SHAPE, {}, True)):
        _, hits = compare_rows(np.ones_like(vectors), is_text, tokens)
    assert not np.asarray(hits).any()  # where all are as near, none is the nearest
    away = np.array([[[[1, 0], [-1, 9], [-9, 1]]] * 3], np.float32)
    away[:, 1:, 1:] = away[:, :1, 2:]
    with jax.set_mesh(device_mesh(ONE_DEVICE_SHAPE, {}, True)):
        _, hits = compare_rows(away, is_text, np.arange(9, dtype=np.int32).reshape(1, 3, 3))
    assert hits[0].tolist() == [1, 0, 0]  # all documents point away from the queries, the first one the least


RUN_OF_GROUPS = [
    *RUN, "task=embed", "task.negatives=2", "task.sizes=[8]", "data=pairs", "tokenizer=bytes", "training.seq_len=64",
    "data.held_out_fraction=0.2", "training.global_batch_size=4", "optimizer.learning_rate=1e-2",
    "distributed.allow_idle_devices=true", "evaluation.num_sequences=4", "evaluation.sample_tokens=0",
]  # fmt: skip


@pytest.mark.nightly
def test_a_run_learns_resumes_and_is_exported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_rows(tmp_path / "rows.jsonl")
    words = [*RUN_OF_GROUPS, *ONE_LAYER, *FULL, f"data.paths=[{path}]", ONE_DEVICE, "training.max_steps=6"]
    words.append("model.query_scale=${model.head_dim}")  # as in llama.cpp
    run = tunix.train([*words, "hydra.run.dir=run"]).folder
    lines, held_out = metrics(run), metrics(run, "held_out")
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert {"accuracy", "accuracy_8"} <= held_out[-1].keys()
    tunix.train(["resume=run/checkpoints/3"])
    assert [line["loss"] for line in metrics(run)][6:] == [line["loss"] for line in lines[3:]]
    evaluate(read_settings(Evaluate, [f"checkpoint={run}", "output=results.json"]))
    assert json.loads((tmp_path / "results.json").read_text())["accuracy"] == held_out[-1]["accuracy"]

    export(read_settings(Export, [f"checkpoint={run}", "output=out"]))
    text = "what is 5"
    ids = Tokenizer.from_file("out/tokenizer.json").encode(text).ids
    corpus = load_corpus(compose(words).config)
    bos = corpus.vocab.bos_token or ""
    read = corpus.tokenizer.decode(ids, skip_special_tokens=False)
    assert read == f"{bos}{text}{corpus.vocab.eos_token}"
    vectors = tunix.load_pretrained(run).embed([ids], "last")
    np.testing.assert_allclose(tunix.load_pretrained("out").embed([ids], "last"), vectors, rtol=1e-5, atol=1e-6)
    assert json.loads((tmp_path / "out" / "1_Pooling" / "config.json").read_text())["pooling_mode_lasttoken"]
    average(read_settings(Average, [f"checkpoint={run}", "steps=[3,6]", "output=mean"]))
    export(read_settings(Export, ["checkpoint=out", "output=again", "dtype=bfloat16"]))
    for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "tokenizer.json"):
        for other in ("mean", "again"):
            assert (tmp_path / other / name).read_text() == (tmp_path / "out" / name).read_text()
    export(read_settings(Export, [f"checkpoint={run}", "output=gguf", "format=gguf"]))
    keys = {name: field.contents() for name, field in gguf.GGUFReader("gguf/model.gguf").fields.items()}
    family = keys["general.architecture"]
    assert (keys[f"{family}.pooling_type"], keys["tokenizer.ggml.eos_token_id"]) == (3, corpus.vocab.eos)
    assert [keys.get(f"tokenizer.ggml.add_{name}_token", False) for name in ("bos", "eos")] == [bool(bos), True]
    # A row has its texts one after the other, each with <eos>, and the last token of each is marked.
    example = corpus.train["jsonl"][0]
    for segment in range(1, example["segment_ids"].max() + 1):
        own = example["segment_ids"] == segment
        assert example["tokens"][own][-1] == corpus.vocab.eos
        assert example["loss_mask"][own].tolist() == [0] * (own.sum() - 1) + [1]


@pytest.mark.nightly
def test_an_adapter_has_the_files_of_sentence_transformers(hf_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    of_run = [word for word in RUN_OF_GROUPS if word not in (*SMALL, "tokenizer=bytes")]
    words = [*of_run, f"model.init_from={hf_dir}", "model.lora.rank=2", "training.seq_len=64", ONE_DEVICE]
    words += [f"data.paths=[{write_rows(tmp_path / 'rows.jsonl')}]", "training.max_steps=3", "hydra.run.dir=run"]
    tunix.train([*words, "training.loss_chunk_size=64", "training.micro_batch_size=1"])
    for more in (["output=adapter"], ["output=merged", "merge_lora=true", "dtype=float32"]):
        export(read_settings(Export, ["checkpoint=run", *more]))
    for name in ("modules.json", "1_Pooling/config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "adapter" / name).read_text() == (tmp_path / "merged" / name).read_text()
    rows = [[5, 6, 7], [8]]
    vectors = tunix.load_pretrained(hf_dir, adapter="adapter").embed(rows, "last")
    np.testing.assert_allclose(vectors, tunix.load_pretrained("merged").embed(rows, "last"), rtol=1e-4, atol=1e-5)


MISTAKES = {
    "loading.packing=best_fit": "a row of task=embed has one query with its documents; set it to pad",
    "loading.packing=concat": "a row of task=embed has one query with its documents; set it to pad",
    "task.sizes=[8,8]": "names a size twice",
    "task.sizes=[4096]": "4096 is no part of a vector",
    "model.lora={rank: 2, dropout: 0.1}": "they have to be the same; set model.lora.dropout=0",
}


@pytest.mark.parametrize("word", MISTAKES)
def test_what_contradicts_is_refused(word):
    with pytest.raises(UserError) as error:
        compose([*EMBED, word])
    assert MISTAKES[word] in str(error.value)


def test_each_number_of_negatives_is_read_anew(tmp_path):
    row = {"prompt": "a", "chosen": "b", "rejected": ["c", "d"]}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row | {"prompt": f"{n}"}) + "\n" for n in range(4)))
    words = [*RUN_OF_GROUPS, *ONE_LAYER, f"data.paths=[{path}]", "data.held_out_fraction=0"]
    for count in (1, 0, 2):
        corpus = load_corpus(compose([*words, f"task.negatives={count}"]).config)
        assert corpus.train["jsonl"][0]["segment_ids"].max() == 2 + count


def test_negatives_of_a_table_are_a_list_as_json_a_text_or_none(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('prompt,chosen,rejected\n1,b,"[""c"", ""d""]"\n2,b,\n3,b,[c]\n')
    words = [*RUN_OF_GROUPS, *ONE_LAYER, "data=csv", "data.columns.prompt=prompt", f"data.paths=[{path}]"]
    corpus = load_corpus(compose([*words, "data.held_out_fraction=0"]).config)
    found = {}
    for example in (corpus.train["csv"][number] for number in range(3)):
        segments = [example["tokens"][example["segment_ids"] == number] for number in range(1, 5)]
        query, _, *wrong = [corpus.tokenizer.decode(each.tolist()) for each in segments]
        found[query] = [text for text in wrong if text]
    assert found == {"1": ["c", "d"], "2": [], "3": ["[c]"]}


def test_a_tokenizer_is_trained_on_the_negatives_that_are_read(tmp_path):
    """Whatever other run has trained one before."""
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps({"prompt": "a", "chosen": "b", "rejected": "negative " * 20}) + "\n") * 4)
    words = [
        *RUN_OF_GROUPS,
        f"data.paths=[{path}]",
        "tokenizer=bpe",
        "tokenizer.vocab_size=270",
        "training.seq_len=512",
    ]
    for count in (0, 1):
        corpus = load_corpus(compose([*words, "data.held_out_fraction=0", f"task.negatives={count}"]).config)
        assert ("negative" in corpus.tokenizer.get_vocab()) == bool(count)


def test_rows_without_a_document_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "chosen": ""}) + "\n")
    with pytest.raises(UserError, match="has a query or a document that is empty, or no text"):
        load_corpus(compose([*RUN_OF_GROUPS, *ONE_LAYER, "task.negatives=0", f"data.paths=[{path}]"]).config)


@pytest.mark.nightly
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_run_is_the_same_on_every_mesh_and_for_every_microbatch(pooling, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_rows(tmp_path / "rows.jsonl")
    layers = ["model.num_layers=4", "model.global_every=2"]
    words = [*RUN_OF_GROUPS, *layers, f"task.pooling={pooling}", f"data.paths=[{path}]", "training.max_steps=3"]
    stages = ["model.mesh_shape=[[2,2],[pp,fsdp]]", "training.micro_batch_size=1"]
    meshes = {
        "one": [ONE_DEVICE, "training.micro_batch_size=4"],
        "accumulated": [ONE_DEVICE, "training.micro_batch_size=1"],
        "stages": stages,
        **{str(n): each for n, each in enumerate(SPLIT_MESHES)},
    }
    found = {name: metrics(tunix.train([*words, *own, f"hydra.run.dir={name}"]).folder) for name, own in meshes.items()}
    for name, lines in found.items():
        for line, other in zip(lines, found["one"], strict=True):
            for key in ("loss", "grad_norm", "accuracy"):
                assert line[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5), (name, key)
