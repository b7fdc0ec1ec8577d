"""Parameters of the API's routes. An unknown name is refused, so that a typo never widens an answer."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from advisor.entries import EntryKind
from advisor.moves import MoveKind, MoveState
from advisor.views import DRY, OPEN

ANSWER_ROWS_MAX = 1000
SAMPLES_SECONDS_MAX = 3600

Limit = Annotated[int, Field(ge=1, le=ANSWER_ROWS_MAX, description="The most rows to answer with.")]


class Query(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ListQuery(Query):
    limit: Limit = ANSWER_ROWS_MAX


MOVES_ROWS = 50


STATES = (*map(str, MoveState), DRY, OPEN)


def _known_state(state: str) -> str:
    if state not in STATES:
        raise ValueError(f"choose one of {', '.join(STATES)}")
    return state


ShownState = Annotated[
    str, AfterValidator(_known_state), WithJsonSchema({"type": "string", "enum": list(STATES), "title": "State"})
]


class CompactionsQuery(Query):
    limit: Limit = MOVES_ROWS


class MovesQuery(Query):
    after: str | None = Field(None, max_length=512, description="`next_cursor` of the page before.")
    limit: Limit = MOVES_ROWS
    state: ShownState | None = Field(
        None, description="Only moves in this state; `open`: that have not ended; `dry`: that a dry run planned."
    )
    kind: MoveKind | None = Field(None, description="Only moves of this kind.")
    volume: str | None = Field(None, min_length=1, max_length=64, description="Only from or to this volume.")
    tenant: str | None = Field(None, min_length=1, max_length=256, description="Only of this tenant's blocks.")


class EventsQuery(Query):
    from_position: int | None = Field(
        None, ge=1, le=2**63 - 1, description="First log position; the newest entries where it is left out."
    )
    limit: Limit = 100
    kind: EntryKind | None = Field(None, description="Only entries of this kind.")
    producer: str | None = Field(
        None, pattern=r"^[0-9a-f]{16}$", description="Only batches of this producer: its id, 16 hex digits."
    )
    source: str = Field("", max_length=256, description="Only batches that came by this source.")
    until_position: int | None = Field(None, ge=1, le=2**63 - 1, description="Last log position.")


class SamplesQuery(Query):
    seconds: int = Field(300, ge=1, le=SAMPLES_SECONDS_MAX, description="How far back.")
