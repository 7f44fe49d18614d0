"""Questions with several choices inside a run: the scores are those of the trained model's logits, on every mesh."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from support.harness import ONE_LAYER, RUN, metrics

import tunix
from tunix.base.errors import UserError
from tunix.config import Evaluate
from tunix.config.command_line import read_settings
from tunix.config.compose import compose
from tunix.data.tokenizer import decode, load_vocab
from tunix.evaluate import evaluate
from tunix.processes import peers
from tunix.training.multiple_choice import MultipleChoice, Question, _arrange, _encode, read_questions

QUESTIONS = [
    {"prompt": "def f(x): ", "choices": ["return x", "yield", "pass # nothing at all"], "answer": 0},
    {"prompt": "import", "choices": [" os", " \u00e9t\u00e9"], "answer": 1},
    {"prompt": "for i in", "choices": [" range(3):", " x:", " [1, 2, 3, 4]:", " y"], "answer": 2},
    {"prompt": "class A", "choices": [":", "(B):"], "answer": 0},
    {"prompt": "x = 1\n", "choices": ["y = 2", "while True:"], "answer": 1},
]  # fmt: skip


@pytest.fixture
def words(corpus, tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("code.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)) + "\n\n")
    data = ["data=text", f"data.paths=['{corpus}']"]
    return [*RUN, *ONE_LAYER, *data, "+evaluation.choices.code=code.jsonl", "training.max_steps=2"]


def score(model, question: dict) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of log-probabilities of the choices [choices], and the same for each byte."""
    prompt = question["prompt"].rstrip()
    sums = []
    for choice in question["choices"]:
        ids, context = (
            model.tokenizer.encode(text, add_special_tokens=False).ids for text in (question["prompt"] + choice, prompt)
        )
        start = [] if model.vocab.bos is None else [model.vocab.bos]
        tokens = [*start, *ids]
        log_probs = np.asarray(jax.nn.log_softmax(model(np.array([tokens[:-1]]))[0]))
        own = range(len(tokens) - 1 - (len(ids) - len(context)), len(tokens) - 1)
        sums.append(sum(float(log_probs[place, tokens[place + 1]]) for place in own))
    totals = np.array(sums)
    return totals, totals / [len(choice.encode()) for choice in question["choices"]]


@pytest.mark.nightly
def test_the_likeliest_choice_is_that_of_the_logits_on_every_mesh(words):
    found = []
    for mesh in ("[[8],[fsdp]]", "[[2,2,2],[fsdp,tp,cp]]"):
        sizes = ["training.global_batch_size=8", "training.micro_batch_size=1"]
        folder = tunix.train([*words, *sizes, f"model.mesh_shape={mesh}"]).folder
        found.append(metrics(folder, "code"))
        assert [line["step"] for line in found[-1]][-1] == 2
    assert found[0] == found[1]
    model = tunix.load_pretrained(folder)
    scores = [score(model, question) for question in QUESTIONS]
    answers = [question["answer"] for question in QUESTIONS]
    right, per_byte = (
        np.mean([np.argmax(each[kind]) == answer for each, answer in zip(scores, answers, strict=True)])
        for kind in (0, 1)
    )
    line = found[0][-1]
    assert (line["accuracy"], line["accuracy_per_byte"], line["questions"]) == (right, per_byte, 5)
    # The sums too, of texts that share rows.
    with jax.set_mesh(model.mesh):
        asked = MultipleChoice("code", compose(words).config, model.vocab, model.arch, model.mesh, 2)
        np.testing.assert_allclose(
            asked.sum_choices(model.params), np.concatenate([each[0] for each in scores]), rtol=1e-5
        )
    assert asked.batches["segment_ids"].max() > 1
    evaluate(read_settings(Evaluate, [f"checkpoint={folder}", "output=results.json"], {"overrides": []}))
    measured = json.loads(Path("results.json").read_text())["sets"]["code"]
    assert (measured["accuracy"], measured["accuracy_per_byte"]) == (right, per_byte)


def test_scores_that_are_no_numbers_have_no_likeliest_choice(monkeypatch):
    """Of a model whose weights are not finite: the first choice counted as the likeliest one."""
    asked = object.__new__(MultipleChoice)
    asked.answers, asked.first, asked.num_bytes = np.array([0, 1]), np.array([0, 2, 4]), np.ones(4)
    for sums, right in (([0.0, -1.0, -1.0, 0.0], 1.0), ([np.nan, -1.0, -1.0, 0.0], np.nan)):
        monkeypatch.setattr(asked, "sum_choices", lambda _, sums=sums: np.array(sums))
        np.testing.assert_equal(asked.evaluate(None), {"accuracy": right, "accuracy_per_byte": right, "questions": 2})


