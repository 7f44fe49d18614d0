"""What is drawn follows the model's distribution, and does not depend on who else is answered."""

import csv
import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import chdtri
from support.harness import ROOT, errors, run_python
from tokenizers import Tokenizer, models

import tunix
from tunix import generate
from tunix.base.errors import UserError
from tunix.config import Generate
from tunix.config.command_line import read_settings, run_command
from tunix.data.tokenizer import load_vocab
from tunix.inference.engine import Answer
from tunix.inference.gathered import gather
from tunix.inference.kv_cache import make_cache, prefill
from tunix.inference.sampling import (
    Sampling,
    _count_right,
    _find_guesses,
    _run_race,
    find_stop_ids,
    select,
    select_greedy,
)

PARITY = ROOT / "tests" / "models" / "parity"
PROMPTS = [[5, 9, 11], [7] * 20, [3]]


@pytest.fixture(scope="module")
def gemma():
    return tunix.load_pretrained(PARITY / "gemma2")


def initializer(logits, count, sampling):
    """Tokens of `count` rows with these logits [V]."""
    keys = jax.random.split(jax.random.key(1), count)
    return jax.jit(select, static_argnums=2)(jnp.tile(logits, (count, 1)), keys, sampling)


@pytest.mark.parametrize("vocab_size", [12, 300])  # one block of the race, and three, of which the last is not full
def test_frequencies_are_those_of_the_softmax(vocab_size):
    """Chi-square of 20,000 draws, at the 0.1 % level."""
    logits = np.random.default_rng(0).normal(size=vocab_size).astype(np.float32)
    sampled = initializer(logits, 20_000, Sampling(1, temperature=0.7))
    shares = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    requested = shares * 20_000
    counts = np.bincount(sampled.tokens, minlength=vocab_size)
    assert (((counts - requested) ** 2) / requested).sum() < chdtri(vocab_size - 1, 0.001)
    np.testing.assert_allclose(sampled.log_probs, np.log(shares)[sampled.tokens], atol=1e-5)
    of_model = logits - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(sampled.model_log_probs, of_model[sampled.tokens], atol=1e-5)


@pytest.mark.parametrize("vocab_size", [7, 128, 300])
def test_the_likeliest_token_is_the_first_of_the_largest_logits(vocab_size):
    """Also among equal ones, and where none is above minus infinity."""
    logits = np.random.default_rng(0).integers(0, 4, (64, vocab_size)).astype("float32")
    logits[0] = -np.inf
    np.testing.assert_array_equal(jax.jit(select_greedy)(logits).tokens, logits.argmax(-1))


@pytest.mark.parametrize(
    ("filters", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.7}, {0, 1}),  # 0.5 + 0.25 is the first sum above
        ({"top_p": 0.5}, {0}),
        ({"min_p": 0.3}, {0, 1}),
        ({"min_p": 0.2}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.9}, {0, 1, 2}),
    ],
)
def test_filters(filters, allowed):
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625], np.float32))
    sampled = initializer(logits, 2000, Sampling(1, **filters))
    assert set(np.asarray(sampled.tokens).tolist()) == allowed
    # A policy is compared by them with itself in training, with its reference and with a teacher, none of them filtered.
    np.testing.assert_allclose(sampled.log_probs, logits[sampled.tokens], atol=1e-5)


HOW = Sampling(max_new_tokens=8, temperature=2.0, top_k=5)  # one choice of tokens: its programs are shared


@pytest.fixture(scope="module")
def together(gemma):
    """Answers to all prompts."""
    return gemma.sample(PROMPTS, HOW, seed=3)


def test_an_answer_depends_on_its_prompt_and_the_seed_alone(gemma, together):
    assert together == gemma.sample(PROMPTS, HOW, seed=3)
    assert together != gemma.sample(PROMPTS, HOW, seed=4)
    assert gemma.sample([PROMPTS[0], [1], [2]], HOW, seed=3)[0].tokens == together[0].tokens


