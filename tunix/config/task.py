"""Tasks: which documents a run learns from, and which loss their batches get."""

import math
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from tunix.base.config_types import (
    Count,
    CountOrZero,
    Flag,
    NameOrPath,
    NonNegative,
    Positive,
    Section,
    Share,
    Temperature,
    row_of,
)
from tunix.base.errors import UserError, near_multiples
from tunix.config.rewards import JudgeTerm, ModelTerm, RewardTerms
from tunix.rl.environments import describe_tools, gives_reward
from tunix.rl.table import ENVIRONMENTS, check_options, find_environment, format_environment
from tunix.rl.tool_parsers import TOOL_CALLS
from tunix.sharding.mesh import list_divisors, nearest

MAX_GUESS = 15  # with the newest token, so many are few queries of attention (models/attention.py)


class Guessing(Section):
    """Tokens that are guessed, so that one pass through the model draws several."""

    guess: Annotated[int, Field(ge=0, le=MAX_GUESS)]
    """Tokens that are guessed beside each that is drawn. One pass checks all of them, and the answer stays the same; 0
    guesses none."""
    guess_by: Literal["prompt_lookup", "mtp"]
    """prompt_lookup guesses those that followed the two newest tokens where they stood before in the prompt or the
    answer; mtp asks the layer of model.mtp, which was trained to predict the token after the next one."""

    @property
    def by_mtp(self) -> bool:
        return self.guess > 0 and self.guess_by == "mtp"

    @model_validator(mode="after")
    def _check_guesses(self) -> Self:
        if self.guess_by == "mtp" and not self.guess:
            raise ValueError("guess_by=mtp guesses nothing with guess=0; set guess=1")
        return self


class Decoding(Section):
    """Choice of each token of an answer, and where an answer ends. The filters apply in the order of their keys."""

    max_new_tokens: Count
    """Longest answer, in tokens."""
    temperature: Temperature
    """Logits are divided by it; 0 takes the likeliest token."""
    top_k: Count | None
    """Draw from the k likeliest tokens only."""
    top_p: Annotated[Share, Field(gt=0)] | None
    """Draw from the likeliest tokens that together have this probability (Holtzman et al. 2020)."""
    min_p: Share | None
    """Draw from tokens with at least this share of the likeliest one's probability (arXiv:2407.01082)."""
    stop: tuple[str, ...]
    """Tokens that end an answer, beside those that the model and its chat template name."""
    cache: Literal["auto", "pages", "slots"]
    """Where keys and values of earlier tokens are: pages, of which a row has as many as its tokens fill and answers to
    one prompt share those of the prompt; or slots, as many in each row as the longest row has. auto takes pages on GPUs
    for which the kernel is compiled, and slots elsewhere. Tokens do not depend on it."""
    cache_dtype: Literal["int8"] | None
    """dtype of the keys and values of earlier tokens: int8, with a scale for each vector, takes half of bfloat16's
    memory and rounds probabilities; null is the dtype of products."""


FILTERS = ("top_k", "top_p", "min_p")  # keys of `Decoding` that leave tokens out


class Sampling(Guessing, Decoding):
    """Choice of each token of an answer, and where a turn and an answer end."""

    max_turn_tokens: Count | None
    """Longest turn of an episode, in tokens (task.environment); null: what max_new_tokens leaves."""


class Cycle(NamedTuple):
    """How much data a run reads at one time, and how many optimizer steps use it."""

    samples: int  # sequences of a corpus, or prompts
    steps: int  # 1, or those that share the answers of one rollout


