"""EleutherAI's evaluation harness asks our models: log-likelihoods of continuations and of texts, and answers.

The harness (package lm_eval, of the extra `lm_eval`) brings tasks, prompts and metrics. It is imported when it is asked
for. Tokens, prefixes and windows are those of its own backend for transformers, so the numbers are comparable.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, reshard

from tunix.base.errors import UserError, did_you_mean
from tunix.config import Evaluate
from tunix.costs.rollout import pad_batch
from tunix.data.tokenizer import decode, load_vocab
from tunix.inference.pretrained import Pretrained, reject_nan
from tunix.inference.sampling import Sampling
from tunix.models.vision import Images
from tunix.training.logprobs import make_splitter, merge_chunks

SHORTEST = 32  # tokens: rows are filled up to powers of 2 from here, so that few programs are compiled


def import_harness() -> Any:
    """Import the package lm_eval. Raises `UserError` where it is not installed."""
    try:
        import lm_eval
        import lm_eval.api.model
        import lm_eval.tasks
        import lm_eval.utils
    except ImportError:
        raise UserError("metric=lm_eval needs the harness: pip install 'tunix-trainer[lm_eval]'") from None
    return lm_eval


class TopScores(NamedTuple):
    """Scores of the n tokens of a row without its first, and of the k likeliest tokens in the place of each."""

    log_probs: np.ndarray  # [n] float32, nats
    top_tokens: np.ndarray  # [n, k] int32, the likeliest first
    top_log_probs: np.ndarray  # [n, k] float32


class TokenScorer:
    """Scores of tokens under a model, on its mesh: the log-probability of each, and whether no other is likelier."""

    def __init__(self, model: Pretrained, num_top: int = 0):
        """`num_top` likeliest tokens of each place are found for `score_with_top`."""
        self.model = model

        def score(params, tokens, targets, images):
            module = model.arch.module(params)
            vocab_weights = module.vocab_weights()
            hidden, _ = module.hidden(vocab_weights, tokens, images=images)
            ids = reshard(jnp.arange(vocab_weights[1].shape[0]), module.layout.activation("V"))

            def one_chunk(_, chunk):
                hidden, targets = chunk
                # `logits` reads the second table, the head, alone.
                logits = module.logits((vocab_weights[1], vocab_weights[1]), hidden)
                target_logits = jnp.sum(jnp.where(ids == targets[..., None], logits, 0), -1)
                total = jax.nn.logsumexp(logits, -1)
                scores = target_logits - total, target_logits >= jnp.max(logits, -1)
                if not num_top:
                    return None, (scores, [], [])
                whole = reshard(logits, PartitionSpec(*jax.typeof(logits).sharding.spec[:2], None))
                values, tokens = jax.lax.top_k(whole, min(num_top, whole.shape[-1]))
                # One array for each of the likeliest: chunks that are merged have no more dimensions.
                indices = range(values.shape[-1])
                return None, (scores, [tokens[..., n] for n in indices], [values[..., n] - total for n in indices])

            split = make_splitter(hidden, "auto")
            scores = jax.lax.scan(one_chunk, None, (split(hidden), split(targets)))[1]
            return jax.tree.map(lambda x: reshard(merge_chunks(x, hidden.shape[1]), PartitionSpec()), scores)

        self.score = jax.jit(score)

    def __call__(self, rows: list[list[int]], batch_size: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return for each row of T tokens the log-probabilities [T - 1] of all but the first, nats, and whether each is
        the likeliest, bool [T - 1]."""
        return [(log_probs, likeliest) for log_probs, likeliest, _, _ in self._score_rows(rows, batch_size)]

    def score_with_top(self, tokens: list[int], images: Images | None) -> TopScores:
        """Return the scores of a row of tokens without its first, with the likeliest tokens in the place of each.

        `images` are those that the row begins with (`Engine.admit`).
        """
        log_probs, _, top_tokens, top_log_probs = self._score_rows([tokens], 1, images)[0]
        return TopScores(log_probs, top_tokens, top_log_probs)

    def _score_rows(
        self, rows: list[list[int]], batch_size: int, images: Images | None = None
    ) -> list[tuple[np.ndarray, ...]]:
        scores: dict[int, tuple[np.ndarray, ...]] = {}
        # Longest first: rows of a batch are about equally long, and too little memory shows in the first batch.
        order = sorted(range(len(rows)), key=lambda n: -len(rows[n]))
        with jax.set_mesh(self.model.mesh):
            for start in range(0, len(order), batch_size):
                batch = order[start : start + batch_size]
                # The next power of 2 that is not below the n - 1 places of n tokens: the last token predicts nothing.
                length = max(SHORTEST, 1 << (len(rows[batch[0]]) - 2).bit_length())
                # Zeros behind a row change nothing: attention is causal, and their own scores are cut off below.
                tokens = np.zeros((batch_size, length + 1), np.int32)
                for index, n in enumerate(batch):
                    tokens[index, : len(rows[n])] = self.model.read_tokens(rows[n])
                arrays = tokens[:, :-1], tokens[:, 1:], images and _fill_up(images, length)
                arguments = jax.tree.map(lambda array: self.model.rows(np.ascontiguousarray(array)), arrays)
                own, top_tokens, top_log_probs = self.score(self.model.params, *arguments)
                found = [np.asarray(x) for x in own]
                found += [np.stack([np.asarray(x) for x in top], -1) for top in (top_tokens, top_log_probs) if top]
                found += [np.zeros((*found[0].shape, 0))] * (4 - len(found))
                for index, n in enumerate(batch):
                    scores[n] = tuple(x[index, : len(rows[n]) - 1] for x in found)
        return [scores[n] for n in range(len(rows))]


