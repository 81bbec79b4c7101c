"""What an outside witness knows and must never forget, in SQLite. Blocks on the disk: one thread at a time.

A witness's folder:

    witness.json      its name, and the id that its state has
    ed25519.pem       its keys; either may be missing, not both
    ml-dsa-44.pem
    state.db          the logs, and the newest checkpoint cosigned of each
    state.db-journal  SQLite's; empty while nothing is under way
    lock              flock of the process that serves

Keys without their state would cosign a second history. So `witness.json`, which lies with the keys, and `state.db` carry
each other's id, and a witness does not start where the state is missing, is another one's, or is older: the id changes at
every start, so that a state put back from a backup taken before the last start is refused. (A backup of the whole
folder, put back whole, cannot be told from the original; docs/witnesses.md says what to do instead.)

Invariants: `advance` is one transaction, on the disk when it returns: of two that start from one checkpoint one fails, also
when two processes try; a stored size never falls; after an error of the disk the file is opened anew, since SQLite undoes a change by what it reads from a journal
that the disk may never have got, and its memory may show what was undone; what is stored of a checkpoint are its three lines and signatures that
were verified, nothing else of what a client sent.
"""

from __future__ import annotations

import errno
import fcntl
import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, Self

from audit.note import Algorithm, NoteSigner, VerifierKey, check_key_name
from felix.errors import Code, CorruptionError, RequestError, UnavailableError
from felix.files import PRIVATE, create_file, read_file, replace_file
from felix.runtime.real import REAL
from felix.storage.disk import is_elsewhere
from felix.storage.sqlite_errors import is_busy, is_full, may_be_disk, result_code
from keys.key_file import load_ml_dsa_key, load_signing_key, save_ml_dsa_key, save_signing_key
from keys.post_quantum import MlDsaKey
from keys.signing import SigningKey

FORMAT: Final = "felix/witness/1"
LOGS_MAX: Final = 100_000
KEYS_MAX: Final = 8
"""Of one log."""
_BUSY_S: Final = 10.0
_ID_BYTES: Final = 16
_NEW_WITNESS: Final = (
    "Do not put an old state back. Make a new witness, under another name, with `felix witness init`, and have those who "
    "trust the old one trust it instead."
)
_PASSING: Final = frozenset(
    {
        sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_INTERRUPT,
    }
)  # fmt: skip
_SCHEMA: Final = """
CREATE TABLE witness (
    one INTEGER PRIMARY KEY CHECK (one = 1), name TEXT NOT NULL, keys TEXT NOT NULL,
    current TEXT NOT NULL, previous TEXT NOT NULL
);
CREATE TABLE logs (
    origin TEXT PRIMARY KEY, hash TEXT NOT NULL UNIQUE, keys TEXT NOT NULL,
    size INTEGER NOT NULL, root BLOB, note BLOB, cosigned BLOB
);
"""


class Held(NamedTuple):
    """The newest checkpoint cosigned of a log: 0 leaves and no root where there is none yet."""

    size: int
    root: bytes | None


class KnownLog(NamedTuple):
    """A log that is cosigned, and what its checkpoints verify under."""

    origin: str
    keys: tuple[VerifierKey, ...]
    held: Held


class WitnessFolder(NamedTuple):
    """The paths of a witness."""

    root: Path

    @property
    def about(self) -> Path:
        return self.root / "witness.json"

    @property
    def ed25519(self) -> Path:
        return self.root / "ed25519.pem"

    @property
    def ml_dsa_44(self) -> Path:
        return self.root / "ml-dsa-44.pem"

    @property
    def state(self) -> Path:
        return self.root / "state.db"

    @property
    def lock(self) -> Path:
        return self.root / "lock"