class Task(Section):
    """The task of a run: its documents and its loss."""

    documents: ClassVar[str]  # what a document of the data is: a key of `DOCUMENTS` in data/documents.py
    supports_text: ClassVar[bool] = False  # a source may give plain text; otherwise it must give rows with columns
    default_loss: ClassVar[str]  # a key of LOSSES in training/loss.py
    other_losses: ClassVar[tuple[str, ...]] = ()  # further keys that take its batches
    needs_head: ClassVar[bool] = True  # the loss takes logits, or the numbers of model.labels

    name: str
    """Which task."""
    chat_template: str | None
    """A Jinja file or text that turns a conversation into text; null takes the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] | None
    """Variables that the template gets beside the messages, like {enable_thinking: false}; null for none."""
    loss: NameOrPath | None
    """Name of a loss, or `package.module:name` of your own (docs/extending.md); null takes the loss of the task."""

    @property
    def output_labels(self) -> tuple[str, ...] | None:
        """Names of the numbers that the model gives in the place of logits (`model.labels`); None for logits."""
        return None

    @property
    def offline_top_k(self) -> int | None:
        """Tokens of each position that a teacher on disk has; None without one."""
        return None

    def cycle(self, num_sequences: int, unit: int = 1) -> Cycle:
        """Return what is read at one time for steps of `num_sequences` sequences, a multiple of `unit`."""
        return Cycle(num_sequences, 1)

    def describe_tools(self) -> list[dict[str, Any]]:
        """Return the schemas of tools that every conversation has."""
        return []

    def list_turn_choices(self) -> dict[str, Any]:
        """Return what decides the tokens of documents beside the template, without what is usual."""
        return {"chat_template_kwargs": self.chat_template_kwargs} if self.chat_template_kwargs else {}


class Taught(Task):
    """A task that may have a teacher: a second model, whose distributions are learnt."""

    teacher: str | None
    """A run's folder, or a folder or an ID of Hugging Face's: a model with the same tokenizer, of any family; null for
    none. With task.teacher_top_k also the folder of its logits that another run, or tunix.prepare, has written."""
    teacher_beta: Share
    """Divergence from the teacher: KL(teacher || model) (0), KL(model || teacher) (1), or between them the generalized
    Jensen-Shannon divergence (GKD, arXiv:2306.13649)."""

    @property
    def teacher_in_loss(self) -> bool:
        """True where the loss takes whole distributions of a teacher, which is then a part of the step."""
        return self.teacher is not None

    @model_validator(mode="after")
    def _check_loss(self) -> "Taught":
        if self.teacher_in_loss and self.loss is not None:
            raise ValueError(
                f"task.loss={self.loss} knows nothing of task.teacher={self.teacher}; leave one of the two out"
            )
        return self


class Distilled(Taught):
    """A task on documents, beside whose targets the distributions of a teacher are learnt."""

    teacher_weight: Share
    """Weight of the divergence from the teacher; the cross entropy has the rest. 1 learns from the teacher alone."""
    teacher_temperature: Positive
    """Logits of both models are divided by it in the divergence (arXiv:1503.02531)."""
    teacher_top_k: Count | None
    """Tokens of each learnt position that are likeliest for the teacher: it runs once, before the first step, writes
    their probabilities into loading.cache_dir, and is not kept in memory. null keeps it beside the model."""

    @property
    def offline_top_k(self) -> int | None:
        return self.teacher_top_k

    @model_validator(mode="after")
    def _check_top_k(self) -> "Distilled":
        if self.teacher_top_k is not None and self.teacher is None:
            raise ValueError(
                f"task.teacher_top_k={self.teacher_top_k} is of a teacher, and task.teacher=null; give "
                "task.teacher=RUN, or leave it out"
            )
        return self


class Pretrain(Distilled):
    """Next-token loss on every token of documents."""

    documents = "text"
    supports_text = True
    default_loss = "next_token"

    name: Literal["pretrain"]  # type: ignore[assignment]
    """What is learnt."""


class Sft(Distilled):
    """Next-token loss on the answers of conversations alone."""

    documents = "conversation"
    default_loss = "next_token"
    other_losses = ("dft",)

    name: Literal["sft"]  # type: ignore[assignment]
    """What is learnt."""
    learnt_turns: Literal["all", "last", "assistant"]
    """Turns of a conversation that are learnt: all, the last of the assistant, or each of the assistant. A column
    (data.columns.learnt_turns) says it for each turn."""

    def list_turn_choices(self) -> dict[str, Any]:
        usual = self.learnt_turns == "assistant"
        return super().list_turn_choices() | ({} if usual else {"learnt_turns": self.learnt_turns})


class Prompted(Task):
    """The model writes the answers to the prompts of the data itself."""

    documents = "prompt"

    system: str | None
    """Message of the system before each prompt that has none of its own; null for none."""

    @property
    def has_environment(self) -> bool:
        """True where an answer is an episode of several turns."""
        return False


class Curriculum(Section):
    """Prompts that are left out for a time because of their newest answers; right ones get 1 or more by the first
    reward."""

    solved: Share | None
    """Share of right answers from which on a prompt is left out; null for none."""
    unsolved: Annotated[Share, Field(lt=1)] | None
    """Share of right answers down to which a prompt is left out; null for none."""
    turns: Count
    """Times that a prompt is left out when its turn comes, once in each epoch."""

    @model_validator(mode="after")
    def _check(self) -> "Curriculum":
        if self.solved is not None and self.unsolved is not None and self.unsolved >= self.solved:
            raise ValueError(
                f"task.curriculum.unsolved={self.unsolved:g} and task.curriculum.solved={self.solved:g} leave every "
                "prompt out; give a smaller unsolved"
            )
        return self

    @property
    def is_used(self) -> bool:
        return self.solved is not None or self.unsolved is not None


class Grpo(Prompted, Taught):
    """The model answers prompts, and learns from the rewards of its answers, each compared with its group, or from what
    a teacher says of their tokens."""

    default_loss = "grpo"

    name: Literal["grpo"]  # type: ignore[assignment]
    """What is learnt."""
    group_size: Annotated[Count, Field(ge=2)]
    """Answers to each prompt. A sequence of training.global_batch_size is one answer."""
    steps_per_rollout: Count
    """Optimizer steps on different answers of one rollout; 1 keeps the answers those of the model in training."""
    passes_per_rollout: Count
    """Times that each answer of a rollout is used."""
    answers_per_row: Count
    """Most answers that share a row of training.seq_len tokens, as short documents do; a step then takes as many
    microbatches as its rows need. 1 gives each answer a row of its own."""
    advantage: Literal["centered", "group_std", "batch_std", "leave_one_out"]
    """Advantage of an answer: its reward less the mean of its group (centered); that, divided by the standard deviation
    of the group (group_std: GRPO, arXiv:2402.03300) or of all answers of the step (batch_std: arXiv:2508.08221); or its
    reward less the mean of the others of its group (leave_one_out: RLOO, arXiv:2402.14740)."""
    divide_by: Literal["tokens", "answers", "constant"]
    """What the sum over tokens of a step is divided by: tokens of all answers (DAPO, arXiv:2503.14476); answers, each
    by its own length first (GRPO); or answers x sampling.max_new_tokens (Dr. GRPO, arXiv:2503.20783)."""
    ratio: Literal["token", "answer"]
    """What the ratio of new to old probability is of: each token, or the whole answer (GSPO, arXiv:2507.18071: with
    divide_by=answers)."""
    clip: Literal["ratio", "weights", "soft"]
    """Beyond the limits a token has no gradient (ratio: PPO), or keeps it with a clipped weight (weights: CISPO,
    arXiv:2506.13585); or without limits its gradient fades with the distance of the ratio from 1 (soft: SAPO,
    arXiv:2511.20347)."""
    clip_low: Share
    """Share by which a ratio may fall."""
    clip_high: NonNegative
    """Share by which a ratio may rise."""
    max_importance: Positive | None
    """Cap of the probability in training over the one in sampling, which weights each token. With several steps on a
    rollout it bounds the ratio where the advantage is negative (dual clip, arXiv:1912.09729). Null does neither."""
    importance: Literal["truncate", "mask", "sequence", "sequence_mask"]
    """What task.max_importance does with one step a rollout: caps the weight of each token (truncate), leaves tokens
    beyond it out (mask), or caps one weight of the whole answer, the product of those of its tokens (sequence), or
    leaves answers beyond it out (sequence_mask)."""
    staleness: CountOrZero
    """Rollouts that are drawn ahead, beside learning: each by the weights that are so many rollouts older than those
    that learn from it, always. 0 draws between steps."""
    rollout_devices: Count | None
    """Devices that draw answers on a mesh of their own, the last ones of each host; null draws on the mesh that
    learns. Needs task.staleness."""
    kl: Literal["advantage", "loss", "weighted"]
    """Where the divergence from the model of step 0 enters: as a penalty of each answer's reward, whose gradient is
    exact (advantage: k1), or in the loss of each token (loss: k3, http://joschu.net/blog/kl-approx.html), there also
    times the ratio of task.ratio, which makes the gradient of each token's divergence exact (weighted:
    arXiv:2512.02556)."""
    kl_coefficient: NonNegative
    """Weight of the divergence, a reward per nat; 0 needs no reference model."""
    truncated: Literal["count", "mask", "zero"]
    """An answer that is cut at sampling.max_new_tokens: counts with its reward, has no loss, or gets the reward 0."""
    oversample: Annotated[Positive, Field(ge=1)]
    """Prompts that are answered for each prompt that a step uses. Groups with unlike rewards are used first."""
    refill: CountOrZero
    """Most times that further prompts are asked in the place of groups whose answers are all equally good; 0 learns
    from what was drawn."""
    curriculum: Curriculum
    """Prompts that are left out for a time."""
    teacher_weight: NonNegative
    """Weight of the divergence from the teacher, in rewards per nat."""
    teacher_loss: Literal["sampled", "full"]
    """Divergence from the teacher at each token of an answer: by the token that was drawn (sampled), whose advantage
    gets log p of the teacher less log p of the model; or over all tokens of the vocabulary, in the loss (full)."""
    rewards: RewardTerms
    """Terms of the reward, each {function: NAME, weight: NUMBER}, or a name alone, which has the weight 1. A term of
    weight 0 is measured and not learnt. None ([]) needs a teacher, or an environment that rewards."""
    reward_processes: Count
    """Processes that compute rewards, for each process of the run."""
    reward_timeout_s: Positive
    """Seconds that one reward may take for the answers of a rollout; an answer without a score by then is an error."""
    reward_errors: Literal["zero", "stop"]
    """A reward that fails: counts as 0 and is counted in reward_errors, or ends the run."""
    rollout_rows: Count | Literal["auto"] | None
    """Answers that are drawn at one time, over the whole mesh. auto draws as many as fit into the memory of a device
    beside the training state, and all of a rollout where that memory is not known; null draws all of a rollout."""
    samples_every_steps: Count | None
    """Steps between those whose answers are written to samples.jsonl; null writes none."""
    environment: row_of(ENVIRONMENTS, type) | tuple[row_of(ENVIRONMENTS, type), ...] | None  # type: ignore[valid-type]
    """What the model talks with in several turns: an environment of docs/agents.md, like calculator, or
    `package.module:name` of a class of your own; a list gives the tools of several; null: an answer is one turn."""
    environment_options: dict[str, Any] | None
    """Arguments of its class; of several {NAME: {ARGUMENT: VALUE}}; null for none."""
    max_turns: Count
    """Most turns of the model in an episode. sampling.max_new_tokens counts what it draws and what it sees together."""
    tool_calls: row_of(("auto", *TOOL_CALLS))  # type: ignore[valid-type]
    """How the model writes calls of tools; auto chooses by the chat template."""
    environment_processes: Count
    """Processes that hold environments, for each process of the run."""
    environment_timeout_s: Positive
    """Seconds that an environment may take for one turn, with all calls of tools in it; then its process is killed, and
    the episode has no score."""
    episode_timeout_s: Positive | None
    """Seconds that the environment of one episode may work in all its calls; the turn after which it has worked longer
    is the last one. Then answers depend on the speed of the machine. null sets no limit."""
    environment_memory_mib: Count
    """Memory of each process of environments."""
    environment_errors: Literal["zero", "stop"]
    """An episode whose environment fails: counts as 0 and is counted in reward_errors, or ends the run."""
    credit: Literal["answer", "turns"]
    """Advantage of an episode's tokens: one for all of its turns (answer), or for each turn the rewards from it on,
    compared with the same turn of the others of its group (turns)."""

    @property
    def has_environment(self) -> bool:
        return self.environment is not None

    @property
    def is_rewarded(self) -> bool:
        """True where answers have a reward, of task.rewards or of the environment."""
        return bool(self.rewards) or self._environment_rewards

    @property
    def _environment_rewards(self) -> bool:
        return self.environment is not None and gives_reward(find_environment(self.environment))

    @property
    def _without_reward(self) -> str:
        """The reason why there is no reward to learn from; "" where there is one."""
        if self._environment_rewards or any(term.weight for term in self.rewards):
            return ""
        names = ", ".join(term.label for term in self.rewards)
        return f"a weight of 0 for {names}" if names else "task.rewards=[]"

    def describe_tools(self) -> list[dict[str, Any]]:
        return [] if self.environment is None else describe_tools(find_environment(self.environment))

    def list_turn_choices(self) -> dict[str, Any]:
        tools = {"tools": self.describe_tools(), "episode": True} if self.has_environment else {}
        return super().list_turn_choices() | tools

    @model_validator(mode="after")
    def _check_environment(self) -> "Grpo":
        if self.environment is not None and any(isinstance(term, ModelTerm | JudgeTerm) for term in self.rewards):
            raise ValueError(
                "task.rewards: a model or a judge scores one answer, and task.environment makes episodes; leave one of "
                "the two out"
            )
        if self.environment is None and (self.credit == "turns" or self.environment_options is not None):
            key = "credit=turns" if self.credit == "turns" else "environment_options"
            raise ValueError(f"task.{key} is of an environment, and task.environment=null")
        if self.credit == "turns" and self.advantage == "batch_std":
            raise ValueError(
                "task.credit=turns compares the answers to one prompt, and task.advantage=batch_std those of a step; "
                "set task.advantage=group_std"
            )
        if isinstance(self.environment, tuple) and len({*self.environment}) < max(1, len(self.environment)):
            raise ValueError(
                f"task.environment={format_environment(self.environment)}: expected names that differ, or null"
            )
        if self.environment is not None:
            if not callable(getattr(find_environment(self.environment), "reset", None)):
                raise ValueError(
                    f"task.environment={format_environment(self.environment)} has no method reset (docs/agents.md)"
                )
            self.describe_tools()  # a tool without types is refused
            check_options(self.environment, self.environment_options or {})
        return self

    @model_validator(mode="after")
    def _check(self) -> "Grpo":
        if self.rollout_devices is not None and not self.staleness:
            raise ValueError(
                f"task.rollout_devices={self.rollout_devices} would wait for the devices that learn, and they for it; "
                "set task.staleness=1 or more"
            )
        if self._without_reward and (self.teacher is None or not self.teacher_weight):
            hint = ""
            if self.environment is not None:
                hint = f" (task.environment={format_environment(self.environment)} rewards nothing itself)"
            way_out = "give task.teacher=RUN" if self.teacher is None else "set task.teacher_weight=1"
            raise ValueError(f"{self._without_reward} leaves nothing to learn from; name a reward{hint}, or {way_out}")
        if self.teacher is not None and self.teacher_loss == "sampled" and self.teacher_beta != 1:
            raise ValueError(
                f"task.teacher_beta={self.teacher_beta:g} needs the whole distribution; set task.teacher_loss=full, or "
                "task.teacher_beta=1"
            )
        return self

    @model_validator(mode="after")
    def _check_order(self) -> "Grpo":
        if self.adaptive is None:
            return self
        if self.staleness:
            raise ValueError(
                f"{self.adaptive} chooses prompts by answers that rollouts ahead do not have yet (task.staleness="
                f"{self.staleness}); set task.staleness=0"
            )
        # The curriculum goes by the score of the first term, whatever its weight.
        if self._without_reward and (self.refill or not self.rewards):
            raise ValueError(f"{self.adaptive} goes by rewards, and {self._without_reward} leaves none; name a reward")
        return self

    @property
    def adaptive(self) -> str | None:
        """The key, with its value, because of which prompts depend on earlier answers; None where they do not."""
        values = self.curriculum.solved, self.curriculum.unsolved
        keys = {"refill": self.refill or None, "curriculum.solved": values[0], "curriculum.unsolved": values[1]}
        return next((f"task.{key}={value}" for key, value in keys.items() if value is not None), None)

    @property
    def teacher_in_loss(self) -> bool:
        return self.teacher is not None and self.teacher_loss == "full"

    @property
    def on_policy(self) -> bool:
        """True where every answer is used once, by the model that gave it."""
        return self.num_steps_of_rollout == 1

    @property
    def num_steps_of_rollout(self) -> int:
        """Return the steps from one rollout to the next."""
        return self.steps_per_rollout * self.passes_per_rollout

    def cycle(self, num_sequences: int, unit: int = 1) -> Cycle:
        """Return the prompts of a rollout, and the steps from one rollout to the next; see `num_prompts`."""
        prompts = round(self.oversample * self.num_prompts(num_sequences, unit) * self.steps_per_rollout)
        return Cycle(prompts, self.num_steps_of_rollout)

    def num_prompts(self, num_sequences: int, unit: int = 1) -> int:
        """Return the number of prompts of a step of `num_sequences` answers: each prompt has a group of answers.

        Every batch of the run is a multiple of `unit`, and so are those that the message names. Raises `UserError`
        where the groups do not fill the sequences; it names the nearest values that do.
        """
        if num_sequences % self.group_size:
            near = " or ".join(map(str, nearest(list_divisors(num_sequences, least=2), self.group_size)))
            batches = near_multiples(num_sequences, math.lcm(self.group_size, unit))
            raise UserError(
                f"task.group_size={self.group_size} does not divide the {num_sequences} answers of a step "
                f"(training.global_batch_size); nearest: a batch of {batches}"
                f"{f', or task.group_size={near}' if near else ''}"
            )
        return num_sequences // self.group_size


class Paired(Task):
    """A task on documents of two answers to one prompt, which stay in one row of a batch."""

    long_pairs: Literal["error", "skip"]
    """Pairs of which both answers, each with its prompt, do not fit into training.seq_len: refused, or left out and
    counted."""


class Compared(Paired):
    """A task on pairs, which may compare them with a reference model."""

    @property
    def has_reference(self) -> bool:
        """True where answers are compared with those of the model of step 0."""
        return True


class PairObjective(NamedTuple):
    """A loss of pairs of answers."""

    function: str  # `module:function` of (`Pairs`, the task) -> [B, T / 2], the loss of each pair (training/dpo.py)
    has_reference: bool  # what counts is how much likelier an answer has become since step 0
    per_token: bool  # log-probabilities of an answer are means over its tokens; False: task.length_normalized says so
    is_smoothed: bool  # reads task.label_smoothing


PAIR_OBJECTIVES = {
    "sigmoid": PairObjective("tunix.training.dpo:sigmoid_loss", has_reference=True, per_token=False, is_smoothed=True),
    "robust": PairObjective("tunix.training.dpo:robust_loss", has_reference=True, per_token=False, is_smoothed=True),
    "ipo": PairObjective("tunix.training.dpo:ipo_loss", has_reference=True, per_token=True, is_smoothed=False),
    "simpo": PairObjective("tunix.training.dpo:simpo_loss", has_reference=False, per_token=True, is_smoothed=True),
    "orpo": PairObjective("tunix.training.dpo:orpo_loss", has_reference=False, per_token=True, is_smoothed=False),
}


class Dpo(Compared):
    """The better of two answers becomes likelier than the worse, compared with the model of step 0 (DPO,
    arXiv:2305.18290; IPO), or without a reference (SimPO, ORPO)."""

    documents = "pair"
    default_loss = "dpo"

    name: Literal["dpo"]  # type: ignore[assignment]
    """What is learnt."""
    objective: Literal[tuple(PAIR_OBJECTIVES)]  # type: ignore[valid-type]
    """Loss, a function of the margin: -log sigmoid(beta x margin) (sigmoid: DPO), the same without the bias of turned
    labels (robust: arXiv:2403.00409), or (margin - 1 / (2 beta))^2, per
    token of an answer (ipo: arXiv:2310.12036). The margin is how much more the log-probability of the chosen answer has
    grown since step 0 than that of the rejected one. Without a reference, with log-probabilities per token: -log
    sigmoid(beta x margin - simpo_gamma) (simpo: arXiv:2405.14734), or the loss of the chosen answer and its prompt less
    beta x log sigmoid(log-odds of the chosen answer less those of the rejected one) (orpo: arXiv:2403.07691)."""
    beta: Positive
    """Strength of the tie to the model of step 0; of simpo, scale of the margin; of orpo, weight of the odds (lambda of
    the paper)."""
    simpo_gamma: NonNegative
    """simpo: margin, times beta, that a pair should have."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)]
    """sigmoid, simpo, robust: share of the pairs that are taken to be in the wrong order (sigmoid: cDPO,
    ericmitchell.ai/cdpo.pdf)."""
    length_normalized: Flag
    """sigmoid: log-probabilities per token of an answer in place of their sum."""
    sft_weight: NonNegative
    """Weight of the cross entropy of the chosen answer, which is added to the loss: a mean over its tokens (RPO,
    arXiv:2404.19733)."""

    @property
    def has_reference(self) -> bool:
        return PAIR_OBJECTIVES[self.objective].has_reference

    @model_validator(mode="after")
    def _check(self) -> "Dpo":
        if self.label_smoothing and not PAIR_OBJECTIVES[self.objective].is_smoothed:
            smoothed = " or ".join(name for name, row in PAIR_OBJECTIVES.items() if row.is_smoothed)
            raise ValueError(
                f"task.label_smoothing={self.label_smoothing:g} belongs to task.objective={smoothed}; set it to 0"
            )
        return self