def _fill_up(images: Images, length: int) -> Images:
    """Return the images of one row of `length` tokens, [1, ...], in slots of which there are a power of 2."""
    pixels, grids = (
        np.pad(array, [(0, pad_batch(len(array)) - len(array)), *[(0, 0)] * (array.ndim - 1)])
        for array in (images.pixels, images.grids)
    )
    index = np.full(length, -1, np.int32)
    index[: len(images.image_index)] = images.image_index[:length]
    return Images(pixels[None], index[None], grids[None])


class Respondent:
    """A model that answers what the harness asks: how likely a continuation or a text is, and what follows a prompt."""

    def __init__(self, model: Pretrained, batch_size: int, name: str):
        """`name` is the value of the key checkpoint, for messages."""
        self.model, self.batch_size, self.name = model, batch_size, name
        vocab = model.vocab or load_vocab(str(model.tokenizer_files))
        # A run's own tokenizer adds the first token here, as it does in the export.
        self.backend = model.source_tokenizer if model.has_source_tokenizer else vocab.with_bos()
        self.scorer, self.eos = TokenScorer(model), vocab.eos
        self.stop = tuple(sorted({*model.find_stop_ids(), vocab.eos}))  # what the harness's own backend stops at
        self.prefix = vocab.eos if vocab.bos is None else vocab.bos  # stands before a text
        self.max_length = model.cfg.context_length

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Return the tokens of a text. Special tokens are not added to a text that begins with one already."""
        starts = text.startswith(self.backend.id_to_token(self.prefix) or "\0")
        special = not starts if add_special_tokens is None else add_special_tokens
        return self.backend.encode(text, add_special_tokens=special).ids

    def score_continuations(self, requests: Any) -> list[tuple[float, bool]]:
        """Return for each (_, context, continuation) its log-probability, and whether it is the likeliest one.

        Tokens that do not fit into the context of the model are cut off at the beginning.
        """
        # One token more than the context: the last one is only predicted, and never an input.
        rows = [(context + continuation)[-(self.max_length + 1) :] for _, context, continuation in requests]
        answers = []
        scores = self.scorer(rows, self.batch_size)
        self._reject_nan(log_probs for log_probs, _ in scores)
        for (_, _, continuation), (log_probs, likeliest) in zip(requests, scores, strict=True):
            first = max(0, len(log_probs) - len(continuation))  # behind the last one of an empty continuation
            answers.append((float(log_probs[first:].sum(dtype=np.float64)), bool(likeliest[first:].all())))
        return answers

    def score_texts(self, texts: list[str]) -> list[float]:
        """Return the log-probability of each text, in windows of the context in which each token counts once."""
        utils = import_harness().utils
        windows, owners = [], []
        for number, text in enumerate(texts):
            rolling = utils.get_rolling_token_windows(
                token_list=self.encode(text), prefix_token=self.prefix, max_seq_len=self.max_length, context_len=1
            )
            for window in map(utils.make_disjoint_window, rolling):
                windows.append((None, *window))
                owners.append(number)
        totals = [0.0] * len(texts)
        for owner, (log_prob, _) in zip(owners, self.score_continuations(windows), strict=True):
            totals[owner] += log_prob
        return totals

    def answer(self, requests: list[tuple[str, dict[str, Any]]]) -> list[str]:
        """Return an answer to each (prompt, keys), cut where one of its stop words begins."""
        groups: dict[Sampling, list[int]] = {}
        prompts: list[list[int]] = []
        stops: list[list[str]] = []
        for number, (prompt, keys) in enumerate(requests):
            sampling, until = _read_keys(keys, self.stop), keys.get("until") or []
            budget = self.max_length - sampling.max_new_tokens  # tokens of the prompt that stay, its last ones
            if budget < 1:
                raise UserError(
                    f"metric=lm_eval: a task wants answers of {sampling.max_new_tokens} tokens, and the context of the "
                    f"model has {self.max_length}"
                )
            groups.setdefault(sampling, []).append(number)
            prompts.append(self.encode(prompt)[-budget:])
            stops.append([until] if isinstance(until, str) else list(until))
        answers = [""] * len(prompts)
        # Requests with the same choice of tokens are one rollout, whatever their order is.
        for sampling, numbers in groups.items():
            sampled = self.model.sample([prompts[n] for n in numbers], sampling, rows_at_once=self.batch_size)
            self._reject_nan(answer.log_probabilities for answer in sampled)
            for n, answer in zip(numbers, sampled, strict=True):
                # With the token that stopped it: one that is special is no part of the text.
                answers[n] = _truncate(decode(self.backend, answer.tokens), stops[n])
        return answers

    def _reject_nan(self, log_probs: Iterable[Sequence[float] | np.ndarray]) -> None:
        """Raise `UserError` for scores that are no numbers, of which the harness would take the first for the best."""
        reject_nan(log_probs, self.name, "training.mixed_precision=fp32")


def make_adapter(model: Pretrained, batch_size: int, name: str) -> Any:
    """Return the harness's object for a model. Its class is made here, because the package is optional."""
    respondent = Respondent(model, batch_size, name)

    class Adapter(import_harness().api.model.TemplateLM):  # type: ignore[misc]
        """The harness's names for what a `Respondent` does."""

        @property
        def eot_token_id(self) -> int:
            return respondent.eos

        @property
        def prefix_token_id(self) -> int:
            return respondent.prefix

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return respondent.encode(string, add_special_tokens)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return respondent.score_continuations(requests)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            return respondent.score_texts([request.args[0] for request in requests])

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return respondent.answer([request.args for request in requests])

    return Adapter()


