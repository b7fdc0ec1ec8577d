"""The schema of a log's database: made, brought up to date, or refused, by Alembic's migrations."""

from __future__ import annotations

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect

from advisor.errors import LogError


def migrate(connection: Connection, place: object) -> None:
    """Make the tables, or bring them to this version's. Raises `LogError` for a database that is not ours or newer."""
    config = _alembic()
    scripts = ScriptDirectory.from_config(config)
    found = MigrationContext.configure(connection).get_current_revision()
    if found is None and inspect(connection).get_table_names():
        raise LogError(f"{place} is another program's database: move it away or choose another")
    _refuse_newer(found, scripts, place)
    if found != scripts.get_current_head():
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def require_current(connection: Connection, place: object) -> None:
    """Raises `LogError` unless the schema is this version's."""
    scripts = ScriptDirectory.from_config(_alembic())
    found = MigrationContext.configure(connection).get_current_revision()
    if found is None:
        raise LogError(f"{place} holds no log: check the directory")
    _refuse_newer(found, scripts, place)
    if found != scripts.get_current_head():
        raise LogError(
            f"{place} has schema {found}, older than this version's {scripts.get_current_head()}: "
            "start `kvadvisor serve` on it once, which brings it up to date"
        )


def _alembic() -> Config:
    config = Config()
    config.set_main_option("script_location", "advisor:migrations")
    config.set_main_option("path_separator", "os")
    return config


def _refuse_newer(found: str | None, scripts: ScriptDirectory, place: object) -> None:
    known = {script.revision for script in scripts.walk_revisions()}
    if found is not None and found not in known:
        raise LogError(
            f"{place} has schema {found}, made by a newer kvadvisor than this one, which knows up to "
            f"{scripts.get_current_head()}: install that version again or choose another directory"
        )
