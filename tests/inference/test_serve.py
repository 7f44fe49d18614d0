"""The server: real clients get the answers of the model, each its own, whatever else is served; and errors that say why."""

import asyncio
import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import openai
import pytest
import uvicorn
from pydantic import ValidationError
from support.devices import xla_flags
from support.forks import start
from support.harness import ROOT, errors, run_python
from support.processes import wait_until
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE

import tunix
from benchmarks.fuzz_requests import make_request, send
from tunix.base.errors import UserError
from tunix.config import Evaluate, Serve
from tunix.config.command_line import read_settings
from tunix.costs.rollout import USABLE, CacheSpec, count_page_bytes, derive_rollout_costs
from tunix.data.chat import THOUGHTS
from tunix.data.prompts import Prompt
from tunix.data.thoughts import ANSWER, THOUGHT, PartReader
from tunix.data.tokenizer import TokenBytes
from tunix.inference import engine
from tunix.inference.lm_eval import TopScores
from tunix.inference.openai_api import (
    AnswerText,
    ApiError,
    ChatParameters,
    CompletionParameters,
    Parameters,
    TokenScores,
    read_message,
    read_parameters,
)
from tunix.inference.openai_requests import RequestReader
from tunix.inference.page_pool import PagePool
from tunix.inference.rollout import Request, RowSizes
from tunix.inference.sampling import NO_MIN_P, NO_TOP_K, NO_TOP_P, RowChoices, Sampling, select, select_by_row
from tunix.inference.serving import Piece, QueueFull, Serving
from tunix.inference.serving import Request as QueuedRequest
from tunix.rl.judge import Judge
from tunix.rl.tool_parsers import Call, find_reader
from tunix.serve import TAKEN, App, Connection, _Answer, _Answers, _show_message, open_socket, serve
from tunix.sharding.arrays import bytes_per_device

KEY = "a-key-of-the-tests"


def damage(rng: random.Random, whole: bytes) -> bytes:
    """Return bytes with one changed, or some cut off or put in."""
    at = rng.randrange(len(whole) + 1)
    return whole[:at] + rng.choice((b"", b"\0", b"\xff", b"{", b"[" * 300)) + whole[at + rng.choice((0, 1, 9, 999)) :]


PROMPTS = ["a few words", "to be", "merged", "words to merge, a few"]


@pytest.fixture(scope="module")
def model(hf_dir):
    return tunix.load_pretrained(hf_dir)


@contextlib.contextmanager
def serving(model, hf_dir, *words):
    """A server in a thread of this process, and its port."""
    command = read_settings(Serve, [f"checkpoint={hf_dir}", "server.model_name=small", *words])
    app, sock = App(model, command), open_socket("127.0.0.1", 0)
    config = uvicorn.Config(app, http=Connection, access_log=False, lifespan="off", log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield app, sock.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
        app.serving.close(30)


@pytest.fixture(scope="module")
def served(model, hf_dir):
    with serving(model, hf_dir, "server.max_rows=8", f"server.api_key={KEY}", "server.max_body_mb=0.1") as (app, port):
        yield app, port


@pytest.fixture(scope="module")
def client(served):
    return openai.OpenAI(api_key=KEY, base_url=f"http://127.0.0.1:{served[1]}/v1", max_retries=0, timeout=120)


def post(port, body, path="/v1/completions", key=KEY, method="POST", **headers):
    """Send bytes, and return the status, the headers and the JSON of what comes back."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request(method, path, body, {"Authorization": f"Bearer {key}"} | headers)
    response = connection.getresponse()
    return response.status, response.headers, json.loads(response.read())


def ask(client, prompt="a few", **parameters):
    return client.completions.create(model="small", prompt=prompt, **parameters)


def test_the_server_is_a_judge_of_a_run(served, client, tmp_path, monkeypatch):
    """`{function: judge}` of task.rewards reads what the server says: here no rating, since nobody has taught one."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    term = f"function: judge, url: 'http://127.0.0.1:{served[1]}/v1', model: small, api_key_variable: JUDGE_KEY"
    term += ", prompt: 'a few {completion}', options: {max_tokens: 6, temperature: 0}"
    words = ["checkpoint=x", "metric=reward", f"rewards=[{{{term}}}]"]
    judge = Judge(read_settings(Evaluate, words).rewards[0], 60, tmp_path)
    answers = ["words", "to be"]
    scores, numbers = judge.score([Prompt([], "", {})] * 2, answers)
    usages = []
    for score, answer in zip(scores, answers, strict=True):
        messages = [{"role": "user", "content": f"a few {answer}"}]
        reply = client.chat.completions.create(model="small", messages=messages, max_tokens=6, temperature=0)
        text = " ".join(reply.choices[0].message.content.split())
        assert score == f"the judge's reply has no rating like [[5]]: {text}"
        usages.append(reply.usage)
    assert numbers["calls"] == 2
    assert numbers["tokens_read"] == sum(usage.prompt_tokens for usage in usages)
    assert numbers["tokens_written"] == sum(usage.completion_tokens for usage in usages)


# The tokens.


def test_rows_with_choices_of_their_own_draw_as_if_alone():
    logits = 3 * np.random.default_rng(0).normal(size=(6, 300)).astype(np.float32)
    many = np.repeat(logits, 50, 0)
    count = np.arange(300, dtype=np.int32)
    choices = [
        Sampling(1), Sampling(1, temperature=0), Sampling(1, 0.7, top_k=5), Sampling(1, 1.3, top_p=0.8),
        Sampling(1, 1.1, min_p=0.1), Sampling(1, 1.5, top_k=5, top_p=0.7, min_p=0.05),
    ]  # fmt: skip

    def repeat(values, dtype):
        return jax.numpy.asarray(np.repeat(np.array(values, dtype), 50))

    rows = RowChoices(
        repeat(range(6), "int32"), repeat(range(6), "int32"), repeat([each.temperature for each in choices], "float32"),
        repeat([each.top_k or NO_TOP_K for each in choices], "int32"),
        repeat([each.top_p or NO_TOP_P for each in choices], "float32"),
        repeat([each.min_p or NO_MIN_P for each in choices], "float32"),
    )  # fmt: skip

    def draw_alone(logits, count, choice, seed):
        key = jax.random.fold_in(jax.random.key(seed), seed)
        return select(logits, jax.vmap(lambda n: jax.random.fold_in(key, n))(count), choice)

    draw = jax.jit(select_by_row)
    together = draw(many, rows, count)
    for index, choice in enumerate(choices):
        part = slice(index * 50, index * 50 + 50)
        apart = draw(many[part], jax.tree.map(lambda values, part=part: values[part], rows), count[part])
        assert np.array_equal(apart.tokens, together.tokens[part]), choice  # whatever the others ask for
        if choice.temperature:
            alone = jax.jit(draw_alone, static_argnums=2)(many[part], count[part], choice, index)
            assert np.array_equal(together.tokens[part], alone.tokens), choice
            np.testing.assert_allclose(together.log_probs[part], alone.log_probs, atol=1e-5)
        else:
            assert (together.tokens[part] == logits[index].argmax()).all()
            assert not together.log_probs[part].any()


CHOICES = [
    {"temperature": 0.0}, {"temperature": 1.3, "top_p": 0.9}, {"temperature": 0.8, "top_k": 50, "min_p": 0.01},
]  # fmt: skip


def test_a_seeded_request_draws_the_tokens_of_generate_whatever_else_is_served(model, client):
    """Twelve requests at one time, with three choices of tokens, on eight rows; two answers to each."""
    ids = [model.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    stop = (2,)

    def draw_alone(index, choice, seed):
        answers = model.sample([ids[index]], Sampling(12, stop=stop, **choice), seed, answers_per_prompt=2)
        return [(model.tokenizer.decode(each.text_tokens), sum(each.log_probabilities)) for each in answers]

    def request(index, choice, seed):
        own = {name: choice[name] for name in choice if name in ("top_k", "min_p")}
        usual = {name: choice[name] for name in choice if name not in own}
        answer = ask(client, PROMPTS[index], max_tokens=12, seed=seed, n=2, logprobs=0, extra_body=own, **usual)
        return [(each.text, sum(each.logprobs.token_logprobs)) for each in answer.choices]

    cases = [(index, choice, 3 * index + n) for index in range(len(PROMPTS)) for n, choice in enumerate(CHOICES)]
    with ThreadPoolExecutor(len(cases)) as pool:
        found = list(pool.map(lambda case: request(*case), cases))
    for case, answers in zip(cases, found, strict=True):
        for (text, log_prob), (own_text, own_log_prob) in zip(answers, draw_alone(*case), strict=True):
            assert text == own_text, case
            assert log_prob == pytest.approx(own_log_prob, abs=1e-3)


@pytest.mark.nightly
def test_guesses_change_no_answer_and_the_cache_may_have_8_bits(model, hf_dir, client):
    """Each of four prompts, with other tokens after it; with a cache of 8 bits probabilities are near."""
    expected = [ask(client, prompt, max_tokens=12, seed=3, temperature=0.7).choices[0].text for prompt in PROMPTS]
    with serving(model, hf_dir, "server.max_rows=8", "guess=3") as (_, port):
        guessing = openai.OpenAI(api_key=KEY, base_url=f"http://127.0.0.1:{port}/v1", max_retries=0, timeout=120)
        assert [
            ask(guessing, text, max_tokens=12, seed=3, temperature=0.7).choices[0].text for text in PROMPTS
        ] == expected
    with serving(model, hf_dir, "server.max_rows=8", "cache_dtype=int8") as (_, port):
        rounding = openai.OpenAI(api_key=KEY, base_url=f"http://127.0.0.1:{port}/v1", max_retries=0, timeout=120)
        found, usual = (
            ask(each, "a few", max_tokens=1, temperature=0, logprobs=0).choices[0].logprobs.token_logprobs
            for each in (rounding, client)
        )
    assert found == pytest.approx(usual, abs=0.05)


@pytest.mark.parametrize("length", ["²".encode(), b"-1", b"1" * 5000, b"1e3"])
def test_a_length_that_is_no_number_is_refused(served, length):
    with socket.create_connection(("127.0.0.1", served[1]), timeout=60) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n".encode()
        connection.sendall(head + b"Content-Length: " + length + b"\r\n\r\n")
        assert connection.recv(100).split()[1] in (b"400", b"413")


def test_several_prompts_draw_as_a_file_of_prompts(model, client):
    ids = [model.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    expected = [model.tokenizer.decode(each.text_tokens) for each in model.sample(ids, Sampling(6, stop=(2,)), seed=5)]
    answer = client.completions.create(model="small", prompt=PROMPTS, max_tokens=6, seed=5)
    assert [each.text for each in answer.choices] == expected
    assert [each.index for each in answer.choices] == [0, 1, 2, 3]
    assert client.completions.create(model="small", prompt=ids, max_tokens=6, seed=5).choices == answer.choices


def test_chat_is_the_template_and_streams_what_it_answers(model, served, client):
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "a few"}]}]
    text = "<bos>system: be<eos><bos>user: a few<eos><bos>assistant:"
    prompt = model.tokenizer.encode(text, add_special_tokens=False).ids
    asked = {"model": "small", "messages": messages, "max_tokens": 20, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**asked)
    expected = model.sample([prompt], Sampling(20, stop=(2,)), seed=3, answers_per_prompt=2)
    assert [each.message.content for each in whole.choices] == [model.tokenizer.decode(e.text_tokens) for e in expected]
    assert [each.finish_reason for each in whole.choices] == ["stop" if e.stopped else "length" for e in expected]
    assert whole.usage.prompt_tokens == len(prompt)
    assert whole.usage.completion_tokens == sum(len(each.tokens) for each in expected)
    texts, ends, usage = ["", ""], [None, None], None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [each.message.content for each in whole.choices]
    assert ends == [each.finish_reason for each in whole.choices]
    assert usage == whole.usage
    # What clients that read the stream by themselves wait for, and what proxies must not hold back.
    with client.chat.completions.with_streaming_response.create(**asked, stream=True) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert (stream.headers["cache-control"], stream.headers["x-accel-buffering"]) == ("no-cache", "no")
        events = stream.read().decode()
    assert events.endswith("}\n\ndata: [DONE]\n\n")