def list_tasks(model: Pretrained, command: Evaluate) -> dict[str, float]:
    """Ask the model the tasks of a command; return the numbers as TASK/METRIC, without standard errors.

    Raises:
        UserError: the harness is not installed, or it does not know a task.
    """
    adapter, harness = make_adapter(model, command.batch_size, command.checkpoint), import_harness()
    manager = harness.tasks.TaskManager(include_path=command.task_folder)
    if unknown := [name for name in command.tasks if name not in manager.all_tasks]:
        hint = did_you_mean(unknown[0], manager.all_tasks)
        raise UserError(
            f"tasks={list(command.tasks)}: the harness has no task {unknown[0]}{hint}; task_folder names a folder with "
            "tasks of your own"
        )
    answered = harness.simple_evaluate(
        adapter,
        tasks=list(command.tasks),
        num_fewshot=command.num_fewshot,
        limit=command.limit,
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=False,
    )
    return {
        f"{task}/{metric.removesuffix(',none')}": float(value)
        for task, numbers in answered["results"].items()
        for metric, value in numbers.items()
        if isinstance(value, int | float) and "stderr" not in metric and metric != "sample_len"
    }


# Keys of a task for the longest answer, as the harness takes them: the first that is there wins.
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def _read_keys(keys: dict[str, Any], stop: tuple[int, ...]) -> Sampling:
    """Return how a request wants its answer to be drawn: the likeliest tokens, unless it says otherwise."""
    max_length = next((int(keys[name]) for name in LENGTHS if keys.get(name) is not None), 256)
    temperature, is_drawn = keys.get("temperature"), keys.get("do_sample")
    if not (float(temperature or 0) > 0 if is_drawn is None else is_drawn):
        return Sampling(max_length, 0.0, stop=stop)
    top_k = keys.get("top_k") or None  # 0: all tokens
    return Sampling(max_length, 1.0 if temperature is None else float(temperature), top_k, keys.get("top_p"), stop=stop)


def _truncate(text: str, stops: list[str]) -> str:
    """Return the text up to the first stop word."""
    for stop in filter(None, stops):
        text = text.split(stop)[0]
    return text
