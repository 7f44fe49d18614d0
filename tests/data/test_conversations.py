"""Conversations: from rows to turns, from turns to text by the tokenizer's template, and a loss on answers alone."""

import csv
import json
from contextlib import nullcontext

import numpy as np
import pytest
from support.harness import ONE_LAYER, RUN, SMALL, metrics
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

import tunix
from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.config.task import Prompted
from tunix.data.chat import PLAIN, ChatTemplate, RefusedConversation
from tunix.data.dataset import find_units, load_corpus, prepare_corpus
from tunix.data.documents import DOCUMENTS, Conversation, Document, encode_conversations, encode_whole, read_documents
from tunix.data.files import BadRow
from tunix.data.prompts import load_prompts
from tunix.data.sources import read_questions
from tunix.data.tokenizer import Vocab
from tunix.rl.episodes import ObservationEncoder
from tunix.training.choices import build_mesh
from tunix.training.loss import HeldOut

GEMMA = (  # as the tokenizer_config.json of gemma-3-it has it, for texts
    "{{ bos_token }}\n{%- if messages[0]['role'] == 'system' -%}\n"
    "    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}\n    {%- set loop_messages = messages[1:] -%}\n"
    "{%- else -%}\n    {%- set first_user_prefix = '' -%}\n    {%- set loop_messages = messages -%}\n{%- endif -%}\n"
    "{%- for message in loop_messages -%}\n"
    "    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}\n"
    "        {{ raise_exception('Conversation roles must alternate user/assistant') }}\n    {%- endif -%}\n"
    "    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}\n"
    "    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') }}\n"
    "    {{- message['content'] | trim -}}\n    {{ '<end_of_turn>\n' }}\n{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n    {{ '<start_of_turn>model\n' }}\n{%- endif -%}\n"
)
TALK = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 2 + 2?"}, {"role": "assistant", "content": " 4 "},
]  # fmt: skip


def template(source):
    return ChatTemplate(source, {"bos_token": "<bos>", "eos_token": "<eos>"})


@pytest.mark.parametrize("source", [PLAIN, GEMMA])
def test_pieces_make_the_whole_and_answers_end_their_turn(source):
    (pieces,) = template(source).split_answers(TALK)
    assert "".join(text for text, _ in pieces) == template(source).render(TALK)
    assert [answer for _, answer in pieces] == [False, True, False, True]
    assert pieces[0][0].startswith("<bos>")


KNOWN = "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
LATE = "{% for m in messages %}{% if loop.last and m.role == 'user' %}{{ messages[0].content }}{% endif %}{{ m.role }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "role", "drops"),
    [(KNOWN, "human", True), (KNOWN, "system", True), (PLAIN, "human", False), (LATE, "system", False)],
)
def test_a_template_that_drops_turns_of_a_role_is_refused(source, role, drops):
    """Those of Qwen drop a role that they do not know; those of Mistral show the system behind the last question."""
    talk = [{"role": role, "content": "Be brief."}, *TALK[1:]]
    with pytest.raises(UserError, match=f"drops turns of the role {role}; rename it") if drops else nullcontext():
        template(source).check_roles(talk)
    template(source).check_roles([talk[0] | {"content": ""}, *talk[1:]])


def test_turns_of_many_roles_and_answers_are_written_a_few_times(monkeypatch):
    """Each role was looked for in each prompt of a conversation, which has all turns before it."""
    written = []
    generate = ChatTemplate._generate
    monkeypatch.setattr(ChatTemplate, "_generate", lambda *args: written.append(len(args[1])) or generate(*args))
    turns = [{"role": role, "content": "?"} for role in ("user", "assistant") * 200]
    assert template(KNOWN).find_dropped_role([{"role": "human", "content": "?"}, *turns]) == "human"
    assert sum(written) < 10 * len(turns)
    written.clear()
    chat = template(PLAIN)
    assert chat.find_dropped_role([{"role": f"role {number}", "content": "?"} for number in range(400)]) == ""
    assert sum(written) < 1000
    assert not chat.shown_roles  # names that a client makes up are not kept


def test_a_conversation_with_thousands_of_answers_is_refused():
    turns = [{"role": role, "content": "?"} for role in ("user", "assistant") * 1500]
    with pytest.raises(RefusedConversation, match=r"1,500 answers in 3,000 turns.*learnt_turns=last"):
        template(PLAIN).split_answers(turns)
    ((_, answer),) = template(PLAIN).split_answers(turns, learnt="last")
    assert answer == ("?<eos>", True)