def test_a_stop_string_ends_an_answer_and_is_no_part_of_it(client):
    whole = ask(client, max_tokens=30, seed=1).choices[0].text
    word = whole[4:7]
    cut = ask(client, max_tokens=30, seed=1, stop=["nowhere", word]).choices[0]
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(word)], "stop")
    pieces = ask(client, max_tokens=30, seed=1, stop=word, stream=True)
    assert "".join(each.choices[0].text for each in pieces) == cut.text
    first = ask(client, max_tokens=30, seed=1, stop=whole[0])  # one token, which is counted; none behind it
    assert (first.choices[0].text, first.usage.completion_tokens) == ("", 1)


def test_a_seed_may_be_any_whole_number(client):
    assert len({ask(client, max_tokens=9, seed=seed).choices[0].text for seed in (5, 5 + 2**40, 5 - 2**31)}) == 1


def test_a_stream_has_the_log_probabilities_of_the_whole_answer(client):
    asked = {"max_tokens": 30, "seed": 1, "logprobs": 0}
    text = ask(client, **asked).choices[0].text
    for stop in (None, text[9:12], text[-2:]):
        whole = ask(client, **asked, stop=stop).choices[0].logprobs
        parts = [each.choices[0].logprobs for each in ask(client, **asked, stop=stop, stream=True)]
        for name in ("tokens", "token_logprobs", "text_offset"):
            streamed = [value for part in parts if part for value in getattr(part, name)]
            assert streamed == getattr(whole, name), (stop, name)


def test_texts_grow_by_whole_characters_and_hold_back_what_may_be_a_stop_string(model):
    tokens = model.tokenizer.encode("a few wörds 漢字 to be").ids
    text, parts = AnswerText(model.tokenizer, ["to me", "字 x"]), []
    parts = [text.add([token]) for token in tokens]
    assert not any("\ufffd" in part for part in parts)
    assert "".join(parts) + text.close() == "a few wörds 漢字 to be"
    stopped = AnswerText(model.tokenizer, ["字"])
    assert "".join(stopped.add([token]) for token in tokens) == "a few wörds 漢"
    assert stopped.is_stopped


@pytest.mark.parametrize(
    ("drawn", "stop", "sent", "num_tokens"),
    [
        (["a ", "E", "N", "D", " b"], ["END"], ["a ", "", "", "", ""], 1),
        (["E", "N", "x"], ["END"], ["", "", "ENx"], 3),  # it was none
        (["ab", "cde"], ["e", "c"], ["ab", ""], 1),  # the first of them in the text
        (["ab", "cde"], ["d"], ["ab", "c"], 2),
    ],
)
def test_where_a_stop_string_ends_a_text(drawn, stop, sent, num_tokens):
    tokenizer: Any = SimpleNamespace(decode=lambda tokens, skip_special_tokens: "".join(drawn[n] for n in tokens))
    text = AnswerText(tokenizer, stop)
    assert [text.add([number]) for number in range(len(drawn))] == sent
    assert (text.close(), text.text, text.num_tokens) == ("", "".join(sent), num_tokens)


class CountingTokenizer:
    """A tokenizer of bytes that counts the tokens that it has decoded; from 256 on they are special tokens."""

    num_decoded = 0

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += 1 + len(tokens)
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


HALF = "字".encode()[1]  # a byte within a character


