"""Cursors of identities that see one tenant alone.

A plain cursor is a row's number: two of them tell how many rows lie between, others' among them. A tenant's is
encrypted with a key of this process.
"""

from __future__ import annotations

from cryptography.fernet import Fernet, InvalidToken

from advisor.access.identity import Identity

BEGIN_AGAIN = (
    "it is no cursor of this list for you, or it is of before the service's last start: begin at the first page"
)


class Cursors:
    """Seals and opens the cursors of one process. Whoever sees all tenants gets them plain."""

    def __init__(self) -> None:
        self._fernet = Fernet(Fernet.generate_key())

    def sealed(self, who: Identity, route: str, cursor: str | None) -> str | None:
        """What `who` is shown of a cursor of `route`."""
        if cursor is None or not who.tenant:
            return cursor
        return self._fernet.encrypt(f"{_owner(who, route)}{cursor}".encode()).decode()

    def opened(self, who: Identity, route: str, cursor: str | None) -> str | None:
        """The cursor again. Raises `ValueError` for one that was not sealed for `who` and `route`."""
        if cursor is None or not who.tenant:
            return cursor
        try:
            plain = self._fernet.decrypt(cursor.encode()).decode()
        except InvalidToken as error:
            raise ValueError(BEGIN_AGAIN) from error
        owner = _owner(who, route)
        if not plain.startswith(owner):
            raise ValueError(BEGIN_AGAIN)
        return plain.removeprefix(owner)


def _owner(who: Identity, route: str) -> str:
    return f"{route}\0{who.tenant}\0{who.name}\0"
