"""Feeds: what each kind of documents (`DOCUMENTS` of data/documents.py) gives to the training loop."""

import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import jax
from jax.sharding import Mesh

from tunix.base.dotted_path import import_object
from tunix.base.errors import UserError
from tunix.base.figures import AnsweredImage, draw_sheet
from tunix.config import Config
from tunix.config.rewards import EngineTerm
from tunix.config.task import Cycle, Grpo
from tunix.data.batches import (
    BEGINNING,
    TEACHER,
    Batch,
    BatchSource,
    DataSchedule,
    Position,
    PrefetchReader,
    Samples,
    TrainBatches,
    check_held_out,
)
from tunix.data.dataset import Corpus
from tunix.data.documents import DOCUMENTS
from tunix.data.image_slots import find_slots
from tunix.data.prompts import AnyCorpus, PromptCorpus, load_together
from tunix.data.tokenizer import decode
from tunix.inference.rollout import Request, Sampler
from tunix.inference.sampling import Sampling, find_stop_ids
from tunix.inference.teacher import give_logits, load_teacher
from tunix.processes import peers
from tunix.processes.watchdog import Watchdog
from tunix.rl.engine_rewards import EngineRewards
from tunix.rl.episodes import make_pool, try_user_code
from tunix.rl.evaluation import HeldOutAnswers
from tunix.rl.reference import add_reference, make_reference, make_teacher_scorer
from tunix.rl.rollouts import RolloutEngine, Rollouts
from tunix.rl.samples_file import SamplesFile
from tunix.rl.scoring import Scorer
from tunix.run.folder import find_model_files
from tunix.run.metrics import Metrics
from tunix.training.loss import HeldOut, find_loss_kind, make_completion, make_totals
from tunix.training.multiple_choice import make_choices
from tunix.training.train_spec import TrainSpec

log = logging.getLogger(__name__)

NUM_ANSWERED = 16  # images that are shown with what the model says about them


class Evaluator(Protocol):
    """A fixed held-out set."""

    def evaluate(self, params: Any) -> dict[str, float]:
        """Return numbers by their names in metrics.jsonl."""

    def cost(self, record: dict[str, float]) -> float:
        """Return the number that is lowest for the best model."""

    def describe(self, record: dict[str, float]) -> str:
        """Return an evaluation in a few words for the log."""


