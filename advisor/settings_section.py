"""What every section of the settings is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen; a key that it does not have is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
