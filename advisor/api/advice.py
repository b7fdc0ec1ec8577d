"""Advice that engines ask for: a route of the REST API, and its body."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from advisor.access.identity import Identity, Scope
from advisor.api.access import needs
from advisor.api.problems import documented
from advisor.views import AdvisorReader, LoadAdviceView

HASHES_MAX = 16_384

Hash = Annotated[str, Field(pattern=r"^[0-9a-fA-F]{1,32}$")]


class LoadQuestion(BaseModel):
    """A prompt's blocks, root first, by sequence hash."""

    model_config = ConfigDict(extra="forbid")

    hashes: list[Hash] = Field(min_length=1, max_length=HASHES_MAX, description="Hex, root first.")
    block_tokens: int = Field(ge=1, le=65_535, description="Tokens of a block.")
    namespace_id: str | None = Field(
        None,
        pattern=r"^[0-9a-f]{16}$",
        description="Whose blocks; left out, the namespace that has the most of them.",
    )
    tenant: str | None = Field(None, min_length=1, max_length=256, description="Only this tenant's namespaces.")
    group: int = Field(0, ge=0, le=255, description="Cache group.")
    prefill_tokens_per_s: float | None = Field(
        None, gt=0, le=1e9, description="How fast this engine computes; left out, as the settings say."
    )


def advice_routes(reader: AdvisorReader) -> APIRouter:
    """`/api/v1/advice`: nothing is changed by asking."""
    routes = APIRouter(prefix="/api/v1/advice", tags=["advice"])

    @routes.post("/load", summary="Load a prompt's blocks, or compute them", responses=documented(422))
    def load(
        question: LoadQuestion, who: Annotated[Identity, Depends(needs(Scope.READ, tenants=True))]
    ) -> LoadAdviceView:
        """One that sees a single tenant is answered with that tenant's blocks, whatever it asks for."""
        return reader.load_advice(
            [int(each, 16) for each in question.hashes],
            block_tokens=question.block_tokens,
            namespace_id=None if question.namespace_id is None else int(question.namespace_id, 16),
            tenant=who.tenant or question.tenant,
            group=question.group,
            prefill_tokens_per_s=question.prefill_tokens_per_s,
        )

    return routes
