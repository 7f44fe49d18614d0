"""Several sources in one run: shares, stages, caps; each source's own samples in its own order, none lost or repeated."""

import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import write_corpus
from data.test_packing import sequences
from hypothesis import given, settings
from hypothesis import strategies as st
from support.harness import ONE_LAYER, RUN, SMALL, metrics

import tunix
from tunix.base.errors import UserError
from tunix.checkpoints.checkpoint import check_same
from tunix.config.compose import compose
from tunix.config.task import Cycle
from tunix.data.batches import (
    BEGINNING,
    DataSchedule,
    Position,
    SampleOrder,
    Samples,
    Stage,
    TrainBatches,
    count_read,
    split_samples,
)
from tunix.data.dataset import compute_fingerprint
from tunix.feeds import schedule_prompts
from tunix.sharding.table import axis_names

shares = st.lists(st.integers(0, 1000), min_size=1, max_size=5).filter(any).map(tuple)


@given(shares, st.integers(0, 10**9))
def test_counts_are_within_one_of_the_shares_and_grow_by_one(shares, count):
    now, then = split_samples(count, shares), split_samples(count + 1, shares)
    assert sum(now) == count
    assert sorted(b - a for a, b in zip(now, then, strict=True)) == [0] * (len(shares) - 1) + [1]
    assert all(abs(each - count * share / sum(shares)) < len(shares) for each, share in zip(now, shares, strict=True))
    assert all(each == 0 for each, share in zip(now, shares, strict=True) if share == 0)


@given(st.lists(st.tuples(st.integers(1, 40), st.tuples(*[st.integers(0, 9)] * 3).filter(any)), min_size=1, max_size=4))
@settings(max_examples=50)
def test_every_part_is_read_in_order_through_all_stages(lengths_and_shares):
    """Sample by sample, each part's own numbers are 0, 1, 2, ...: a stage goes on where the one before has stopped."""
    firsts = np.cumsum([0, *(length for length, _ in lengths_and_shares)])
    order = SampleOrder(
        [Stage("s", int(first), share) for first, (_, share) in zip(firsts, lengths_and_shares, strict=False)]
    )
    seen = [0, 0, 0]
    for sample in range(firsts[-1] + 20):
        assert order.count_by_part(sample) == seen
        part, number = order[sample]
        assert number == seen[part]
        seen[part] += 1


def test_samples_that_are_left_out_count_for_no_part():
    order = SampleOrder([Stage("s", 0, (1, 2))])
    read = [order[sample][0] for sample in (6, 7, 9)]
    assert count_read(order, 4, 10, [[2, 6], [8, 9], [12, 14]]) == [read.count(0), read.count(1)]
    data: Any = SimpleNamespace(mixture=True, order=order, parts="ab", tokens_per_sample=8)
    read += [order[sample][0] for sample in range(4)]
    assert Samples.source_tokens(data, 10, [[4, 6], [8, 9]]) == {"a": 8 * read.count(0), "b": 8 * read.count(1)}


def mixture(tmp_path, *words):
    """Three folders of text of different sizes, the words of a config that mixes them."""
    parts = []
    for name, (documents, length) in {"short": (60, 20), "long": (20, 400), "rare": (12, 60)}.items():
        folder = write_corpus(tmp_path / name, documents, length, seed=len(name))
        parts.append(
            f"{name}: {{source: text, held_out_fraction: 0.05, decode_errors: skip, extensions: [.txt], paths: ['{folder}']}}"
        )
    return [
        "data=mixture",
        f"data.parts={{{', '.join(parts)}}}",
        "data.weights={short: 0.5, long: 0.3, rare: 0.2}",
        *words,
    ]


def batches(tmp_path, *words):
    from tunix.data.dataset import load_corpus

    cfg = compose([*SMALL, *mixture(tmp_path, *words)]).config
    corpus = load_corpus(cfg)
    mesh = SimpleNamespace(shape=dict.fromkeys(axis_names(), 1) | {"fsdp": 4})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tunix.data.batches.local_rows", lambda mesh, n: list(range(n)))
        return corpus, TrainBatches(corpus.train, cfg, cfg.training, mesh)


