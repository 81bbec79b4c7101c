"""The keys of a log that several brokers have copies of are changed: where they end, by which files, and what is refused before anything is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from region_home import make_region

from audit.checkpoint import Checkpoint
from audit.cosigned_notes import join
from audit.leaf import Header, Kind, Leaf, Side, encode_leaf
from audit.merkle import Tree, leaf_hash
from audit.note import Algorithm, Note, NoteSigner, encode_note
from audit.origin import region_origin
from audit.signer_disk import held_keys, load_signers
from audit.tile import COPIED_PATH, COSIGNED_PATH, KEPT_PATH, bundle_path, encode_bundle, tile_path
from audit.tile_disk import Folder
from cli.region import _given_checkpoints
from felix.address import Address
from felix.errors import Code, FelixError, RequestError, TamperError, UnavailableError
from keys.bundle import RegionBundle, check_update, decode_bundle
from keys.key_file import load_signing_key
from keys.signing import SigningKey
from region.config import ClusterBroker, ClusterConfig, MetadataConfig, load_config
from region.copied_log import NO_AUDIT
from region.trust.changed_log_key import (
    LOG_KEY_CHANGED,
    WORDS_MAX,
    EndedLogKey,
    LogKeyLeaf,
    ended_word,
    says_changed,
    sign_word,
    stale_log_key,
    unsaid_log_key,
    with_word,
    word_of,
)
from region.trust.log_keys import change_log_keys
from region.trust.signing_key_leaves import key_id_of
from region.trust.signing_keys import change_signing_keys

NOW = 1_900_000_000_000
NAMES = ("b1", "b2", "b3")
NEXT = b"n" * 32


def leaves_of(size: int, *, other_from: int = 1 << 30) -> list[bytes]:
    """The first leaves of a log; from `other_from` on those of another history."""
    headers = (
        Header(
            kind=Kind.KEY, side=Side.INGRESS, time_ms=NOW + at, source_region="us-east", destination_region="us-east",
            key_id=b"k" * 16, action="destroyed" if at >= other_from else "made",
        )
        for at in range(size)
    )  # fmt: skip
    return [encode_leaf(Leaf(header)) for header in headers]


class Store:
    """The metadata store of a region whose brokers are stopped."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.words: bytes | None = None
        self.fails_at = 0
        self.error: FelixError = UnavailableError("It does not answer.")

    def require_stopped(self) -> None:
        self._ask("stopped")

    def successor(self, own: RegionBundle) -> bytes | None:
        word = word_of(self.words, own)
        return None if word is None else word.successor

    def tell_ended(self, own: RegionBundle, key: SigningKey, successor: bytes, *, anew: bool) -> None:
        self._ask("told")
        if not anew and self.successor(own) not in (None, successor):
            raise RequestError("The store names another one.", code=Code.CONFLICT)
        self.words = with_word(self.words, sign_word(own, key, successor, NOW), own)

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if len(self.asked) == self.fails_at:
            raise self.error