def test_log_probabilities_are_the_models(gemma, together):
    answer = together[0]
    logits = np.asarray(gemma(np.array([PROMPTS[0] + answer.tokens])), np.float64)[0]
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    requested = [log_probabilities[2 + index, token] for index, token in enumerate(answer.tokens)]
    np.testing.assert_allclose(answer.log_probabilities, requested, atol=1e-4)


def test_rotations_of_longrope_follow_from_the_row_alone():
    """It has others above 64 tokens: one row stays below them, although its prompt is padded, and one does not, although
    its prompt does."""
    model = tunix.load_pretrained(PARITY / "phi3_short")
    prompts = [(np.arange(length) * 7 % 50 + 3).tolist() for length in (40, 62)]
    for prompt, answer in zip(prompts, model.sample(prompts, Sampling(4)), strict=True):
        logits = jax.nn.log_softmax(model(np.array([prompt + answer.tokens]))[0])[len(prompt) - 1 : -1]
        requested = np.take_along_axis(np.asarray(logits), np.array(answer.tokens)[:, None], 1)[:, 0]
        np.testing.assert_allclose(answer.log_probabilities, requested, atol=1e-4)


def test_a_stop_id_ends_one_answer_and_not_the_others(gemma, together):
    stop = together[0].tokens[3]
    stopped = gemma.sample(PROMPTS, replace(HOW, stop=(stop,)), seed=3)
    index = together[0].tokens.index(stop)
    assert (stopped[0].tokens, stopped[0].stopped) == (together[0].tokens[: index + 1], True)
    for before, after in zip(together[1:], stopped[1:], strict=True):
        assert after.tokens == before.tokens[: len(after.tokens)]


def test_every_id_that_ends_an_answer_is_known(hf_dir, tmp_path):
    """The end of a document, that of a turn in the chat template, those of the model's files, and the user's words."""
    (tmp_path / "end.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }}{{ '<pad><bos>' if m['role'] == 'assistant' }}{% endfor %}"
    )
    vocab = load_vocab(str(hf_dir), chat_template=str(tmp_path / "end.jinja"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert find_stop_ids(vocab, (), tmp_path) == (0, 2, 7)
    (tmp_path / "config.json").write_text(
        '{"eos_token_id": null, "text_config": {"eos_token_id": 6}}'
    )  # a model that sees
    assert find_stop_ids(vocab, (), tmp_path) == (0, 2, 6)
    (tmp_path / "config.json").write_text('{"eos_token_id": 5, "text_config": {"eos_token_id": 6}}')
    assert find_stop_ids(vocab, (), tmp_path) == (0, 2, 5)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 8]}')  # it stands above config.json
    word = vocab.backend.token_to_id("a")
    assert find_stop_ids(vocab, ("a",), tmp_path) == tuple(sorted((0, 2, 8, 9, word)))
    assert find_stop_ids(load_vocab(str(hf_dir)), (), None) == (2,)
    # What ends a turn may follow from variables of the template.
    by_variable = "{% for m in messages %}{{ m.content }}{{ end }}{% endfor %}"
    changed = replace(vocab, chat_template=by_variable)
    assert find_stop_ids(changed, (), None) == (2,)
    assert find_stop_ids(changed, (), None, template_options={"end": "<pad>"}) == (0, 2)
    # A model of others, whose tokenizer says what ends a turn, and its generation_config.json does not.
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    assert find_stop_ids(vocab.backend, (), tmp_path) == (2, 8, 9)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    assert find_stop_ids(vocab.backend, (), tmp_path) == (8, 9), "the tokenizer has no such token"
    # The files of a base with another tokenizer: 2 is the same token there, 8 and 9 are others.
    words = Tokenizer.from_file(str(hf_dir / "tokenizer.json"))
    other = Tokenizer(models.WordLevel({words.id_to_token(n) if n < 3 else f"word {n}": n for n in range(10)}))
    other.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 8, 2, 0]}')
    assert find_stop_ids(load_vocab(str(hf_dir)), (), tmp_path) == (0, 2)
    with pytest.raises(UserError, match="sampling.stop=nowhere is not a token"):
        find_stop_ids(vocab, ("nowhere",), None)