class Feed(Protocol):
    """Data of a run, which may have processes of its own: `with feed: ...`. Made before anything is written."""

    @property
    def samples(self) -> Samples: ...

    @property
    def held_out(self) -> Evaluator | None:
        """The held-out set; None where nothing is held out."""

    @property
    def sets(self) -> Mapping[str, Evaluator]:
        """The sets of evaluation.sets and of evaluation.choices, by name."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def batches(self, start: Position, last: int, metrics: Metrics | None, folder: Path | None) -> BatchSource:
        """Return the batches from `start` to the step `last`.

        Files beside metrics.jsonl go to `folder`. Without metrics and a folder nothing is written.
        """

    def sum_up(self, state: dict[str, Any], evaluation: dict[str, Any], metrics: Metrics) -> None:
        """Log what the last evaluation of a run means."""


class CorpusFeed:
    """Sequences of a corpus, which next-token losses learn from."""

    def __init__(self, cfg: Config, corpus: Corpus, train_spec: TrainSpec, mesh: Mesh, watchdog: Watchdog):
        self.cfg, self.corpus, self.train_spec, self.mesh = cfg, corpus, train_spec, mesh
        self.slots = find_slots(cfg)
        if corpus.num_held_out:  # before what may take hours
            check_held_out(corpus.held_out)
        # As long as a forward pass over all data takes, so without a limit of time.
        with watchdog.phase("computing the teacher's logits", math.inf):
            is_offline = give_logits(cfg, corpus, train_spec, mesh) is not None
        params = None if is_offline else load_teacher(train_spec, mesh, corpus.tokenizer)
        self.shared = {} if params is None else {TEACHER: params}
        fields = find_loss_kind(cfg).fields
        self.samples: TrainBatches = TrainBatches(corpus.train, cfg, train_spec.choices.batch, mesh, fields)
        totals = make_totals(cfg, train_spec.arch, train_spec.teacher)
        info = cfg, corpus, totals, mesh, train_spec.batch.num_rows
        self.held_out = HeldOut(*info, shared=self.shared) if corpus.num_held_out else None
        self.sets: dict[str, Evaluator] = {name: HeldOut(*info, name, self.shared) for name in corpus.sets}
        self.sets |= make_choices(cfg, corpus.vocab, train_spec.arch, mesh, train_spec.batch.num_rows)

    def __enter__(self) -> Self:
        for name, sequences in self.corpus.train.items():
            if text := sequences.describe_decoding(self.train_spec.batch.num_sequences, self.cfg.loading.read_threads):
                log.info("%s: %s", name, text)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def batches(self, start: Position, last: int, metrics: Metrics | None, folder: Path | None) -> BatchSource:
        complete = make_completion(self.cfg, self.train_spec.arch)
        return PrefetchReader(self.samples, start, last, self.shared, None if complete is None else jax.jit(complete))

    def sum_up(self, state: dict[str, Any], evaluation: dict[str, Any], metrics: Metrics) -> None:
        """Log the last evaluation beside the corpus's unigrams, and how the model continues a held-out document."""
        if "bits_per_byte" in evaluation:
            # Beside what word frequencies alone would give.
            bits, unigram = evaluation["bits_per_byte"], self.corpus.unigram_bits_per_byte
            difference = 100 * abs(1 - bits / unigram) if unigram else math.inf  # of a corpus of one token it is 0
            log.info(
                "held out: %.3f bits per byte; unigram entropy of the corpus: %.3f; %.1f %% %s",
                bits, unigram, difference, "below" if bits <= unigram else "above",
            )  # fmt: skip
        if not self.cfg.evaluation.sample_tokens or self.cfg.model.labels is not None:  # scores do not continue a text
            return
        if self.slots is not None and (answered := self._answer(state["params"])):
            right = sum(each.is_right for each in answered)
            log.info("answers to %d images that are held out: %d are right", len(answered), right)
            metrics.image("answers", draw_sheet(answered), evaluation["step"])
        else:
            sample = self._continue_document(state["params"])
            log.info("continuation of a held-out document, after >>>:\n%s", sample)
            metrics.text("sample", sample, evaluation["step"])

    def _continue_document(self, params: Any) -> str:
        """Return the beginning of a held-out document, and how the model continues it."""
        cfg, corpus = self.cfg, self.corpus
        context = cfg.model.context_length
        # Without the token that ends the document, behind which another one begins.
        prompt = (corpus.example[:-1] or corpus.example)[: min(128, cfg.training.seq_len, context // 2)]
        sampling = Sampling(min(cfg.evaluation.sample_tokens, context // 2), cfg.evaluation.sample_temperature)
        (answer,) = Sampler(self.train_spec.arch, context, self.mesh)(params, [prompt], sampling, cfg.seed)
        return f"{decode(corpus.tokenizer, prompt)}>>>{decode(corpus.tokenizer, answer.tokens)}"

    def _answer(self, params: Any) -> list[AnsweredImage]:
        """Answer the first question of some held-out conversations with images, by the likeliest tokens."""
        cfg, slots, read = self.cfg, self.slots, partial(decode, self.corpus.tokenizer)
        assert slots is not None
        num_tokens = min(cfg.evaluation.sample_tokens, cfg.model.context_length // 2)
        questions = slots.find_questions(self.corpus.held_out, NUM_ANSWERED, cfg.model.context_length - num_tokens)
        if not questions:
            return []
        options = cfg.task.chat_template_kwargs
        stop = find_stop_ids(self.corpus.vocab, (), find_model_files(cfg), template_options=options)
        sampling = Sampling(num_tokens, 0.0, stop=stop)
        prompts, images = [each.prompt for each in questions], [each.images for each in questions]
        request = Request(prompts, seed=cfg.seed, images=images)
        answers = Sampler(self.train_spec.arch, cfg.model.context_length, self.mesh).rollout(params, request, sampling)
        return [
            AnsweredImage(each.last_image, read(each.prompt), read(answer.text_tokens), read(each.answer))
            for each, answer in zip(questions, answers, strict=True)
        ]


class PairFeed(CorpusFeed):
    """Pairs of answers, each with its log-probabilities under the model of step 0 (the reference of DPO and KTO)."""

    def __init__(self, cfg: Config, corpus: Corpus, train_spec: TrainSpec, mesh: Mesh, watchdog: Watchdog):
        if corpus.num_held_out:
            check_held_out(corpus.held_out)
        # Without a limit of time: it takes as long as a forward pass over all data.
        with watchdog.phase("scoring the pairs with the model of step 0", math.inf):
            add_reference(cfg, corpus, train_spec, mesh)
        super().__init__(cfg, corpus, train_spec, mesh, watchdog)


def schedule_prompts(cycle: Cycle) -> DataSchedule:
    """Return the prompts that steps take, by which a stage of a mixture begins with a step.

    A rollout takes the prompts of all its steps at once. A stage may begin within them, where each step has as many of
    them; else it begins with the next rollout.
    """
    per_step, rest = divmod(cycle.samples, cycle.steps)
    return DataSchedule(BEGINNING, cycle if rest else Cycle(per_step, 1), ())


class PromptFeed:
    """Prompts that the model in training answers, and rewards that score its answers."""

    def __init__(self, cfg: Config, corpus: PromptCorpus, train_spec: TrainSpec, mesh: Mesh, watchdog: Watchdog):
        assert isinstance(cfg.task, Grpo)
        self.cfg, self.train_spec, self.mesh, task = cfg, train_spec, mesh, cfg.task
        shape = train_spec.batch
        cycle = task.cycle(shape.num_sequences)
        if corpus.num_samples < cycle.samples:
            raise UserError(
                f"the training data have {corpus.num_samples} prompts, one rollout needs {cycle.samples}; add data, or "
                "make training.global_batch_size, task.oversample or task.steps_per_rollout smaller"
            )
        tokens_per_prompt = shape.num_tokens * cycle.steps // cycle.samples
        self.samples = Samples(corpus.train, cfg, schedule_prompts(cycle), tokens_per_prompt)
        self.has_images = corpus.has_images
        in_processes = [term for term in task.rewards if not isinstance(term, EngineTerm)]
        keys = task.reward_processes, task.reward_timeout_s, task.reward_errors
        self.scorer = Scorer(in_processes, *keys, column_names=corpus.column_names)
        self.pool = make_pool(task, corpus.vocab, corpus.column_names)
        by_key = {"sampling": cfg.sampling, "evaluation.sampling": cfg.evaluation.sampling}
        max_lengths = {f"{key}.max_new_tokens": keys.max_new_tokens for key, keys in by_key.items()}
        info = task.rewards, max_lengths, task.reward_errors, task.reward_timeout_s, cfg
        engine_rewards = EngineRewards(*info) if len(in_processes) < len(task.rewards) else None
        self.engine = RolloutEngine(cfg, corpus, train_spec, mesh, self.scorer, watchdog, self.pool, engine_rewards)
        # Without rewards nothing says how good held-out answers are.
        self.held_out = HeldOutAnswers(cfg, corpus, self.engine) if corpus.num_held_out and task.is_rewarded else None
        self.teacher = load_teacher(train_spec, mesh, corpus.tokenizer)
        self.sets: dict[str, Evaluator] = {}  # the config refuses them for prompts
        self.stack = ExitStack()

    def __enter__(self) -> Self:
        """Start the processes of the rewards, and try the rewards on one prompt with made-up answers."""
        example = self.samples[0]
        # If the trial fails, this block ends the processes. If not, `pop_all` hands them on to `__exit__`.
        with ExitStack() as stack:
            stack.enter_context(self.scorer)
            if self.pool is not None:
                stack.enter_context(self.pool)
            peers.together(lambda: try_user_code(example, self.scorer, self.pool), "trying the rewards")
            if self.engine.engine_rewards is not None:
                stack.callback(self.engine.engine_rewards.close)
                self.engine.engine_rewards.try_out(example, self.has_images)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def batches(self, start: Position, last: int, metrics: Metrics | None, folder: Path | None) -> BatchSource:
        task = self.cfg.task
        assert isinstance(task, Grpo)
        reference = make_reference(self.cfg, self.train_spec, self.mesh) if task.kl_coefficient else None
        every = task.samples_every_steps
        file = SamplesFile(folder, every, task.num_steps_of_rollout, metrics) if folder and metrics and every else None
        score_by_teacher, shared = None, Batch()
        if self.teacher is not None:
            if task.teacher_in_loss:
                shared[TEACHER] = self.teacher
            else:
                score_by_teacher = make_teacher_scorer(self.cfg, self.train_spec, self.teacher)
        info = self.cfg, self.train_spec.batch, self.samples, self.engine, reference, start, file
        return Rollouts(*info, score_by_teacher, shared, last)

    def sum_up(self, state: dict[str, Any], evaluation: dict[str, Any], metrics: Metrics) -> None:
        """Log what the last evaluation says."""
        assert self.held_out is not None
        log.info("held out, %d prompts: %s", evaluation["prompts"], self.held_out.describe(evaluation))


def load_data(cfg: Config) -> AnyCorpus:
    """Load the data of a run on every process, process 0 first, of the kind of documents of its task."""
    return load_together(lambda: import_object(DOCUMENTS[cfg.task.documents].load)(cfg))


def make_feed(cfg: Config, corpus: AnyCorpus, train_spec: TrainSpec, mesh: Mesh, watchdog: Watchdog) -> Feed:
    """Return the feed of a run, of the kind of documents of its task."""
    return import_object(DOCUMENTS[cfg.task.documents].feed)(cfg, corpus, train_spec, mesh, watchdog)