class Home:
    """A region of three brokers, whose copies of the log lie here as far as they are written."""

    def __init__(self, root: Path) -> None:
        self.folder = make_region(root, "us-east")
        brokers = tuple(
            ClusterBroker(id=name, listen=Address("127.0.0.1", 9 + at)) for at, name in enumerate(NAMES)
        )
        loaded = load_config(self.folder.config)
        self.config = msgspec.structs.replace(
            loaded,
            metadata=MetadataConfig(kind="etcd", endpoints=("127.0.0.1:9",)),
            cluster=ClusterConfig(brokers=brokers),
        )
        self.origin = region_origin(self.config.region, self.config.mesh)
        self.store = Store()
        self.signers = list(load_signers(self.origin, self.folder.audit_key, self.folder.audit_ml_dsa_key))

    @property
    def bundle(self) -> RegionBundle:
        return decode_bundle(self.folder.bundle.read_bytes()).bundle

    def path(self, name: str) -> Path:
        return self.folder.root / self.config.of_broker(name).data / "audit"

    def note(self, leaves: list[bytes], size: int = -1) -> bytes:
        tree = Tree()
        for leaf in leaves:
            tree.add(leaf_hash(leaf))
        text = Checkpoint(self.origin, tree.size if size < 0 else size, tree.root()).text()
        return encode_note(Note(text, tuple(signer.sign(text, NOW // 1000) for signer in self.signers)))

    def copy(self, name: str, leaves: list[bytes], *, at: Path | None = None) -> None:
        files, tree = Folder(at or self.path(name)), Tree()
        for leaf in leaves:
            tree.add(leaf_hash(leaf))
        assert len(leaves) < 256
        if leaves:
            files.write(bundle_path(0, len(leaves)), encode_bundle(leaves))
        for tile in tree.partial_tiles():
            files.write(tile_path(tile.level, tile.number, tile.width), tile.hashes)
        files.write("checkpoint", self.note(leaves))
        files.write(COPIED_PATH, b"")

    def change(self, **more: Any) -> int:
        return change_log_keys(self.folder, self.config, NOW, store=self.store, **more).size

    def held(self) -> frozenset[bytes]:
        return held_keys(self.origin, self.folder.audit_key, self.folder.audit_ml_dsa_key)

    def named(self) -> frozenset[bytes]:
        keys = [key for key in self.bundle.audit_keys if (key.role, key.name) == ("log", self.origin)]
        return frozenset(key.public for key in keys if key.to_size is None)

    def refused(self, match: str, **more: Any) -> FelixError:
        """Refused, with nothing changed and nothing told."""
        before, keys, told = self.folder.bundle.read_bytes(), self.held(), self.store.words
        with pytest.raises(FelixError, match=match) as found:
            self.change(**more)
        assert self.folder.bundle.read_bytes() == before and self.held() == keys
        assert self.store.words == told
        return found.value


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_the_keys_end_with_the_largest_checkpoint_of_all_copies(home: Home) -> None:
    for name, size in zip(NAMES, (5, 7, 0), strict=True):
        home.copy(name, leaves_of(size))
    before = home.bundle
    assert home.change() == 7 and home.named() == home.held()
    # A broker that is started between the first look and the word is seen by the second one; a later one reads the word.
    assert home.store.asked == ["stopped", "told", "stopped"]
    assert "other keys sign the log now" in ended_word(home.store.words, before)
    assert not ended_word(home.store.words, home.bundle)
    own = [key for key in home.bundle.audit_keys if (key.role, key.name) == ("log", home.origin)]
    assert sorted((key.from_size, key.to_size or 0) for key in own) == [(0, 7), (0, 7), (7, 0), (7, 0)]
    with pytest.raises(TamperError, match="any more, or another one"):
        check_update(before, decode_bundle(home.folder.bundle.read_bytes()))


def test_of_a_copy_that_lies_elsewhere_the_newest_checkpoint_is_asked_for(home: Home) -> None:
    home.copy("b2", leaves_of(7))
    found = home.refused("brokers b1, b3")
    assert (
        found.code is Code.NOT_FOUND and "--checkpoint b1=FILE" in found.hint and "--without b1" in found.hint
    )
    found = home.refused("brokers b3", copies={"b1": home.note(leaves_of(7))})
    given = {"b1": home.note(leaves_of(3)), "b3": home.note(leaves_of(7))}
    home.refused("no broker b4", copies=given | {"b4": home.note([])})
    changed = change_log_keys(home.folder, home.config, NOW, store=home.store, copies=given)
    assert changed.size == 7
    assert changed.copies == (
        "broker b2: 7 leaves, its copy here; broker b1: 3 leaves, as given; broker b3: 7 leaves, as given. None was left out."
    )


def test_of_two_files_of_one_broker_both_count(home: Home, tmp_path: Path) -> None:
    paths = [tmp_path / "first", tmp_path / "second"]
    for path, size in zip(paths, (6, 3), strict=True):
        path.write_bytes(home.note(leaves_of(size)))
    copies, others = _given_checkpoints(home.config, [f"b1={path}" for path in paths])
    assert copies == {"b1": paths[1].read_bytes()} and [note for _, note in others] == [paths[0].read_bytes()]


def test_a_copy_that_is_gone_or_that_a_broker_never_had_is_not_waited_for(home: Home) -> None:
    home.copy("b1", leaves_of(4))
    home.path("b2").with_name(NO_AUDIT).mkdir(parents=True)
    home.refused("brokers b3")
    changed = change_log_keys(home.folder, home.config, NOW, store=home.store, without=["b3"])
    assert changed.size == 4 and changed.copies.endswith("Not asked: b2, b3.")


def test_a_checkpoint_ends_the_keys_only_where_the_leaves_under_it_are_at_hand(home: Home) -> None:
    """Whoever stole the keys can sign one over leaves that nobody has: then no broker could go on with the log."""
    home.copy("b1", leaves_of(4))
    large = home.note([], size=1_000_000)
    found = home.refused("goes further than those here", copies={"b2": home.note(leaves_of(4)), "b3": large})
    assert found.code is Code.CONFLICT and "broker b3" in found.sentence and "--log" in found.hint
    home.copy("b2", leaves_of(4))
    home.copy("b3", leaves_of(4))
    Folder(home.path("b3")).write("checkpoint", large)
    home.refused("none of the others one of more than 4")
    Folder(home.path("b3")).write("checkpoint", home.note([], size=10))
    home.refused("are not those under its checkpoint of 10 leaves")
    found = home.refused(
        "is known to have had 6 leaves", without=["b3"], remembered=[home.note(leaves_of(6))]
    )
    assert "Start the brokers" in found.hint
    assert home.change(without=["b3"], remembered=[b"no note", home.note(leaves_of(2))]) == 4


def test_of_a_copy_that_is_far_ahead_of_all_others_is_asked_first(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stole the keys and can write one broker's folder has leaves and a checkpoint there that nobody else has: the new keys would begin behind what the log has."""
    monkeypatch.setattr("region.copied_log.LEAD_LEAVES_MAX", 10)
    home.copy("b1", leaves_of(4))
    home.copy("b2", leaves_of(3))
    home.copy("b3", leaves_of(15))
    found = home.refused("broker b3 has a checkpoint of 15 leaves, and none of the others one of more than 4")
    assert "(--without)" in found.hint
    home.copy("b2", leaves_of(5))
    assert home.change() == 15, "no further ahead than it may be"


def test_nothing_is_told_where_the_bundle_cannot_be_signed(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told and not finished, no broker would start again."""
    for name in NAMES:
        home.copy(name, leaves_of(4))
    policy_key = home.folder.policy_key.rename(home.folder.policy_key.with_suffix(".aside"))
    home.refused("policy.pem")
    policy_key.rename(home.folder.policy_key)

    def full(*_: object) -> None:
        raise RequestError("The bundle has no room.")

    with monkeypatch.context() as patch:
        patch.setattr("region.trust.log_keys.sign_bundle", full)
        home.refused("no room")
    assert home.change() == 4


def test_a_copy_that_was_brought_here_counts_as_one(home: Home, tmp_path: Path) -> None:
    home.copy("b1", leaves_of(4))
    home.copy("", leaves_of(6), at=tmp_path / "brought")
    given = {"b2": home.note(leaves_of(6)), "b3": home.note(leaves_of(5))}
    home.refused("goes further than those here", copies=given)
    shutil.rmtree(home.path("b1"))
    (tmp_path / "brought" / COPIED_PATH).unlink()  # as felix audit copy makes it
    given |= {"b1": home.note(leaves_of(4))}
    home.refused("No copy of the audit log", copies=given)
    assert home.change(copies=given, log=tmp_path / "brought") == 6


def test_a_copy_that_was_brought_to_a_machine_without_any_is_one_of_several(
    home: Home, tmp_path: Path
) -> None:
    """`felix audit copy` does not say of which kind the log is."""
    brought = tmp_path / "brought"
    home.copy("", leaves_of(6), at=brought)
    (brought / COPIED_PATH).unlink()
    home.refused("brokers b1, b2, b3", log=brought)
    given = {name: home.note(leaves_of(size)) for name, size in zip(NAMES, (6, 5, 0), strict=True)}
    assert home.change(copies=given, log=brought) == 6 and home.store.words is not None


@pytest.mark.parametrize("where", ["a copy", "a checkpoint that was given", "what others remember"])
@pytest.mark.parametrize("size", [3, 4, 5])
def test_of_two_histories_none_is_chosen(home: Home, where: str, size: int) -> None:
    for name in NAMES:
        home.copy(name, leaves_of(5))
    other = leaves_of(size, other_from=2)
    more: dict[str, Any] = {}
    if where == "a copy":
        home.copy("b2", other)
    elif where == "what others remember":
        more = {"remembered": [home.note(other)]}
    else:
        shutil.rmtree(home.path("b2"))
        more = {"copies": {"b2": home.note(other)}}
    found = home.refused("is of another history", **more)
    assert isinstance(found, TamperError) and f"checkpoint of {size} leaves" in found.sentence


def test_leaves_that_are_not_those_under_the_checkpoint_end_no_keys(home: Home) -> None:
    for name in NAMES:
        home.copy(name, leaves_of(5))
        Folder(home.path(name)).write(bundle_path(0, 5), encode_bundle(leaves_of(5, other_from=4)))
    assert isinstance(home.refused("are not those under its checkpoint"), TamperError)


def test_a_checkpoint_that_the_log_did_not_sign_is_refused(home: Home) -> None:
    home.copy("b1", leaves_of(4))
    home.signers = [NoteSigner.from_key(home.origin, SigningKey.generate(), Algorithm.ED25519)]
    given = {"b2": home.note(leaves_of(4)), "b3": home.note(leaves_of(4))}
    found = home.refused("checkpoint of broker b2 is none of the audit log", copies=given)
    assert "folder is of before" in found.hint


def test_a_copy_that_a_broker_has_open_is_refused(home: Home) -> None:
    for name in NAMES:
        home.copy(name, leaves_of(4))
    lock = Folder(home.path("b2")).lock()
    assert "Stop the region's brokers" in home.refused("open in another process").hint
    lock.release()
    assert home.change() == 4


def test_checkpoints_of_brokers_are_not_asked_for_a_log_that_none_has_a_copy_of(home: Home) -> None:
    home.copy("b1", leaves_of(4))
    (home.path("b1") / COPIED_PATH).unlink()
    home.refused("No copy of the region's own audit log", copies={"b1": b""})
    home.copy("b1", leaves_of(4))
    home.refused("No copy of the region's own audit log", without=["b1"], bridge="a")


@pytest.mark.parametrize("at", [1, 2, 3])
def test_where_the_store_does_not_answer_or_a_broker_is_alive_nothing_is_changed_and_the_next_call_does_it(
    home: Home, at: int
) -> None:
    for name in NAMES:
        home.copy(name, leaves_of(4))
    before, keys = home.folder.bundle.read_bytes(), home.held()
    home.store.fails_at = at
    with pytest.raises(UnavailableError) as failed:
        home.change()
    assert ("no broker starts before this has been run again" in failed.value.hint) is (at == 3)
    assert home.folder.bundle.read_bytes() == before and home.held() == keys
    # Once the store says so, no broker starts before the change is finished, with the key that it names.
    assert bool(ended_word(home.store.words, home.bundle)) is (at == 3)
    told = home.store.successor(home.bundle)
    assert home.change() == 4 and home.named() == home.held()
    assert told is None or told in home.held()


def test_a_folder_of_before_on_another_machine_makes_no_second_keys_for_what_comes(
    home: Home, tmp_path: Path
) -> None:
    """Two bundles would name two keys, and whoever was told of the one would believe nothing of the other."""
    for name in NAMES:
        home.copy(name, leaves_of(4))
    before = tmp_path / "before"
    shutil.copytree(home.folder.root, before)
    assert home.change() == 4
    first = home.named()
    shutil.rmtree(home.folder.root)
    before.rename(home.folder.root)
    home.refused("names another one")
    assert home.change(anew=True) == 4 and home.named() == home.held() and not first & home.named()


OPERATIONS: tuple[tuple[str, str], ...] = (
    ("region.trust.log_keys", "save_signing_key"),
    ("region.trust.log_keys", "save_ml_dsa_key"),
    ("region.trust.log_keys", "replace_file"),
    ("pathlib.Path", "replace"),
    ("pathlib.Path", "unlink"),
)


OPERATIONS_DONE = 10


def cut_off_at(patch: pytest.MonkeyPatch, number: int, *, behind: bool) -> Callable[[], int]:
    """The process is killed before, or behind, that file operation. How many there were."""
    import importlib

    done = 0

    def wrapped(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            nonlocal done
            done += 1
            is_it = done == number
            if is_it and not behind:
                raise KeyboardInterrupt
            result = operation(*given, **named)
            if is_it:
                raise KeyboardInterrupt
            return result

        return run

    for place, name in OPERATIONS:
        owner = Path if place == "pathlib.Path" else importlib.import_module(place)
        patch.setattr(owner, name, wrapped(getattr(owner, name)))
    return lambda: done


@pytest.mark.parametrize("are_lost", [False, True])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("number", range(1, OPERATIONS_DONE + 1))
def test_a_change_that_is_cut_off_at_any_file_operation_is_finished_by_the_next_call(
    home: Home, number: int, behind: bool, are_lost: bool
) -> None:
    for name in NAMES:
        home.copy(name, leaves_of(4))
    before = home.named()
    if are_lost:
        home.folder.audit_key.unlink()
        home.folder.audit_ml_dsa_key.unlink()
    with pytest.MonkeyPatch.context() as patch:
        cut_off_at(patch, number, behind=behind)
        with pytest.raises(KeyboardInterrupt):
            home.change(lost_keys=are_lost)
    if home.named() == before or home.held() != home.named():
        assert home.change(lost_keys=are_lost) == 4
    assert home.held() == home.named() and not before & home.named()
    assert {key.to_size for key in home.bundle.audit_keys if key.public in before} == {4}
    assert not list(home.folder.secrets.glob("new.*"))


def test_where_one_of_the_new_keys_is_lost_it_is_said_and_there_is_a_way_on(home: Home) -> None:
    for name in NAMES:
        home.copy(name, leaves_of(4))
    with pytest.MonkeyPatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr("region.trust.log_keys._put_in_place", lambda *_: 1 / 0)
        home.change()
    home.folder.audit_key.with_name("new.audit.mldsa.pem").unlink()
    for _ in range(2):
        with pytest.raises(RequestError, match=r"not in|not all keys") as refused:
            home.change()
        assert "--lost-keys" in refused.value.hint
    assert home.change(lost_keys=True) == 4 and home.named() == home.held()


def test_keys_that_are_lost_are_told_of_nowhere_and_keys_that_are_here_are_not_lost(home: Home) -> None:
    for name in NAMES:
        home.copy(name, leaves_of(4))
    assert "without --lost-keys" in home.refused("are here", lost_keys=True).hint
    home.folder.audit_key.unlink()
    assert "--lost-keys" in home.refused("that are not in").hint
    assert home.change(lost_keys=True) == 4
    assert home.store.asked == ["stopped"] and home.store.words is None, "nobody can sign a word"


def test_where_one_of_two_keys_is_lost_the_other_one_still_signs_the_word(home: Home) -> None:
    """The folders of before on other machines may have both."""
    for name in NAMES:
        home.copy(name, leaves_of(4))
    before = home.bundle
    home.folder.audit_ml_dsa_key.unlink()
    assert home.change(lost_keys=True) == 4
    assert home.store.asked == ["stopped", "told", "stopped"] and ended_word(home.store.words, before)


def test_a_word_is_believed_under_the_key_of_now_alone(home: Home, tmp_path: Path) -> None:
    own, key, other = home.bundle, load_signing_key(home.folder.audit_key), SigningKey.generate()
    word = sign_word(own, key, NEXT, NOW)

    def stored(word: EndedLogKey, held: bytes | None = None) -> bytes:
        return with_word(held, word, own)

    assert ended_word(stored(word), own)
    elsewhere = make_region(tmp_path / "elsewhere", "eu-west")
    theirs = decode_bundle(elsewhere.bundle.read_bytes()).bundle
    wrong: list[bytes | None] = [
        None, b"", b"{}", b"\xff", stored(word)[:-1], b'{"words":[{}],"format":1}',
        stored(sign_word(own, other, NEXT, NOW)),
        stored(sign_word(theirs, key, NEXT, NOW)),
        stored(msgspec.structs.replace(sign_word(own, other, NEXT, NOW), public=key.verify_key.public)),
        stored(msgspec.structs.replace(word, time_ms=NOW + 1)),
        stored(msgspec.structs.replace(word, signature=b"")),
        stored(word) + b" " * 65_536,
    ]  # fmt: skip
    assert not any(ended_word(each, own) for each in wrong)
    assert stored(word, b"junk") == stored(word)


def test_words_of_earlier_changes_stay_and_nothing_that_somebody_else_put_there_takes_their_place(
    home: Home,
) -> None:
    for name in NAMES:
        home.copy(name, leaves_of(4))
    folders = list[RegionBundle]()
    for _ in range(3):
        folders.append(home.bundle)
        home.change()
        assert all(ended_word(home.store.words, own) for own in folders)
        assert not ended_word(home.store.words, home.bundle)
        # Whoever can write the store, and has keys of his own.
        others = [SigningKey.generate() for _ in range(WORDS_MAX - 1 - len(folders))]
        words = [sign_word(home.bundle, other, NEXT, NOW) for other in others]
        large = EndedLogKey(region="x" * 30_000, mesh="acme", public=b"k" * 32, successor=NEXT, time_ms=0)
        kept = msgspec.json.decode(home.store.words or b"")["words"]
        home.store.words = msgspec.json.encode({"words": [*kept, *words, large], "format": 1})
        assert all(ended_word(home.store.words, own) for own in folders)


def test_a_log_whose_keys_changed_gets_a_leaf_once(home: Home) -> None:
    for name in NAMES:
        home.copy(name, leaves_of(4))
    before = home.bundle
    assert unsaid_log_key(before, lambda _: False) is None, "no key has ended"
    home.change()
    now = key_id_of(load_signing_key(home.folder.audit_key).verify_key.public)
    assert unsaid_log_key(home.bundle, lambda _: False) == LogKeyLeaf(now)
    assert unsaid_log_key(home.bundle, lambda key_id: key_id == now) is None
    assert not stale_log_key(home.bundle, now, 4) and "is of before that" in stale_log_key(before, now, 4)


def test_a_leaf_in_front_of_where_the_keys_of_now_begin_is_of_no_later_change(home: Home) -> None:
    """Whoever had one broker, and with it the log's key and the stream, could write a leaf that names a key of nobody."""
    for name in NAMES:
        home.copy(name, leaves_of(6))
    nobodys = key_id_of(SigningKey.generate().verify_key.public)
    assert stale_log_key(home.bundle, nobodys, 5), "of before a change, as far as this folder knows"
    home.change()
    assert not stale_log_key(home.bundle, nobodys, 5) and stale_log_key(home.bundle, nobodys, 6)


def test_what_others_have_cosigned_beside_a_copy_is_known_of_the_log_where_its_checkpoint_is_an_older_one(
    home: Home,
) -> None:
    """The checkpoints of brokers are carried between machines as files of one name."""
    for name in NAMES:
        home.copy(name, leaves_of(6))
        Folder(home.path(name)).write("checkpoint", home.note(leaves_of(4)))
    for path, data in (
        (COSIGNED_PATH, home.note(leaves_of(6))),
        (KEPT_PATH, join([home.note(leaves_of(6)), home.note(leaves_of(5))])),
    ):
        Folder(home.path("b2")).write(path, data)
        assert home.refused("is known to have had 6 leaves").code is Code.CONFLICT
        Folder(home.path("b2")).write(path, b"no note")
    Folder(home.path("b2")).write(COSIGNED_PATH, home.note(leaves_of(3, other_from=2)))
    home.refused("what was cosigned, beside the copy of broker b2, is of another history")
    assert home.change(without=["b2"]) == 4


def test_a_log_whose_keys_were_changed_before_it_was_copied_gets_the_leaf_that_ends_folders_of_before(
    home: Home, tmp_path: Path
) -> None:
    """The leaf of the command stands in front of the end, under the former key's last checkpoint, and no broker looks at it."""
    for name in NAMES:
        home.copy(name, leaves_of(4))
    home.change()
    now = key_id_of(load_signing_key(home.folder.audit_key).verify_key.public)
    rotated, changed = (
        Header(
            kind=Kind.KEY, side=Side.INGRESS, time_ms=NOW, source_region="us-east", destination_region="us-east",
            key_id=now, action=action,
        )
        for action in ("rotated", LOG_KEY_CHANGED)
    )  # fmt: skip
    found = list[Header]()
    for header in (rotated, changed):
        found.append(header)
        said = {each.key_id for each in found if says_changed(each)}
        assert (unsaid_log_key(home.bundle, said.__contains__) is None) is (header is changed)
    denied = msgspec.structs.replace(changed, kind=Kind.DENY)
    assert not says_changed(denied), "the action of other leaves is not the region's word about its keys"


def test_a_change_has_so_many_file_operations(home: Home) -> None:
    for name in NAMES:
        home.copy(name, leaves_of(4))
    with pytest.MonkeyPatch.context() as patch:
        count = cut_off_at(patch, 0, behind=False)
        home.change()
    assert count() == OPERATIONS_DONE


def test_nothing_is_told_while_a_change_of_signing_keys_is_not_finished(home: Home) -> None:
    for name in NAMES:
        home.copy(name, leaves_of(4))
    with pytest.MonkeyPatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr("region.trust.signing_keys._put_in_place", lambda *_: 1 / 0)
        change_signing_keys(home.folder, home.config, NOW)
    assert "felix region change-signing-keys" in home.refused("was cut off").hint
    change_signing_keys(home.folder, home.config, NOW + 1)
    assert home.change() == 4
    # And the other way round: that the log goes on under other keys is nothing to a change of signing keys.
    assert change_signing_keys(home.folder, home.config, NOW + 2).ends[0].size == 4


def test_a_checkpoint_is_given_of_a_broker_or_of_nobody(home: Home, tmp_path: Path) -> None:
    for name in ("one", "other", "b2=odd"):
        (tmp_path / name).write_text(name)
    given = [f"b1={tmp_path / 'one'}", str(tmp_path / "other"), str(tmp_path / "b2=odd")]
    assert _given_checkpoints(home.config, given) == (
        {"b1": b"one"},
        [(given[1], b"other"), (given[2], b"b2=odd")],
    )
    for words, why in (
        (f"b9={tmp_path / 'one'}", "no broker b9"),
        (f"b1={tmp_path / 'none'}", "none"),
        ("none", "none"),
    ):
        with pytest.raises(FelixError, match=why):
            _given_checkpoints(home.config, [words])
