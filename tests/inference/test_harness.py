"""EleutherAI's harness asks our models: the numbers are those of the logits, and of the model's own answers."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.harness_tasks import write_tasks

import tunix
from tunix.base.errors import UserError
from tunix.config import Evaluate
from tunix.config.command_line import read_settings
from tunix.evaluate import evaluate
from tunix.inference import lm_eval
from tunix.inference.engine import Answer
from tunix.inference.sampling import Sampling


def log_probs(model, tokens: list[int]) -> np.ndarray:
    """Log-probability of each token but the first, of logits of this row alone."""
    row = np.zeros((1, 64), np.int32)  # one length, so one program; what follows a token does not change its score
    row[0, : len(tokens) - 1] = tokens[:-1]
    logits = np.asarray(model(row), np.float64)[0]
    logits -= np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) + logits.max(
        -1, keepdims=True
    )
    return logits[np.arange(len(tokens) - 1), tokens[1:]]


@pytest.mark.nightly
def test_tasks_of_the_harness(hf_dir, tmp_path, monkeypatch):
    """`benchmarks/harness.py` compares the same tasks with the harness's own backend for transformers."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    write_tasks(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    words = [
        f"checkpoint={hf_dir}",
        "metric=lm_eval",
        "tasks=[choices,texts]",
        f"task_folder={tmp_path}",
        "batch_size=3",
    ]
    mesh = [
        "model.mesh_shape=[[2,2],[fsdp,tp]]",
        "distributed.allow_idle_devices=true",
        "training.mixed_precision=fp32",
        "training.seq_len=64",
    ]
    evaluate(read_settings(Evaluate, [*words, f"output={tmp_path}/results.json"], {"overrides": mesh}))
    found = json.loads((tmp_path / "results.json").read_text())
    assert not {"data", "split"} & found.keys()  # of the run's own data, which no task asks for

    model = tunix.load_pretrained(hf_dir)

    def encode(text: str) -> list[int]:
        return model.tokenizer.encode(text).ids

    right, total, num_bytes = 0, 0.0, 0
    for row in rows:
        context = encode(row["question"])
        choices = [encode(f"{row['question']} {choice}") for choice in ("few words", "to be", "merged together")]
        scores = [log_probs(model, whole)[len(context) - 1 :].sum() for whole in choices]
        right += int(np.argmax(scores)) == row["label"]
        tokens, prefix = encode(row["text"]), 1
        for start in range(0, len(tokens), 64):
            window = tokens[start : start + 64]
            if start and len(window) < 64:  # the last window reaches back as far as it can
                total += log_probs(model, tokens[-65:])[-len(window) :].sum()
            else:
                total += log_probs(model, [tokens[start - 1] if start else prefix, *window]).sum()
        num_bytes += len(row["text"].encode())
    assert found["choices/acc"] == pytest.approx(right / len(rows))
    assert found["texts/bits_per_byte"] == pytest.approx(-total / num_bytes / np.log(2), rel=1e-5)


