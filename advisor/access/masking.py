"""Secrets taken out of what people are shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"

_SECRET_WORDS = r"pass(word|wd|phrase)?|pwd|secret|token|credentials?|signature|api_?key|access_?key|private_?key"
_SECRET_KEY = re.compile(rf"(.*[_-])?({_SECRET_WORDS})", re.IGNORECASE)
_MASKS = (
    # To the last @: a password may hold any character, if whoever wrote it forgot to encode it.
    (re.compile(r"([a-z][a-z0-9+.-]*://[^/?#@:\s]*:).*@", re.IGNORECASE), rf"\g<1>{MASK}@"),
    (re.compile(rf"([?&;][^=&;\s]*({_SECRET_WORDS})[^=&;\s]*=)[^&;\s]*", re.IGNORECASE), rf"\g<1>{MASK}"),
    (re.compile(r"\b(kva_[0-9a-f]{12}_)[\w-]+"), rf"\g<1>{MASK}"),
    (re.compile(r"\beyJ[\w-]+\.[\w-]+\.[\w-]*"), MASK),
)


def masked_text(text: str) -> str:
    """Without passwords and keys in URLs, secrets of tokens and JSON Web Tokens."""
    for pattern, replacement in _MASKS:
        text = pattern.sub(replacement, text)
    return text


def masked(value: Any, key: str = "") -> Any:
    """JSON types as they are, but for secrets in texts, and all that stands under a key which names one."""
    if key and _SECRET_KEY.fullmatch(key) and value not in ("", None):
        return MASK
    if isinstance(value, Mapping):
        return {name: masked(each, str(name)) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [masked(each) for each in value]
    return masked_text(value) if isinstance(value, str) else value
