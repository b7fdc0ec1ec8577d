"""Sessions: found while they hold, never after, and never more than there may be."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from advisor.access.identity import Identity, Scope
from advisor.access.sessions import IDLE_US_MAX, SESSIONS_EACH_MAX, WHOLE_US_MAX, Admission, Sessions
from tests.examples import examples

HOUR_US = 3_600_000_000


class SessionsMachine(RuleBasedStateMachine):
    """Beside a model that knows for each id when it was opened and used, and until when its token is good."""

    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.sessions = Sessions()
        self.now_us = 1_000 * HOUR_US
        self.known: dict[str, tuple[Admission, int, int]] = {}

    @rule(target=ids, name=st.sampled_from(["ann", "bo"]), hours=st.integers(0, 30))
    def opens(self, name: str, hours: int) -> str:
        admission = Admission(Identity(name, Scope.READ), expires_us=self.now_us + hours * HOUR_US if hours else 0)
        own = [each for each, (other, _, _) in self.known.items() if other.identity == admission.identity]
        for oldest in own[: max(0, len(own) - SESSIONS_EACH_MAX + 1)]:
            del self.known[oldest]
        session_id = self.sessions.open(admission, self.now_us)
        assert session_id not in self.known
        self.known[session_id] = (admission, self.now_us, self.now_us)
        return session_id

    @rule(session_id=ids)
    def is_looked_for(self, session_id: str) -> None:
        found = self.sessions.find(session_id, self.now_us)
        admission, opened_us, used_us = self.known.pop(session_id, (None, 0, 0))
        ends_us = opened_us + WHOLE_US_MAX
        if admission is not None and admission.expires_us:
            ends_us = min(ends_us, admission.expires_us)
        if admission is None or self.now_us >= ends_us or self.now_us - used_us >= IDLE_US_MAX:
            assert found is None
            return
        assert found == admission
        self.known[session_id] = (admission, opened_us, self.now_us)

    @rule(session_id=consumes(ids))
    def is_closed(self, session_id: str) -> None:
        admission = self.known.pop(session_id, (None, 0, 0))[0]
        assert self.sessions.close(session_id) == admission
        assert self.sessions.find(session_id, self.now_us) is None

    @rule(hours=st.integers(0, 9))
    def time_passes(self, hours: int) -> None:
        self.now_us += hours * HOUR_US

    @rule()
    def nobodys_id_opens_nothing(self) -> None:
        assert self.sessions.find("A" * 43, self.now_us) is None

    @invariant()
    def there_are_as_many_as_known(self) -> None:
        assert len(self.sessions) == len(self.known)


SessionsMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=40)
TestSessions = SessionsMachine.TestCase
