"""Pages of a run's answers, from made-up folders: what is chosen, what hostile text does, and what a browser shows."""

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.harness import ROOT
from tokenizers import Tokenizer, decoders, models

from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.rl import samples_index as index
from tunix.rl.samples_page import (
    Choice,
    TokenTexts,
    check_comparable,
    escape,
    make_curves,
    make_page,
    mean_rewards,
    read_run,
)

ALL = Choice(steps=None, num_steps=30, num_groups=12, max_bytes=10**7)
HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "<!--<script>",
    ']]>&lt;b&gt; \\", "reward": 9.0, "step": 7',
    "\u202eright to left \u2028 \x00",
    "PAGE_DATA SCRIPT_DIGEST",
)
GROUP = 4


def answer(step: int, sample: int, number: int, prompt: str, **more) -> dict:
    """A line of samples.jsonl; the rewards of a group are 0, s, 2s and 3s, where s is its sample."""
    reward = float(number * sample)
    return {
        "step": step, "sample": sample, "prompt": prompt, "answer": f"answer {number}", "reward": reward, "reward_length": 0.5,
        "advantage": reward - 1 if number else None, "stopped": True, "tokens": [5, 6, 7], "log_probabilities": [-0.1, -2.0, 0.0],
    } | more  # fmt: skip


def write_run(folder: Path, lines: list[dict], end: str = "", task: str = "grpo") -> Path:
    folder.mkdir()
    config = compose([]).config.model_dump(mode="json", by_alias=True)
    config["task"] = {"name": task, "group_size": GROUP}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (folder / "samples.jsonl").write_text(text + end)
    return folder


def make_lines(steps: range, samples: int = 3, word: str = "prompt") -> list[dict]:
    return [
        answer(step, step * samples + sample, number, f"{word} {sample}")
        for step in steps
        for sample in range(samples)
        for number in range(GROUP)
    ]


def read_data(page: str) -> dict:
    return json.loads(page[page.index('id="data">') + 10 : page.index("</script>")])


def test_what_is_chosen(tmp_path):
    """Steps evenly, prompts with the widest spread first, the same prompt elsewhere; what is left out is counted."""
    run = read_run(write_run(tmp_path / "run", make_lines(range(1, 11))))
    page, left_out = make_page([run], Choice(None, 4, 2, 10**7))
    data = read_data(page)
    shown = [(data["groups"][number]["step"], data["groups"][number]["sample"]) for number in data["listed"]]
    assert sorted(shown) == [(step, 3 * step + sample) for step in (1, 4, 7, 10) for sample in (1, 2)]
    for number in data["listed"]:
        group = data["groups"][number]
        others = [data["groups"][other] for other in data["same"][str(number)]]
        assert {other["prompt"] for other in others} == {group["prompt"]}
        steps = {other["step"] for other in others}
        assert steps >= {1, 10} - {group["step"]}
        assert group["step"] not in steps
        assert [each["reward"] for each in group["answers"]] == [number * group["sample"] for number in range(GROUP)]
    assert left_out[:2] == [
        "6 of 10 steps are left out: steps, num_steps", "22 of 30 groups are left out: num_groups"
    ]  # fmt: skip
    assert data["runs"][0]["curves"]["numbers"]["reward"][0] == 1.5 * 4  # without metrics.jsonl, means of the answers
    small, left_out = make_page([run], Choice(None, 10, 3, 5000))
    assert len(small) < len(page)
    assert any("the page is full" in line for line in left_out)
    with pytest.raises(UserError, match=r"steps=\[99\].* the nearest is 10"):
        make_page([run], Choice((99,), 4, 2, 10**7))


