"""A judge behind an address: ratings of a real server, also where it is down, slow or rude; nothing is asked twice."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.harness import metrics
from support.rollouts import ONE, TASK

import tunix
from tunix.base.errors import UserError
from tunix.config import Evaluate
from tunix.config.command_line import read_settings
from tunix.data.documents import Question
from tunix.data.prompts import Prompt
from tunix.rl.judge import MAX_BYTES, Judge

KEY = "a-key-that-nobody-sees"


class Server(BaseHTTPRequestHandler):
    """Answers as the last word of a prompt says."""

    protocol_version = "HTTP/1.1"
    asked: list[dict]

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append(body | {"path": self.path, "key": self.headers["Authorization"]})
        content = body["messages"][0]["content"]
        word = content.split()[-1] if content.startswith("a?") else str(sum(map(ord, content)) % 12)
        before = sum(each["messages"] == body["messages"] for each in self.asked)
        reply = {"choices": [{"message": {"content": f"Fine. [[1]] I mean [[{word}]]"}}]}
        reply["usage"] = {"prompt_tokens": 100, "completion_tokens": 10}
        match word:
            case "busy" if before < 3:
                self.send(503, b"wait", **{"Retry-After": "0"})
            case "busy":
                reply["choices"][0]["message"]["content"] = "7"
                self.send(200, json.dumps(reply).encode())
            case "rude":
                self.send(500, b"<html>\n\x1b[31m" + b"no! " * 999)
            case "half":
                self.send(200, json.dumps(reply).encode()[:40], **{"Content-Length": "4000"})
            case "html":
                self.send(200, b"<html>Sign in to the hotel</html>")
            case "key":
                self.send(401, f"the key {self.headers['Authorization']} is wrong".encode())
            case "away":
                self.send(302, b"", Location="http://127.0.0.1:9/steal/chat/completions")
            case "endless":
                self.send(200, b"x" * (MAX_BYTES + 9))
            case "slow":
                self.send(200, b"", **{"Content-Length": "4000"})
                for _ in range(40):
                    self.wfile.write(b" ")
                    time.sleep(0.1)
            case "deep":
                self.send(200, b"[" * 100_000)
            case _:
                self.send(200, json.dumps(reply).encode())

    def send(self, status, data, **headers):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass

    def handle(self):
        try:
            super().handle()
        except ConnectionError:  # a judge that was left
            self.close_connection = True


@pytest.fixture
def server(monkeypatch):
    Server.asked = []
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setattr(ThreadingHTTPServer, "request_queue_size", 128)
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def make(url, folder, *keys, timeout_s=30):
    term = f"{{function: judge, url: '{url}', model: big, {', '.join(keys)}}}"
    words = ["checkpoint=x", "metric=reward", f"rewards=[{term}]"]
    return Judge(read_settings(Evaluate, words).rewards[0], timeout_s, folder)


def rate(judge, *words):
    prompts = [Prompt([], "", {"level": 3}, Question([{"role": "user", "content": "a?"}], {}))] * len(words)
    return judge.score(prompts, words)


ASKED = "prompt: '{prompt} {level} {completion}'", "api_key_variable: JUDGE_KEY"


def test_ratings_are_counted_and_asked_once(server, tmp_path):
    """Also by the next judge, which finds them on disk; the file may have been cut."""
    judge = make(server, tmp_path, *ASKED, "usd_per_million_tokens: [1, 4]", "options: {temperature: 0.5}")
    scores, numbers = rate(judge, "5", "10", "5", "0.5")
    assert scores == [0.5, 1, 0.5, 0.05]
    assert numbers == {"calls": 3, "cached": 1, "tokens_read": 300, "tokens_written": 30, "usd": 420e-6}
    texts = sorted(each["messages"][0]["content"] for each in Server.asked)
    assert texts == ["a? 3 0.5", "a? 3 10", "a? 3 5"]
    first = Server.asked[0]
    assert {name: first[name] for name in ("model", "temperature", "path", "key")} == {
        "model": "big", "temperature": 0.5, "path": "/v1/chat/completions", "key": f"Bearer {KEY}",
    }  # fmt: skip
    judge.close()
    (file,) = (tmp_path / "judge").iterdir()
    assert KEY not in file.read_text()
    file.write_text(file.read_text()[:-5])
    again = make(server, tmp_path, *ASKED, "options: {temperature: 0.5}")
    assert rate(again, "5", "10", "0.5")[1]["calls"] == 1
    other = make(server, tmp_path, *ASKED, "options: {temperature: 0}")  # another judge
    assert rate(other, "5")[1]["calls"] == 1
    of_20 = make(server, tmp_path, *ASKED, "options: {temperature: 0.5}", "max_rating: 20")  # and another one
    question = Question([{"role": "system", "content": "S"}, {"role": "user", "content": "a?"}], {})
    scores, numbers = rate(of_20, "5")
    assert (scores, numbers["calls"]) == ([0.25], 1)
    of_20.score([Prompt([], "", {"level": 3}, question)], ["5"])
    assert Server.asked[-1]["messages"][0]["content"] == "system: S\nuser: a? 3 5"


def test_a_full_disk_keeps_no_rating_and_ends_no_run(server, tmp_path, caplog):
    judge = make(server, tmp_path, *ASKED)
    judge.file.close()
    judge.file = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    scores, numbers = rate(judge, "[[5]]", "7", "7")
    again, _ = rate(judge, "[[5]]", "8")
    judge.close()
    assert (scores, again, numbers["calls"]) == ([0.5, 0.7, 0.7], [0.5, 0.8], 2)
    assert caplog.text.count("judge: /dev/full cannot be written (No space left on device): a resumed run asks") == 1


def test_images_that_a_judge_does_not_see_are_said_once(server, tmp_path, caplog):
    judge = make(server, tmp_path, *ASKED)
    prompt = Prompt([], "", {"level": 3}, Question([{"role": "user", "content": "a?"}], {}), images=object())
    with caplog.at_level("WARNING"):
        assert [judge.score([prompt], [answer])[0] for answer in ("5", "10")] == [[0.5], [1]]
    assert caplog.text.count("judge rates answers to prompts with images by the texts alone") == 1


@pytest.mark.parametrize(
    ("word", "message", "calls"),
    [
        ("rude", "the judge answers with HTTP 500: <html> ?[31mno! no! ", 4),
        ("half", "does not answer: the server ended 3,960 bytes before the end", 4),
        ("html", "the judge's reply is no chat completion: <html>Sign in to the hotel</html>", 4),
        ("deep", "the judge's reply is no chat completion: [[[[", 4),
        ("key", "the judge answers with HTTP 401: the key Bearer *** is wrong", 1),
        (
            "away",
            "the judge answers with HTTP 302: it redirects to http://127.0.0.1:9/steal, which is not followed; give",
            1,
        ),
        ("endless", "the judge's reply is longer than 1 MiB", 1),
        ("11", "the judge's rating 11 is above max_rating=10", 1),
        ("-3", "the judge's rating 1 ", 1),
    ],
)
def test_a_rude_judge_costs_one_answer(server, tmp_path, monkeypatch, word, message, calls):
    """In one line, without the key; the others keep their scores."""
    monkeypatch.setattr("tunix.base.web.PAUSE_S", 0.01)
    (good, bad), numbers = rate(make(server, tmp_path, *ASKED), "5", word)
    assert good == 0.5
    if word == "-3":  # no rating; the one before it counts
        assert bad == 0.1
        return
    assert message in bad
    assert "\n" not in bad
    assert KEY not in bad
    assert len(bad) < 300
    assert numbers["calls"] == 1 + calls


def test_a_judge_that_is_busy_is_asked_again(server, tmp_path, monkeypatch):
    monkeypatch.setattr("tunix.base.web.PAUSE_S", 0.01)
    assert rate(make(server, tmp_path, *ASKED), "busy") == (
        [0.7],
        {"calls": 3, "cached": 0, "tokens_read": 100, "tokens_written": 10},
    )


def test_a_slow_judge_ends_at_the_deadline(server, tmp_path):
    """Also one that sends a byte now and then; what came in time counts, and nothing is asked behind the deadline."""
    begin = time.monotonic()
    (good, slow, late), _ = rate(make(server, tmp_path, *ASKED, "num_parallel: 1", timeout_s=0.5), "5", "slow", "7")
    assert time.monotonic() - begin < 2.5
    assert (good, late) == (0.5, "the judge gave no answer within 0.5 s")
    for thread in threading.enumerate():
        if thread.name == "judge":
            thread.join(30)
    assert [each["messages"][0]["content"] for each in Server.asked] == ["a? 3 5", "a? 3 slow"]
    assert "it takes more than 0." in slow or "within 0.5 s" in slow


def test_a_judge_that_is_down(tmp_path, monkeypatch):
    monkeypatch.setattr("tunix.base.web.PAUSE_S", 0.01)
    judge = make("http://127.0.0.1:9/v1", tmp_path, "max_rating: 5")
    (score,), _ = rate(judge, "5")
    assert score == "the judge at http://127.0.0.1:9/v1 does not answer: [Errno 111] Connection refused"
    with pytest.raises(UserError, match="rewards: judge fails: the judge at .* does not answer"):
        judge.try_out(Prompt([], "a?", {}))


def test_mistakes_are_found_before_a_judge_is_asked(server, tmp_path, monkeypatch):
    (tmp_path / "judge").write_text("")
    with pytest.raises(UserError, match="judge cannot be written"):
        make(server, tmp_path, "weight: 1")
    (tmp_path / "judge").unlink()
    with pytest.raises(UserError, match=r"names \{answer\}, and the data have completion, level, prompt$"):
        make(server, tmp_path, "prompt: 'Is {completion} {answer}?'").try_out(Prompt([], "a?", {"level": 3}))
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(UserError, match="api_key_variable=JUDGE_KEY names an environment variable that is not set"):
        make(server, tmp_path, *ASKED)
    assert Server.asked == []


@pytest.mark.nightly
def test_a_run_learns_from_a_judge(server, tmp_path):
    """The scores are those of the server, errors are counted, and a resumed run has the same digits and pays nothing."""

    def train(prompt, *words):
        term = f"{{function: judge, url: '{server}', model: m, weight: 2, prompt: '{prompt}', api_key_variable: JUDGE_KEY}}"
        words = [*words, f"task.rewards=[{term}]", f"loading.cache_dir={tmp_path}/cache"]
        return tunix.train([*TASK, *ONE, *words, "training.max_steps=4", f"hydra.run.dir={tmp_path}/run"]).folder

    with pytest.raises(UserError, match="the prompt of judge names {level}, and the data have"):
        train("{completion} {level}")
    assert not (tmp_path / "run").exists()
    run = train("Rate {completion} {answer}")
    lines = metrics(run)
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    for line in lines:
        own = [each for each in samples if each["step"] == line["step"]]
        assert line["judge_calls"] + line["judge_cached"] == 16
        assert line["judge_tokens_read"] == 100 * line["judge_calls"]
        assert line["reward_judge"] == pytest.approx(sum(each["reward_judge"] for each in own) / 16)
        assert all(each["reward"] == 2 * each["reward_judge"] for each in own)
    assert len({each["reward_judge"] for each in samples}) > 5
    assert 0 < sum(line["reward_errors"] for line in lines) < 16  # ratings of 11
    Server.asked = []
    tunix.train([f"resume={run}/checkpoints/2"])
    again = metrics(run)[4:]
    assert [line["loss"] for line in again] == [line["loss"] for line in lines[2:]]
    assert [line["reward_judge"] for line in again] == [line["reward_judge"] for line in lines[2:]]
    assert all(each["messages"][0]["content"].startswith("Rate") for each in Server.asked)
    assert sum(line["judge_calls"] for line in again) == sum(line["reward_errors"] for line in again)
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert KEY.encode() not in file.read_bytes(), file