def test_a_conversation_of_which_the_sequences_are_too_long_is_refused(monkeypatch):
    """2 MB with 400 thoughts were 400 sequences, and 400 MB."""
    source = "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else '' }}{% endfor %}"
    turns = [{"role": role, "content": role * 125} for role in ("user", "assistant") * 20]
    assert len(template(source).split_answers(turns)) == 20
    monkeypatch.setattr("tunix.data.chat.MAX_WRITTEN", 100_000)
    assert len(template(source).split_answers(turns, learnt="last")) == 1
    with pytest.raises(RefusedConversation, match="20 answers in 40 turns, and the turns before an answer"):
        template(source).split_answers(turns)


def test_a_corpus_has_the_same_date_on_each_day():
    """Generation has today's."""
    backend = Tokenizer(models.WordLevel({"<eos>": 0}, unk_token="<eos>"))
    vocab = Vocab(backend, None, "<eos>", "{{ strftime_now('%d %b %Y') }}")
    assert vocab.chat.render(TALK) == "26 Jul 2024"
    assert template(vocab.chat_template).render(TALK) != "26 Jul 2024"


def test_a_conversation_may_begin_with_the_assistant():
    expected = [("<bos>assistant:\n", False), ("2<eos>", True)]
    assert template(PLAIN).split_answers(TALK[2:3]) == [expected]


@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
def test_a_template_gets_thoughts_by_each_of_their_names(tmp_path, read):
    """That of GPT-OSS reads `thinking`, that of Qwen 3 `reasoning_content`; transformers 5 takes all three for both."""
    names = ["reasoning_content", "thinking", "reasoning"]
    rows = [{"messages": [TALK[1], {**TALK[2], name: "Count."}]} for name in names] + [{"messages": TALK[1:3]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cfg = compose([*SMALL, "task=sft", "data=jsonl", f"data.paths=[{tmp_path}]"]).config
    source = f"{{% for message in messages %}}<{{{{ message.{read} }}}}>{{{{ message.content }}}}{{% endfor %}}"
    (unit,) = find_units(cfg.data, cfg.loading)
    texts = [template(source).render(each.content.messages) for each in read_documents(cfg.data, cfg.task, unit)]
    assert texts == ["<>1 + 1?<Count.>2"] * 3 + ["<>1 + 1?<>2"]


def test_gemmas_template():
    (pieces,) = template(GEMMA).split_answers(TALK)
    assert pieces == [
        ("<bos><start_of_turn>user\nBe brief.\n\n1 + 1?<end_of_turn>\n<start_of_turn>model\n", False),
        ("2<end_of_turn>\n", True),
        ("<start_of_turn>user\nand 2 + 2?<end_of_turn>\n<start_of_turn>model\n", False),
        ("4<end_of_turn>\n", True),
    ]


# Templates that show an answer in another form when the conversation has gone on: with its thoughts while it is the last
# turn (Qwen 3, GPT-OSS with its <|return|>), or with the end of the text behind it (Phi 3).
THOUGHTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FINAL_END = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt else eos_token }}"
)
LATER = {
    "thoughts": (THOUGHTS, "<think></think>2<|end|>", "<think></think> 4 <|end|>"),
    "end of the text": (FINAL_END, "2<|end|><eos>", " 4 <|end|><eos>"),
}


@pytest.mark.parametrize("kind", LATER)
def test_each_answer_is_learnt_behind_the_text_that_generation_has(kind):
    source, *answers = LATER[kind]
    chat, prompts = template(source), [TALK[:2], TALK[:4]]
    sequences = chat.split_answers(TALK)
    assert sequences == [
        [(chat.render(prompt, add_generation_prompt=True), False), (answer, True)]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    assert chat.split_answers(TALK, learnt="last") == sequences[1:]
    assert chat.split_answers(TALK, learnt=[False] * 4 + [True]) == sequences[1:]
    assert chat.split_answers(TALK, learnt=[False] * 2 + [True] + [False] * 2) == sequences[:1]
    assert chat.split_answers(TALK, learnt="all") == [[(chat.render(TALK), True)]]
    (nothing,) = chat.split_answers(TALK, learnt=[False] * 5)
    assert not any(is_learnt for _, is_learnt in nothing)


# As DeepSeek R1's: a prompt begins the thought, and thoughts of answers are dropped.
BEGUN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    r"{{ '<|assistant|><think>\n' if add_generation_prompt }}"
)