def test_a_local_layers_cache_is_no_larger_than_its_window():
    model = tunix.load_pretrained(PARITY / "gemma3")
    with jax.set_mesh(model.mesh):
        tokens, count = model.rows(np.ones((2, 16), np.int32)), model.rows(np.full(2, 16, np.int32))

        def after_prompts():
            weights = gather(model.arch, model.params, as_matrices=False)
            _, entries = prefill(weights.module(model.arch), weights, tokens, count, 40)
            return make_cache(entries, 2, tuple(model.cfg.list_windows(40)))

        cache = jax.eval_shape(after_prompts)
    assert [keys.shape[2] for keys, _ in cache] == [5, 5, 40, 5, 5, 40, 5]


@pytest.mark.filterwarnings("error")  # Hydra warns about a file whose order of defaults is not said
@pytest.mark.parametrize(
    ("words", "values"),
    [
        ([], (0.8, None, None)),
        (["sampling=greedy"], (0.0, None, None)),
        (["top_k=7", "sampling=standard"], (0.7, 7, 0.95)),
        (["sampling=liberal", "temperature=0.5"], (0.5, 2000, 1.0)),
    ],
)
def test_presets_and_the_keys_that_are_typed(words, values):
    settings = read_settings(Generate, ["checkpoint=nowhere", "prompt=a", *words])
    assert (settings.temperature, settings.top_k, settings.top_p) == values


PROMPT = '{"prompt": "a few", '
MISTAKES = [
    (["prompt=a", "sampling=gredy"], "sampling=gredy: expected one of default, greedy, liberal, standard; did you mean greedy?"),
    (["prompt=a", "top_p=0"], "top_p=0: expected a number above 0"),
    (["prompt=a", "temperature=1e-39"], "temperature=1e-39: must be 0, which takes the likeliest token, or at least 1e-6"),
    (["prompt=a", "seed=99999999999999999999"], "seed=99999999999999999999: expected a number below 2147483648"),
    (["prompt=a", "output=."], "output=. must end in .csv or .jsonl"),
    (["prompt=a", "output=folder.csv"], "output=folder.csv is a folder; name a file to write"),
    (["prompt="], "prompt is empty: it has no token to continue from; give prompt=TEXT"),
    (["input=none.csv"], "input=none.csv cannot be read: No such file or directory"),
    ([".csv", ""], "input=in.csv is empty"),
    (["prompt=a", "input=in.csv"], "prompt and input are both given; keep one"),
    ([], "give prompt=TEXT, input=FILE or chat=true"),
    ([".csv", "prompt\na\n", "output=in.csv"], "output=in.csv would take the place of the prompts, which are in it; name another file"),
    ([".tsv", "id\tquestion\n1\ta\n"], "has no prompt in row 1; column=NAME says which column holds the prompts; row 1 has the columns id, question"),
    ([".csv", "prompt,prompt\na,b\n"], "in.csv cannot be read: its column prompt stands there more than once; rename all but one"),
    ([".csv", "prompt\n\udcff\n"], "in.csv is no text in UTF-8 (byte 7); save it so, as .txt, .csv, .tsv"),
    ([".csv", "id,question\n1,a\n"], "has no prompt in row 1; column=NAME says which column holds the prompts; row 1 has the columns id, question"),
    (["prompt=a", "system=Be brief."], "system is of a chat, and prompts are plain text without one; add chat=true, or drop system"),
    (["prompt=a", "chat_template=chatml"], "chat_template is of a chat"),
    (["prompt=a", "chat_template_kwargs={calm: true}"], "chat_template_kwargs is of a chat"),
    ([".csv", "prompt\na\nb,c\n"], "has more cells than columns in row 2"),
    ([".csv", 'prompt\n"a\n'], "cannot be read: unexpected end of data"),
    ([".jsonl", PROMPT], "cannot be read: Expecting property name"),
    ([".jsonl", '["prompt"]'], "has no JSON object in row 1"),
    ([".json", '[{"prompt": "a"},\n {"prompt": 5}]'], "has int for prompt, not text, in row 2"),
    ([".ndjson", '{"prompt": 5}'], "has int for prompt, not text, in row 1"),
    ([".jsonl", '{"prompt": 5}'], "has int for prompt, not text, in row 1"),
    ([".jsonl", '{"prompt": [{"role": "user", "content": "a"}]}'], "has list for prompt, not text, in row 1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text"), [("in.txt", "a\u2028b\r\n\r\nc"), ("in.json", '{"prompt": "a\u2028b"}\n\n{"prompt": "c"}\r\n')]
)
def test_rows_end_where_lines_do(name, text, tmp_path):
    (tmp_path / name).write_bytes(text.encode())
    assert generate._read_rows(tmp_path / name, "prompt") == [{"prompt": "a\u2028b"}, {"prompt": "c"}]