def init_witness(root: Path, name: str) -> tuple[VerifierKey, ...]:
    """Make a witness: keys of both algorithms, and an empty state. Raises RequestError(ALREADY_EXISTS, INVALID)."""
    check_key_name(name)
    folder = WitnessFolder(root)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(root.iterdir()):
        raise RequestError(
            f"{root} is not empty; a witness is made once.",
            code=Code.ALREADY_EXISTS,
            hint="Name another folder; a new witness has a new name, too.",
        )
    save_signing_key(SigningKey.generate(), folder.ed25519)
    save_ml_dsa_key(MlDsaKey.generate(), folder.ml_dsa_44)
    keys = tuple(signer.key for signer in _load_signers(folder, name))
    state_id = REAL.random.randbytes(_ID_BYTES).hex()
    # An empty file first: SQLite alone would make it readable by others.
    create_file(folder.state, b"", PRIVATE)
    connection = _connect(folder.state)
    try:
        with connection:
            connection.executescript(_SCHEMA)
            connection.execute(
                "INSERT INTO witness VALUES (1, ?, ?, ?, ?)", (name, _encode_keys(keys), state_id, state_id)
            )
    finally:
        connection.close()
    create_file(folder.about, _about(name, state_id), PRIVATE)
    return keys


def _about(name: str, state_id: str) -> bytes:
    return json.dumps({"format": FORMAT, "name": name, "state": state_id}, indent=1).encode() + b"\n"


def _load_signers(folder: WitnessFolder, name: str) -> tuple[NoteSigner, ...]:
    signers = []
    if folder.ed25519.exists():
        signers.append(NoteSigner.from_key(name, load_signing_key(folder.ed25519), Algorithm.COSIGNATURE))
    if folder.ml_dsa_44.exists():
        signers.append(NoteSigner.from_ml_dsa(name, load_ml_dsa_key(folder.ml_dsa_44)))
    if not signers:
        raise RequestError(f"The witness in {folder.root} has no key.", code=Code.NOT_FOUND)
    return tuple(signers)


