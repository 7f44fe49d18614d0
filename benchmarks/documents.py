"""Peak memory of `tunix.prepare` on one long document: `python -m benchmarks.documents [MiB]`.

Each row is a process of its own. Its limit is 1 GiB plus 4 times the document; where one needs more, the program exits
with 1.
A row whose document is longer than `data.max_document_bytes` has it left out.
"""

import gzip
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

WORDS = "The quick brown fox, 1234 times, jumps over the lazy dog.\n"
CHILD = """
import resource, sys
from tunix.config.compose import compose
from tunix.data.dataset import prepare_corpus
(prepared,) = prepare_corpus(compose(sys.argv[1:]).config)[0].values()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, prepared.index["tokens"], prepared.index["left_out"])
"""


def write_documents(folder: Path, size: int) -> Iterator[tuple[str, int, list[str]]]:
    """Write a long document in each form, beside short ones; yield name, bytes and words for the config of each."""
    text = WORDS * (size // len(WORDS))
    (folder / "words.txt").write_text(text)
    yield "text", len(text), ["data=text", f"data.paths=[{folder}/words.txt,{folder}/short]"]
    rows = [json.dumps({"text": each}) for each in (text, "short one", "short two")]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    yield "a line of JSON", len(text), ["data=jsonl", f"data.paths=[{folder}/rows.jsonl]"]
    (folder / "word.txt").write_text("abcdefgh" * (size // 8))
    yield "one word", size, ["data=text", f"data.paths=[{folder}/word.txt,{folder}/short]"]
    with gzip.open(folder / "zeros.txt.gz", "wb") as file:
        for _ in range(512):
            file.write(bytes(1 << 20))
    paths = f"data.paths=[{folder}/zeros.txt.gz,{folder}/short]"
    yield "512 MiB of zeros in a .gz", 256 << 20, ["data=text", paths]


def main() -> int:
    size = int(sys.argv[1] if sys.argv[1:] else 64) << 20
    table = Table("document", "tokenizer", "document MiB", "peak MiB", "limit MiB", "tokens", "left out")
    too_much = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "short").mkdir()
        for number in range(2):
            (folder / "short" / f"{number}.txt").write_text(f"short {number}")
        for label, num_bytes, words in write_documents(folder, size):
            for tokenizer in ("bytes", "bpe"):
                own = [*words, f"tokenizer={tokenizer}", "data.held_out_fraction=0", "loading.prepare_processes=1"]
                own += [f"loading.cache_dir={folder}/cache"]
                out = subprocess.run([sys.executable, "-c", CHILD, *own], capture_output=True, text=True, check=True)
                peak, tokens, left_out = out.stdout.splitlines()[-1].split(maxsplit=2)
                limit = (1 << 30) + 4 * num_bytes
                too_much |= int(peak) > limit
                figures = (f"{value / 2**20:,.0f}" for value in (num_bytes, int(peak), limit))
                table.add_row(label, tokenizer, *figures, f"{int(tokens):,}", left_out)
    Console(width=160).print(table)
    return int(too_much)


if __name__ == "__main__":
    sys.exit(main())