class Kto(Compared):
    """Answers with a label: desirable ones become likelier and undesirable ones less likely, compared with the model of
    step 0 (KTO, arXiv:2402.01306).

    Each answer is paired with another one, which tells how far the model has moved from that of step 0.
    """

    documents = "labelled"
    default_loss = "kto"

    name: Literal["kto"]  # type: ignore[assignment]
    """What is learnt."""
    beta: Positive
    """Strength of the tie to the model of step 0: scale of the gain in log-probability beyond the divergence."""
    desirable_weight: NonNegative
    """Weight of answers whose label is true."""
    undesirable_weight: NonNegative
    """Weight of answers whose label is false."""


class Reward(Paired):
    """A head gives each answer a number, its reward, which becomes larger for the better of two answers (Bradley and
    Terry 1952; Ouyang et al. 2022, arXiv:2203.02155)."""

    documents = "comparison"
    default_loss = "reward"

    name: Literal["reward"]  # type: ignore[assignment]
    """What is learnt."""
    center_coefficient: NonNegative
    """Weight of the square of the sum of both rewards of a pair, which keeps rewards around 0 (arXiv:2312.09244)."""

    @property
    def output_labels(self) -> tuple[str, ...]:
        return ("reward",)


# The type of the name of a class. A column may have numbers, or true and false, and so may the list of the classes.
ClassName = Annotated[
    str,
    BeforeValidator(lambda value: str(value).lower() if isinstance(value, bool) else value),
    BeforeValidator(lambda value: str(value) if isinstance(value, int) and not isinstance(value, bool) else value),
]


