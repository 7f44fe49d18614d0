"""Command lines that mean something else than a newcomer may think."""

import pytest

from tunix.base.errors import UserError
from tunix.config.compose import compose, count_idle_rows, reject_foreign_vocab, remark_on_tiny


@pytest.mark.parametrize("name", ["gemma3_1b", "gpt2_124m", "qwen3_0_6b"])
def test_a_published_size_without_its_tokenizer_is_refused(name):
    with pytest.raises(UserError, match=rf"model={name} has .* would never be trained.*model.vocab_size=auto"):
        reject_foreign_vocab(compose([f"model={name}", "model.num_layers=1"]))


@pytest.mark.parametrize(
    "words",
    [
        ["model=gemma3_1b", "model.vocab_size=auto"],
        ["model=gemma3_1b", "model.vocab_size=262144"],
        ["model=gemma3_1b", "dry_run=true"],
        ["model=gpt2_124m", "tokenizer.vocab_size=50000"],
        ["model=gemma3_1b", "tokenizer.path=tokenizer.json"],
        ["model=tiny", "tokenizer=bytes"],
        ["model=adder", "tokenizer=bytes"],  # its file says vocab_size: auto
        ["model=gemma3_1b", "model.vocab_size=auto", "tokenizer=bytes"],
        [],
    ],
)
def test_what_is_meant_is_not_refused(words):
    reject_foreign_vocab(compose(words))


def test_rows_that_no_token_reaches_are_counted():
    cfg = compose(["model=gemma3_1b"]).config
    assert count_idle_rows(cfg, None) == 262144 - 4096
    assert count_idle_rows(cfg, 262000) == 0
    assert count_idle_rows(compose([]).config, 259) == 4096 - 259
    # 384 rows for 259 tokens
    assert count_idle_rows(compose(["model.vocab_size=auto", "tokenizer=bytes"]).config, None) == 0
    assert count_idle_rows(compose(["model.vocab_size=auto", "tokenizer=bytes"]).config, 259) == 0
    assert count_idle_rows(compose(["model.vocab_size=385", "tokenizer=bytes"]).config, 259) == 385 - 259
    assert count_idle_rows(compose(["tokenizer.path=tokenizer.json"]).config, None) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.source=tokens"], "data.source=tokens has no keys"),
        (["data=tokens"], "data.paths must be given"),
        (["data=tokens", "data.paths=[]"], "data.paths=[]: give at least one"),
    ],
)
def test_rows_for_tokens_whose_folder_is_not_named(words, message):
    with pytest.raises(UserError) as error:
        compose(["model.vocab_size=auto", *words])
    assert str(error.value).startswith(message)


def test_other_dimensions_do_not_keep_the_training_of_tiny_in_silence():
    remark = remark_on_tiny(compose(["model.embed_dim=256", "training.max_steps=10"]))
    assert remark.startswith("model.embed_dim is given, the rest is that of model=tiny: also optimizer.learning_rate, ")
    assert "training.max_steps" not in remark
    for words in (
        [],
        ["training.max_steps=3"],
        ["model.embed_dim=256", "training=default"],
        ["model=gemma3_1b", "model.embed_dim=256"],
    ):
        assert remark_on_tiny(compose(words)) == ""
