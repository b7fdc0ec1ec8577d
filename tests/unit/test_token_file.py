"""The file of tokens: its owner's alone, whole or refused, and what is in it opens nothing by itself."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from advisor import token_command
from advisor.access.errors import NotAdmitted, TokensError
from advisor.access.identity import Identity, Scope
from advisor.access.token_file import TOKENS_MAX, TokenFile

NOW_US = 1_764_440_651_000_000


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    return TokenFile(tmp_path / "state")


def test_a_token_is_kept_as_a_hash_in_a_file_that_nobody_else_reads(file: TokenFile) -> None:
    token, text = file.create("ann", Scope.OPERATE, "acme", valid_s=60, now_us=NOW_US)
    prefix, token_id, secret = text.split("_", 2)
    assert (prefix, token_id, len(secret)) == ("kva", token.id, 43)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700, "a directory that it made"
    kept = json.loads(file.path.read_text())
    assert kept == {"version": 1, "tokens": [{
        "id": token.id, "name": "ann", "scope": "operate", "digest": hashlib.sha256(secret.encode()).hexdigest(),
        "created_us": NOW_US, "expires_us": NOW_US + 60_000_000, "tenant": "acme",
    }]}  # fmt: skip
    assert [each.name for each in file.path.parent.iterdir() if each.suffix == ".part"] == []
    assert file.book().admitted(text, NOW_US).identity == Identity("ann", Scope.OPERATE, "acme")


def test_what_another_process_changes_is_seen_at_the_next_look(file: TokenFile) -> None:
    reader = TokenFile(file.path.parent)
    assert len(reader.book()) == 0
    token, text = file.create("ann", Scope.READ)
    assert reader.book().admitted(text, NOW_US) == token
    file.revoke(token.id)
    with pytest.raises(NotAdmitted) as refused:
        reader.book().admitted(text, NOW_US)
    assert refused.value.reason == "no such token"


def test_many_who_make_tokens_at_once_lose_none(file: TokenFile) -> None:
    made: list[str] = []

    def make(number: int) -> None:
        made.extend(TokenFile(file.path.parent).create(f"n{number}", Scope.READ)[0].id for _ in range(5))

    threads = [threading.Thread(target=make, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {token.id for token in file.book()} == set(made)
    assert len(made) == 30


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is damaged"),
        (b"{", "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (b'{"version": 2, "tokens": []}', "is not what this version writes"),
        (b'{"version": 1, "tokens": [], "more": 1}', "is damaged"),
        (b'{"version": 1, "tokens": [{"id": "0123456789ab", "name": "a", "scope": "root"}]}', "is damaged"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused_in_a_sentence_and_kept(file: TokenFile, content: bytes, words: str) -> None:
    file.path.parent.mkdir()
    file.path.write_bytes(content)
    file.path.chmod(0o600)
    with pytest.raises(TokensError, match=rf"tokens\.json {words}.*nobody comes in by a token; mend it, or delete it"):
        file.book()
    with pytest.raises(TokensError, match=words):
        file.create("ann", Scope.READ)
    assert file.path.read_bytes() == content


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o602])
def test_a_file_that_others_may_touch_is_refused(file: TokenFile, mode: int) -> None:
    file.create("ann", Scope.READ)
    file.path.chmod(mode)
    with pytest.raises(TokensError, match=rf"mode {mode:o}, open to others: chmod 600 it"):
        file.book()
    file.path.chmod(0o600)
    assert len(file.book()) == 1


def test_a_link_in_its_place_is_refused(file: TokenFile) -> None:
    file.create("ann", Scope.READ)
    file.path.symlink_to(file.path.rename(file.path.with_name("elsewhere")))
    with pytest.raises(TokensError, match="nobody comes in by a token"):
        file.book()


@pytest.mark.parametrize(
    ("name", "words"),
    [("", "the name ''"), ("a b", "the name 'a b'"), ("a\n", "the name"), ("a" * 65, "up to 64 letters"),
     ("operator", "is whoever uses a service without login"), ("-a", "the name '-a'")],
)  # fmt: skip
def test_a_name_that_cannot_be_one_is_said(file: TokenFile, name: str, words: str) -> None:
    with pytest.raises(TokensError, match=words):
        file.create(name, Scope.READ)


def test_there_is_a_most_of_tokens_and_an_unknown_one_cannot_be_revoked(file: TokenFile) -> None:
    file.create("ann", Scope.READ)
    with pytest.raises(TokensError, match="holds no token 'x': kvadvisor token list names"):
        file.revoke("x")
    kept = json.loads(file.path.read_text())
    kept["tokens"] = [{**kept["tokens"][0], "id": f"{number:012x}"} for number in range(TOKENS_MAX)]
    file.path.write_text(json.dumps(kept))
    with pytest.raises(TokensError, match="1024 tokens, which is the most: revoke some first"):
        file.create("bo", Scope.READ)


def test_a_name_that_another_good_token_has_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, file = tmp_path / "a.toml", TokenFile(tmp_path)
    config.write_text('directory = "."\n')
    file.create("ann", Scope.READ, valid_s=60, now_us=NOW_US)  # long expired
    token_command.create("ann", "read", config=config)
    assert "warning" not in capsys.readouterr().err
    token_command.create("ann", "operate", config=config)
    first = list(file.book())[1]
    assert f"warning: ann has other good tokens, {first.id}: " in capsys.readouterr().err


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """Whoever comes may enter; pytest closes its own to others whenever another pytest begins."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone makes a folder another user's")
def test_what_root_makes_is_whose_the_folder_is_and_no_link_of_theirs_is_followed(public_folder: Path) -> None:
    config, state, treasure = (public_folder / name for name in ("a.toml", "state", "treasure"))
    config.write_text('directory = "state"\n')
    treasure.write_text("root's")
    state.mkdir()
    os.chown(state, 1234, 1234)
    command = [sys.executable, "-m", "advisor.cli", "token", "create", "--name", "a", "--scope", "read"]
    command += ["--config", str(config)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert {(each.stat().st_uid, each.stat().st_gid) for each in state.iterdir()} == {(1234, 1234)}
    (state / "tokens.json.part").symlink_to(treasure)
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (failed.returncode, treasure.read_text(), treasure.stat().st_uid) == (2, "root's", 0)
    assert "tokens.json cannot be written (Permission denied)" in failed.stderr
    os.chown(state / "tokens.json", 4321, 1234)
    with pytest.raises(TokensError, match="belongs to user 4321: chown it to 0, who runs this"):
        TokenFile(state).book()


@pytest.mark.parametrize("tenant", ["a\nb", "a\x1b[2Jb", "a\u202eb", "a\x00"])
def test_a_tenant_that_cannot_be_printed_is_refused_by_its_value(file: TokenFile, tenant: str) -> None:
    with pytest.raises(TokensError) as refused:
        file.create("ann", Scope.READ, tenant)
    assert str(refused.value) == f"the tenant {tenant!r} has characters that cannot be printed: leave them out"
    assert not file.path.exists()


def test_a_file_that_finds_no_room_leaves_nothing_half_written(file: TokenFile) -> None:
    file.create("ann", Scope.READ)
    before = file.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    taken = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        with pytest.raises(TokensError, match="cannot be written"):
            file.create("bo", Scope.READ)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, taken)
    assert file.path.read_bytes() == before
    assert [each.name for each in file.path.parent.iterdir() if each.suffix == ".part"] == []