@pytest.mark.parametrize("is_ahead", [False, True])
def test_the_seconds_of_steps_are_those_that_passed(is_ahead, tmp_path):
    """With task.staleness answers are drawn beside the steps, and step n waits for those of step n + 1."""
    folder = write_run(tmp_path / "run", make_lines(range(1, 4)))
    times = [(5.0, 4.0, 1.0), (3.0, 1.0, 0.5), (1.0, 9.0, 2.0)] if is_ahead else [(5.0, 4.0, 0.5), (3.0, 2.0, 0.5)]
    names = "step_time_s", "rollout_s", "data_wait_s"
    lines = [{"step": step} | dict(zip(names, each, strict=True)) for step, each in enumerate(times, 1)]
    lines = [line | {"reward": 1.0, "reward_s": 0.0} | ({"staleness": 1} if is_ahead else {}) for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    phases = make_curves(read_run(folder))["phases"]
    assert [sum(parts) for parts in zip(*phases.values(), strict=True)] == [step_time for step_time, *_ in times]
    assert phases["drawing"] == ([0, 0, 0] if is_ahead else [4, 2])
    assert phases["waiting for data"] == ([1.5, 2, 0] if is_ahead else [0.5, 0.5])


def test_a_step_that_was_written_again(tmp_path):
    """The newest lines count, those of a step that a kill has cut short and those of a group that follows itself."""
    old = make_lines(range(1, 4))[:-5]  # killed in step 3
    new = [line | {"answer": "new", "reward": 7.0} for line in make_lines(range(2, 4))]
    run = read_run(write_run(tmp_path / "run", [*old, *new]))
    groups = run.index.groups
    assert [(int(row["step"]), int(row["sample"])) for row in groups] == [
        (s, 3 * s + n) for s in (1, 2, 3) for n in range(3)
    ]
    assert (groups["answers"] == GROUP).all()
    assert np.allclose(groups["highest"][3:], 7)
    assert [record["answer"] for record in run.index.read(3)] == ["new"] * GROUP
    abandoned = read_run(write_run(tmp_path / "abandoned", [*make_lines(range(1, 6)), *new]))  # ends at step 3 now
    assert abandoned.index.steps.tolist() == [1, 2, 3]
    single = [answer(1, 5, number, "p") for number in range(GROUP)]
    again = read_run(write_run(tmp_path / "single", [*single, *(line | {"answer": "new"} for line in single)]))
    assert [record["answer"] for record in again.index.read(0)] == ["new"] * GROUP


def test_lines_that_are_broken(tmp_path, monkeypatch):
    """They are counted and left out: torn, no object, nested deep, in another order of keys, without a length."""
    odd = json.dumps({"prompt": "odd", "reward": 2, "sample": 9, "step": 1})
    huge, text = (
        '{"step": 1, "sample": 0, "prompt": "' + "x" * 5000,
        "\n".join([odd, "[1]", "{", "[" * 100_000, "nothing"]),
    )
    folder = write_run(tmp_path / "run", make_lines(range(1, 2)), f"{huge}\n{text}\n" + '{"step": 1, "sam')
    monkeypatch.setattr(index, "MAX_LINE", 4000)
    run = read_run(folder)
    assert len(run.index.groups) == 4
    assert [record["prompt"] for record in run.index.read(3)] == ["odd"]  # it stands behind the longest line
    assert run.index.num_broken == 5
    assert run.index.torn
    _, left_out = make_page([run], ALL)
    assert any(line.startswith("5 lines of ") for line in left_out)
    assert any(line.endswith("has no end and is left out") for line in left_out)


def test_added_tokens_are_listed_once_for_all_tokens_of_a_page():
    """A tokenizer like Gemma's has 6,400: with a list for each token, a page with 10,000 tokens took 90 s."""
    backend, listed = Tokenizer(models.BPE({"a": 0, "b": 1}, [])), []

    class Counting:
        decoder, id_to_token, decode = backend.decoder, backend.id_to_token, backend.decode

        def get_added_tokens_decoder(self) -> dict:
            listed.append(1)
            return backend.get_added_tokens_decoder()

    backend.add_special_tokens(["<unused0>"])
    texts = TokenTexts(Counting())
    for token in range(3):
        texts.add(token)
    assert (list(texts.texts.values()), len(listed)) == (["a", "b", "<unused0>"], 1)


def test_mean_rewards_of_all_steps_are_found_at_one_time():
    """Each step looked at all groups of the file: 32,000 steps of 8 groups took 9 s."""

    class Counting(np.ndarray):
        num_compared = 0

        def __eq__(self, other: object) -> np.ndarray:
            Counting.num_compared += 1
            return super().__eq__(other)

    groups = np.zeros(6, index.FIELDS)
    groups["step"], groups["answers"], groups["total"] = np.repeat([2, 3, 7], 2), 2, [1, 1, 2, 0, 4, 3]
    found = list(mean_rewards(index.SamplesIndex(Path(), groups.view(Counting), 6, 0, False)))
    assert found == [(2, 0.5), (3, 0.5), (7, 1.75)]
    assert Counting.num_compared <= 1


def test_tokens_that_the_tokenizer_lacks():
    backend = Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoders.ByteLevel()
    texts = TokenTexts(backend)
    for token in (0, -1, 10**12):
        texts.add(token)
    assert texts.texts == {0: "a", -1: "[-1]", 10**12: "[1000000000000]"}


def test_patterns_read_what_a_parser_reads():
    """Texts that look like keys do not mislead the patterns that find keys in a line."""
    for text in (*HOSTILE, ', "reward": 5.0, ', "\\", '\\", "reward": 5.0}', "\n", ""):
        for value in (1.5, -2e-07, 0.0):
            line = (json.dumps(answer(3, 4, 0, text, answer=text, reward=value), ensure_ascii=False) + "\n").encode()
            head = index.read_head(line)
            assert head is not None
            assert (head.step, head.sample, json.loads(head.prompt), head.reward) == (3, 4, text, value)
    assert index.read_head(b'{"step": 1, "sample": 1, "prompt": "p", "answer": "a", "reward": NaN}\n').reward == 0
    assert index.read_head(b'{"step": 1, "sample": 1, "prompt": "p", "answer": "a", "reward": 0..5}\n') is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "is no folder of a run: it has no config.yaml"),
        (["plain"], "has no samples.jsonl; task=grpo writes it"),
        (["torn"], "has no whole line with an answer"),
        (["good", "against=other"], "have no prompt in common"),
        (["good", "against=dpo"], "learns task=grpo, dpo task=dpo"),
        (["good", "good"], "one RUN is named already"),
        (["good", "--json"], "tunix.samples has no --json"),
        (["good", "num_stesp=3"], "did you mean num_steps"),
        (["good", "output=nowhere/page.html"], "there is no folder nowhere"),
        ([], "run"),
    ],
)
def test_wrong_input_is_one_line(words, message, tmp_path, monkeypatch, capsys):
    from tunix import samples as command

    monkeypatch.chdir(tmp_path)
    Path("nothing").mkdir()
    write_run(Path("plain"), [])
    Path("plain/samples.jsonl").unlink()
    write_run(Path("torn"), [], '{"step": 1')
    write_run(Path("good"), make_lines(range(1, 2)))
    write_run(Path("other"), make_lines(range(1, 2), word="another"))
    write_run(Path("dpo"), make_lines(range(1, 2)), task="dpo")
    monkeypatch.setattr(sys, "argv", ["samples", *words])
    assert command.run_local(command.Samples, command.write_samples) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not list(Path().glob("*.html"))