def test_the_tokens_of_a_choice(hf_dir):
    """Spaces at the end of a prompt are a part of each choice, and a text begins as a document does."""
    vocab = load_vocab(str(hf_dir))
    texts = _encode(Question("def f(x):  ", ["return x", "\u00e9t\u00e9"], 0), vocab)
    batch, owners = _arrange(texts, num_rows=1, seq_len=64)
    for number, ((ids, count), choice) in enumerate(zip(texts, ("return x", "\u00e9t\u00e9"), strict=True)):
        assert vocab.bos == ids[0]
        assert decode(vocab.backend, ids[:-count]) == "def f(x):"
        assert decode(vocab.backend, ids[-count:]) == f"  {choice}"
        is_own = owners == number
        assert batch["targets"][is_own].tolist() == ids[-count:]
        assert batch["positions"][is_own].tolist() == [*range(len(ids) - 1)][-count:]
        assert set(batch["segment_ids"][is_own]) == {number + 1}
        assert batch["loss_mask"][is_own].all()
    assert batch["loss_mask"].sum() == sum(count for _, count in texts)
    assert _encode(Question("a", ["b", "c"], 0), replace(vocab, bos_token=None))[0][0][0] != vocab.bos


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2 is not \{\"prompt\": TEXT"),
        ("[1]", "line 2 is not"),
        ('{"prompt": " ", "choices": ["a", "b"], "answer": 0}', "prompt is no text"),
        ('{"prompt": "a", "choices": ["a"], "answer": 0}', "choices are not two texts"),
        ('{"prompt": "a", "choices": ["a", ""], "answer": 0}', "choices are not two texts"),
        ('{"prompt": "a", "choices": ["a", "b"], "answer": 2}', "answer=2 is no index of 2 choices"),
        ('{"prompt": "a", "choices": ["a", "b"], "answer": true}', "answer=True is no index"),
    ],
)
def test_lines_that_are_no_question_are_named(line, message, words):
    Path("code.jsonl").write_text(json.dumps(QUESTIONS[0]) + "\n" + line + "\n")
    with pytest.raises(UserError, match=r"^evaluation.choices.code=code.jsonl, " + f".*{message}"):
        read_questions("code", "code.jsonl")


def test_a_text_may_have_an_end_of_a_line_that_json_does_not_escape(words):
    odd = {**QUESTIONS[0], "prompt": "one\u2028two\x85three"}
    Path("code.jsonl").write_text(f"\ufeff{json.dumps(odd, ensure_ascii=False)}\n\n", encoding="utf-8")
    assert [each.prompt for each in read_questions("code", "code.jsonl")] == [odd["prompt"]]


def test_a_file_is_read_once_and_again_when_it_has_changed(words):
    first = read_questions("code", "code.jsonl")
    assert read_questions("code", "code.jsonl") is first
    Path("code.jsonl").write_text(json.dumps(QUESTIONS[1]) + "\n")
    assert [each.prompt for each in read_questions("code", "code.jsonl")] == ["import"]


def test_files_that_cannot_be_asked_are_refused_before_data_are_read(words, monkeypatch):
    monkeypatch.setattr("tunix.trainer.set_up", lambda *_: pytest.fail("the program is made"))
    for name, content, message in (
        ("nowhere.jsonl", None, "cannot be read: No such file"),
        ("empty.jsonl", b"\n\n", "has no question"),
        ("bytes.jsonl", b"\xff\xfe", "is no text in UTF-8"),
    ):
        if content is not None:
            Path(name).write_bytes(content)
        with pytest.raises(UserError, match=f"^evaluation.choices.code={name} {message}"):
            tunix.train([*words[:-2], f"+evaluation.choices.code={name}"])
    for name in ("train", "goodput"):  # splits of metrics.jsonl; a resumed run reads the lines of goodput
        with pytest.raises(UserError, match=f"evaluation.choices.{name}: this name is taken"):
            compose([*words, f"+evaluation.choices.{name}=a.jsonl"])
    with pytest.raises(UserError, match="task=dpo has no loss on other documents"):
        compose(["+evaluation.choices.a=a.jsonl", "task=dpo", "data=pairs", "data.paths=[x]"])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (range(400), "400 tokens with a choice are more than"),
        ([7], "1 tokens with a choice have none that another one"),
    ],
)
def test_a_question_that_no_row_can_have_is_named(words, tokens, message, monkeypatch):
    """It is longer than a row; or prompt and choice are one token, where the tokenizer has no `<bos>`."""

    def encode(question: Question, vocab: object) -> list[tuple[list[int], int]]:
        return [([*tokens] if question == Question(**QUESTIONS[1]) else [1, 2], 1) for _ in question.choices]

    monkeypatch.setattr("tunix.training.multiple_choice._encode", encode)
    with pytest.raises(UserError, match=f"^evaluation.choices.code, question 2: {message}"):
        tunix.train([*words, "model.mesh_shape=[[8],[fsdp]]", "training.global_batch_size=8"])


def test_processes_ask_the_same_questions(words, monkeypatch):
    """With another file on one host the first evaluation ended in a message of Gloo, or its accuracy was of neither."""
    cfg, asked = compose(words).config, []
    monkeypatch.setattr(peers, "gather", lambda key, name: [key, asked.append(name) or "other"])
    monkeypatch.setattr(peers, "hosts", lambda: ["a", "b"])
    with pytest.raises(UserError, match=r"evaluation.choices.code=code.jsonl: process 0 \(a\) and process 1 \(b\) see"):
        MultipleChoice("code", cfg, None, None, None, 2)
    assert asked == ["questions"]