@pytest.mark.parametrize(
    ("turn", "learnt"),
    [
        ({"content": "<think>\none and one\n</think>\n\n2"}, "one and one\n</think>\n\n2<|end|>"),
        ({"content": "one and one</think>2"}, "one and one</think>2<|end|>"),
        ({"content": "2", "reasoning": "one and one"}, "one and one\n</think>\n\n2<|end|>"),
        ({"content": "<think>\n\n</think>\n\n2"}, "\n</think>\n\n2<|end|>"),
    ],
)
def test_a_thought_that_the_prompt_begins_is_learnt(turn, learnt):
    turns = [TALK[1], {"role": "assistant"} | turn, TALK[3], {"role": "assistant", "content": "<think>two</think>4"}]
    chat = template(BEGUN)
    chat.check_thoughts(turns, {}, "assistant")
    first, second = chat.split_answers(turns)
    assert first == [("<|user|>1 + 1?<|end|><|assistant|><think>\n", False), (learnt, True)]
    assert second[0] == (chat.render(turns[:3], add_generation_prompt=True), False)
    assert second[1] == ("two</think>4<|end|>", True)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (BEGUN, r"give its answers thoughts, <think>\\n\\n</think>\\n\\n where they have none, or another template"),
        (BEGUN.replace("<think>", "<think></think>"), r"often \{enable_thinking: true\}"),
    ],
)
def test_an_answer_without_the_thought_that_its_prompt_begins(source, message):
    with pytest.raises(RefusedConversation, match=message):
        template(source).split_answers(TALK[1:3])


def test_a_template_that_drops_thoughts_is_refused():
    """What the model is to learn would be left out without a word."""
    turns = [ASKED, {"role": "assistant", "content": "2", "thinking": "one and one"}, *TALK[3:]]
    vocab = Vocab(Tokenizer(models.WordLevel({"<eos>": 0}, "<eos>")), "<bos>", "<eos>", GEMMA)
    with pytest.raises(
        UserError, match=r"drops the thoughts of answers \(reasoning_content\).*write them into the con"
    ):
        list(encode_conversations(vocab, [Document("", Conversation(turns))]))
    template(GEMMA).check_thoughts(turns, {}, "last")  # it learns no thought
    template(THOUGHTS.replace("<think>", "<think>{{ m.thinking }}")).check_thoughts(turns, {}, "assistant")


# As Gemma 4's: two answers in a row are one turn.
JOINS = (
    "{% for m in messages %}{% if loop.changed(m.role) %}<|{{ m.role }}|>{% endif %}{{ m.content }}"
    "{% if loop.last or loop.nextitem.role != m.role %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_an_answer_that_a_template_joins_with_the_one_before_is_refused():
    """The model would learn to write the first one again."""
    turns = [ASKED, *({"role": "assistant", "content": text} for text in ("one", "two"))]
    with pytest.raises(RefusedConversation, match=r"cannot be told from it: .* and \.\.\..*onetwo"):
        template(JOINS).split_answers(turns)
    sequences = template(THOUGHTS).split_answers(turns)
    learnt = [text for pieces in sequences for text, is_learnt in pieces if is_learnt]
    assert learnt == ["<think></think>one<|end|>", "<think></think>two<|end|>"]


ASKED_TWICE = ["task=dpo", "data.columns.prompt=start", "data.columns.chosen=one", "data.columns.rejected=two"]


def test_conversations_of_such_a_template_are_several_sequences(tmp_path):
    rows = [
        {"messages": [*TALK[:4], {"role": "assistant", "content": f"{n}"}], "one": f"{n}", "two": f"{n + 1}"}
        for n in range(40)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row | {"start": row["messages"][:4]}) for row in rows))
    (tmp_path / "own.jinja").write_text(THOUGHTS)
    words = [*SMALL, "data=jsonl", f"data.paths=[{tmp_path}/a.jsonl]", f"task.chat_template={tmp_path}/own.jinja",
             "training.seq_len=256", "tokenizer=bytes", "model.vocab_size=auto"]  # fmt: skip

    def read(corpus) -> list[list[tuple[str, str]]]:
        """Return text and answers of the documents of each split."""
        decode, splits = corpus.tokenizer.decode, []
        for part in (*corpus.train.values(), *corpus.held_out_parts.values()):
            shard = part.stream.shard(0)
            ends = [*shard.starts[1:], len(shard.tokens)]
            spans = [slice(start, end) for start, end in zip(shard.starts, ends, strict=True)]
            splits.append([(decode(shard.tokens[at]), decode(shard.tokens[at][shard.answers[at]])) for at in spans])
        return splits

    corpus = load_corpus(compose([*words, "task=sft", "data.held_out_fraction=0.2"]).config)
    train, held_out = read(corpus)
    assert len(train) + len(held_out) == 80
    for split in (train, held_out):
        assert split
        for (first, of_first), (second, of_second) in zip(split[::2], split[1::2], strict=True):
            assert of_first == "<think></think>2<|end|>"
            assert first.endswith(f"<|assistant|>{of_first}")
            assert second.endswith(f"2<|end|><|user|>and 2 + 2?<|end|><|assistant|>{of_second}")
    # A model that scores or classifies a conversation reads all of its turns.
    vocab = Vocab(corpus.tokenizer, "<bos>", "<eos>", THOUGHTS)
    (whole,) = encode_whole(vocab, [Document("", Conversation(TALK))])
    assert corpus.tokenizer.decode(np.concatenate(whole.tokens)) == vocab.chat.render(TALK)
    # Of a pair, only the answers are learnt, so the prompt may have earlier ones.
    pairs, _ = read(load_corpus(compose([*words, *ASKED_TWICE, "data.held_out_fraction=0.2"]).config))
    assert all("|>2<|end|>" in text and len(answers) < 60 for text, answers in pairs)