def test_the_command(tmp_path):
    """A folder with odd characters in its name; the page holds nothing that opens a connection."""
    folder = write_run(tmp_path / "a run, {x}", make_lines(range(1, 3)))
    (tmp_path / "link.html").symlink_to("page.html")
    command = [sys.executable, "-m", "tunix", "samples", str(folder), f"output={tmp_path}/link.html"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "link.html: 0.0 MB" in done.stdout
    page = (tmp_path / "page.html").read_text()
    assert not re.findall(r"""(?:src|href)\s*=|url\(|@import|fetch\(""", page)
    assert set(re.findall(r"https?://[^\"\s]*", page)) == {"http://www.w3.org/2000/svg"}  # a name, not an address


def test_hostile_text_stays_in_its_element(tmp_path):
    lines = [
        answer(1, n, k, text, answer=text, problem=text) for n, text in enumerate(HOSTILE, 1) for k in range(GROUP)
    ]
    page, _ = make_page([read_run(write_run(tmp_path / "run", lines))], ALL)
    assert page.count("<script") == page.count("</script>") == 2
    assert sorted(group["prompt"] for group in read_data(page)["groups"]) == sorted(HOSTILE)
    assert json.loads(escape(json.dumps("\ud800<\u2028", ensure_ascii=False))) == "\ud800<\u2028"
    page.encode()


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
# Clicks through the page: every prompt, every button, without and with colours; says what is wrong in #result.
CLICKS = """<script>
const result = make("div", {id: "result"}); document.body.append(result);
try {
  const found = [];
  for (const option of at("order").options) { at("order").value = option.value; at("order").dispatchEvent(new Event("change")); }
  for (const step of at("step").options) {
    at("step").value = step.value; at("step").dispatchEvent(new Event("change"));
    for (const button of [...at("list").children]) {
      button.click();
      for (const time of [0, 1]) { document.getElementById("colours").click(); document.querySelectorAll(".same")[0]?.click(); }
      found.push(document.querySelector(".prompt").textContent);
    }
  }
  at("search").value = "x x x"; at("search").dispatchEvent(new Event("input"));
  result.textContent = JSON.stringify({prompts: found, count: at("count").textContent, script: document.scripts.length,
    images: document.images.length, title: document.title, wide: document.documentElement.scrollWidth > innerWidth,
    turns: document.querySelectorAll(".turn").length, grey: document.querySelectorAll(".unlearnt").length});
} catch (error) { result.textContent = JSON.stringify({error: String(error.stack)}); }
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="NOT TESTED: no browser; apt-get update && apt-get install -y chromium")
def test_in_a_browser(tmp_path):
    """Hostile text runs nothing and makes no element, every button works, and the page is not wider than its window."""
    turns = [
        {"role": "assistant", "content": "x " * 300, "reward": 0.5}, {"role": "tool", "content": HOSTILE[0], "seconds": 1.5},
        {"role": "assistant", "content": HOSTILE[1], "tool_calls": [{"name": HOSTILE[0]}]},
    ]  # fmt: skip
    lines = [
        answer(
            step, n, k, text, answer=f"answer {k} {text}", **({"turns": turns, "learnt": [1, 0, 1]} if n % 2 else {})
        )
        for step in (1, 2)
        for n, text in enumerate(HOSTILE, 1)
        for k in range(GROUP)
    ]
    runs = [read_run(write_run(tmp_path / name, lines)) for name in ("one", "two")]
    (tmp_path / "one" / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": n, "reward": n / 2, "step_time_s": 2.0, "rollout_s": 1.0}) + "\n" for n in (1, 2))
    )
    page, _ = make_page(runs, ALL)

    def load(text: str, width: int) -> str:
        (tmp_path / "page.html").write_bytes(text.encode())
        command = [
            BROWSER,
            *FLAGS.split(),
            f"--user-data-dir={tmp_path}/browser",
            f"--window-size={width},900",
            "--dump-dom",
        ]
        done = subprocess.run(
            [*command, f"file://{tmp_path}/page.html"], capture_output=True, text=True, check=True, timeout=120
        )
        return done.stdout

    # With the policy of the page another script does not run.
    dom = load(page.replace("</body>", "<script>document.title='owned'</script></body>"), 1200)
    assert "<title>samples of one and two</title>" in dom
    assert dom.count('data-number="') == len(HOSTILE)
    assert "waiting for data" in dom
    policy = re.search(r"<meta http-equiv=.*>", page)
    assert policy is not None
    for width in (600, 1200):
        clicked = load(page.replace(policy[0], "").replace("</body>", CLICKS + "</body>"), width)
        found = re.search(r'<div id="result">(.*?)</div>', clicked)
        assert found is not None
        result = json.loads(html.unescape(found[1]))
        assert "error" not in result, result
        assert len(result["prompts"]) == 2 * len(HOSTILE)
        assert HOSTILE[0] in result["prompts"]
        assert (result["images"], result["script"], result["title"]) == (0, 3, "samples of one and two")
        assert (result["wide"], result["count"]) == (False, f"{len(HOSTILE)} prompts")  # those with turns
        assert result["turns"] > 0
        assert result["grey"] > 0


def test_runs_side_by_side(tmp_path):
    """Prompts that both runs have come first, each with its answers in the other run."""
    one = read_run(write_run(tmp_path / "one", [*make_lines(range(1, 2)), answer(1, 9, 1, "alone")]))
    two = read_run(write_run(tmp_path / "two", make_lines(range(2, 4))))
    check_comparable(one, two)
    data = read_data(make_page([one, two], Choice(None, 5, 3, 10**7))[0])
    assert [data["groups"][number]["prompt"] for number in data["listed"]] == ["prompt 2", "prompt 1", "prompt 0"]
    others = [data["groups"][data["same"][str(number)][-1]] for number in data["listed"]]
    assert [(other["run"], other["step"]) for other in others] == [(1, 2)] * 3
