"""Ends of a program that users see: each has its exit code. Any other exception is a bug."""

import difflib

from tunix.base.secrets import mask_secrets


def did_you_mean(value: str, choices: list[str]) -> str:
    """Return "; did you mean CHOICE?" for the choice nearest to `value`; empty if none is near."""
    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def near_multiples(value: int, unit: int) -> str:
    """Return in words the multiples of `unit` on both sides of a value that is none: 256 or 384."""
    low = max(1, value // unit) * unit
    return f"{low} or {low + unit}"


class Ending(Exception):
    """An end with an exit code of its own. Its message is for the user, and is shown without a traceback."""

    code: int
    is_failure = True  # its message goes to stderr, and the other processes of the run are told
    saves = False  # the state is saved before a run ends with it

    def __str__(self) -> str:
        """The message, without the passwords and signatures of addresses in it."""
        return mask_secrets(super().__str__())


class UserError(Ending, ValueError):
    """A request that cannot be carried out."""

    code = 2


class Stopped(Ending):
    """The run was asked to stop early (SIGTERM, SIGUSR1, time limit), and everything is saved: `resume` goes on."""

    code, is_failure, saves = 75, False, True


class Finished(Ending):
    """The run has come to its end before its last step, as the config asked (`evaluation.patience`)."""

    code, is_failure, saves = 0, False, True


class PeerLost(Ending):
    """Another process of the run did not come, has died or hangs."""

    code = 76


class Diverged(Ending):
    """Steps had to be skipped more often than the config allows: not finite (`training.max_skipped_steps`), or spikes
    (`training.max_spikes`)."""

    code = 77
