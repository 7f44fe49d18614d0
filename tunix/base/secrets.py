"""Secrets in texts: passwords and signatures of addresses, values of variables. Files and logs get `***`."""

import logging
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
PATTERNS = "KEY|TOKEN|SECRET|PASS|PWD|CRED|AUTH|WEBHOOK|JWT|SIG|COOKIE|SESSION"
NAME = re.compile(PATTERNS, re.IGNORECASE)  # of a variable or of a parameter of an address, whose value is a secret
# https://USER:PASSWORD@HOST/x?name=1&X-Amz-Signature=VALUE: the user with the password, and the value.
USER = re.compile(r"(?<=://)[^/\s?#'\"]+@")
PARAMETER = re.compile(
    rf"([?&][^=&#\s'\"]*(?:{PATTERNS})[^=&#\s'\"]*=)[^&#\s'\"]+?(?=[:,.;)\]]*(?:[&#\s'\"]|$))", re.IGNORECASE
)
MASKED = re.compile(rf"://{re.escape(MASK)}@|[?&][^=&\s]*={re.escape(MASK)}")


def mask_secrets(text: str) -> str:
    """Return the text with `***` in place of the users, passwords and signatures of the addresses in it."""
    if "://" not in text:
        return text
    return PARAMETER.sub(rf"\1{MASK}", USER.sub(f"{MASK}@", text))


def mask_values(values: Any) -> Any:
    """Return plain values, as a config has them, with their texts masked."""
    if isinstance(values, dict):
        return {key: mask_values(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [mask_values(value) for value in values]
    return mask_secrets(values) if isinstance(values, str) else values


def mask_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with `***` for each whose name says that its value is a secret."""
    return {name: MASK if NAME.search(name) else mask_secrets(value) for name, value in environment.items()}


def is_masked(text: str) -> bool:
    """Return whether a text is an address from which a secret was taken out."""
    return bool(MASKED.search(text))


class MaskingFilter(logging.Filter):
    """Masks the messages that a handler of a log gets."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if (masked := mask_secrets(text)) != text:
            record.msg, record.args = masked, None
        if record.exc_info and not record.exc_text:
            record.exc_text = mask_secrets(logging.Formatter().formatException(record.exc_info))
        return True