def _connect(path: Path) -> sqlite3.Connection:
    """Opens and never makes the file. Every commit is synced, and that the journal is over: it is truncated and not removed, since SQLite takes the sync of a folder that it cannot
    open (too many open files) for done, and a journal that comes back with the power undoes what was cosigned. Its name is synced with the folder at each start."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        uri=True,
        timeout=_BUSY_S,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.execute("PRAGMA journal_mode=TRUNCATE")
    connection.execute("PRAGMA synchronous=FULL")
    return connection


def _encode_keys(keys: tuple[VerifierKey, ...]) -> str:
    return "\n".join(sorted(map(str, keys)))


def _decode_keys(text: str) -> tuple[VerifierKey, ...]:
    keys = map(VerifierKey.parse, text.split("\n"))
    return tuple(sorted(keys, key=lambda key: key.algorithm))


class ConflictError(Exception):
    """The stored checkpoint is not the one that was started from. `held` is what is stored."""

    def __init__(self, held: Held) -> None:
        super().__init__(f"The witness has {held.size} leaves.")
        self.held = held


class WitnessState:
    """An open state. Make it with `open`; close it. Calls must not overlap."""

    def __init__(
        self,
        folder: WitnessFolder,
        name: str,
        signers: tuple[NoteSigner, ...],
        connection: sqlite3.Connection,
    ) -> None:
        self.folder, self.name, self.signers = folder, name, signers
        self._open_connection: sqlite3.Connection | None = connection
        self._state_id = ""
        self._lock: IO[bytes] | None = None

    @classmethod
    def open(cls, root: Path, *, serve: bool = False) -> Self:
        """Open a witness's folder; `serve`: to cosign, as the only process. Blocks.

        Raises RequestError(NOT_FOUND) where there is no witness, RequestError(CONFLICT) where another process serves,
        CorruptionError(ROLLED_BACK) where the state is not the one of these keys as it was last, UnavailableError where it cannot be read or
        written now.
        """
        folder = WitnessFolder(root)
        name, state_id = _read_about(folder)
        signers = _load_signers(folder, name)
        if not folder.state.exists():
            raise CorruptionError(
                f"The state of the witness {name} is lost: {folder.state} is not there, and its keys are.",
                code=Code.ROLLED_BACK,
                hint=_NEW_WITNESS,
            )
        lock = _take_lock(folder, name) if serve else None
        try:
            try:
                state = cls._opened(folder, name, signers, state_id, serve=serve)
            except sqlite3.Error as error:
                if not may_be_disk(error):
                    raise
                state = cls._opened(folder, name, signers, state_id, serve=serve)
        except BaseException as error:
            if lock is not None:
                lock.close()
            if not isinstance(error, sqlite3.Error):
                raise
            if _passes(error) or (may_be_disk(error) and not _reads(folder.state)):
                raise _unusable(name, folder, error) from error
            raise CorruptionError(
                f"The state of the witness {name} cannot be read: {error}.",
                code=Code.ROLLED_BACK,
                hint=_NEW_WITNESS,
            ) from error
        state._lock = lock
        return state

    @classmethod
    def _opened(
        cls,
        folder: WitnessFolder,
        name: str,
        signers: tuple[NoteSigner, ...],
        state_id: str,
        *,
        serve: bool,
    ) -> Self:
        connection = _connect(folder.state)
        try:
            state = cls(folder, name, signers, connection)
            state._check(state_id)
            if serve:
                state._renew()
        except BaseException:
            connection.close()
            raise
        return state

    def _check(self, state_id: str) -> None:
        row = self._connection.execute("SELECT name, keys, current, previous FROM witness").fetchone()
        keys = _encode_keys(tuple(signer.key for signer in self.signers))
        if row is None or row[0] != self.name or row[1] != keys:
            raise CorruptionError(
                f"The state in {self.folder.state} is not of the witness {self.name} with these keys.",
                code=Code.ROLLED_BACK,
                hint=_NEW_WITNESS,
            )
        self._state_id = row[2]
        # The state is renewed first, then witness.json: a crash between the two leaves the id before in the file.
        if state_id not in (row[2], row[3]):
            raise CorruptionError(
                f"The state of the witness {self.name} is not the one that it had when it last started: an older one was "
                "put back, or witness.json was.",
                code=Code.ROLLED_BACK,
                hint=_NEW_WITNESS,
            )

    def _renew(self) -> None:
        """A new id in both places, so that what was copied before this start is known for what it is."""
        state_id = REAL.random.randbytes(_ID_BYTES).hex()
        before = _read_about(self.folder)[1]
        with self._transaction():
            self._connection.execute("UPDATE witness SET current = ?, previous = ?", (state_id, before))
        self._state_id = state_id
        replace_file(self.folder.about, _about(self.name, state_id), PRIVATE)

    @property
    def _connection(self) -> sqlite3.Connection:
        """Opens the file again where its disk had failed. Raises UnavailableError, CorruptionError(ROLLED_BACK) where another state is there by now."""
        if self._open_connection is None:
            try:
                self._require_there()
                connection = _connect(self.folder.state)
            except (OSError, sqlite3.Error) as error:
                raise _unusable(self.name, self.folder, error) from error
            try:
                row = connection.execute("SELECT name, current FROM witness").fetchone()
                if row != (self.name, self._state_id):
                    raise CorruptionError(
                        f"The state of the witness {self.name} is not the one that it was started with.",
                        code=Code.ROLLED_BACK,
                        hint="Stop it, and put back the folder as it was.",
                    )
            except sqlite3.Error as error:
                connection.close()
                raise _unusable(self.name, self.folder, error) from error
            except BaseException:
                connection.close()
                raise
            self._open_connection = connection
        return self._open_connection

    def _require_there(self) -> None:
        """Raises OSError where another folder is at the path: moved, unmounted, or with another one mounted over it."""
        if self._lock is not None and is_elsewhere(self.folder.lock, self._lock.fileno()):
            raise OSError(errno.ENODEV, "it is not the folder that was opened", str(self.folder.root))

    def _disconnect(self) -> None:
        """Nothing that SQLite has in memory is believed any more; what is half done is undone as the file is opened again."""
        connection, self._open_connection = self._open_connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Others wait, processes too; committed and synced at the end, or undone."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        except sqlite3.DatabaseError as error:
            if is_full(error):
                raise self._no_room() from error
            if not is_busy(error):
                self._disconnect()
                raise _unusable(self.name, self.folder, error) from error
            raise UnavailableError(f"The witness's state is busy: {error}.", retry_after_ms=1_000) from error
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException as error:
            self._undo()
            if isinstance(error, sqlite3.OperationalError) and is_full(error):
                raise self._no_room() from error
            if isinstance(error, sqlite3.Error) and (_passes(error) or may_be_disk(error)):
                # Undone from the journal by the connection that opens the file next: nothing was cosigned.
                self._disconnect()
                raise _unusable(self.name, self.folder, error) from error
            raise

    def _undo(self) -> None:
        if self._open_connection is None:
            return
        try:
            self._open_connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            # Where there is no transaction any more, SQLite has undone it.
            if result_code(error) != sqlite3.SQLITE_ERROR:
                self._disconnect()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raises UnavailableError where the disk does not answer."""
        try:
            yield
        except sqlite3.Error as error:
            if _passes(error) or may_be_disk(error):
                if not is_busy(error):
                    self._disconnect()
                raise _unusable(self.name, self.folder, error) from error
            raise

    def _no_room(self) -> UnavailableError:
        return UnavailableError(
            f"The disk of the witness {self.name} is full: {self.folder.state} cannot be written.",
            code=Code.DISK_FULL,
            hint="Make room. What it has cosigned is kept, and it goes on by itself.",
            retry_after_ms=1_000,
        )

    # -- logs ------------------------------------------------------------------------------------------

    def add_log(self, origin: str, key: VerifierKey, *, in_place: bool = False) -> bool:
        """Cosign this log from now on, or take another key of it; `in_place`: of its keys of that algorithm this one alone. False where
        nothing changes. Raises RequestError where the key is a witness's or there are too many."""
        if key.algorithm is Algorithm.COSIGNATURE:
            raise RequestError(f"{key.name} has a witness's key, not a log's.")
        if not origin or len(origin.encode()) > 255 or any(ord(letter) < 0x20 for letter in origin):
            raise RequestError(f"{origin[:80]!r} is not an origin: one line of 1 to 255 bytes.")
        with self._transaction():
            held = self.log(origin)
            if held is None:
                if self._connection.execute("SELECT count(*) FROM logs").fetchone()[0] >= LOGS_MAX:
                    raise RequestError(f"A witness has {LOGS_MAX} logs at most.", code=Code.LIMIT_STORED)
                self._connection.execute(
                    "INSERT INTO logs VALUES (?, ?, ?, 0, NULL, NULL, NULL)",
                    (origin, origin_hash(origin), _encode_keys((key,))),
                )
                return True
            stay = (
                [each for each in held.keys if each.algorithm is not key.algorithm] if in_place else held.keys
            )
            keys = (*(each for each in stay if each != key), key)
            if set(keys) == set(held.keys):
                return False
            if len(keys) > KEYS_MAX:
                raise RequestError(f"A log has {KEYS_MAX} keys at most.", code=Code.LIMIT_STORED)
            self._connection.execute(
                "UPDATE logs SET keys = ? WHERE origin = ?", (_encode_keys(keys), origin)
            )
        return True

    def log(self, origin: str) -> KnownLog | None:
        """A log by its origin. Raises UnavailableError where the disk does not answer."""
        with self._reading():
            row = self._connection.execute(
                "SELECT keys, size, root FROM logs WHERE origin = ?", (origin,)
            ).fetchone()
        return None if row is None else KnownLog(origin, _decode_keys(row[0]), Held(row[1], row[2]))

    def logs(self) -> list[KnownLog]:
        """Every log, by origin."""
        rows: list[Any] = self._connection.execute(
            "SELECT origin, keys, size, root FROM logs ORDER BY origin"
        ).fetchall()
        return [KnownLog(row[0], _decode_keys(row[1]), Held(row[2], row[3])) for row in rows]

    # -- checkpoints -----------------------------------------------------------------------------------

    def advance(self, origin: str, start: Held, size: int, root: bytes, note: bytes) -> None:
        """Store this checkpoint in place of `start`; durable on return. `note`: verified lines alone.

        Raises ConflictError where something else than `start` is stored by now, UnavailableError where the disk is full, sqlite3.Error where it
        fails.
        """
        assert size >= start.size
        with self._transaction():
            log = self.log(origin)
            assert log is not None, "the caller has just read it, and logs are never removed"
            if log.held != start:
                raise ConflictError(log.held)
            self._connection.execute(
                "UPDATE logs SET size = ?, root = ?, note = ? WHERE origin = ?", (size, root, note, origin)
            )

    def keep_cosigned(self, origin: str, size: int, root: bytes, cosigned: bytes) -> None:
        """Keep the cosigned note for monitors, unless a newer checkpoint was stored meanwhile."""
        with self._transaction():
            self._connection.execute(
                "UPDATE logs SET cosigned = ? WHERE origin = ? AND size = ? AND root = ?",
                (cosigned, origin, size, root),
            )

    def cosigned(self, hash_: str) -> bytes | None:
        """The newest cosigned note, by the SHA-256 of the origin in hexadecimal. Raises UnavailableError where the disk does not answer."""
        with self._reading():
            row = self._connection.execute("SELECT cosigned FROM logs WHERE hash = ?", (hash_,)).fetchone()
        return None if row is None else row[0]

    def close(self) -> None:
        """Let go of the files. Safe to call twice."""
        self._disconnect()
        if self._lock is not None:
            self._lock.close()