def test_what_ends_an_answer():
    """The first special token behind the text of an answer, and not one before it."""
    harmony = (
        "{% for m in messages %}<|{{ m.role }}|>{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endfor %}"
    )
    assert template(harmony).read_end() == "<|return|>"
    assert template(PLAIN).read_end() == "<eos>"
    assert template("{{ messages | length }}").read_end() == ""


def test_a_filter_has_the_words_that_templates_give_it():
    text = template("{{ messages | tojson(ensure_ascii=False, indent=1) }}").render([{"role": "user", "content": "ü"}])
    assert text == '[\n {\n  "role": "user",\n  "content": "ü"\n }\n]'


def test_a_generation_block_gives_its_body():
    source = (
        "{% for message in messages %}{% set end = '\n' %}{{ message.role }}:\n"
        "{% if message.role == 'assistant' %}\n  {% generation %}\n  {%- set end = eos_token %}\n"
        "{{ loop.index }}{{ message.content }}{{ end }}{% endgeneration %}\n{% else %}{{ message.content }}{% endif %}"
        "{{ end }}{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    # `end` within the block is another name than outside of it, as in transformers.
    (pieces,) = template(source).split_answers(TALK[1:3])
    assert pieces == [("user:\n1 + 1?\nassistant:\n", False), ("22<eos>\n", True)]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (GEMMA, "refuses a conversation: Conversation roles must alternate"),
        ("{% for", "task.chat_template: "),
        ("{{ messages | length }}", "does not begin with the text before the answer"),
        ("{{ ''.__class__.__mro__ }}", "refuses a conversation: access to attribute '__class__'"),
    ],
)
def test_templates_that_do_not_work(source, message):
    with pytest.raises(UserError, match=message):
        template(source).split_answers([TALK[1], *TALK[1:]])