@pytest.mark.parametrize("tokens", [[HALF], [256], [*b"a", *[256] * 50, *"字".encode(), *[HALF] * 50, *b"b"]], ids=str)
def test_tokens_without_a_certain_text_are_not_all_decoded_for_each_new_one(tokens):
    """A model that drew bytes of no character, or special tokens, kept the server busy: 32,000 took 25 to 47 s."""
    tokenizer, drawn = CountingTokenizer(), tokens * (2000 // len(tokens))
    text = AnswerText(tokenizer, [])
    parts = [text.add([token]) for token in drawn]
    assert tokenizer.num_decoded <= 150 * len(drawn)
    assert "".join(parts) + text.close() == CountingTokenizer().decode(drawn)
    assert text.num_tokens == len(drawn)


def test_tokens_of_a_thought_are_not_decoded_for_the_answer():
    """32,000 tokens of a thought took 2.7 s to find that the answer has no text yet, and an answer as long for it."""
    parts = SimpleNamespace(read=lambda token: THOUGHT if token < ord("b") else ANSWER)
    for part in (ANSWER, THOUGHT):
        tokenizer = CountingTokenizer()
        text = AnswerText(tokenizer, [], parts=parts, part=part)
        text.add(b"a" * 1000 + b"b" * 1000)
        assert tokenizer.num_decoded <= 8 * 1000
        assert text.close() == ""
        assert text.text == (1000 * "b" if part == ANSWER else 1000 * "a")


def test_tokens_stand_at_their_places_in_the_text(model):
    text = "a few wörds <eos>漢字 to be"
    tokens = [1, *model.tokenizer.encode(text, add_special_tokens=False).ids]
    for told, missing in ((text, {"<bos>"}), (text.replace("<eos>", ""), {"<bos>", "<eos>"})):
        scores = TokenScores(TokenBytes(model.tokenizer), tokens, [0.0] * len(tokens), None, told)
        chat, shown = scores.for_chat()["content"], scores.for_completion()
        assert b"".join(bytes(each["bytes"]) for each in chat).decode() == "<bos>" + text
        places = zip(shown["tokens"], shown["text_offset"], strict=True)
        assert {token for token, at in places if not told.startswith(token, at)} == missing | {"\ufffd"}
        assert scores.end == len(told)


def test_log_probabilities_of_prompts_answers_and_other_tokens(model, client):
    ids = model.tokenizer.encode("a few words to be").ids
    answer = ask(client, ids, max_tokens=3, temperature=0, echo=True, logprobs=2).choices[0].logprobs
    whole = ids + model.sample([ids], Sampling(3, temperature=0, stop=()))[0].tokens
    logits = np.asarray(model(np.array([whole])), np.float64)[0]
    own = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = own[np.arange(len(whole) - 1), whole[1:]]
    assert answer.token_logprobs[0] is None
    np.testing.assert_allclose(answer.token_logprobs[1:], expected, atol=1e-4)
    for place in range(len(whole) - 3, len(whole)):  # drawn as the likeliest
        assert max(answer.top_logprobs[place].values()) == answer.token_logprobs[place]
    assert answer.top_logprobs[0] is None
    for token, log_prob, top in zip(answer.tokens[1:], answer.token_logprobs[1:], answer.top_logprobs[1:], strict=True):
        first, *others = top.values()
        assert first >= max(others), "the likeliest comes first"
        assert top[token] >= log_prob, "the one in the text stands there too, as with OpenAI"
    chat = client.chat.completions.create(
        model="small", messages=[{"role": "user", "content": "be"}], max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )  # fmt: skip
    for each in chat.choices[0].logprobs.content:
        assert len(each.top_logprobs) == 3
        assert each.top_logprobs[0].logprob == each.logprob


def test_tools_reach_the_template_and_calls_are_read(model, hf_dir):
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}<tool_call>"
        "{% for m in messages %}{{ m.content }}{{ m.tool_calls[0].function.arguments.a if m.tool_calls }}{% endfor %}"
    )
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    with serving(model, hf_dir, f"chat_template='{template}'") as (app, port):
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 17}'}}
        messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        for nothing in ({"arguments": ""}, {"arguments": "null"}, {"arguments": None}, {}):
            without = messages[1] | {"tool_calls": [call | {"function": {"name": "now", **nothing}}]}
            assert read_message(without, 1)["tool_calls"][0]["function"]["arguments"] == {}, nothing
        # OpenAI's client sends the name behind the arguments, and templates may write the object as it is.
        backward = messages[1] | {"tool_calls": [call | {"function": {"arguments": "{}", "name": "now"}}]}
        assert json.dumps(read_message(backward, 1)["tool_calls"][0]["function"]) == '{"name": "now", "arguments": {}}'
        for name in THOUGHTS:
            for text in ({"content": ""}, {"content": None}, {}):
                thought = {"role": "assistant", name: "hm"}
                assert read_message(thought | text, 1) == thought | {"content": ""}
        body = {"messages": messages, "tools": [tool], "max_tokens": 2}
        job = asyncio.run(app.reader.read_chat(json.dumps(body).encode(), 0))
        assert model.tokenizer.decode(job.prompts[0], skip_special_tokens=False) == "add <tool_call>u17"
        said = {"role": "tool", "content": "3<eos>4"}, {"role": "user", "content": "5<eos>"}
        told = asyncio.run(app.reader.read_chat(json.dumps(body | {"messages": [*messages, *said]}).encode(), 0))
        text = model.tokenizer.decode(told.prompts[0], skip_special_tokens=False)
        assert text == "add <tool_call>u173< eos>45<eos>"
        assert told.prompts[0].count(model.tokenizer.token_to_id("<eos>")) == 1, "a tool writes no special token"
        for nameless in ({}, {"function": "add"}, {"function": {"name": None}}):
            with pytest.raises(ApiError, match="tools.1 has no name"):
                asyncio.run(app.reader.read_chat(json.dumps(body | {"tools": [tool, nameless]}).encode(), 0))
        text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        assert job.read_calls(text) == [Call("add", {"a": 1})]
        one = asyncio.run(app.reader.read_chat(json.dumps(body | {"parallel_tool_calls": False}).encode(), 0))
        assert [len(each.read_calls(text * 2)) for each in (job, one)] == [2, 1]
        raw = AnswerText(model.tokenizer, [], keep_special=True)
        raw.add(model.tokenizer.encode(f"<bos>a ```b``` {text}").ids)
        ends = [
            _show_message(job, SimpleNamespace(text=raw, raw=raw, thought=None, finish=end))
            for end in ("stop", "length")
        ]
        assert [end for _, end in ends] == ["tool_calls", "length"], "an answer that is cut calls nothing"
        assert ends[0][0]["content"] == "a ```b```"
        status, _, answer = post(port, json.dumps(body), "/v1/chat/completions")
        assert (status, answer["choices"][0]["message"]["role"]) == (200, "assistant")
        own = openai.OpenAI(api_key=KEY, base_url=f"http://127.0.0.1:{port}/v1", max_retries=0, timeout=120)
        asked = body | {"model": app.name, "max_tokens": 20, "seed": 1, "logprobs": True}
        whole = own.chat.completions.create(**asked).choices[0].logprobs.content
        scores = [part.choices[0].logprobs for part in own.chat.completions.create(**asked, stream=True)]
        assert [token for each in scores if each for token in each.content] == whole


