"""What one organisation's region takes from another's: offers, their updates, the agent's configuration made of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from audit_log import colliding
from ports import claim_port
from region_home import make_region
from typer.testing import CliRunner, Result

from bridge.config import BridgeConfig, DestinationConfig, load_config
from cli.agent import config_text
from cli.bridge import app as bridge_app
from cli.exits import EXIT_UNAVAILABLE, exit_code
from cli.region import app as region_app
from felix.address import Address
from felix.errors import Code, FelixError
from felix.runtime.real import now_ms
from keys.bundle import AuditKey, FormerKeys, SignedBundle, decode_bundle, sign_bundle
from keys.key_file import load_signing_key
from keys.offer import decode_offer
from keys.pin import UNCOMPARED
from keys.signing import SigningKey
from region.bootstrap import issue_identity, write_profile
from region.config import RegionConfig
from region.config import load_config as load_region
from region.trust.offers import keep_offer, kept_offer, make_offer
from region.trust.trusted_bundles import read_pin


class Sides:
    """Two homes that share nothing but files."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self._patch = path, monkeypatch
        self.us = make_region(path / "a", "us-east")
        self.eu = make_region(path / "b", "eu-west")
        write_profile(self.us, "us-east", "acme", Address("127.0.0.1", claim_port()))
        monkeypatch.setenv("FELIX_HOME", str(path / "a"))
        monkeypatch.delenv("FELIX_REGION", raising=False)
        monkeypatch.chdir(path)

    def offer(self, name: str, entity: str = "", contact: str = "", at_ms: int = 0) -> str:
        """An offer of eu-west in a file; its fingerprint."""
        config = load_region(self.eu.config)
        if entity:
            text = self.eu.config.read_text().replace(config.entity, entity)
            self.eu.config.write_text(text)
        signed = make_offer(
            self.eu, load_region(self.eu.config), ["eu.example.org:7444"], contact, at_ms or now_ms()
        )
        (self.path / name).write_bytes(signed.encode())
        return signed.offer.bundle.bundle.fingerprint()


@pytest.fixture
def sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sides:
    return Sides(tmp_path, monkeypatch)


def region(*words: str) -> Result:
    """No broker runs, unless a test says so."""
    offline = ["--offline"] if words[0] == "trust" else []
    return CliRunner().invoke(region_app, [*words, *offline])


def refused(result: Result) -> FelixError:
    assert isinstance(result.exception, FelixError), result.output
    return result.exception


def test_an_offer_is_compared_once_and_its_updates_are_taken_as_far_as_they_may(sides: Sides) -> None:
    fingerprint = sides.offer("first")
    assert "Nobody compared" in refused(region("trust", "first")).sentence
    assert "Nobody compared" in refused(region("trust", "first", "--yes")).sentence
    assert kept_offer(sides.us, "eu-west") is None
    said = region("trust", "first", "--fingerprint", fingerprint)
    assert said.exit_code == 0 and "Acme IE" in said.output, said.output
    # A bridge later, the fingerprint that was noted is still the one, and none is needed.
    issue_identity(sides.eu, load_region(sides.eu.config), "bridge", "eu-to-us", now_ms())
    assert sides.offer("second") == fingerprint
    for words in (["second"], ["second", "--fingerprint", fingerprint]):
        assert region("trust", *words).exit_code == 0
    kept = kept_offer(sides.us, "eu-west")
    assert kept is not None and kept.addresses == ("eu.example.org:7444",)
    # What is older is refused, what names another entity needs a person.
    assert refused(region("trust", "first", "--fingerprint", fingerprint)).code in (
        Code.CONFLICT,
        Code.INVALID,
    )
    sides.offer("third", entity="Initech")
    assert "another entity" in refused(region("trust", "third")).sentence
    assert region("trust", "third", "--yes").exit_code == 0
    kept = kept_offer(sides.us, "eu-west")
    assert kept is not None and kept.entity == "Initech"