@pytest.fixture
def files(tmp_path):
    """The same 40 conversations in the forms that are read."""
    turns = [(f"Be {n % 3}.", f"what is {n}?", f"it is {n * 7}" * (1 + n % 3)) for n in range(40)]
    names = ("system_prompt", "user_prompt", "prediction")
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([names, *turns])
    messages = [
        [{"role": r, "content": c} for r, c in zip(("system", "user", "assistant"), t, strict=True)] for t in turns
    ]
    rows = [
        {"messages": m, "as_text": json.dumps(m), **dict(zip(names, t, strict=True))}
        for m, t in zip(messages, turns, strict=True)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


FORMS = {
    "csv of three columns": ["data=conversations_csv", "data.paths=[a.csv]"],
    "messages": ["data=jsonl", "data.paths=[a.jsonl]"],
    "messages as text": ["data=jsonl", "data.paths=[a.jsonl]", "data.columns.messages=as_text"],
    "prompt and completion": [
        "data=jsonl", "data.paths=[a.jsonl]", "data.columns.prompt=user_prompt", "data.columns.completion=prediction",
        "data.columns.system=system_prompt",
    ],
}  # fmt: skip


@pytest.mark.parametrize("packing", ["concat", "best_fit", "pad"])
def test_every_form_gives_the_same_conversations_and_learns_the_answers(files, monkeypatch, packing):
    monkeypatch.chdir(files)
    found = []
    for words in FORMS.values():
        cfg = compose(
            [
                *SMALL,
                "task=sft",
                *words,
                "data.held_out_fraction=0",
                f"loading.packing={packing}",
                "tokenizer.train_bytes=500",
                "training.seq_len=64",
            ]
        ).config
        corpus = load_corpus(cfg)
        (packed,) = corpus.train.values()
        shard = packed.stream.shard(0)
        texts, answers = [], []
        for start, end in zip(shard.starts, [*shard.starts[1:], len(shard.tokens)], strict=True):
            tokens, learnt = shard.tokens[start:end], shard.answers[start:end]
            texts.append(corpus.tokenizer.decode(tokens, skip_special_tokens=False))
            answers.append(corpus.tokenizer.decode(tokens[learnt], skip_special_tokens=False))
        found.append(sorted(zip(texts, answers, strict=True)))
        learnt = [row["targets"][row["loss_mask"] > 0] for row in map(packed.__getitem__, range(len(packed)))]
        total = sum(map(len, learnt))
        assert total == shard.answers.sum() if packing != "concat" else total <= shard.answers.sum()
        assert 0 < total < packed.num_tokens / 1.5
    assert all(each == found[0] for each in found)
    for number in range(40):
        answer = f"it is {number * 7}" * (1 + number % 3) + "<eos>"
        text = f"<bos>system:\nBe {number % 3}.\nuser:\nwhat is {number}?\nassistant:\n{answer}"
        assert (text, answer) in found[0]


@pytest.mark.parametrize(("seq_len", "is_said"), [(16, True), (128, False)])
def test_conversations_that_are_longer_than_a_sequence_are_named(tmp_path, caplog, seq_len, is_said):
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "word " * 8}]}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    words = ["task=sft", "data=jsonl", f"data.paths=[{tmp_path}/a.jsonl]", "data.held_out_fraction=0"]
    load_corpus(compose([*SMALL, *words, "tokenizer=bytes", f"training.seq_len={seq_len}"]).config)
    assert (f"tokens on average, more than training.seq_len={seq_len}: most are cut" in caplog.text) == is_said


def test_rows_without_a_conversation(tmp_path):
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    bad = [
        {"messages": 5},
        {"messages": [{"role": "user"}]},
        {"messages": "no json"},
        {"messages": [{"role": "user", "content": [1]}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "gpt", "content": "b"}]},
        {"messages": good["messages"], "marks": "3"},
        {"messages": good["messages"], "marks": "[" * 20_000},
        {"messages": good["messages"], "marks": '{"a": 1, "b": 1}'},
    ]
    good["marks"] = [0, 1]
    words = [
        *SMALL,
        "task=sft",
        "data=jsonl",
        f"data.paths=[{tmp_path}/a.jsonl]",
        "data.held_out_fraction=0",
        "training.seq_len=8",
    ]
    for row in bad:
        (tmp_path / "a.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n")
        marks = ["data.columns.learnt_turns=marks"] if "marks" in row else []
        with pytest.raises(UserError, match=r"line 2, (holds int|has no list|has a content|has role gpt)"):
            load_corpus(compose([*words, *marks]).config)
    (tmp_path / "a.jsonl").write_text(
        f"{json.dumps(good)}\n" * 9 + '{"messages": [{"role": "user", "content": "unanswered"}]}\n'
    )
    assert load_corpus(compose(words).config).train["jsonl"].stream.num_documents == 9
    with pytest.raises(UserError, match="task=sft needs rows with columns, of jsonl, csv, parquet or hf"):
        load_corpus(compose([*SMALL, "task=sft"]).config)