def test_a_call_that_no_token_ends_is_said_at_the_start(model, caplog):
    """A model that was trained here with the template of GPT-OSS has no files that name `<|call|>`."""
    template = (
        "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.a }}END{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    for end in ("<bos>", "<eos>"):
        words = f"checkpoint={model.files}", f"chat_template='{template.replace('END', end)}'"
        RequestReader(model, "small", read_settings(Serve, list(words)), 64, 1)
    assert caplog.text.count("and none of its tokens ends an answer") == 1
    assert "the chat template writes '<bos>' between a call" in caplog.text


OF_GPT_OSS = Tokenizer(BPE({chr(n): n for n in range(128)}, [], fuse_unk=False))
OF_GPT_OSS.decoder = Fuse()
OF_GPT_OSS.add_special_tokens(["<|start|>", "<|channel|>", "<|message|>", "<|end|>"])
SAID = "<|channel|>analysis<|message|>I add 2!<|end|><|start|>assistant<|channel|>final<|message|>It is 5."


@pytest.mark.parametrize("has_tools", [False, True])
def test_a_thought_that_special_tokens_mark_is_no_part_of_the_content(has_tools):
    """As of GPT-OSS: without the marks, which texts lack, the content was analysisI add.assistantfinalIt is 5."""
    job = SimpleNamespace(is_chat=True, read_calls=(lambda text: []) if has_tools else None)
    job.parameters = SimpleNamespace(wants_logprobs=False)
    tokens, prompt = OF_GPT_OSS.encode(SAID).ids, OF_GPT_OSS.encode("<|start|>assistant").ids
    texts = [
        AnswerText(OF_GPT_OSS, ["!"] if part == ANSWER else [], parts=PartReader(OF_GPT_OSS, prompt), part=part)
        for part in (ANSWER, THOUGHT)
    ]
    answer = _Answer(0, prompt, texts[0], AnswerText(OF_GPT_OSS, [], keep_special=True), texts[1])
    shown = []
    for number, token in enumerate(tokens):
        piece = Piece(0, [token], [0.0], "length" if number == len(tokens) - 1 else None)
        shown += App._show_piece(None, job, answer, *answer.take(piece))
    deltas = [choice["delta"] for choice in shown]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I add 2!"
    assert "".join(delta.get("content", "") for delta in deltas) == "It is 5."
    message, _ = _show_message(job, answer)
    assert (message["content"], message["reasoning_content"]) == ("It is 5.", "I add 2!")
    assert answer.list_tokens(True) == tokens


@pytest.mark.parametrize(("stop", "called"), [("!", {"a": "b?"}), ("b", None)])
def test_a_stop_string_within_a_thought_loses_no_call(stop, called):
    """The text with special tokens, in which calls are read, ended with the thought. One in the answer ends both."""
    said = SAID.partition("<|channel|>final")[0] + 'to=functions.add<|message|>{"a": "b?"}'
    prompt = OF_GPT_OSS.encode("<|start|>assistant").ids
    job = SimpleNamespace(
        is_chat=True, read_calls=find_reader("harmony"), call_format="harmony", num_calls=0, num_answers=1, arrived=0.0,
        prompts=[prompt], parameters=SimpleNamespace(stop=[stop]),
    )  # fmt: skip
    limits = SimpleNamespace(request_timeout_s=1)

    async def make_answers() -> _Answers:
        return _Answers(SimpleNamespace(tokenizer=OF_GPT_OSS, marks_thoughts=True, limits=limits), job, None)

    (answer,) = asyncio.run(make_answers()).all
    answer.take(Piece(0, [*OF_GPT_OSS.encode(said).ids, 0], [0.0], "stop"))
    message, finish = _show_message(job, answer)
    assert finish == ("tool_calls" if called else "stop")
    assert [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", [])] == (
        [called] if called else []
    )
    assert message["reasoning_content"] == "I add 2!"


CALLS = {  # format of calls, an answer with a thought, a text behind it and a call
    "Gemma 4": ("gemma", "<|channel>thought\nI add.<channel|>So:<|tool_call>call", "So:"),
    "Apertus": ("apertus", "<|inner_prefix|>I add.<|inner_suffix|>So:<|tools_prefix|>[]", "So:"),
    "GPT-OSS": (
        "harmony",
        SAID.replace(
            "final<|message|>It is 5.",
            "commentary<|message|>So:<|end|><|start|>assistant to=functions.add<|message|>{}",
        ).replace("I add 2!", "I add."),
        "So:",  # it was lost
    ),
    "a call among thoughts": ("apertus", "<|inner_prefix|>I add.<|tools_prefix|>[]", None),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_stands_before_a_call_has_no_thought(name):
    backend, (call_format, said, content) = Tokenizer.from_str(OF_GPT_OSS.to_str()), CALLS[name]
    backend.add_special_tokens(["<|channel>", "<channel|>", "<|tool_call>"])
    backend.add_special_tokens(["<|inner_prefix|>", "<|inner_suffix|>", "<|tools_prefix|>"])
    kinds = {"raw": {"keep_special": True}, "text": {"parts": PartReader(backend)}}
    kinds["thought"] = {"parts": PartReader(backend), "part": THOUGHT}
    texts = {kind: AnswerText(backend, [], **keys) for kind, keys in kinds.items()}
    for text in texts.values():
        text.add(backend.encode(said).ids)
        text.close()
    job = SimpleNamespace(read_calls=lambda text: [Call("add", {})], call_format=call_format, num_calls=0)
    message, _ = _show_message(job, SimpleNamespace(**texts, finish="stop"))
    assert (message["content"], message["reasoning_content"]) == (content, "I add.")


def test_arguments_are_texts_where_the_schema_of_the_request_says_so(model, hf_dir):
    """The format of Qwen 3 Coder does not tell the text 42 from the number."""
    command = read_settings(Serve, [f"checkpoint={hf_dir}", "chat_template='{{ messages[0].content }}<function='"])
    reader = RequestReader(model, "small", command, 100, 1)
    properties = {"zip": {"type": "string"}, "count": {"type": "integer"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    body = {"messages": [{"role": "user", "content": "u"}], "tools": [tool], "max_tokens": 2}
    job = asyncio.run(reader.read_chat(json.dumps(body).encode(), 0))
    text = "<function=f><parameter=zip>42</parameter><parameter=count>42</parameter></function>"
    (call,) = job.read_calls(text)
    assert call.arguments == {"zip": "42", "count": 42}
    for parallel, count in ((None, 2), (True, 2), (False, 1)):
        asked = json.dumps(body | {"parallel_tool_calls": parallel}).encode()
        assert len(asyncio.run(reader.read_chat(asked, 0)).read_calls(text * 2)) == count


@pytest.mark.parametrize(
    ("template", "answer", "shown"),
    [
        ("[TOOL_CALLS]{{ 1 / 0 if (call.id | length) != 9 }}{{ call.function.name }}", "[TOOL_CALLS]f{}", "f"),
        (
            "<|tool_call_begin|>{{ call.id }}",
            "<|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}",
            "functions.f:0",
        ),
        (
            "<|channel|>commentary{{ call.function.name }}",
            " to=functions.f<|channel|>commentary json<|message|>{}",
            "f",
        ),
    ],
    ids=["Mistral", "Kimi K2", "GPT-OSS"],
)
def test_a_template_takes_the_ids_that_the_server_gives(model, hf_dir, template, answer, shown):
    """Mistral's refuse other ids than nine letters and digits; that of Kimi K2 shows the id in the place of the name."""
    template = f"{{% for m in messages %}}{{% for call in m.tool_calls or [] %}}{template}{{% endfor %}}{{% endfor %}}"
    reader = RequestReader(
        model,
        "small",
        read_settings(Serve, [f"checkpoint={hf_dir}", f"chat_template='{{{{ tools[0].function.name }}}}{template}'"]),
        100,
        1,
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    body = {"messages": [{"role": "user", "content": "u"}], "tools": [tool], "max_tokens": 2}
    job = asyncio.run(reader.read_chat(json.dumps(body).encode(), 0))
    raw = AnswerText(model.tokenizer, [], keep_special=True)
    raw.add(model.tokenizer.encode(answer).ids)
    message, _ = _show_message(job, SimpleNamespace(text=raw, raw=raw, thought=None, finish="stop"))
    assert message["content"] is None
    body["messages"].append(message)
    job = asyncio.run(reader.read_chat(json.dumps(body).encode(), 0))
    assert model.tokenizer.decode(job.prompts[0]).endswith(shown)
    assert job.num_calls == 1


def test_an_object_that_has_a_name_is_no_call(model, hf_dir):
    """Llama 3 writes calls as JSON without a mark, and an answer may be JSON too."""
    command = read_settings(
        Serve, [f"checkpoint={hf_dir}", "chat_template='{{ tools[0].function.name }}<|python_tag|>'"]
    )
    tool = {"type": "function", "function": {"name": "now", "parameters": {}}}
    body = {"messages": [{"role": "user", "content": "u"}], "tools": [tool], "max_tokens": 2}
    job = asyncio.run(RequestReader(model, "small", command, 100, 1).read_chat(json.dumps(body).encode(), 0))
    for text, names in (
        ('{"name": "Ada", "born": 1815}', []),
        ('{"name": "now"}', ["now"]),
        ('{"name": "later", "parameters": {"hours": 2}}', ["later"]),  # no tool: the client says so
    ):
        assert [call.name for call in job.read_calls(text)] == names


@pytest.mark.parametrize("in_files", [False, True])
def test_a_conversation_with_tools_has_the_template_for_them(model, hf_dir, tmp_path, in_files):
    """It is named tool_use, as in Hermes 3 and Command R: in tokenizer_config.json, or in a file as transformers 5 has it."""
    folder = shutil.copytree(hf_dir, tmp_path / "hf")
    templates = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools[0].function.name }}"}
    if in_files:
        (folder / "additional_chat_templates").mkdir()
        (folder / "chat_template.jinja").write_text(templates["default"])
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(templates["tool_use"])
    else:
        named = [{"name": name, "template": text} for name, text in templates.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    own = replace(model, tokenizer_files=folder)
    body = {"messages": [{"role": "user", "content": "be"}], "max_tokens": 2}
    body_with_tools = body | {"tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]}
    reader = RequestReader(own, "small", read_settings(Serve, [f"checkpoint={hf_dir}"]), 100, 1)
    jobs = [asyncio.run(reader.read_chat(json.dumps(each).encode(), 0)) for each in (body, body_with_tools)]
    assert [model.tokenizer.decode(job.prompts[0]) for job in jobs] == ["be", "add"]
    words = [f"checkpoint={hf_dir}", "chat_template=default"]
    reader = RequestReader(own, "small", read_settings(Serve, words), 100, 1)
    with pytest.raises(ApiError, match=r"the chat template does not show the model its tools \(add\)"):
        asyncio.run(reader.read_chat(json.dumps(body_with_tools).encode(), 0))
    told = body | {"messages": [*body["messages"], {"role": "developer", "content": "Be brief."}]}
    with pytest.raises(ApiError, match="the chat template drops messages of the role developer: send them as system"):
        asyncio.run(reader.read_chat(json.dumps(told).encode(), 0))
    if in_files:
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{")
        reader = RequestReader(own, "small", read_settings(Serve, [f"checkpoint={hf_dir}"]), 100, 1)
        asyncio.run(reader.read_chat(json.dumps(body).encode(), 0))
        with pytest.raises(ApiError, match="the model has no chat template"):
            asyncio.run(reader.read_chat(json.dumps(body_with_tools).encode(), 0))


# Many clients.


def load(model, port, num_clients, seconds):
    """Let clients ask until the time is over, each at least twice; return how many answers were right, and how many not."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 300, length).tolist() for length in rng.integers(2, 16, num_clients)]
    expected = [
        model.tokenizer.decode(each.text_tokens)
        for each in model.sample(prompts, Sampling(10, temperature=0, stop=(2,)))
    ]
    end = time.monotonic() + seconds
    right, wrong = [], []

    def work(index):
        own = openai.OpenAI(api_key=KEY, base_url=f"http://127.0.0.1:{port}/v1", max_retries=0, timeout=120)
        turn = 0
        while turn < 2 or time.monotonic() < end:
            # Seeded and greedy requests, whole and streamed, side by side.
            ask(own, prompts[index], max_tokens=5, seed=turn)
            answer = ask(own, prompts[index], max_tokens=10, temperature=0, stream=bool(turn % 2))
            parts = answer if turn % 2 else [answer]
            text = "".join(part.choices[0].text for part in parts)
            (right if text == expected[index] else wrong).append(index)
            turn += 1

    with ThreadPoolExecutor(num_clients) as pool:
        list(pool.map(work, range(num_clients)))
    return right, wrong


@pytest.mark.parametrize("seconds", [0, pytest.param(60, marks=pytest.mark.nightly)])
def test_64_clients_get_their_own_answers(model, served, seconds):
    right, wrong = load(model, served[1], 64, seconds)
    assert wrong == []
    assert len(right) >= 128
    assert (served[0].serving.num_running, served[0].serving.num_waiting) == (0, 0)


def count_gib(model, num_pages):
    sampler = model.sampler
    return num_pages * count_page_bytes(sampler.arch, sampler.mesh, CacheSpec()) / 2**30


@pytest.mark.nightly
def test_many_requests_share_few_pages(model, hf_dir, monkeypatch):
    """They wait for pages and get the answers of slots; no token is drawn twice."""
    drawn, begun = [], []
    take, begin = engine._Row.take, PagePool.begin
    monkeypatch.setattr(engine._Row, "take", lambda row, *given: drawn.append(row.num_sampled) or take(row, *given))
    monkeypatch.setattr(PagePool, "begin", lambda *given: begun.append(begin(*given)) or begun[-1])
    words = "server.max_rows=8", "cache=pages", f"cache_gib={count_gib(model, 9)}"
    with serving(model, hf_dir, *words, f"server.api_key={KEY}") as (app, port):
        (pool,) = app.serving.engine.pools
        assert (pool.num_pages, pool.most) == (9, 4)
        assert app.serving.bound.text.startswith("pages for 144 tokens, ")
        drawn.clear(), begun.clear()
        right, wrong = load(model, port, 24, 0)
        assert wrong == []
        assert None in begun  # how often depends on when the clients come
        answers = len(begun) - begun.count(None)
        assert (len(right), answers, drawn.count(0)) == (48, 96, 24 + 96)  # the first 24 draw on slots, to compare with
        assert len(pool.free) == 9
    prompts, said = [[5, 6, 7] * 5] * 6, []
    slots = model.sample(prompts, Sampling(20, 1.3), 7)
    request, paged = Request(prompts, seed=7), Sampling(20, 1.3, cache="pages")
    pages = model.rollout(request, paged, cache_gib=count_gib(model, 7), say=said.append)
    assert [answer.tokens for answer in pages] == [answer.tokens for answer in slots]
    assert said[0].num_pages == 7


def test_memory_for_pages(model, hf_dir, monkeypatch):
    def bound(cache="pages", gib=None):
        sizes = RowSizes(8, 64, 64)
        return model.sampler.bound_cache(model.params, Sampling(0, cache=cache), sizes, gib, "max_new_tokens")

    assert bound("auto").text == "slots for 8 rows of at most 64 tokens"
    assert bound().text == "pages for all tokens of 8 rows of at most 64"  # a CPU bounds nothing
    with pytest.raises(UserError, match="cache_gib=1 bounds pages, and the cache has slots; set cache=pages"):
        bound("auto", 1.0)
    settings = read_settings(Serve, [f"checkpoint={hf_dir}", "cache=pages", f"cache_gib={count_gib(model, 7)}"])
    with pytest.raises(UserError, match=r"no room for two rows of 64 tokens, which take .* lower server.max_length$"):
        App(model, settings)
    costs = derive_rollout_costs(model.arch, model.mesh, 8, 8, 1, 64, 0, CacheSpec(has_pages=True, num_pages=0))
    free = count_gib(model, 20) * 2**30 + bytes_per_device(model.params) + costs.memory
    monkeypatch.setattr("tunix.inference.rollout.gather_device_bytes", lambda: round(free / USABLE) + 1)
    assert (bound().num_pages, bound(gib=count_gib(model, 9)).num_pages) == (20, 9)
    monkeypatch.setattr("tunix.inference.rollout.gather_device_bytes", lambda: 1)
    assert bound().text.startswith("pages as rows need them: memory is derived to be too small for two rows")


def test_a_full_queue_says_when_to_come_again_and_a_client_that_goes_frees_its_row(model, hf_dir):
    with serving(model, hf_dir, "server.max_rows=1", "server.max_waiting=0") as (app, port):
        gate = threading.Event()
        run = app.serving.engine.run
        app.serving.engine.run = lambda: gate.wait(60) and run()  # an engine that draws when we like
        connection = socket.create_connection(("127.0.0.1", port))
        body = json.dumps({"prompt": "a few", "max_tokens": 50})
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        wait_until(lambda: app.serving.num_running == 1, "an answer that is drawn")
        status, headers, answer = post(port, body)
        assert (status, answer["error"]["type"]) == (503, "server_busy")
        assert 1 <= int(headers["retry-after"]) <= 60
        status, _, answer = post(port, json.dumps({"prompt": "a", "n": 2}))
        assert (status, answer["error"]["message"]) == (400, "2 answers are more than 1 of one request")
        held = next(iter(app.serving.held.values()))
        connection.close()
        wait_until(lambda: held.request.cancelled, "the end of the request")
        gate.set()
        wait_until(lambda: app.serving.num_running == 0, "the end of all answers")
        assert held.num_sent < 50
        assert post(port, body)[0] == 200


def test_tokens_are_counted(served, client):
    counters = served[0].metrics.prompt_tokens, served[0].metrics.drawn_tokens
    before = [each._value.get() for each in counters]
    usage = ask(client, max_tokens=3).usage
    assert usage.prompt_tokens > 1
    found = [each._value.get() - number for each, number in zip(counters, before, strict=True)]
    assert found == [usage.prompt_tokens, usage.completion_tokens]


def queue_up(num_answers: int) -> QueuedRequest:
    return QueuedRequest([5], num_answers, 8, Sampling(8), 0, 0, lambda piece: None)


def test_a_request_gets_rows_as_they_are_free_and_none_for_answers_that_nobody_waits_for():
    first, second, admitted = queue_up(4), queue_up(1), []
    engine = SimpleNamespace(admit=lambda prompt, numbers, *_, **__: admitted.append(numbers))
    own: Any = SimpleNamespace(
        waiting=deque([first, second]), free=deque([0, 1]), held={}, engine=engine, _choose=lambda *_: None,
        changed=threading.Condition(),
    )  # fmt: skip
    Serving._admit(own)
    assert (admitted, first.num_admitted, len(own.waiting)) == ([[0, 1]], 2, 2)
    Serving.cancel(own, first, 2)
    assert len(own.waiting) == 2  # another one of its answers waits
    own.free.extend([7, 8, 9])
    Serving._admit(own)
    assert admitted[1:] == [[7], [8]]
    assert [(held.request, held.index) for held in own.held.values()] == [
        (first, 0),
        (first, 1),
        (first, 3),
        (second, 0),
    ]
    own.waiting.append(third := queue_up(2))
    Serving.cancel(own, third)
    assert not own.waiting


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1}, (0.5, 3, 0.9, 0.1)),
        ({"temperature": 0.0}, (0.0, NO_TOP_K, NO_TOP_P, NO_MIN_P)),
    ],
)
def test_a_row_has_the_choices_of_its_answer(keys, expected):
    """Also where another answer had the row before, with other ones."""
    fields = dict.fromkeys(RowChoices._fields, np.float64)
    choices = RowChoices(**{name: np.full(3, 7, dtype) for name, dtype in fields.items()})
    own: Any = SimpleNamespace(choices=choices, engine=SimpleNamespace())
    request = QueuedRequest([5], 4, 8, Sampling(8, **keys), 11, 20, lambda piece: None)
    Serving._choose(own, 1, request, 2)
    found = own.engine.key
    assert (found.seed[1], found.answer[1]) == (11, 22)
    assert (found.temperature[1], found.top_k[1], found.top_p[1], found.min_p[1]) == expected
    assert {each[0] for each in found} == {each[2] for each in found} == {7}
    choices.seed[1] = 0
    assert found.seed[1] == 11  # the engine keeps what it was given


def test_all_answers_of_a_request_count_in_the_queue():
    counted: list[int] = []
    own: Any = SimpleNamespace(
        changed=threading.Condition(), num_waiting=1, free=deque([0]), waiting=deque(), _refuse_more=counted.append
    )
    Serving.submit(own, requests := [queue_up(3), queue_up(2)])
    assert (counted, list(own.waiting)) == ([1 + 3 + 2 - 1], requests)


@pytest.mark.parametrize(("seconds", "told"), [(0.01, 1), (6.0, 8), (900.0, 60)])
def test_when_to_come_again(seconds, told):
    """When the answers that wait may have ended, within a minute."""
    own: Any = SimpleNamespace(max_waiting=3, seconds_per_answer=seconds, num_waiting=3, num_rows=3)
    with pytest.raises(QueueFull) as full:
        Serving._refuse_more(own, 4)
    assert full.value.retry_after_s == told
    Serving._refuse_more(own, 3)


def test_a_deadline_and_a_broken_engine_end_requests_and_not_the_server(model, hf_dir, caplog):
    with serving(model, hf_dir, "server.request_timeout_s=0.5", "server.max_rows=2") as (app, port):
        gate = threading.Event()
        engine, run = app.serving.engine, app.serving.engine.run
        engine.run = lambda: gate.wait(60) and run()
        status, _, answer = post(port, json.dumps({"prompt": "a few"}))
        assert (status, answer["error"]["type"]) == (504, "timeout")
        assert "server.request_timeout_s=0.5" in answer["error"]["message"]
        app.limits = app.limits.model_copy(update={"request_timeout_s": 60})
        with ThreadPoolExecutor() as pool:  # the server ends, and does not wait for answers any longer
            late = pool.submit(post, port, json.dumps({"prompt": "a few"}))
            wait_until(lambda: bool(app.open), "a request")
            app.is_draining = True
            app.give_up()
            assert late.result()[0] == 503
        status, headers, _ = post(port, json.dumps({"prompt": "a few"}))
        assert (status, headers["Retry-After"]) == (503, "5")
        assert post(port, None, "/health", method="GET")[0] == 503
        app.is_draining = False
        gate.set()
        wait_until(lambda: app.serving.num_running == 0, "the end of all answers")

        def fail():
            raise RuntimeError("RESOURCE_EXHAUSTED")

        engine.run = fail
        status, _, answer = post(port, json.dumps({"prompt": "a few"}))
        assert (status, answer["error"]["type"]) == (500, "server_error")
        assert post(port, json.dumps({"prompt": "a few", "max_tokens": 3}))[0] == 200


def test_scores_of_weights_that_are_not_finite_are_errors(model):
    answer = _Answer(0, [5], AnswerText(model.tokenizer, []), None, None)
    with pytest.raises(ApiError, match="NaN") as error:
        answer.take(Piece(0, [7, 0], [-1.0, float("nan")], None))
    assert error.value.status == 500
    scores = Future()  # of a prompt alone
    scores.set_result(TopScores(*(np.full(shape, np.nan) for shape in (2, (2, 1), (2, 1)))))
    job = SimpleNamespace(is_chat=False, texts=["a few"], images=None, num_answers=1)
    app = SimpleNamespace(serving=SimpleNamespace(score=lambda *_: scores))
    answer.prompt = [5, 6, 7]
    with pytest.raises(ApiError, match="NaN"):
        asyncio.run(App._score(app, job, answer))


def test_scores_have_the_limits_of_answers_and_others_draw_between_them(model, hf_dir):
    body = json.dumps({"prompt": "a few words", "echo": True, "max_tokens": 0, "logprobs": 1})
    with serving(model, hf_dir, "server.max_waiting=2") as (app, port), ThreadPoolExecutor() as pool:
        gate, work, score, run = threading.Event(), [], app.serving._score, app.serving.engine.run
        app.serving._score = lambda *text: (gate.wait(60), work.append("score"), score(*text))
        app.serving.engine.run = lambda: (work.append("draw"), run())[1]
        app.limits = app.limits.model_copy(update={"request_timeout_s": 0.5})
        assert post(port, body)[0] == 504
        app.limits = app.limits.model_copy(update={"request_timeout_s": 60})
        others = []
        for number in range(3):
            others.append(pool.submit(post, port, body))
            wait_until(lambda number=number: len(app.serving.scorings) > number, "a prompt to score")
        assert post(port, body)[0] == 503
        gate.set()
        assert [each.result()[0] for each in others] == [200] * 3
    assert "score score" not in " ".join(work)


# What is refused.


@pytest.mark.parametrize(
    ("parameters", "kind", "message"),
    [
        ({"model": "other"}, openai.NotFoundError, "there is no model other; this server has small"),
        ({"prompt": [3] * 60, "max_tokens": 5}, openai.BadRequestError, "60 tokens and max_tokens=5 are more than 64"),
        ({"prompt": [3] * 64}, openai.BadRequestError, "64 tokens and max_tokens=1 are more than 64"),
        ({"prompt": ""}, openai.BadRequestError, "prompt is empty"),
        ({"prompt": "a" * 5000}, openai.BadRequestError, "a prompt of 5000 characters is more than 64 tokens"),
        ({"prompt": ["a" * 5000] * 10, "n": 20}, openai.BadRequestError, "200 answers are more than 128"),
        ({"prompt": [5000]}, openai.BadRequestError, "tokens outside of 0 to 319"),
        ({"temperature": -1}, openai.BadRequestError, "temperature: "),
        ({"temperature": 1e-40}, openai.BadRequestError, "temperature: "),
        ({"temperature": "hot"}, openai.BadRequestError, "temperature: "),
        ({"top_p": 0}, openai.BadRequestError, "top_p: "),
        ({"n": 0}, openai.BadRequestError, "n: "),
        ({"n": 1000}, openai.BadRequestError, "1000 answers are more than 128 of one request"),
        ({"stop": [""]}, openai.BadRequestError, "stop"),
        ({"presence_penalty": 1}, openai.BadRequestError, "presence_penalty: "),
        ({"best_of": 3}, openai.BadRequestError, "best_of is served where it is n"),
        ({"best_of": 1, "prompt": ""}, openai.BadRequestError, "prompt is empty"),
        ({"stream": True, "logprobs": 2}, openai.BadRequestError, "logprobs is served without stream"),
        ({"extra_body": {"nonsense": 1}}, openai.BadRequestError, "nonsense is not a parameter that is served"),
    ],
)
def test_parameters_that_are_refused_are_named(client, parameters, kind, message):
    with pytest.raises(kind) as error:
        client.completions.create(**{"model": "small", "prompt": "a"} | parameters)
    assert message in error.value.message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "messages: "),
        ({"messages": ["hi"]}, "messages.0: "),
        ({"messages": [{"role": "user", "content": "a" * 5000}]}, "characters is more than 64 tokens"),
        ({"messages": [{"content": "a"}]}, "messages.0 has no role"),
        ({"messages": [{"role": "user"}]}, "messages.0 has no content that is a text"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "a"}}]}, "messages.0 has no content that is a"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts other than text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": 3}]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}}, 'response_format: {"type": "text"} alone is served'),
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, "surrogates"),
        ({"\ud800": 1}, "\ud800 is not a parameter that is served"),
        ({"": 1}, " is not a parameter that is served"),
        ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "top_logprobs needs logprobs=true"),
        ({"messages": [{"role": "user", "content": ""}] * 65}, "65 messages, calls and tools are more than 64 tokens"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 64}]}, "65 messages, calls and tools are"),
    ],
)  # fmt: skip
def test_chats_that_are_refused(served, body, message):
    status, _, answer = post(served[1], json.dumps(body), "/v1/chat/completions")
    assert status == 400
    assert message in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400), (b"{", 400), (b"[]", 400), (b"\xff\x00", 400), (b"[" * 50_000, 400), (b'{"prompt": 1e999}', 400),
        (b'{"prompt": "a", "temperature": NaN}', 400), (b'{"prompt": "\\ud800"}', 400), (b"<html>", 400),
        (b'{"prompt": "' + b"a" * 200_000 + b'"}', 413),
    ],
)  # fmt: skip
def test_bodies_that_are_nonsense(served, body, status):
    found, _, answer = post(served[1], body)
    assert found == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}


MANY = dict.fromkeys(map(str, range(50)), 1)


@pytest.mark.parametrize(
    ("key", "items"),
    [
        *((key, [1.5] * 50) for key in ("prompt", "messages", "tools", "stop", "modalities")),
        *((key, MANY) for key in ("logit_bias", "response_format")),
    ],
)
def test_a_list_of_wrong_items_is_refused_by_its_first(key, items):
    kind = CompletionParameters if key == "prompt" else ChatParameters
    values = {"prompt": "a"} if key == "prompt" else {"messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(ValidationError) as error:
        kind.model_validate(values | {key: items})
    assert error.value.error_count() < 6


def test_unknown_parameters_are_refused_by_the_first(monkeypatch):
    monkeypatch.setattr(ChatParameters, "model_validate", None)  # which would make an error of each
    with pytest.raises(ApiError, match="^0 is not a parameter that is served$"):
        read_parameters(ChatParameters, json.dumps(MANY).encode())


def test_parameters_that_change_nothing_are_taken():
    """Those of benchmarks of vLLM and SGLang, those that came in place of OpenAI's `user`, and null of a client that
    sends all it knows."""
    values = {"repetition_penalty": 1.0, "ignore_eos": False, "safety_identifier": "a", "prompt_cache_key": "a"}
    nulls = {"functions": None, "reasoning_effort": None}
    messages = {"messages": [{"role": "user", "content": "a"}], "modalities": ["text"]}
    assert read_parameters(CompletionParameters, json.dumps({"prompt": "a"} | values | nulls).encode()).prompt == "a"
    assert read_parameters(ChatParameters, json.dumps(messages | values | nulls).encode()).modalities == ["text"]
    with pytest.raises(ApiError, match="repetition_penalty"):
        read_parameters(CompletionParameters, b'{"prompt": "a", "repetition_penalty": 1.1}')


@pytest.mark.parametrize("top_k", [0, -1])
def test_a_request_may_leave_every_token_in(top_k):
    """Whatever filters the server was started with."""
    own: Any = SimpleNamespace(command=SimpleNamespace(temperature=0.5, top_k=5, top_p=0.5, min_p=0.5))
    assert RequestReader.select_sampling(own, Parameters()) == Sampling(0, 0.5, 5, 0.5, 0.5)
    everything = Parameters(temperature=1.0, top_k=top_k, top_p=1.0, min_p=0.0)
    assert RequestReader.select_sampling(own, everything) == Sampling(0, 1.0)


def test_nonsense_gets_an_answer_and_ends_nothing(model, hf_dir):
    """The requests of a try of `make fuzz`, which takes other seeds."""
    rng = random.Random(5)
    with serving(model, hf_dir, "server.max_rows=8") as (_, port):
        for number in range(80):
            request = make_request(rng, damage)
            assert send(port, request) == "", (number, request[:500])
        assert post(port, b"", "/health", method="GET")[0] == 200


def test_a_body_of_unknown_length_is_bounded_too(served):
    def parts():
        for _ in range(100):
            yield b"a" * 10_000

    connection = http.client.HTTPConnection("127.0.0.1", served[1], timeout=60)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.request("POST", "/v1/completions", parts(), {"Authorization": f"Bearer {KEY}"}, encode_chunked=True)
    assert connection.getresponse().status == 413


def test_connections_without_a_request_are_closed(model, hf_dir, monkeypatch):
    monkeypatch.setattr("tunix.serve.HEAD_S", 0.5)
    monkeypatch.setattr("tunix.serve.OWN_FILES", 1e9)
    with serving(model, hf_dir) as (_, port), contextlib.ExitStack() as opened:
        socks = [opened.enter_context(socket.create_connection(("127.0.0.1", port), 60)) for _ in range(TAKEN + 8)]
        began = time.monotonic()
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        seconds = []
        for sock in socks:
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
            seconds.append(time.monotonic() - began)
        assert max(seconds[:TAKEN]) > 0.4  # and those that are one too many, at once
        assert post(port, None, "/health", method="GET")[0] == 200
        late = opened.enter_context(socket.create_connection(("127.0.0.1", port), 60))
        late.sendall(b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 20_000)
        assert late.recv(20).startswith(b"HTTP/1.1 400 ")


def test_a_long_text_stops_no_other_thread(model):
    count, ends = [0], []

    def work():
        while not ends:
            count[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    before = count[0]
    tokens = model.encode("merged " * 20_000)
    after = count[0]
    ends.append(True)
    thread.join()
    assert after > before
    assert tokens == model.tokenizer.encode("merged " * 20_000).ids


def test_long_texts_that_wait_hold_no_thread(model, hf_dir, monkeypatch):
    """There are at most 32 threads; a short text had waited for all long ones."""
    reader = RequestReader(model, "small", read_settings(Serve, [f"checkpoint={hf_dir}"]), 64, 4)
    reader.max_characters = 1 << 20
    long, short = (json.dumps({"prompt": text, "max_tokens": 1}).encode() for text in ("a" * 200_000, "a"))
    gate, at_work = threading.Event(), []

    def wait(text):
        if len(text) > 1:
            at_work.append(text)
            gate.wait(60)
        return [3] * min(2, len(text))

    async def ask():
        waiting = [asyncio.create_task(reader.read_completion(long, 0)) for _ in range(40)]
        async with asyncio.timeout(60):
            while not at_work:
                await asyncio.sleep(0.01)
        try:
            return await asyncio.wait_for(reader.read_completion(short, 0), 20)
        finally:
            gate.set()
            await asyncio.gather(*waiting)

    monkeypatch.setattr(type(model), "encode", lambda _, text: wait(text))
    assert asyncio.run(ask()).prompts == [[3]]


def test_other_addresses_keys_and_what_is_shown(served, client):
    port = served[1]
    assert post(port, b"{}", key="wrong")[0] == 401
    basic = http.client.HTTPConnection("127.0.0.1", port)
    basic.request("GET", "/v1/models", headers={"Authorization": f"Basic {KEY}"})
    assert basic.getresponse().status == 401
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(api_key="no", base_url=f"http://127.0.0.1:{port}/v1", max_retries=0).models.list()
    assert post(port, None, "/v1/nothing", method="GET")[0] == 404
    assert post(port, None, "/v1/completions", method="GET")[0] == 405
    assert [each.id for each in client.models.list()] == ["small"]
    assert client.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert post(port, None, "/health", key="", method="GET")[2] == {"status": "ok"}
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {KEY}"})
    text = connection.getresponse().read().decode()
    assert 'tunix_requests_total{path="/v1/models",status="401"}' in text
    assert 'tunix_requests_total{path="/v1/models/{name:path}",status="404"}' in text  # a client may invent others
    assert KEY not in text


def test_a_key_may_have_any_characters(served, monkeypatch):
    monkeypatch.setattr(served[0], "key", "schlüssel".encode())
    as_sent = "schlüssel".encode().decode("latin-1")  # as curl sends it: http.client encodes it so
    assert [post(served[1], None, "/v1/models", key, "GET")[0] for key in (as_sent, "schlüssel")] == [200, 401]


def test_without_a_key_names_other_than_those_of_loopback_are_refused(model, hf_dir):
    with serving(model, hf_dir) as (_, port):
        for host in (
            "rebound.example",
            "a{b.example",
            "rebound.example:",
            "rebound@localhost",
            "127.0.0.1.example",
            "",
        ):
            assert post(port, None, "/v1/models", method="GET", Host=host)[0] == 403, host
        for host in (f"localhost:{port}", "LOCALHOST", "127.0.0.1:", f"[::1]:{port}"):
            assert post(port, None, "/v1/models", method="GET", Host=host)[0] == 200, host
        for page, code in (("https://a.example", 403), ("null", 403), ("http://localhost:3000", 200)):
            assert post(port, None, "/v1/models", method="GET", Origin=page)[0] == code, page


def test_settings_that_are_refused(hf_dir, monkeypatch):
    monkeypatch.setenv("TUNIX_API_KEY", f"{KEY}\n")  # as a secret out of a file
    assert read_settings(Serve, [f"checkpoint={hf_dir}"]).server.api_key.get_secret_value() == KEY
    monkeypatch.delenv("TUNIX_API_KEY")
    words = [f"checkpoint={hf_dir}", "server.host=0.0.0.0"]
    with pytest.raises(UserError, match=r"server.host=0.0.0.0 can be reached from other machines.*TUNIX_API_KEY"):
        read_settings(Serve, words)
    settings = read_settings(Serve, [*words, f"server.api_key={KEY}"])
    assert KEY not in str(settings) + repr(settings) + str(settings.model_dump(mode="json"))
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UserError, match="cannot be used: Address already"),
    ):
        open_socket("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(UserError, match="server.image_folders: there is no folder nowhere$"):
        serve(read_settings(Serve, [f"checkpoint={hf_dir}", "server.image_folders=[nowhere]"]))


# The command.


def test_the_command_ends_clean_on_sigterm_after_the_answers_that_run(hf_dir, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TUNIX_API_KEY": KEY, "XLA_FLAGS": xla_flags(1)}
    words = ["-m", "tunix", "serve", f"checkpoint={hf_dir}", "server.port=0", "max_new_tokens=40"]
    out, err = tmp_path / "out", tmp_path / "err"
    process = start(words, tmp_path, environment, out, err)
    try:
        wait_until(lambda: out.read_text().endswith("\n") or process.poll() is not None, "the server's line")
        line = out.read_text()
        url = line.split()[3]
        assert line.startswith(f"serving {hf_dir.name} on http://127.0.0.1:")
        own = openai.OpenAI(api_key=KEY, base_url=url, max_retries=0, timeout=120)
        asked = {"model": hf_dir.name, "prompt": "a few", "seed": 1, "max_tokens": 40, "logit_bias": {}}
        whole = own.completions.create(**asked).choices[0].text
        stream = own.completions.create(**asked, stream=True)
        first = next(stream).choices[0].text
        process.send_signal(signal.SIGTERM)
        assert first + "".join(each.choices[0].text for each in stream) == whole
        assert process.wait(60) == 0
        with pytest.raises(openai.APIConnectionError):
            own.models.list()
    finally:
        process.kill()
    assert KEY not in out.read_text() + err.read_text()


def test_sigterm_ends_a_server_that_still_loads_its_model(hf_dir, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)

    def load(*words, **options):
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("loading goes on")

    monkeypatch.setattr("tunix.serve.load_language_model", load)
    try:
        with pytest.raises(SystemExit) as ended:
            serve(read_settings(Serve, [f"checkpoint={hf_dir}", "server.port=0"]))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 0


def test_a_port_that_another_server_takes_while_the_model_is_loaded_is_named(hf_dir, monkeypatch):
    with open_socket("127.0.0.1", 0) as other:  # both may have the address until one listens
        monkeypatch.setattr("tunix.serve.load_language_model", lambda *words, **options: other.listen())
        before, port = signal.getsignal(signal.SIGTERM), other.getsockname()[1]
        try:
            with pytest.raises(UserError, match=f"server.port={port} cannot be used: Address already"):
                serve(read_settings(Serve, [f"checkpoint={hf_dir}", f"server.port={port}"]))
        finally:
            signal.signal(signal.SIGTERM, before)


def test_an_engine_that_is_busy_at_the_end_does_not_crash_the_process(model, hf_dir, monkeypatch):
    async def stop(*words):
        """End as a server whose engine compiles for longer than anybody waits."""

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr("tunix.serve._run", stop)
    monkeypatch.setattr("tunix.serve.os._exit", leave)
    monkeypatch.setattr("tunix.serve.load_language_model", lambda *words, **options: model)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="0"):
            serve(read_settings(Serve, [f"checkpoint={hf_dir}", "server.port=0"]))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_open_server_without_a_key_is_refused_in_one_line(hf_dir, tmp_path):
    run = run_python("-m", "tunix.serve", f"checkpoint={hf_dir}", "server.host=::", cwd=tmp_path)
    assert run.returncode == 2
    (line,) = errors(run)
    assert line.startswith("error: ")


@pytest.mark.nightly
def test_the_client_of_the_harness_gets_the_answers_and_scores_of_the_model(model, served, client, monkeypatch):
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    url = f"http://127.0.0.1:{served[1]}/v1/completions"
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    # Without transformers, whose tokenizer the harness would load: texts for answers, tokens for scores.
    harness = LocalCompletionsAPI(base_url=url, model="small", tokenizer_backend="none", max_length=64)
    until = {"until": ["X"], "max_gen_toks": 8, "temperature": 0}
    answers = harness.generate_until([Instance("generate_until", {}, (prompt, until), 0) for prompt in PROMPTS])
    own = [ask(client, prompt, max_tokens=8, temperature=0, stop="X").choices[0].text for prompt in PROMPTS]
    assert answers == own
    harness.tokenized_requests, harness.tokenizer = True, model.tokenizer
    pairs = [
        (model.tokenizer.encode(a).ids, model.tokenizer.encode(b).ids)
        for a, b in [("a few", " words"), ("to", " be a")]
    ]
    scores = harness._loglikelihood_tokens([(("", str(index)), *pair) for index, pair in enumerate(pairs)])
    for (context, rest), (log_prob, is_greedy) in zip(pairs, scores, strict=True):
        logits = np.asarray(model(np.array([context + rest])), np.float64)[0]
        own = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        places = np.arange(len(context) - 1, len(context + rest) - 1)
        assert log_prob == pytest.approx(own[places, rest].sum(), abs=1e-3)
        assert is_greedy == (own[places].argmax(-1) == rest).all()
