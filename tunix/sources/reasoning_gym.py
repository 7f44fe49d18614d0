"""Problems of the library reasoning-gym, which also checks the answers to them (arXiv:2505.24760)."""

from collections.abc import Iterator
from importlib.metadata import version
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field

from tunix.base.errors import UserError, did_you_mean
from tunix.base.section import Count, Seed
from tunix.sources.files import Unit
from tunix.sources.rows import Rows
from tunix.sources.source import Item

PROBLEM_BYTES = 400  # of one problem, roughly: it decides only how the work is cut


class ReasoningGym(Rows):
    """Problems that the library reasoning-gym makes (the extra `reasoning`); its reward is `reasoning_gym`."""

    source: Literal["reasoning_gym"]
    """Where documents come from."""
    tasks: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]
    """Kinds of problems by their names in the library, each with arguments: {chain_sum: {max_terms: 3}}."""
    num_problems: Count
    """Problems of each kind."""
    problem_seed: Seed
    """Seed of the problems: problem n of a kind follows from it and from n."""

    def units(self, unit_bytes: int) -> list[Unit]:
        """List ranges of the problems of each kind."""
        step = max(1, unit_bytes // PROBLEM_BYTES)
        cuts = list(pairwise([*range(0, self.num_problems, step), self.num_problems]))
        self.try_out()
        library = version("reasoning-gym")
        return [
            Unit(task, "", start, stop, (stop - start) * PROBLEM_BYTES, library)
            for task in self.tasks
            for start, stop in cuts
        ]

    def read(self, unit: Unit) -> Iterator[Item]:
        """Yield rows with `question`, `answer`, `task`, and what makes the problem again: `config` and `index`."""
        config = self._config(unit.name)
        problems = make_problems(unit.name, config)
        for index in range(unit.start, unit.stop):
            problem = problems[index]
            row = {"question": problem["question"], "answer": problem["answer"], "task": unit.name}
            yield Item(f"{unit.name}@{index}", row | {"config": config, "index": index})

    def try_out(self) -> None:
        """Raise `UserError` where the library does not know a kind of problems, or an argument of one."""
        for task in self.tasks:
            make_problems(task, self._config(task))

    def _config(self, task: str) -> dict[str, Any]:
        return self.tasks[task] | {"size": self.num_problems, "seed": self.problem_seed}


def make_problems(task: str, config: dict[str, Any]) -> Any:
    """Return the library's data set of one kind of problems: problem n is the same in every process.

    Raises:
        UserError: the library is not installed, or does not know the kind or an argument.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UserError("data.source=reasoning_gym needs the library: pip install 'tunix-trainer[reasoning]'") from None
    if task not in DATASETS:
        raise UserError(f"data.tasks: reasoning-gym has no {task}{did_you_mean(task, list(DATASETS))}")
    try:
        return reasoning_gym.create_dataset(task, **config)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"data.tasks.{task}: {error or 'reasoning-gym refuses the arguments'}") from None