ASKED, SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
OF_OTHERS = [  # task, row, and what the answer to it says
    ("sft", {"prompt": "a", "completion": "b"}, "data.columns.prompt=COLUMN reads a prompt, and data.columns.completion=COLUMN its"),
    ("sft", {"messages": [{"from": "human", "value": "a"}]}, """of {from, value}; `jq -c '.messages |= map({role: ({human: "user", """),
    ("sft", {"messages": [ASKED, SAID | {"weight": 0}, SAID]}, """jq -c '.learnt = [.messages[] | .role == "assistant" and .weight != 0]' FILE"""),
    ("sft", {"messages": json.dumps([ASKED, SAID | {"train": False}])}, "has a turn with train=false in column messages"),
    ("sft completion", {"prompt": "a", "completion": [SAID | {"weight": 0}]}, "write the prompt's turns and these into one"),
    ("dpo", {"prompt": "a", "chosen": [{"role": "developer", "content": "b"}, SAID], "rejected": [SAID]}, "begins with a turn of the developer"),
    ("dpo", {"prompt": [ASKED, SAID], "chosen": "c", "rejected": "d"}, "behind one of the prompt, with which TRL goes on"),
    ("dpo", {"chosen": [ASKED, SAID], "rejected": [ASKED]}, "data.columns.prompt=null takes the prompt from the conversations"),
    ("dpo", {"prompt": "a", "chosen": SAID, "rejected": SAID}, "holds one turn in column chosen, not a list; `jq -c '.chosen |= [.]' FILE`"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "row", "answer"), OF_OTHERS)
def test_rows_of_other_trainers_are_answered(task, row, answer):
    task, _, has_completion = task.partition(" ")
    data = {"sft": "jsonl", "dpo": "pairs"}[task]
    words = ["data.columns.prompt=prompt", "data.columns.completion=completion"] if has_completion else []
    cfg = compose([*SMALL, f"task={task}", f"data={data}", "data.paths=[a.jsonl]", *words]).config
    with pytest.raises(BadRow) as error:
        DOCUMENTS[cfg.task.documents].read(cfg.data.columns, row, cfg.task)
    assert answer in str(error.value)
    learnt = {"messages": [ASKED, SAID | {"weight": 0}, SAID], "learnt": [0, 0, 1]}
    columns = cfg.data.columns.model_copy(update={"learnt_turns": "learnt", "prompt": None, "messages": "messages"})
    assert DOCUMENTS["conversation"].read(columns, learnt, cfg.task).learnt == [False, False, True]


def test_a_turn_of_the_user_may_say_that_it_is_not_learnt():
    cfg = compose([*SMALL, "task=sft", "data=jsonl", "data.paths=[a.jsonl]"]).config
    row = {"messages": [ASKED | {"train": False}, SAID | {"train": True}]}
    conversation = DOCUMENTS["conversation"].read(cfg.data.columns, row, cfg.task)
    assert conversation.messages == [ASKED, SAID]


NEEDS_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
WORDS = {"sft": [], "dpo": ASKED_TWICE[1:], "kto": [], "grpo": ["sampling.max_new_tokens=8"]}


@pytest.mark.parametrize("task", WORDS)
def test_a_conversation_that_the_template_refuses_is_a_bad_row(tmp_path, task, caplog):
    rows = [{"messages": TALK[:3], "start": TALK[:2], "one": f"{n}", "two": "no", "label": n > 9} for n in range(20)]
    rows[0]["one"] = "[" * 20_000  # text, and no JSON
    rows[1] |= {"messages": TALK[1:3], "start": TALK[1:2]}
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "own.jinja").write_text(NEEDS_SYSTEM)
    words = [*SMALL, f"task={task}", "data=jsonl", f"data.paths=[{tmp_path}]", f"task.chat_template={tmp_path}/own.jinja",
             "tokenizer=bytes", "model.vocab_size=auto", "data.held_out_fraction=1e-9", *WORDS[task]]  # fmt: skip
    with pytest.raises(
        UserError, match=r"a.jsonl, line 2, has a conversation that .* refuses: no system; data.bad_rows"
    ):
        prepare_corpus(compose(words).config)
    (found,) = prepare_corpus(compose([*words, "data.bad_rows=skip"]).config)[0].values()
    assert found.index["left_out"] == {"refused by task.chat_template": 1}
    assert found.index["documents"] == 18  # one is held out
    assert "jsonl: left out: 1 refused by task.chat_template (a.jsonl@" in caplog.text


