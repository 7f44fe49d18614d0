"""Terms of the reward of an answer, as `task.rewards` and `rewards` of a command list them.

Each function has the keys of its row of `TERMS`, beside `function`, `weight` and `name`:

    [gsm8k, {function: format, weight: 0.2}, {function: overlong, buffer: 256}, {function: model, path: RUN}]
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal, Union
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from tunix.base.config_types import Count, NonNegative, Positive, Section, row_of
from tunix.rl.table import REWARDS

JUDGE_PROMPT = """You grade an answer to a question.

[Question]
{prompt}

[Answer]
{completion}

Say in one or two sentences what is right and what is wrong. Then rate the answer from 0 to 10, in double brackets: \
[[5]]"""


class RewardTerm(Section):
    """One term of the reward of an answer, which is the sum of all terms."""

    function: str
    """What gives the score."""
    weight: Annotated[float, Field(allow_inf_nan=False)]
    """Its score is multiplied by this."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | None
    """Name in metrics.jsonl, samples.jsonl and results.json; null is the name of the function."""

    @property
    def label(self) -> str:
        """Name of the term in files."""
        return self.name or self.function.rpartition(":")[2]


class EngineTerm(RewardTerm):
    """A term that the run computes itself, and no process of rewards (tunix/rl/engine_rewards.py)."""


class OverlongTerm(EngineTerm):
    """Less for an answer that comes near its longest length (DAPO, arXiv:2503.14476)."""

    function: Literal["overlong"]  # type: ignore[assignment]
    """What gives the score."""
    buffer: Count
    """Tokens before the longest length of an answer over which the score falls from 0 to -1."""


class ModelTerm(EngineTerm):
    """The number that a model of task=reward gives the answer, on the mesh of the run."""

    function: Literal["model"]  # type: ignore[assignment]
    """What gives the score."""
    path: str
    """A run of task=reward, or a folder or an ID of Hugging Face's with a `...ForSequenceClassification`."""


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.port == 0:
        raise ValueError("expected an address like http://HOST:8000/v1")
    if "@" in parts.netloc:
        raise ValueError("leave the password out; api_key_variable names an environment variable with the key")
    return url.rstrip("/")


def _check_prompt(prompt: str) -> str:
    if "{completion}" not in prompt:
        raise ValueError("it lacks {completion}, the answer that the judge is to rate")
    return prompt


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    if own := {"model", "messages", "stream", "n"} & options.keys():
        raise ValueError(f"{min(own)} is set by the run; leave it out")
    return options


class JudgeTerm(EngineTerm):
    """The rating that a language model behind an OpenAI-like address gives the answer, divided by the best one."""

    function: Literal["judge"]  # type: ignore[assignment]
    """What gives the score."""
    url: Annotated[str, AfterValidator(_check_url)]
    """Address of the server, up to /v1."""
    model: str
    """Name of the judge there."""
    prompt: Annotated[str, AfterValidator(_check_prompt)]
    """What the judge is told: {prompt}, {completion} and the columns of the data stand for their texts. It should ask
    for a rating in double brackets."""
    max_rating: Positive
    """The best rating; the worst one is 0."""
    options: Annotated[dict[str, Any], AfterValidator(_check_options)]
    """Further keys of each request."""
    num_parallel: Annotated[Count, Field(le=256)]
    """Requests at one time."""
    api_key_variable: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None
    """Environment variable with the key of the server; null sends none."""
    usd_per_million_tokens: tuple[NonNegative, NonNegative] | None
    """Price of what is read and of what is written, for the counter of costs; null counts tokens alone."""


# Of each function that has keys of its own its type, and the values of those that may be left out.
TERMS: dict[str, tuple[type[RewardTerm], dict[str, Any]]] = {
    "overlong": (OverlongTerm, {}),
    "model": (ModelTerm, {}),
    "judge": (JudgeTerm, {
        "prompt": JUDGE_PROMPT, "max_rating": 10.0, "options": {"temperature": 0, "max_tokens": 512},
        "num_parallel": 16, "api_key_variable": None, "usd_per_million_tokens": None,
    }),
}  # fmt: skip


class FunctionTerm(RewardTerm):
    """A function, which runs in processes of its own."""

    function: row_of((*REWARDS, *TERMS))  # type: ignore[valid-type]
    """A reward by name, or `package.module:name` of your own (docs/post_training.md)."""


def _read_term(value: Any) -> Any:
    """Return the values of a term with those that were left out; a name alone has the weight 1. Raises `ValueError` for
    a key of another function, or one that is missing."""
    values = {"function": value} if isinstance(value, str) else value
    if not isinstance(values, dict):
        return values
    function = values.get("function")
    kind, defaults = TERMS.get(str(function), (FunctionTerm, {}))
    # Configs of earlier versions have a null for each key of another function.
    values = {key: each for key, each in values.items() if each is not None or key in kind.model_fields}
    values = {"weight": 1.0, "name": None, **defaults, **values}
    for key in values.keys() - kind.model_fields.keys():
        owners = [name for name, (other, _) in TERMS.items() if key in other.model_fields]
        if owners:
            raise ValueError(f"{key}={values[key]} is of the reward {owners[0]}, not of {function}; leave it out")
        raise ValueError(f"unknown key {key} of the reward {function}; its keys are {', '.join(kind.model_fields)}")
    for key in kind.model_fields:
        if key not in values:
            raise ValueError(f"the reward {function} needs {key}: {{function: {function}, {key}: ...}}")
    return values


def _find_tag(value: Any) -> str:
    name = value.get("function") if isinstance(value, dict) else getattr(value, "function", None)
    return f"[{name if isinstance(name, str) and name in TERMS else 'function'}]"


# The type of a term. Its tags have brackets, so that no message takes one for a key.
if TYPE_CHECKING:
    AnyTerm = RewardTerm
else:
    KINDS = {"function": FunctionTerm, **{name: kind for name, (kind, _) in TERMS.items()}}
    AnyTerm = Annotated[
        Union[tuple(Annotated[kind, Tag(f"[{name}]")] for name, kind in KINDS.items())],  # noqa: UP007
        Discriminator(_find_tag),
        BeforeValidator(_read_term),
    ]


def _check_names(terms: tuple[RewardTerm, ...]) -> tuple[RewardTerm, ...]:
    labels = [term.label for term in terms]
    for label in ("environment", "errors", "s"):
        if label in labels:
            raise ValueError(f"a reward named {label} would hide the run's own reward_{label} in files; rename it")
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(f"{twice[0]} stands there twice; numbers are recorded by name, so give one a name of its own")
    return terms


RewardTerms = Annotated[tuple[AnyTerm, ...], AfterValidator(_check_names)]