class Uncut(Task):
    """A task on documents that are never cut."""

    long_documents: Literal["error", "skip"]
    """Documents that do not fit into training.seq_len (task=embed: a query with its document and its negatives):
    refused, or left out and counted."""


class Classify(Uncut):
    """A head gives each document a score for each class, or a number."""

    documents = "example"
    default_loss = "classify"

    name: Literal["classify"]  # type: ignore[assignment]
    """What is learnt."""
    labels: Annotated[tuple[ClassName, ...], Field(min_length=2)] | None
    """Classes, as the column data.columns.label has them; null: that column has numbers, and the loss is the squared
    error."""

    @property
    def output_labels(self) -> tuple[str, ...]:
        return ("number",) if self.labels is None else self.labels

    def list_turn_choices(self) -> dict[str, Any]:
        return super().list_turn_choices() | {"labels": self.labels}

    @model_validator(mode="after")
    def _check(self) -> "Classify":
        if self.labels is not None and len(set(self.labels)) < len(self.labels):
            raise ValueError(f"task.labels={list(self.labels)} names a class twice")
        return self


class Embed(Uncut):
    """The vector of a query comes near that of its document, and away from those of all other documents of the step
    (InfoNCE, arXiv:1807.03748)."""

    documents = "group"
    default_loss = "embed"
    needs_head = False

    name: Literal["embed"]  # type: ignore[assignment]
    """What is learnt."""
    pooling: Literal["last", "mean"]
    """Vector of a text: that of its last token, <eos> (last), or the mean over its tokens (mean)."""
    temperature: Positive
    """Cosines are divided by it before the softmax over the documents of a step."""
    negatives: CountOrZero
    """Texts that are read of each row's column data.columns.rejected, a text or a list: documents that do not answer
    the query. A row may have fewer; 0 reads none, and the documents of the other queries are all that is wrong."""
    sizes: Annotated[tuple[Count, ...], Field(min_length=1)] | None
    """Numbers of the vector's first values that are learnt as a vector of their own, beside the whole one (Matryoshka,
    arXiv:2205.13147); the losses of all sizes are added up. null learns the whole vector alone."""

    @property
    def num_texts(self) -> int:
        """Most texts of a row: the query, its document, negatives."""
        return 2 + self.negatives

    def list_turn_choices(self) -> dict[str, Any]:
        return super().list_turn_choices() | {"negatives": self.negatives}

    @model_validator(mode="after")
    def _check(self) -> "Embed":
        if self.sizes is not None and len(set(self.sizes)) < len(self.sizes):
            raise ValueError(f"task.sizes={list(self.sizes)} names a size twice")
        return self


AnyTask = Annotated[Pretrain | Sft | Grpo | Dpo | Kto | Reward | Classify | Embed, Field(discriminator="name")]


def list_tasks_of_loss(loss: str) -> list[str]:
    """Return the names of the tasks whose batches this loss takes."""
    tasks = [task for task in get_args(get_args(AnyTask)[0]) if loss in (task.default_loss, *task.other_losses)]
    return [get_args(task.model_fields["name"].annotation)[0] for task in tasks]
