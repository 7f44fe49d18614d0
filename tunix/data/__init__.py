"""Data: from files on disk to batches of token ids. The pipeline in order, with the name of each thing on the way:

    find   `files`, `sources`   Unit       a piece of work for one process: a file, or a range of its bytes or rows
    read   `files`, `sources`   Item       one thing in a unit: a text, or a row with named columns
           `documents`          Document   an item as the task needs it: a text, the turns of a conversation, or a
                                           Question: the turns before an answer, and the other columns of the row
    make   `shards`             Part       tokens of the documents of one split, train or held out, while collected
                                Arrays     the same on disk, for one shard: tokens, starts of documents, answers
    open   `shards`             Stream     all shards of a split, mapped into memory when they are read
    pack   `packing`            Sequences  a stream cut into sequences of T = training.seq_len tokens
                                Example    one of them: the arrays that the model is trained on
           `prompts`            Prompt     in place of an Example, where the model writes the answers itself

`dataset.prepare` runs the first half for one source and keeps the result in the cache, `dataset.prepare_corpus` for
all sources of a config. `dataset.load_corpus` and `prompts.load_prompts` run the second half, too. `batches`
lists the fields of a batch, chooses and shuffles the samples of one source or of several, and reads those of a step.
`sources` lists the sources, of which `parquet` has one, and `documents` the kinds of documents. Read `dataset` first.

Text becomes tokens by a `tokenizer`, in `pieces` where it is long, and by a memory of `words`; conversations become
text in `chat`, and `thoughts` tells a thought from the answer behind it. `images` reads those of rows,
`image_processors` makes of them what a tower takes, and `image_slots` has their places in sequences and prompts.
`teacher_logits` are numbers of a teacher for each token of a corpus.

An example. The row {"prompt": "1+1?", "completion": "2"} of a JSONL file (task=sft) becomes a conversation of two
turns; the chat template makes it text, and the tokenizer makes that tokens (written as text here, with T = 8):

    document      <bos>   user:\\n  1+1?           \\nassistant:\\n  2      <eos>
    answers       False   False    False          False           True   True

    tokens        <bos>   user:\\n  1+1?           \\nassistant:\\n  2      <pad>  <pad>  <pad>
    targets       user:\\n 1+1?     \\nassistant:\\n  2              <eos>  <pad>  <pad>  <pad>
    positions     0       1        2              3               4      0      0      0
    segment_ids   1       1        1              1               1      0      0      0
    loss_mask     0       0        0              1               1      0      0      0

A target is the next token. The model learns only the targets that are part of an answer (loss_mask 1). Documents in
one sequence have segment ids 1, 2, ...; a token sees only tokens with its own id. Without task=sft a document is a
text, and each of its tokens but the first is learnt.
"""