def _reads(path: Path) -> bool:
    """Whether the disk gives all of a file."""
    try:
        path.read_bytes()
    except OSError:
        return False
    return True


def _passes(error: sqlite3.Error) -> bool:
    """Whether it is the disk, its room, its rights or too many open files, and says nothing of what the state holds."""
    return result_code(error) in _PASSING


def _unusable(name: str, folder: WitnessFolder, error: sqlite3.Error | OSError) -> UnavailableError:
    return UnavailableError(
        f"The state of the witness {name} cannot be used now: {error}.",
        code=Code.DISK_FULL if isinstance(error, sqlite3.Error) and is_full(error) else Code.UNAVAILABLE,
        hint=f"Look after the disk that {folder.state} is on, who may read the file, and how many files the process may open. "
        "What it has cosigned is kept.",
        retry_after_ms=1_000,
    )


def origin_hash(origin: str) -> str:
    """What an origin is called in the monitoring interface."""
    return sha256(origin.encode()).hexdigest()


def _read_about(folder: WitnessFolder) -> tuple[str, str]:
    if not folder.about.exists():
        raise RequestError(
            f"{folder.root} is not the folder of a witness: it has no {folder.about.name}.",
            code=Code.NOT_FOUND,
            hint=f"Name its folder with --dir, or make a witness: felix witness init NAME --dir {folder.root}",
        )
    data = read_file(folder.about, "the name and state of a witness", private=True)
    try:
        about = json.loads(data)
        name, state_id = about["name"], about["state"]
        if about["format"] != FORMAT or not isinstance(name, str) or not isinstance(state_id, str):
            raise ValueError("the format is another one")
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{folder.about} cannot be read: {error}.", code=Code.CONFIG_INVALID) from error
    return check_key_name(name), state_id


def _take_lock(folder: WitnessFolder, name: str) -> IO[bytes]:
    lock = folder.lock.open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise RequestError(
            f"The witness {name} is served by another process.",
            code=Code.CONFLICT,
            hint="Stop that one first.",
        ) from error
    return lock
