"""Kinds of documents by name: what a task learns from.

Rows name functions as text, `module:function`, and `import_object` imports them when they are used. So this file, and
with it the config, imports neither jax nor a tokenizer.

a source -> row or text -- read --> document -- encode --> arrays of a shard -- load --> corpus -- feed --> batches
"""

from typing import NamedTuple


class DocumentKind(NamedTuple):
    """A kind of the data of a task, from a row of a source to the batches of a step."""

    read: str  # function from a row to a document, with the arguments of `read_text` (data/documents.py)
    encode: str  # function from documents to tokens, with the arguments of `encode_texts` (data/encoding.py)
    # The name of this kind in the hashes that name folders of the cache: that of the task that first used the kind.
    # Another name would tokenize every corpus again.
    in_hashes: str
    arrays: tuple[str, ...] = ()  # that a shard has beside tokens and starts (data/stream.py)
    load: str = "tunix.data.corpus:load_corpus"  # function that reads all data of a config
    feed: str = "tunix.rl.feeds:CorpusFeed"  # class, a `Feed` (rl/feeds.py): batches, and held-out data
    takes_text: bool = False  # a source may give plain text; otherwise it must give rows with columns
    asks_peers: bool = False  # the processes exchange data outside of the step to make a batch: rewards, for example


DOCUMENTS = {
    "text": DocumentKind(
        "tunix.data.documents:read_text", "tunix.data.encoding:encode_texts", "pretrain", takes_text=True
    ),
    "conversation": DocumentKind(
        "tunix.data.documents:read_conversation",
        "tunix.data.encoding:encode_conversations",
        "sft",
        arrays=("answers",),
    ),
    "prompt": DocumentKind(
        "tunix.data.documents:read_prompt",
        "tunix.data.encoding:encode_prompts",
        "prompt",
        arrays=("rows", "row_ends"),
        load="tunix.rl.feeds:load_task_prompts",
        feed="tunix.rl.feeds:PromptFeed",
        asks_peers=True,
    ),
    "pair": DocumentKind(
        "tunix.data.documents:read_pair",
        "tunix.data.encoding:encode_pairs",
        "pair",
        arrays=("answers", "splits"),
        feed="tunix.rl.feeds:PairFeed",
        asks_peers=True,
    ),
}