@pytest.mark.parametrize("unit", ["token", "sample", "document"])
@pytest.mark.parametrize("packing", ["concat", "best_fit", "pad"])
def test_shares_are_of_the_unit_asked_for(tmp_path, unit, packing):
    corpus, data = batches(tmp_path, f"data.weight_unit={unit}", f"loading.packing={packing}")
    counts = dict(zip(data.parts, data.order.count_by_part(10_000), strict=True))
    each = {
        "sample": dict.fromkeys(counts, 1.0),
        "token": {name: part.num_tokens / len(part) for name, part in corpus.train.items()},
        "document": {name: part.stream.num_documents / len(part) for name, part in corpus.train.items()},
    }[unit]
    total = sum(counts[name] * each[name] for name in counts)
    found = {name: counts[name] * each[name] / total for name in counts}
    assert found == pytest.approx({"short": 0.5, "long": 0.3, "rare": 0.2}, abs=2e-3)
    assert corpus.num_held_out >= 3
    assert len(corpus.held_out) > 0


def test_samples_come_from_their_sources(tmp_path):
    """A sample of the mixture is the source's own sample, each once an epoch."""
    _, data = batches(tmp_path, "data.weights={short: 0, long: 0, rare: 1}")
    size = len(data.parts["rare"])
    first_epoch = {bytes(data.samples[number]["tokens"]) for number in range(size)}
    assert first_epoch == {bytes(data.parts["rare"][number]["tokens"]) for number in range(size)}


STAGES = "data.stages=[{name: more, from_step: 10, weights: {short: 0, long: 1, rare: 0}}, {name: last, from_tokens: 4080, weights: {short: 0.5, long: 0.5, rare: 0}}]"


def test_stages_and_caps_and_the_table(tmp_path):
    _, data = batches(tmp_path, STAGES, "data.max_epochs={rare: 2}")
    assert [stage.first_sample for stage in data.order.stages] == [0, 40, 128]  # 128 is the first with no token before
    before, after = data.order.count_by_part(40), data.order.count_by_part(128)
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, 88, 0]

    def read_rows(last_step, data_schedule):
        return [line.split() for line in data.stages(last_step, data_schedule).splitlines()[1:]]

    rows = read_rows(40, data.data_schedule)
    assert [row[:4] for row in rows[::3]] == [
        ["start", "0", "0", "short"],
        ["more", "10", "1,280", "short"],
        ["last", "32", "4,096", "short"],
    ]
    assert [row[-3] for row in rows] == ["short", "long", "rare"] * 3
    assert sum(data.source_tokens(128).values()) == 128 * 32
    # 40 samples of the stage `more` are left out: 48 are read of it, and the run reads 40 more of the last stage.
    skipping = DataSchedule(BEGINNING, data.data_schedule.cycle, ["14:23"])
    assert skipping.left_out(40) == [[52, 92]]
    rows = read_rows(40, skipping)
    assert [row[1] for row in rows[::3]] == ["0", "10", "22"]
    assert rows[4][:2] == ["long", "48"]
    assert sum(int(row[-2]) for row in rows) == 160
    # Four steps with four samples each, then two samples a step.
    rows = read_rows(20, DataSchedule(Position(4, 16, "", ""), Cycle(2, 1), []))
    assert [row[1] for row in rows[::3]] == ["begun", "16", "60"]
    assert sum(int(row[-2]) for row in rows) == 16 + 16 * 2
    _, other = batches(tmp_path, "data.max_epochs={rare: 2}")
    assert (
        len({"corpus", data.fingerprint("corpus"), other.fingerprint("corpus")}) == 3
    )  # other samples, in a resumed run
    data = other
    data.stages(10, data.data_schedule)
    with pytest.raises(
        UserError, match=r"data.max_epochs: the run would read rare [\d.]+ times, more than 2; lower its weight"
    ):
        data.stages(1000, data.data_schedule)


@pytest.mark.parametrize(
    ("cycle", "step", "samples"),
    [
        (Cycle(4, 1), 30, 120),
        (Cycle(8, 2), 3, 12),  # in the middle of a rollout
        (Cycle(4, 3), 30, 40),  # task.passes_per_rollout=3: ten rollouts
        (Cycle(4, 8), 40, 20),
    ],
)
def test_a_stage_of_prompts_begins_with_its_step(cycle, step, samples):
    assert schedule_prompts(cycle).taken(step) == samples


def test_a_stage_by_step_is_named_where_another_batch_moves_it(tmp_path):
    """The samples of a stage with `from_step` follow from the batch, also where more devices have made it larger."""
    cfg = compose([*SMALL, *mixture(tmp_path, STAGES)]).config
    saved, position = cfg.model_dump(mode="json", by_alias=True), Position(3, 24, "stages of the batch", "")
    with pytest.raises(UserError, match=r"moved stage more of data.stages.* from_step=10 .* give from_tokens"):
        check_same(cfg, saved, position, Position(0, 0, "stages of another", ""))


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("data.weights={short: 0.9999996, long: 0, rare: 4e-7}", "data.weights"),
        (STAGES.replace("long: 1, rare: 0", "long: 0.9999996, rare: 4e-7"), "data.stages: stage more: weights"),
    ],
)
def test_a_weight_that_gives_no_sample_is_refused(tmp_path, words, key):
    with pytest.raises(UserError, match=f"^{key}: rare=4e-07 is less than half a millionth .*set it to 0"):
        batches(tmp_path, words, "data.weight_unit=sample")