def test_odd_requests(hf_dir):
    """A continuation without tokens, texts longer than the context, and a filter that leaves every token in."""
    model = tunix.load_pretrained(hf_dir)
    respondent = lm_eval.Respondent(model, 5, "small")
    assert (respondent.max_length, respondent.prefix) == (64, 1)
    likeliest = int(np.argmax(np.asarray(model(np.array([[5, 6]])))[0, -1]))
    long, short = [5, *range(10, 80)], [6, 7, 8]
    pairs = [([5, 6, 7], []), ([5, 6], [7]), ([5, 6], [likeliest]), (long, short), (short, long)]
    empty, last, best, cut, whole = respondent.score_continuations([(None, *pair) for pair in pairs])
    assert empty == (0.0, True)
    assert last[0] == pytest.approx(log_probs(model, [5, 6, 7])[-1], abs=1e-4)
    assert (last[1], best[1]) == (False, True)
    # Their last tokens: one more than the context, because the last one is no input.
    assert cut[0] == pytest.approx(log_probs(model, [*long, *short][-65:])[-3:].sum(), abs=1e-3)
    assert whole[0] == pytest.approx(log_probs(model, [*short, *long][-65:]).sum(), abs=1e-3)
    asked = []
    respondent.model = SimpleNamespace(
        sample=lambda prompts, *_, **__: asked.extend(prompts) or [Answer([], [], [], False)]
    )
    respondent.answer([("few words " * 40, {"max_gen_toks": 8})])
    assert asked == [model.encode("few words " * 40)[-56:]]
    respondent.scorer = lambda rows, batch_size: [(np.full(len(row) - 1, np.nan), None) for row in rows]
    with pytest.raises(UserError, match="checkpoint=small: the scores of tokens of text 1 are no numbers"):
        respondent.score_continuations([(None, [5, 6], [7])])
    keys = {"do_sample": True, "temperature": 0.5, "top_k": 0, "top_p": 0.9}
    assert lm_eval._read_keys(keys, (2,)) == Sampling(256, 0.5, None, 0.9, stop=(2,))
    assert lm_eval._read_keys({"temperature": 0.5, "max_new_tokens": 8}, (2,)) == Sampling(8, 0.5, stop=(2,))
    assert lm_eval._read_keys({"temperature": 0.5, "do_sample": False, "max_tokens": 8}, ()) == Sampling(8, 0.0)


def test_a_tokenizer_of_a_run_adds_the_first_token_as_that_of_its_export_does(hf_dir):
    model = replace(tunix.load_pretrained(hf_dir), files=None)  # of a run that began with nothing
    respondent = lm_eval.Respondent(model, 2, "small")
    assert respondent.encode("few") == model.encode("few") == [1, *model.tokenizer.encode("few").ids]
    assert respondent.encode("few", add_special_tokens=False) == model.tokenizer.encode("few").ids


def test_answers_stop_at_all_tokens_that_the_files_name(hf_dir, tmp_path):
    """As in the harness's backend for transformers. The token is a part of the answer, unless it is special."""
    folder = shutil.copytree(hf_dir, tmp_path / "model")
    model = tunix.load_pretrained(folder)
    stop = model.sample([model.encode("few")], Sampling(1, 0.0))[0].tokens[0]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, stop]}))
    answers = lm_eval.Respondent(model, 2, "small").answer([("few", {"max_gen_toks": 3})])
    assert answers == [model.tokenizer.decode([stop])]


def test_what_cannot_be_asked_is_named(hf_dir, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"metric=loss and tasks=\['a'\]: metric=lm_eval takes tasks=\[NAME"):
        read_settings(Evaluate, [f"checkpoint={hf_dir}", "tasks=[a]"])
    asking = [f"checkpoint={hf_dir}", "metric=lm_eval", "tasks=[a]"]
    for words, problem in (
        ([asking[0], "limit=10"], "limit=10 is of metric=lm_eval, and metric=loss"),
        ([asking[0], "num_samples=4"], "num_samples=4 is of metric=reward, and metric=loss"),
        ([asking[0], "batch_size=2"], "batch_size=2 is of metric=lm_eval and metric=reward, and metric=loss"),
        ([*asking, "num_prompts=8"], "num_prompts=8 is of metric=reward, and metric=lm_eval"),
        ([*asking, "split=train"], "split=train is of metric=loss and metric=reward, and metric=lm_eval"),
    ):
        with pytest.raises(UserError, match=f"{problem}; leave it out"):
            read_settings(Evaluate, words)
    with pytest.raises(UserError, match=r"sampling.top_k=2: a task of metric=lm_eval says itself how answers are"):
        evaluate(read_settings(Evaluate, asking, {"overrides": ["sampling.top_k=2", "training.seq_len=64"]}))
    with pytest.raises(UserError, match="samples=a.jsonl is of metric=reward, and metric=lm_eval; leave it out"):
        read_settings(Evaluate, [f"checkpoint={hf_dir}", "metric=lm_eval", "tasks=[a]", "samples=a.jsonl"])
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"needs the harness: pip install 'tunix-trainer\[lm_eval\]'"):
        lm_eval.import_harness()