def test_values_of_json_are_json_in_a_csv(tmp_path):
    row = {"prompt": "a", "meta": {"x": ["é", None]}, "ok": True, "n": 2, "none": None, "prediction": "b"}
    generate.AnswerFile(tmp_path / "out.csv", [row], {}).add([row])
    (read,) = generate._read_rows(tmp_path / "out.csv", "prompt")
    assert read.pop("log_probability") == ""
    assert read == {"prompt": "a", "meta": '{"x": ["é", null]}', "ok": "true", "n": "2", "none": "", "prediction": "b"}


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_mistakes_are_told_before_the_model_is_loaded(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.csv").mkdir()
    if words and words[0].startswith("."):
        (tmp_path / f"in{words[0]}").write_bytes(words[1].encode(errors="surrogateescape"))
        words = [f"input=in{words[0]}", *words[2:]]
    with pytest.raises(UserError) as error:
        generate.generate(read_settings(Generate, ["checkpoint=nowhere", *words]))
    assert message in str(error.value)


def test_prompts_of_all_kinds_and_answers_that_are_kept(hf_dir, tmp_path, monkeypatch):
    """A mark at the beginning, columns that only some rows have, half of a surrogate pair; a prompt that is too long ends
    it after the first."""
    monkeypatch.chdir(tmp_path)
    lines = '\ufeff{"prompt": "a few"}\n{"prompt": "words", "id": 2, "note": "ö\\ud83d"}\n'
    (tmp_path / "in.jsonl").write_text(lines, encoding="utf-8")
    words = [f"checkpoint={hf_dir}", "max_new_tokens=2", "batch_size=1", "output=out.csv"]
    generate.generate(read_settings(Generate, [*words, "input=in.jsonl"]))
    assert [row["id"] for row in csv.DictReader((tmp_path / "out.csv").open())] == ["", "2"]
    generate.generate(read_settings(Generate, [*words, "input=in.jsonl", "output=out.jsonl"]))
    written = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert written[1].startswith('{"prompt": "words", "id": 2, "note": "ö\\ud83d", "prediction": ')
    rows = f"prompt,prediction\nmerged,old\n{'a few words ' * 20_000},old\n"
    (tmp_path / "in.csv").write_text(rows, encoding="utf-8-sig")
    with pytest.raises(
        UserError, match=r"^input=in.csv, row 2: a prompt .* are more than the model's context of 64; shor"
    ):
        generate.generate(read_settings(Generate, [*words, "input=in.csv"]))
    assert [row["prompt"] for row in csv.DictReader((tmp_path / "out.csv").open())] == ["merged"]
    # Of weights that are no numbers it was token 0, without a word.
    monkeypatch.setattr(
        "tunix.inference.pretrained.Pretrained.rollout", lambda *_, **__: [Answer([0], [np.nan], [np.nan], False)]
    )
    with pytest.raises(UserError, match=rf"^checkpoint={hf_dir}: the scores of tokens of text 1 are no numbers"):
        generate.generate(read_settings(Generate, [words[0], "prompt=a"]))


def test_a_chat_and_mistakes(hf_dir, tmp_path, monkeypatch, capsys):
    """Each line of the input has an answer; a mistake ends the command with exit code 2 and one line."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["generate", f"checkpoint={hf_dir}", *words])
        return run_command(Generate, generate.generate), *capsys.readouterr()

    asked, answer = [], generate.Speaker.answer

    def note(speaker, prompts, seed):
        asked.append((len(prompts[0].turns), seed))
        return answer(speaker, prompts, seed)

    monkeypatch.setattr(sys, "stdin", io.StringIO("a few\nmerged\n\nnever read\n"))
    with monkeypatch.context() as patch:
        patch.setattr(generate.Speaker, "answer", note)
        code, out, _ = run("chat=true", "max_new_tokens=2", "seed=7")
    assert (code, sys.stdin.read()) == (0, "never read\n")
    assert out
    assert asked == [(1, 7), (3, 8)]  # all turns so far, each with noise of its own
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8"))
    for mistake, message in (
        (["prompt=a", "max_new_tokens=100"], "are more than the model's context of 64"),
        (
            ["prompt=a", "chat=true", "chat_template=none"],
            "chat_template=none cannot be read: No such file or directory; the tokenizer has default",
        ),
        (
            ["prompt=a", "chat=true", "system=Be brief.", "chat_template='{{ messages[-1].content }}'"],
            "system=Be brief.: the chat template drops it; put it into the prompt, or give a template",
        ),
        (["prompt=a", "top_q=1"], "unknown key top_q; did you mean top_p?"),
        (["chat=true"], "stdin is no text in utf-8 (invalid start byte); give it in this encoding"),
    ):
        code, out, error = run(*mistake)
        assert (code, out) == (2, "")
        assert message in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl"])
def test_a_killed_command_goes_on_behind_its_answers(name, tmp_path, monkeypatch):
    """Whole rows are there after each batch, and the second start, with other batches, ends with the same file."""
    monkeypatch.chdir(tmp_path)
    rows = [{"id": number, "prompt": f"line {number}\nof two"} for number in range(5)]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dies_at, started = [4], []

    class Speaker:
        def __init__(self, model, command):
            self.number = command.temperature

        def read(self, row, number):
            return generate.Prompt([row])

        def answer(self, prompts, seed, first_row):
            started.append(first_row)
            if first_row in dies_at:
                raise KeyboardInterrupt
            return [(f'"{self.number}"\n', Answer([], [-1.0], [-1.0], stopped=True)) for _ in prompts]

    def command(*more: str) -> None:
        words = ["checkpoint=model", "input=in.jsonl", f"output={name}", *more]
        generate.generate(read_settings(Generate, words))

    monkeypatch.setattr(generate, "load_language_model", lambda *source, **more: None)
    monkeypatch.setattr(generate, "Speaker", Speaker)
    with pytest.raises(KeyboardInterrupt):
        command("batch_size=2")
    assert [row["id"] for row in generate._read_rows(Path(name), "prompt")] == (
        ["0", "1", "2", "3"] if name == "out.csv" else [0, 1, 2, 3]
    )
    with Path(name).open("ab") as file:  # a kill while rows are written
        file.write(b'"half a row')
    with pytest.raises(UserError, match=f"output={name} has 4 answers of .* differs in temperature; name another"):
        command("temperature=0.5")
    prompts = Path("in.jsonl").read_text()
    Path("in.jsonl").write_text(prompts.replace("line 3", "line 9"))
    with pytest.raises(UserError, match="differs in prompts; name another"):
        command()
    Path("in.jsonl").write_text(prompts.replace("line 4", "line 9"))  # one that has no answer yet
    dies_at.clear()
    command("batch_size=3")
    assert started == [0, 2, 4, 4]
    answered = Path(name).read_bytes()
    command()
    assert started == [0, 2, 4, 4, 0]
    assert Path(name).read_bytes() == answered
    assert not Path(f"{name}.unfinished").exists()
    command("temperature=0.5")  # the answers of a command that came to its end are replaced
    assert Path(name).read_bytes() != answered


@pytest.mark.slow
def test_the_command(hf_dir, tmp_path):
    """As users start it: CSV in, CSV out with every column, and nothing on stderr but what takes long."""
    (tmp_path / "in.csv").write_text('id,question\n1,"a few, words"\n2,merged\n')
    words = [f"checkpoint={hf_dir}", "input=in.csv", "column=question", "output=out.csv", "max_new_tokens=2"]
    done = run_python("-m", "tunix.generate", *words, cwd=tmp_path, fork=False)
    assert (done.returncode, errors(done)) == (0, [])
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [(row["id"], row["question"]) for row in rows] == [("1", "a few, words"), ("2", "merged")]
    assert all(float(row["log_probability"]) < 0 for row in rows)


def test_a_loaded_model_gathers_its_weights_once(gemma, monkeypatch):
    sampling = Sampling(4, temperature=0.0)
    tokens = [answer.tokens for answer in gemma.sample(PROMPTS, sampling)]
    monkeypatch.setattr(type(gemma.sampler), "gather", None)
    assert [answer.tokens for answer in gemma.sample(PROMPTS, sampling)] == tokens


def test_guesses_are_what_followed_the_newest_pair():
    """The last time that it stood there; where less has followed it than is guessed, the guess begins again."""
    texts = [
        [1, 2, 3, 4, 1, 2, 5, 6, 1, 2, 0, 0],  # 1 2 is followed by 5 6 1
        [3, 1, 2, 1, 2, 1, 2, 1, 2, 1, 0, 0],  # 2 1 by 2 1, and so on
        [7, 7, 7, 7, 7, 7, 7, 7, 7, 0, 7, 7],
    ]
    guesses = _find_guesses(jnp.array(texts), jnp.array([9, 9, 8]), 3)
    assert guesses.tolist() == [[5, 6, 1], [2, 1, 2], [7, 7, 7]]


def test_tokens_count_behind_right_guesses_and_before_an_end():
    tokens, drawn = jnp.array([[1, 2, 3, 4]] * 4), jnp.array([[2, 3, 4, 5], [2, 3, 9, 5], [9, 3, 4, 5], [2, 3, 4, 5]])
    ends = jnp.zeros((4, 4), bool).at[3, 1].set(True)
    assert _count_right(tokens, drawn, ends).tolist() == [[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]]


def test_the_largest_random_number_draws_no_token_that_was_left_out():
    """To float32 it is 1, whose logarithm is infinite, as a weight of 0 makes it."""
    key = jax.random.fold_in(jax.random.key(0), 658127)  # one of 10 million: the only token that is left gets it
    logits = np.zeros((1, 128), np.float32)
    logits[0, 86] = 5
    drawn = jax.jit(select, static_argnums=2)(logits, key[None], Sampling(8, 1.0, top_k=1))
    assert drawn.tokens.tolist() == [86]


@pytest.mark.parametrize("bits", [0, 2**32 - 1])
def test_no_random_number_is_0_or_1(bits, monkeypatch):
    """0 would win against every token, and draw one that was left out."""
    monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype: jnp.full(shape, bits, dtype))
    assert _run_race(jnp.array([[0.0, 1.0, 2.0]]), jax.random.key(0)[None]).tolist() == [2]
