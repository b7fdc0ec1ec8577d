"""Changes of the planner's settings while the service runs: what the REST API takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self

from pydantic import ConfigDict, ModelWrapValidatorHandler, PrivateAttr, model_validator

from advisor.settings import PolicySettings, Shadows
from advisor.views import PoliciesView


def _as_patch(schema: dict[str, Any]) -> None:
    """Left out is left alone, so no field has a default; null goes back to the file's."""
    for name, about in schema["properties"].items():
        about = {key: value for key, value in about.items() if key != "default"}
        schema["properties"][name] = {"anyOf": [about, {"type": "null"}], "title": about.get("title", name)}


class PolicyPatch(PolicySettings):
    """A JSON merge patch (RFC 7396) of `policy`, and `shadow` whole. Null: as the file has it."""

    model_config = ConfigDict(json_schema_extra=_as_patch)

    shadow: Shadows = ()

    _back: frozenset[str] = PrivateAttr(default_factory=frozenset)

    @model_validator(mode="wrap")
    @classmethod
    def _without_nulls(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(value, dict):
            return handler(value)
        back = frozenset(name for name, each in value.items() if each is None and name in cls.model_fields)
        patch = handler({name: each for name, each in value.items() if name not in back})
        patch._back = back
        return patch

    @property
    def back_to_file(self) -> frozenset[str]:
        """Fields that are null."""
        return self._back

    @property
    def changes(self) -> dict[str, Any]:
        """The fields that are given, as JSON types."""
        return self.model_dump(mode="json", exclude_unset=True)


class AdvisorPolicies(Protocol):
    """Thread-safe; each change is logged with its `actor`, holds from the next tick on and outlives a restart."""

    def change(self, actor: str, patch: PolicyPatch, accepts: Callable[[PoliciesView], bool]) -> PoliciesView:
        """Raises `advisor.errors.Outdated` where `accepts` does not take what is in force, and `ActionRefused`."""
    def go_back(self, actor: str) -> PoliciesView:
        """To the file's settings."""