def test_a_conversation_that_begins_with_an_answer_is_refused_with_its_way_out(tmp_path):
    """Published templates ask for the role of the first message, also where there is none."""
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps({"messages": [TALK[2], *TALK[1:3]]})] * 2))
    (tmp_path / "own.jinja").write_text("{% if messages[0].role == 'x' %}{% endif %}" + PLAIN)
    words = ["task=sft", "data=jsonl", f"data.paths=[{tmp_path}]", "tokenizer=bytes", "data.held_out_fraction=0"]
    words += [*SMALL, f"task.chat_template={tmp_path}/own.jinja"]
    with pytest.raises(UserError, match="it begins with an answer, .*; task.learnt_turns=last learns its last answer"):
        prepare_corpus(compose(words).config)
    (found,) = prepare_corpus(compose([*words, "task.learnt_turns=last"]).config)[0].values()
    assert found.index["documents"] == 2


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("", "writes nothing behind an answer"),  # as that of GLM 4.5: the next turn begins with the token that stops
        ("<|im_end|>\n", "writes '<|im_end|>' behind an answer, which has no special token"),
        (" {{ eos_token }}", ""),
    ],
)
def test_a_template_that_ends_no_answer_is_said(tmp_path, end, said, caplog):
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps({"messages": TALK[1:3]})] * 2))
    (tmp_path / "own.jinja").write_text(
        f"{{% for m in messages %}}<|{{{{ m.role }}}}|>{{{{ m.content }}}}{end}{{% endfor %}}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    words = ["task=sft", "data=jsonl", f"data.paths=[{tmp_path}]", "tokenizer=bytes", "data.held_out_fraction=0"]
    prepare_corpus(compose([*SMALL, *words, f"task.chat_template={tmp_path}/own.jinja"]).config)
    assert said in caplog.text
    assert ("behind an answer" in caplog.text) == bool(said)


def test_a_conversation_whose_answer_cannot_be_found_is_a_bad_row(tmp_path):
    """In few conversations of a template that shows a prompt in another form once its answer is there."""
    rows = [{"messages": [TALK[1], {"role": "assistant", "content": f"{n}"}]} for n in range(12)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "own.jinja").write_text("{% if messages[-1].content == '7' %}!{% endif %}" + PLAIN)
    words = [*SMALL, "task=sft", "data=jsonl", f"data.paths=[{tmp_path}]", f"task.chat_template={tmp_path}/own.jinja",
             "tokenizer=bytes", "model.vocab_size=auto", "data.held_out_fraction=0"]  # fmt: skip
    with pytest.raises(
        UserError, match=r"a.jsonl, line 8, has a conversation .* cannot be told from it.*data.bad_rows"
    ):
        prepare_corpus(compose(words).config)
    (found,) = prepare_corpus(compose([*words, "data.bad_rows=skip"]).config)[0].values()
    assert found.index["left_out"] == {"refused by task.chat_template": 1}
    assert found.index["documents"] == 11


def test_answers_of_no_token_are_neither_learnt_nor_measured_nor_asked(tmp_path, monkeypatch):
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": ""}]} for n in range(40)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
                                        "{% if add_generation_prompt %}assistant:{% endif %}")  # fmt: skip
    words = [*SMALL, "task=sft", "data=jsonl", f"data.paths=[{tmp_path}/a.jsonl]", "data.held_out_fraction=0.5",
             "training.seq_len=8", "training.loss_chunk_size=8", f"task.chat_template={tmp_path}/own.jinja"]  # fmt: skip
    cfg = compose(words).config
    with pytest.raises(UserError, match="data: jsonl has no token that is learnt: its answers are empty"):
        load_corpus(cfg)
    monkeypatch.setattr("tunix.data.packing.Sequences.has_learnt", True)
    with pytest.raises(UserError, match="the held-out sequences have no text to be predicted: their answers are empty"):
        HeldOut(cfg, load_corpus(cfg), None, build_mesh(cfg), num_rows=8)
    task = Prompted(name="sft", chat_template=cfg.task.chat_template, chat_template_kwargs=None, loss=None, system=None)
    with pytest.raises(UserError, match=r"data.source=jsonl: no conversation with an answer in it \(40 empty"):
        load_prompts(cfg.model_copy(update={"task": task}), 8)


def test_docstrings_are_questions_with_answers():
    cfg = compose(["task=sft", "data=python_docstrings"]).config
    units = [unit for unit in find_units(cfg.data, cfg.loading) if unit.name in ("bisect.py", "json/__init__.py")]
    found = {each.name: each.content for unit in units for each in read_documents(cfg.data, cfg.task, unit)}
    assert {"bisect.insort_right", "bisect.bisect_left", "json.dumps", "json.load"} <= found.keys()
    assert found["json.dumps"].messages == [
        {"role": "user", "content": "What does json.dumps do?"},
        {"role": "assistant", "content": json.dumps.__doc__.splitlines()[0]},
    ]
    (said,) = read_questions(
        b"class A:\n  def f():\n    'Says\\nmore.'\n  def _g():\n    'Hidden.'\ndef h(): pass", "m"
    )
    assert said == {"name": "m.A.f", "question": "What does m.A.f do?", "answer": "Says"}
    with pytest.raises(SyntaxError):
        list(read_questions(b"print 1", "m"))