def test_the_weights_that_a_message_names_are_taken(tmp_path):
    """Of thirds with four digits the sum was 0.9999, which was refused too."""
    with pytest.raises(UserError, match=r"data.weights add up to 3, not to 1; scaled: ") as error:
        compose(mixture(tmp_path, "data.weights={short: 1, long: 1, rare: 1}"))
    compose(mixture(tmp_path, f"data.weights={str(error.value).partition('scaled: ')[2]}"))


def test_stages_out_of_order(tmp_path):
    with pytest.raises(UserError, match="stage last begins at sample 128, not after stage more"):
        batches(tmp_path, STAGES.replace("from_step: 10", "from_step: 32"))


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_counts_what_each_source_gave_and_goes_on_with_the_mixture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*RUN, *ONE_LAYER, *mixture(tmp_path), "model.mesh_shape=[[8],[fsdp]]", "scheduler=constant"]
    folder = tunix.train([*words, "hydra.run.dir=run"]).folder
    lines = metrics(folder)
    for line in lines:
        assert line["tokens"] == sum(line[f"tokens_{name}"] for name in ("short", "long", "rare"))
    assert "stages of the mixture" in (folder / "train.log").read_text()
    saved = json.loads((folder / "checkpoints" / "6" / "run" / "metadata").read_text())
    assert saved["position"]["source_tokens"]["rare"] == lines[-1]["tokens_rare"]
    tunix.train(["resume=run/checkpoints/3"])
    assert re.search("start +begun +0 ", (folder / "train.log").read_text())
    assert [line["loss"] for line in metrics(folder)][6:] == [line["loss"] for line in lines[3:]]
    changed = ["resume=run", "data.weights={short: 0.2, long: 0.6, rare: 0.2}", "training.max_steps=7"]
    with pytest.raises(UserError, match="loading.allow_changed_data=true goes on with it all the same"):
        tunix.train(changed)
    assert tunix.train([*changed, "loading.allow_changed_data=true"]).train["step"] == 7
    assert "going on at sample 48 of the new ones" in (folder / "train.log").read_text()


def test_a_part_without_a_sequence_is_named(tmp_path, cache_dir):
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "a.txt").write_text("a")
    part = f"{{tiny: {{source: text, held_out_fraction: 0, decode_errors: skip, extensions: [.txt], paths: ['{tmp_path}/nothing']}}}}"
    from tunix.data.dataset import load_corpus

    with pytest.raises(UserError, match="data: tiny has 3 tokens to train on, too few for one sequence"):
        load_corpus(compose([*SMALL, "data=mixture", f"data.parts={part}", "data.weights={tiny: 1}"]).config)
    assert len(sequences([3], 32, "concat", cache_dir)) == 0


def test_an_error_names_the_keys_of_its_source_where_they_stand(tmp_path):
    """The name of a file that looks like a key stays as it is."""
    from tunix.data.dataset import load_corpus

    words = [word.replace("decode_errors: skip", "decode_errors: error") for word in mixture(tmp_path, *SMALL)]
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "data.paths.txt").write_bytes(b"\xff")
    sets = [
        "evaluation.sets.more=text",
        f"evaluation.sets.more.paths=[{bad}]",
        "evaluation.sets.more.decode_errors=error",
    ]
    plain = ["data=text", f"data.paths=[{tmp_path}/long]", *SMALL]
    (tmp_path / "short" / "data.paths.txt").write_bytes(b"\xff")
    for key, config in (("data.parts.short", words), ("evaluation.sets.more", [*plain, *sets])):
        said = rf"^{key}: .*/data\.paths\.txt is not UTF-8 \(byte 0\); {key}\.decode_errors=skip leaves"
        with pytest.raises(UserError, match=said):
            load_corpus(compose(config).config)


def test_other_weights_are_other_data(tmp_path):
    prepared: Any = {name: SimpleNamespace(fingerprint=name) for name in ("short", "long", "rare")}
    words = [], ["data.weights={short: 0.5, long: 0.2, rare: 0.3}"], ["data.max_epochs={short: 9}"]
    mixtures = [compose([*SMALL, *mixture(tmp_path, *more)]).config.data for more in words]
    first, others, capped = (compute_fingerprint(each, prepared, "concat") for each in mixtures)
    assert first == capped != others