def test_what_was_compared_is_signed_and_what_needs_no_comparing_is_not_signed_again(sides: Sides) -> None:
    own = decode_bundle(sides.us.bundle.read_bytes()).bundle
    fingerprint = sides.offer("first")
    assert region("trust", "first", "--fingerprint", fingerprint).exit_code == 0
    signed = read_pin(sides.us, own, "eu-west")
    assert signed is not None and signed.bundle.fingerprint() == fingerprint
    issue_identity(sides.eu, load_region(sides.eu.config), "bridge", "eu-to-us", now_ms())
    sides.offer("second")
    assert region("trust", "second").exit_code == 0
    assert read_pin(sides.us, own, "eu-west") == signed
    # As in a folder of before.
    sides.us.pin("eu-west").unlink()
    assert region("trust", "second").exit_code == 0
    renewed = read_pin(sides.us, own, "eu-west")
    assert renewed is not None and renewed.pin.number == UNCOMPARED
    assert region("trust", "second", "--fingerprint", fingerprint).exit_code == 0
    compared = read_pin(sides.us, own, "eu-west")
    assert compared is not None and compared.pin.number > renewed.pin.number


def test_a_bundle_that_names_a_trusted_key_nowhere_is_told_of(sides: Sides) -> None:
    assert region("trust", "first", "--fingerprint", sides.offer("first")).exit_code == 0
    before = decode_bundle(sides.eu.bundle.read_bytes()).bundle
    key = load_signing_key(sides.eu.policy_key)
    for name, former in (
        ("ended", (FormerKeys(receipt_keys=before.receipt_keys),)),
        ("skipped", ()),
    ):
        receipt = SigningKey.generate().verify_key.public
        changed = msgspec.structs.replace(
            before.with_former(former), issued_ms=before.issued_ms + 1, receipt_keys=(receipt,)
        )
        Path(name).write_bytes(sign_bundle(changed, key).encode())
        said = region("trust", name, "--fingerprint", "wrong")
        told = "receipt key of eu-west that is trusted here is neither" in " ".join(said.stderr.split())
        assert told == (name == "skipped"), said.stderr
        assert "A key of the log" not in said.stderr
    log = next(key for key in before.audit_keys if key.role == "log")
    other = msgspec.structs.replace(log, public=SigningKey.generate().verify_key.public)
    for name, keys in (
        ("kept", (msgspec.structs.replace(log, to_size=5), msgspec.structs.replace(other, from_size=5))),
        ("another", (other,)),
    ):
        changed = msgspec.structs.replace(
            before,
            issued_ms=before.issued_ms + 1,
            audit_keys=(*(key for key in before.audit_keys if key != log), *keys),
        )
        Path(name).write_bytes(sign_bundle(changed, key).encode())
        said = region("trust", name, "--fingerprint", "wrong")
        told = f"A key of the log {log.name} that is trusted here" in " ".join(said.stderr.split())
        assert told == (name == "another"), said.stderr