def test_a_tokenizer_without_a_template_and_a_template_of_ones_own(files, monkeypatch):
    monkeypatch.chdir(files)
    words = [*SMALL, "task=sft", *FORMS["messages"], "training.seq_len=64"]
    made = load_corpus(compose(words).config)
    made.tokenizer.save("tokenizer.json")
    with pytest.raises(UserError, match="the tokenizer has no chat template; set task.chat_template to a Jinja file"):
        load_corpus(compose([*words, "tokenizer.path=tokenizer.json"]).config)
    (files / "own.jinja").write_text(PLAIN.replace("{{ bos_token }}", "{{ bos_token }}OWN "))
    own = load_corpus(compose([*words, "tokenizer.path=tokenizer.json", "task.chat_template=own.jinja"]).config)
    assert "OWN system:" in own.tokenizer.decode(own.train["jsonl"].stream.shard(0).tokens)
    assert own.fingerprint != made.fingerprint
    with pytest.raises(UserError, match=r"task.chat_template=none.jinja cannot be read"):
        load_corpus(compose([*words, "task.chat_template=none.jinja"]).config)
    (files / "none.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"task.chat_template: none.jinja is not UTF-8 \(byte 3\); save it as UTF-8"):
        load_corpus(compose([*words, "task.chat_template=none.jinja"]).config)
    with pytest.raises(UserError, match=r"task.chat_template=/dev/full is no regular file"):
        load_corpus(compose([*words, "task.chat_template=/dev/full"]).config)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_learns_the_answers(files, monkeypatch):
    monkeypatch.chdir(files)
    words = [*RUN, *ONE_LAYER, "task=sft", *FORMS["messages"], "loading.packing=best_fit", "data.held_out_fraction=0.1"]
    result = tunix.train([*words, "training.max_steps=20", "evaluation.every_steps=null", "evaluation.sample_tokens=0"])
    lines = metrics(result.folder)
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert np.isfinite(result.held_out["bits_per_byte"])


# Tokenizers that put a space before a text: once, or behind each special token, too.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}"
    "{{ eos_token }}{% endif %}{% endfor %}"
)
PREFIXES = {
    "llama 2": (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None),
    "first": (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "always": (None, pre_tokenizers.Metaspace(prepend_scheme="always")),
    "bytes": (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
}


@pytest.mark.parametrize("source", [PLAIN, MISTRAL])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_pieces_have_the_tokens_of_the_whole(prefix, source):
    """No space is put before an answer, or before a turn that goes on behind another."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    normalizer, words = PREFIXES[prefix]
    if normalizer:
        backend.normalizer = normalizer
    if words:
        backend.pre_tokenizer = words
    talk = [
        {"role": role, "content": text} for role, text in [("user", "hi you"), ("assistant", "so do I"), ("user", "no")]
    ]
    talk.append({"role": "assistant", "content": "I do"})
    texts = [template(source).render(talk)] * 9
    special = ["<unk>", "<bos>", "<eos>"]
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=0, special_tokens=special, show_progress=False))
    vocab = Vocab(backend, "<bos>", "<eos>", source)
    (encoded,) = encode_conversations(vocab, [Document("", Conversation(talk))])
    assert len(encoded.tokens) == 4
    whole = backend.encode(vocab.chat.render(talk), add_special_tokens=False).ids
    assert np.concatenate(encoded.tokens).tolist() == whole
    # What an environment says goes on behind a turn.
    encoder = ObservationEncoder(vocab, [vocab.eos], {})
    behind = backend.encode("?" + vocab.chat.text_after_turn(encoder.role, ["no"]), add_special_tokens=False).ids
    assert encoder.encode(["no"]) == behind[behind.index(vocab.eos) + 1 :]


def test_turns_behind_the_last_answer_are_read():
    vocab = load_corpus(compose([*SMALL, "tokenizer=bytes", "model.vocab_size=auto"]).config).vocab
    for turns in (TALK, TALK[:2], TALK[:-1], TALK[1:]):
        (whole,) = encode_whole(vocab, [Document("", Conversation(turns))])
        assert vocab.backend.decode(np.concatenate(whole.tokens), skip_special_tokens=False) == vocab.chat.render(turns)
