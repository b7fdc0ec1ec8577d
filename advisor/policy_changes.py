"""Changes of the running service's policies: what the REST API asks for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from advisor.changed_settings import as_changes, difference, settings_entry, with_changes
from advisor.entries import OperatorEntry
from advisor.errors import ActionRefused, Outdated, SettingsError
from advisor.policy_views import PolicyPatch
from advisor.service import AdvisorService
from advisor.shadow_views import policies_view
from advisor.views import PoliciesView


class ServicePolicies:
    """`advisor.policy_views.AdvisorPolicies` over a running service."""

    def __init__(self, service: AdvisorService) -> None:
        self._service = service
        self._changing = threading.Lock()
        """Held from the look at what is in force until the change of it is applied."""

    def change(self, actor: str, patch: PolicyPatch, accepts: Callable[[PoliciesView], bool]) -> PoliciesView:
        """See `AdvisorPolicies.change`."""
        with self._changing:
            with self._service.lock:
                if not accepts(policies_view(self._service.fold)):
                    raise Outdated("the policies were changed meanwhile: GET /api/v1/policies, and send its ETag")
                before = self._service.fold.changed_settings
            wanted = {name: value for name, value in before.items() if name not in patch.back_to_file}
            return self._set(actor, {**wanted, **patch.changes})

    def go_back(self, actor: str) -> PoliciesView:
        """See `AdvisorPolicies.go_back`."""
        with self._changing:
            return self._set(actor, {})

    def _set(self, actor: str, wanted: Mapping[str, Any]) -> PoliciesView:
        service, file = self._service, self._service.settings.planning
        with service.lock:
            before = service.fold.changed_settings
        try:
            changes = as_changes(file, wanted)
            detail = difference(with_changes(file, before), with_changes(file, changes))
            entry = settings_entry(file, changes, service.term)
        except SettingsError as error:
            raise ActionRefused(str(error)) from error
        if detail:
            service.submit(OperatorEntry(actor, "settings", detail=detail))
            service.submit(entry).result()
            service.settings_note = ""
        with service.lock:
            return policies_view(service.fold)