def test_a_bundle_of_before_the_one_that_is_trusted_takes_no_key_back(sides: Sides) -> None:
    """Its fingerprint was compared once. Who has the keys that were given up since has the file, too."""
    held = decode_bundle(sides.eu.bundle.read_bytes()).bundle
    log = next(key for key in held.audit_keys if key.role == "log" and key.algorithm == "ed25519")
    new = SigningKey.generate()
    ended = (
        *(msgspec.structs.replace(key, to_size=7) if key == log else key for key in held.audit_keys),
        AuditKey(log.name, "log", SigningKey.generate().verify_key.public, from_size=7),
    )
    changed = msgspec.structs.replace(
        held.with_former((FormerKeys(policy_keys=held.policy_keys, receipt_keys=held.receipt_keys),)),
        issued_ms=held.issued_ms + 1, audit_keys=ended, policy_keys=(new.verify_key.public,), receipt_keys=(new.verify_key.public,),
    )  # fmt: skip
    back = {
        "policy": (msgspec.structs.replace(changed.with_former(()), policy_keys=held.policy_keys), load_signing_key(sides.eu.policy_key)),
        "receipt": (msgspec.structs.replace(changed.with_former(()), receipt_keys=held.receipt_keys), new),
        "log": (msgspec.structs.replace(changed, audit_keys=held.audit_keys), new),
        "further": (
            msgspec.structs.replace(changed, audit_keys=tuple(msgspec.structs.replace(key, to_size=9) if key.to_size == 7 else msgspec.structs.replace(key, from_size=9) if key.from_size else key for key in ended)),
            new,
        ),
    }  # fmt: skip
    Path("changed").write_bytes(sign_bundle(changed, new).encode())
    assert region("trust", "changed", "--fingerprint", changed.fingerprint()).exit_code == 0
    files = {path: path.read_bytes() for path in sides.us.trusted.iterdir()}
    Path("before").write_bytes(sides.eu.bundle.read_bytes())
    error = refused(region("trust", "before", "--fingerprint", held.fingerprint()))
    assert error.code is Code.CONFLICT and "and the one that is trusted here of" in error.sentence
    for name, (bundle, key) in back.items():
        later = msgspec.structs.replace(bundle, issued_ms=held.issued_ms + 2)
        Path(name).write_bytes(sign_bundle(later, key).encode())
        error = refused(region("trust", name, "--fingerprint", later.fingerprint()))
        assert error.code is Code.CONFLICT and "which it gave up" in error.sentence, name
    assert files == {path: path.read_bytes() for path in sides.us.trusted.iterdir()}
    (sides.us.trusted / "eu-west.json").unlink()
    assert region("trust", "before", "--fingerprint", held.fingerprint()).exit_code == 0


def test_a_folder_without_a_policy_key_says_that_it_signs_nothing(sides: Sides) -> None:
    sides.us.policy_key.unlink()
    said = region("trust", "first", "--fingerprint", sides.offer("first"))
    assert said.exit_code == 0 and "no policy key" in said.output
    assert not sides.us.pin("eu-west").exists() and (sides.us.trusted / "eu-west.json").exists()


def test_where_a_pin_was_signed_nobody_else_is_trusted_without_the_policy_key(sides: Sides) -> None:
    fingerprint = sides.offer("first")
    assert region("trust", "first", "--fingerprint", fingerprint).exit_code == 0
    sides.us.policy_key.unlink()
    files = {path: path.read_bytes() for path in sides.us.trusted.iterdir()}
    assert region("trust", "first", "--fingerprint", fingerprint).exit_code == 0, "it is trusted already"
    key, before = SigningKey.generate(), decode_bundle(sides.eu.bundle.read_bytes()).bundle
    changed = msgspec.structs.replace(
        before, issued_ms=before.issued_ms + 1, policy_keys=(key.verify_key.public,)
    )
    (sides.path / "changed").write_bytes(sign_bundle(changed, key).encode())
    error = refused(region("trust", "changed", "--fingerprint", changed.fingerprint()))
    assert error.code is Code.CONFLICT and "Run it on the machine that has the key" in error.hint
    assert files == {path: path.read_bytes() for path in sides.us.trusted.iterdir()}


def test_where_no_broker_answers_it_says_that_nobody_was_told_and_how_to_go_on(sides: Sides) -> None:
    fingerprint = sides.offer("first")
    said = CliRunner().invoke(region_app, ["trust", "first", "--fingerprint", fingerprint])
    error = refused(said)
    assert exit_code(error) == EXIT_UNAVAILABLE
    assert "no broker of us-east was told yet" in error.sentence
    assert "felix region trust --region us-east" in error.hint
    assert "us-east trusts" not in said.output
    assert sides.us.pin("eu-west").exists(), "so that it can be handed over"
    assert exit_code(refused(CliRunner().invoke(region_app, ["trust"]))) == EXIT_UNAVAILABLE
    for words in (["--offline"], ["--fingerprint", fingerprint]):
        said = CliRunner().invoke(region_app, ["trust", *words])
        assert "nothing to compare" in refused(said).sentence


