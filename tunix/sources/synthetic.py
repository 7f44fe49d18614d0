"""Made-up documents."""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Literal

from tunix.base.section import Count
from tunix.sources.files import Unit
from tunix.sources.source import Item, Source


class Synthetic(Source):
    """Made-up words with the frequencies of a natural language (Zipf), for benchmarks: nothing to download."""

    source: Literal["synthetic"]
    """Where documents come from."""
    num_documents: Count
    """Number of documents."""
    mean_document_bytes: Count
    """Mean length of a document; lengths are exponentially distributed."""

    def units(self, unit_bytes: int) -> list[Unit]:
        """List ranges of document numbers."""
        step = max(1, unit_bytes // self.mean_document_bytes)
        cuts = [*range(0, self.num_documents, step), self.num_documents]
        mean = self.mean_document_bytes
        return [Unit("synthetic", "", start, stop, (stop - start) * mean, str(mean)) for start, stop in pairwise(cuts)]

    def read(self, unit: Unit) -> Iterator[Item]:
        """Make documents of made-up words, each from its number. Words are as frequent as in real text (Zipf's law)."""
        import numpy as np  # here, because a config is checked without it

        words = _make_words()
        # Mean bytes of a word with its space. The most frequent 1,000 words make up most of a text.
        mean_word = np.mean([len(word) + 1 for word in words[:1000]])
        for number in range(unit.start, unit.stop):
            rng = np.random.default_rng(number)  # so any process can make any document
            count = 1 + int(rng.exponential(self.mean_document_bytes / mean_word))
            # Rank r is drawn with a probability of about r ** -1.2. Ranks have no upper end, so they wrap around.
            text = " ".join(words[rank % len(words)] for rank in rng.zipf(1.2, count))
            yield Item(f"synthetic@{number}", text)


@cache
def _make_words() -> list[str]:
    import numpy as np

    rng, letters = np.random.default_rng(0), np.array(list("etaoinshrdlu"))
    return ["".join(rng.choice(letters, 1 + number % 9)) for number in range(10_000)]
