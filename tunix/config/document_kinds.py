"""Kinds of documents by name. A row has the places of its functions, so that the config needs no jax and no tokenizer.

a source -> row or text -- read --> document -- encode --> arrays of a shard -- load --> corpus -- feed --> batches
"""

from typing import NamedTuple


class DocumentKind(NamedTuple):
    """A kind of the data of a task, from a row of a source to the batches of a step."""

    read: str  # place of what makes a document of a row: it takes and gives what `read_text` of data/documents.py does
    encode: str  # place of what makes tokens of documents: as `encode_texts` of data/encoding.py
    in_hashes: str  # its name in the hashes of caches: that of the task that first used it
    arrays: tuple[str, ...] = ()  # that a shard has beside tokens and starts (data/stream.py)
    load: str = "tunix.data.corpus:load_corpus"  # place of what reads all data of a config
    feed: str = "tunix.rl.feeds:CorpusFeed"  # place of a `Feed` (rl/feeds.py): batches, and what is held out
    takes_text: bool = False  # a text that a source gives is a document; else only rows give documents
    asks_peers: bool = False  # all processes work together for its batches, beside the steps


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