def test_a_contact_is_kept_in_the_configuration_and_offered_again(sides: Sides) -> None:
    def offered(*words: str) -> str:
        said = region("offer", "--address", "us.example.org:7443", "--out", "mine", *words)
        assert said.exit_code == 0, said.output
        return decode_offer((sides.path / "mine").read_bytes()).offer.contact

    sides.us.config.write_text(sides.us.config.read_text().replace('contact: ""\n', "").rstrip() + "  # end")
    assert offered() == "", "a file of an earlier version says nothing of it"
    for contact in ("Data Office", 'Ada "the" \\1 Lovelace: +1 206'):
        assert offered("--contact", contact) == contact
        assert offered() == contact == load_region(sides.us.config).contact
    text = sides.us.config.read_text()
    assert text.count("contact:") == 1 and "  # end" in text and "entity: " in text
    sides.us.config.write_text(text.replace("contact: ", "contact: >\n  "))
    assert "several lines" in refused(region("offer", "--contact", "Other")).sentence


def test_an_offer_under_a_key_that_is_not_trusted_any_more_says_nothing(sides: Sides) -> None:
    fingerprint = sides.offer("theirs")
    assert region("trust", "theirs", "--fingerprint", fingerprint).exit_code == 0
    other = make_region(sides.path / "c", "eu-west")
    forged = make_offer(other, load_region(other.config), ["evil.example:1"], "", now_ms())
    keep_offer(sides.us, forged)
    assert kept_offer(sides.us, "eu-west") is None


def test_a_region_of_another_mesh_is_refused_before_it_is_trusted(sides: Sides) -> None:
    other = make_region(sides.path / "c", "ap-south", mesh="globex")
    (sides.path / "other").write_bytes(other.bundle.read_bytes())
    bundle = decode_bundle(other.bundle.read_bytes()).bundle
    error = refused(region("trust", "other", "--fingerprint", bundle.fingerprint()))
    assert error.code is Code.WRONG_REGION
    assert "Agree on one name" in error.hint
    assert not (sides.us.trusted / "ap-south.json").exists()


def test_a_region_with_the_witness_key_of_another_is_refused_before_it_is_trusted(sides: Sides) -> None:
    """A third region calls eu-west's witness key, or this region's, its own: eu-west's cosignatures would count twice."""
    fingerprint = sides.offer("theirs")
    assert region("trust", "theirs", "--fingerprint", fingerprint).exit_code == 0
    # What cannot be read of yet another region keeps nobody from being trusted, or refused.
    (sides.us.trusted / "no-bundle.json").write_text("{")
    other = make_region(sides.path / "c", "ap-south")
    honest = decode_bundle(other.bundle.read_bytes()).bundle
    policy_key = load_signing_key(other.policy_key)
    for owner in (sides.us, sides.eu):
        of = decode_bundle(owner.bundle.read_bytes()).bundle
        (public,) = (
            each.public for each in of.audit_keys if (each.role, each.algorithm) == ("cosigner", "ed25519")
        )
        stolen = msgspec.structs.replace(
            honest, audit_keys=(AuditKey("ap-south.acme/witness", "cosigner", public),)
        )
        (sides.path / "third").write_bytes(sign_bundle(stolen, policy_key).encode())
        error = refused(region("trust", "third", "--fingerprint", stolen.fingerprint()))
        assert error.code is Code.CONFLICT
        assert "the region ap-south" in error.sentence and f"the region {of.region}" in error.sentence
        assert not (sides.us.trusted / "ap-south.json").exists()
    (sides.path / "third").write_bytes(other.bundle.read_bytes())
    assert region("trust", "third", "--fingerprint", honest.fingerprint()).exit_code == 0


