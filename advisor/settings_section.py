"""What every section of the settings is."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from advisor.access.masking import masked_text


class Section(BaseModel):
    """Frozen; a key that it does not have is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _without_secret(url: str) -> str:
    if masked_text(url) != url:
        raise ValueError("it holds a password or key: move it to a file and name that here; nothing shows it")
    return url


Url = Annotated[str, AfterValidator(_without_secret)]
"""Told in logs and checks, so that it must hold no secret."""