def test_a_new_bridges_log_under_somebodys_key_is_trusted_by_the_whole_fingerprint_alone(
    sides: Sides,
) -> None:
    """What founds eu-west is as it was compared, and that says nothing of the key: us-east's own witness has it."""
    fingerprint = sides.offer("first")
    assert region("trust", "first", "--fingerprint", fingerprint).exit_code == 0
    held = decode_bundle(sides.eu.bundle.read_bytes()).bundle
    taken = next(
        each.public
        for each in decode_bundle(sides.us.bundle.read_bytes()).bundle.audit_keys
        if (each.role, each.algorithm) == ("cosigner", "ed25519")
    )
    named = msgspec.structs.replace(
        held,
        issued_ms=held.issued_ms + 1,
        audit_keys=(*held.audit_keys, AuditKey("eu-west.acme/bridge/x", "log", taken)),
    )
    (sides.path / "second").write_bytes(sign_bundle(named, load_signing_key(sides.eu.policy_key)).encode())
    assert named.fingerprint() == fingerprint
    for words in ([], ["--fingerprint", fingerprint]):
        error = refused(region("trust", "second", *words))
        assert "the log eu-west.acme/bridge/x under a key of the region us-east" in error.sentence
    assert "--whole" in error.hint
    assert region("trust", "second", "--fingerprint", named.whole_fingerprint()).exit_code == 0


def test_no_bundle_is_trusted_whose_keys_can_be_taken_for_each_other(sides: Sides) -> None:
    made = decode_bundle(sides.eu.bundle.read_bytes()).bundle
    rest = tuple(each for each in made.audit_keys if each.role != "cosigner")
    keys = tuple(
        AuditKey("eu-west.acme/witness", "cosigner", each.verify_key.public)
        for each in colliding("eu-west.acme/witness")
    )
    policy = load_signing_key(sides.eu.policy_key)
    both = msgspec.structs.replace(made, audit_keys=(*rest, *keys))
    (sides.path / "both").write_bytes(
        SignedBundle(both, policy.sign("region-bundle", both.signed_bytes())).encode()
    )
    assert (
        "two keys of eu-west.acme/witness with one key id"
        in refused(region("trust", "both", "--fingerprint", both.fingerprint())).sentence
    )
    # Nor one for the other, later.
    for at, found in enumerate(keys):
        one = msgspec.structs.replace(made, issued_ms=made.issued_ms + at, audit_keys=(*rest, found))
        (sides.path / "one").write_bytes(sign_bundle(one, policy).encode())
        said = region("trust", "one", "--fingerprint", one.fingerprint())
        assert (said.exit_code == 0) is (at == 0)
    assert "with one key id" in refused(said).sentence


def test_a_bridge_is_made_of_what_the_offer_says(sides: Sides) -> None:
    def bridge(*words: str) -> Result:
        return CliRunner().invoke(bridge_app, list(words))

    unknown = refused(bridge("init", "--to", "eu-west"))
    assert "does not know eu-west" in unknown.sentence and "region offer" in unknown.hint
    assert not sides.us.identity("us-east-to-eu-west").exists()
    region("trust", "offer", "--fingerprint", sides.offer("offer"))
    before = decode_bundle(sides.us.bundle.read_bytes()).bundle
    said = bridge("init", "--to", "eu-west")
    assert said.exit_code == 0, said.output
    after = decode_bundle(sides.us.bundle.read_bytes()).bundle
    assert before.fingerprint() == after.fingerprint() in said.output
    path = sides.us.bridge("us-east-to-eu-west") / "bridge.yaml"
    config = load_config(path)
    assert config.destinations == (DestinationConfig(region="eu-west", addresses=("eu.example.org:7444",)),)
    assert refused(bridge("init", "--to", "eu-west")).code is Code.ALREADY_EXISTS
    path.write_text(path.read_text().replace('# engine: ""', "engine: qh3"))
    error = refused(bridge("up", "--to", "eu-west"))
    assert "was edited" in error.sentence
    assert "felix bridge init --to eu-west" in refused(bridge("up", "other", "--to", "eu-west")).hint
    assert "us-east-to-eu-west of us-east" in refused(bridge("down", "other")).sentence


def test_every_key_of_the_configuration_is_explained_in_the_file() -> None:
    config = RegionConfig(region="us-east", mesh="acme", country="US")
    text = config_text(config, "carrier", ["127.0.0.1:1"], {"eu-west": ("127.0.0.1:2",)})
    named = {line.lstrip("# -").split(":")[0] for line in text.splitlines() if ":" in line}
    for part in (BridgeConfig, DestinationConfig):
        assert set(part.__struct_fields__) <= named
