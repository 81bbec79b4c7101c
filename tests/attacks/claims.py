"""What the evidence states, against everybody who would gain from its being false. Data; docs/claims.md prints it.

A cell says *cannot*, *found* (it can be tried, and what finds it), or *can* (and why). Every cell that does not say
*can* names tests that try it. `test_claims.py` holds the page to this table and the table to the tests.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple


class Verdict(StrEnum):
    """Whether a coalition can make the statement false without its being noticed."""

    CANNOT = "cannot"
    FOUND = "is found"
    CAN = "can"


class Cell(NamedTuple):
    """One coalition against one statement. `tests`: files of this folder, or files below tests/, with a test's name or without."""

    verdict: Verdict
    why: str
    tests: tuple[str, ...] = ()


class Statement(NamedTuple):
    """What somebody relies on, and where it is read."""

    key: str
    says: str
    rests_on: str


PARTIES: Final[dict[str, str]] = {
    "agent": "the bridge agent: its identity, the egress log's keys, what it reads under its grants",
    "source": "the operator of the source region: every key of that region, its authority and its approvers' identities, its bridges' logs",
    "destination": "the operator of the destination region: every key of that region",
    "third": "another region of the mesh, with every key of its own; its bundle is among those that the verifier trusts",
    "store": "who administers a region's metadata store, without a key",
    "backup": "who puts back an older copy of a folder: a broker's, an agent's, a log's",
    "network": "who carries, reads, drops, delays and repeats what travels between the regions",
    "two": "two of the parties above together, other than both operators: the strongest such pair",
    "both": "the operators of both regions together, and no witness but them",
    "both-witnessed": "the same, where the verifier asks for a cosignature of an outside witness",
}

NAMES: Final[dict[str, str]] = {
    "agent": "agent",
    "source": "source operator",
    "destination": "destination operator",
    "third": "third region",
    "store": "store administrator",
    "backup": "old backup",
    "network": "network",
    "two": "two of them",
    "both": "both regions",
    "both-witnessed": "both regions, outside witness",
}

STATEMENTS: Final[tuple[Statement, ...]] = (
    Statement(
        "crossed",
        "These records crossed.",
        "INTENT leaves of the egress log, ACK leaves of the ingress log, and their reconciliation",
    ),
    Statement(
        "received", "These were received.", "receipts under the destination's keys, and its ingress log"
    ),
    Statement(
        "terms",
        "Under these terms.",
        "the export grant and the import grant, named by the hash of the terms in every leaf",
    ),
    Statement(
        "approved",
        "Approved by these people.",
        "approvers' signatures over the hash of the terms, in both logs",
    ),
    Statement(
        "order",
        "In this order, and not later than this checkpoint.",
        "the Merkle tree, the checkpoint, its cosignatures",
    ),
    Statement(
        "withheld", "These were withheld.", "WITHHELD leaves of the egress log; contiguous source offsets"
    ),
    Statement(
        "else",
        "Nothing else went through Felix.",
        "nothing is taken without a leaf; both logs; what a bridge of another region may ask for",
    ),
)

_C, _F, _Y = Verdict.CANNOT, Verdict.FOUND, Verdict.CAN

CELLS: Final[dict[tuple[str, str], Cell]] = {
    # -- these records crossed
    ("crossed", "agent"): Cell(
        _F,
        "an INTENT for what it never sent has no receipt. A crossing without its INTENT, or with other bytes than were committed "
        "to, differs from the ingress log. The reconciliation names each such record, also those that a resend left out as if "
        "they had crossed before. What another grant announces again, or another bridge is said to have brought, counts in whole batches, under grants that both regions "
        "signed, and nowhere twice",
        (
            "attacks/test_two_bridges_at_once.py",
            "attacks/test_accounting_worlds.py",
            "attacks/test_one_party_alone.py",
            "attacks/test_rogue_agent.py",
            "spark/test_truncation_report.py",
            "attacks/test_leaf_that_stops_reports.py",
        ),
    ),
    ("crossed", "source"): Cell(
        _F,
        "it can write any egress log, but no ingress leaf nor receipt to go with it. With one log alone, the report says so and "
        "does not end with 0",
        (
            "attacks/test_one_party_alone.py",
            "attacks/test_f03_receipts_of_the_source.py",
            "attacks/test_half_told_evidence.py",
            "attacks/test_log_served_twice.py",
        ),
    ),
    ("crossed", "destination"): Cell(
        _F,
        "it can write any ingress log, but no egress leaf to go with it. Leaves of the source that it writes into a log of its "
        "own prove nothing: a leaf counts only in the log of the region that it speaks for, and says each thing once",
        (
            "attacks/test_one_party_alone.py",
            "attacks/test_log_of_another.py",
            "attacks/test_names_that_stand_twice.py",
        ),
    ),
    ("crossed", "third"): Cell(
        _C,
        "no log, receipt or document of another region verifies under its keys, and no leaf of theirs counts in a log of its own",
        (
            "attacks/test_one_party_alone.py",
            "attacks/test_f05_witnesses_and_names.py",
            "attacks/test_log_of_another.py",
        ),
    ),
    ("crossed", "store"): Cell(
        _C,
        "no leaf stands in the store, and nothing is read from it into a log",
        ("attacks/test_f13_store_administrator.py",),
    ),
    ("crossed", "backup"): Cell(
        _F,
        "a log that is shorter than what was cosigned does not open and does not verify; a source that was cut back stops its "
        "link, with a GAP leaf; an agent whose log announced less than it brought, by the destination's word, brings nothing there",
        (
            "attacks/test_two_bridges_at_once.py",
            "attacks/test_f08_truncation.py",
            "attacks/test_f08_clock_behind.py",
            "audit/test_trail.py",
        ),
    ),
    ("crossed", "network"): Cell(
        _C,
        "TLS 1.3 between proved parties; within it AES-256-GCM-SIV and the agent's signature over scope and position",
        ("keys/test_transfer.py", "bridge/test_ingest.py"),
    ),
    ("crossed", "two"): Cell(
        _Y,
        "the agent and the destination's operator keep both logs between them: what they both leave out is in neither. The "
        "source's broker knows only which sealed batches and keys it handed out",
    ),
    ("crossed", "both"): Cell(
        _Y, "they keep both logs, and may agree on any history that nobody else has cosigned"
    ),
    ("crossed", "both-witnessed"): Cell(
        _Y,
        "they may agree on a lie when they write it. Afterwards they cannot exchange what the witness has cosigned for something "
        "else",
    ),
    # -- these were received
    ("received", "agent"): Cell(
        _C,
        "a receipt verifies under the destination's keys alone, and names the hash of the entries that the destination made of what "
        "it appended: an INTENT that lists other records is no part of it, in the log and in a proof",
        ("attacks/test_f03_receipts_of_the_source.py", "attacks/test_half_told_evidence.py"),
    ),
    ("received", "source"): Cell(
        _C,
        "a receipt verifies under the destination's keys alone, and names the hash of the entries that the destination made of what "
        "it appended: an INTENT that lists other records is no part of it, in the log and in a proof. One under a key that the destination gave up counts below its end alone",
        (
            "attacks/test_f03_receipts_of_the_source.py",
            "attacks/test_former_keys.py",
            "attacks/test_end_served_twice.py",
            "attacks/test_half_told_evidence.py",
        ),
    ),
    ("received", "destination"): Cell(
        _Y,
        "it is its own word: it may sign for records and then throw them away. It cannot deny what it signed under the bundle that it signed it with: a key under which anybody could have "
        "signed is read by nobody. When it changes its keys, a bundle that names where the former ones ended holds it to what they signed, and lets a thief add nothing. One that leaves an end out denies it: "
        "whoever compares sees which receipts no longer verify, and need not trust that bundle",
    ),
    ("received", "third"): Cell(
        _C, "its receipts verify for crossings into it alone", ("attacks/test_f03_receipts_of_the_source.py",)
    ),
    ("received", "store"): Cell(
        _C,
        "receipts are signed by the broker and kept in the egress log",
        ("attacks/test_f13_store_administrator.py",),
    ),
    ("received", "backup"): Cell(
        _F,
        "a destination that forgot what it had signed for is behind the egress log: the link stops and says so. So it does where the destination's log went on from an older copy: "
        "the leaf of the newest receipt, by whichever link, is not at its place",
        ("attacks/test_f08_truncation.py", "bridge/test_receipted.py"),
    ),
    ("received", "network"): Cell(
        _C, "a receipt is signed over the envelope's hash and the range", ("audit/test_receipt.py",)
    ),
    ("received", "two"): Cell(_Y, "any pair with the destination's operator: it is its word"),
    ("received", "both"): Cell(_Y, "it is the destination's word"),
    ("received", "both-witnessed"): Cell(
        _Y, "it is the destination's word; the witness fixes when it was given"
    ),
    # -- under these terms
    ("terms", "agent"): Cell(
        _Y,
        "the terms are taken from documents that both regions signed, and the destination checks against them all that it can see "
        "of a record. It cannot see whether a filter's field, which did not cross, let the record pass, nor whether a pseudonym "
        "was made from the right value. The agent may also keep back a revocation, pause or deny entry of its own region, and a policy that outlaws the grant, or one stream of its pattern. That is "
        "found where the source's own log is given, as far as that goes; it is only a notice as far as the agent had brought *all* halves between the "
        "two regions as late. What crosses beyond a budget each log shows. "
        "Which regions a record was in before the source is the word of the source's agent and brokers; both logs repeat what the "
        "destination was told, and nobody can read another way from them",
        (
            "attacks/test_way_that_is_hidden.py",
            "attacks/test_rogue_agent.py",
            "attacks/test_f04_register.py",
            "attacks/test_over_budget.py",
            "attacks/test_words_held_back.py",
            "attacks/test_clocks_apart.py",
        ),
    ),
    ("terms", "source"): Cell(
        _C,
        "every leaf names the whole hash of the terms, and the import grant with that hash is signed by the destination. Where "
        "one grant id has two terms, the first ones count. Also with a key that the destination gave up: what that signed counts below its end in "
        "the log that the destination had cosigned, and nowhere else, however often and differently that log is served. In which country the destination is, the source's "
        "policy says; where the destination's bundle names another one, verifier, report and proof say so",
        (
            "attacks/test_country_of_another.py",
            "attacks/test_country_of_two_policies.py",
            "attacks/test_former_keys.py",
            "attacks/test_end_served_twice.py",
            "attacks/test_two_terms_of_one_id.py",
            "attacks/test_f04_register.py",
            "attacks/test_one_party_alone.py",
            "attacks/test_half_told_evidence.py",
        ),
    ),
    ("terms", "destination"): Cell(
        _C,
        "the export grant with that hash is signed by the source. Its own half it can deny by a new bundle that leaves out where its former policy key ended: "
        "then crossings verify under the old bundle alone, and whoever compares the new one sees it",
        ("attacks/test_f04_register.py", "attacks/test_former_keys.py", "attacks/test_one_party_alone.py"),
    ),
    ("terms", "third"): Cell(
        _C,
        "a document verifies under the policy keys of the region that it names, and an import that does not fit its export is refused. Where records that came from it "
        "had been before is its own word: it can name regions before itself in a path, and none behind",
        ("attacks/test_hostile_leaves.py", "attacks/test_f12_other_halves.py", "attacks/test_worlds.py"),
    ),
    ("terms", "store"): Cell(
        _C,
        "nothing is believed only because the store says it. And what was believed once is not dropped because the "
        "store no longer has it",
        ("attacks/test_f13_store_administrator.py", "attacks/test_worlds.py"),
    ),
    ("terms", "backup"): Cell(
        _F,
        "a store put back lacks what brokers keep beside it: revocations, pauses, denials and the newest policy still hold",
        ("attacks/test_f13_store_administrator.py", "attacks/test_f08_truncation.py"),
    ),
    ("terms", "network"): Cell(_C, "documents are signed", ("policy/test_signed.py",)),
    ("terms", "two"): Cell(
        _Y,
        "the agent and the destination's operator can let cross what the terms exclude, and leave it out of both logs; terms "
        "that the source did not sign they cannot invent",
    ),
    ("terms", "both"): Cell(_Y, "they sign both halves, and may sign them late with an early date"),
    ("terms", "both-witnessed"): Cell(
        _F,
        "both halves are in the log before the first record under them, and a cosigned checkpoint fixes their place. A log in the "
        "format of version 0.1, for which no halves are needed, does not pass unless exactly its leaves are accepted",
        ("audit/test_agreement.py", "attacks/test_logs_of_version_1.py"),
    ),
    # -- approved by these people
    ("approved", "agent"): Cell(
        _C,
        "it holds no approver's key. Who may approve is said by the policy that the half names, or by the newest later one, just "
        "as brokers ask the one in force. An older policy in its log has no effect, and a proof says by which revision its record "
        "was allowed",
        (
            "attacks/test_f06_approvals.py",
            "attacks/test_one_party_alone.py",
            "attacks/test_older_policy.py",
            "attacks/test_later_policy.py",
        ),
    ),
    ("approved", "source"): Cell(
        _Y,
        "for its own side: its authority says who its people are. It cannot approve for the destination, nor change what was approved",
        ("attacks/test_f06_approvals.py",),
    ),
    ("approved", "destination"): Cell(
        _Y,
        "for its own side: its authority says who its people are. It cannot approve for the source, nor change what was approved",
        ("attacks/test_f06_approvals.py",),
    ),
    ("approved", "third"): Cell(
        _C,
        "an approver's chain is verified against the root of the region for which he speaks",
        ("attacks/test_f06_approvals.py",),
    ),
    ("approved", "store"): Cell(_C, "it holds no approver's key", ("attacks/test_worlds.py",)),
    ("approved", "backup"): Cell(
        _C, "an approval names the hash of the terms that it is for", ("attacks/test_worlds.py",)
    ),
    ("approved", "network"): Cell(_C, "approvals are signed", ("policy/test_approval.py",)),
    ("approved", "two"): Cell(_Y, "as far as one of them is an operator: for that side"),
    ("approved", "both"): Cell(_Y, "each for its own side"),
    ("approved", "both-witnessed"): Cell(
        _Y,
        "each for its own side; an approval that was made afterwards stands behind the first record, under a cosigned checkpoint",
    ),
    # -- in this order, and not later than this checkpoint
    ("order", "agent"): Cell(
        _F,
        "the other region cosigned its log: another history at that size, or a shorter one, is refused and verifies nowhere. A leaf that is dated later than a "
        "cosignature which covers it is told where that cosignature is known: a log has its newest, and the others remember one each",
        (
            "attacks/test_f05_witnesses_and_names.py",
            "attacks/test_dated_after_cosignature.py",
            "audit/test_witness.py",
            "audit/test_verify.py",
        ),
    ),
    ("order", "source"): Cell(
        _F,
        "as the agent: its own region's cosignature never counts, and it takes none back by naming the cosigner's key as its own",
        ("attacks/test_f05_witnesses_and_names.py", "attacks/test_keys_of_one_id.py"),
    ),
    ("order", "destination"): Cell(
        _F,
        "as the agent, for its ingress log. Leaves that nobody had cosigned yet, and that are written anew, are in other places "
        "than the receipts say. What it does not cosign of the source's logs, or not with each of its keys, the agent says for as long as it lasts",
        (
            "attacks/test_f05_witnesses_and_names.py",
            "attacks/test_half_told_evidence.py",
            "attacks/test_silent_witness.py",
        ),
    ),
    ("order", "third"): Cell(
        _C,
        "no log of another region verifies under its keys, and none stops verifying by them: a cosignature that does not hold is none. One that it had "
        "first, and keeps to itself, the log's agent asks for again",
        (
            "attacks/test_f05_witnesses_and_names.py",
            "attacks/test_keys_of_one_id.py",
            "attacks/test_withheld_cosignature.py",
        ),
    ),
    ("order", "store"): Cell(
        _F,
        "no leaf is in the store. In a region of several brokers it can make a broker that never had a copy lead the audit log, "
        "whose log then begins at 0. No other broker follows that log, and whoever cosigned the log refuses it. Where brokers copy the audit log, "
        "the store's record of what the region cosigned decides nothing",
        (
            "cluster/test_witness_memory.py",
            "attacks/test_f13_store_administrator.py",
            "cluster/test_audit_log.py",
            "attacks/test_f05_witnesses_and_names.py",
        ),
    ),
    ("order", "backup"): Cell(
        _F,
        "a log shorter than what was cosigned does not open and does not verify",
        ("attacks/test_f08_truncation.py", "audit/test_trail.py"),
    ),
    ("order", "network"): Cell(
        _C,
        "checkpoints and cosignatures are signed. A witness whose lines it takes out of the answers is shown as failing",
        ("audit/test_witness.py", "audit/test_note.py", "audit/test_submission.py"),
    ),
    ("order", "two"): Cell(
        _Y,
        "a region and a witness that counts: a third region that cosigns for it, unless the verifier's policy asks for another witness. "
        "Also the log's operator and the other region's store administrator, who makes a broker without the copies lead there, or, with one broker on etcd, puts a later note of another history there",
    ),
    ("order", "both"): Cell(_Y, "each cosigns what the other likes"),
    ("order", "both-witnessed"): Cell(
        _F,
        "the outside witness cosigns one history alone, and a policy file asks for it",
        ("audit/test_witness_policy.py", "attacks/test_two_regions_that_lie.py"),
    ),
    # -- these were withheld
    ("withheld", "agent"): Cell(
        _Y,
        "it may withhold what the terms would let cross, and name another reason. The source, which has the stream and the link "
        "secret, can tell. It is found where a record that was withheld crossed after all, where a record is in no leaf, and where it "
        "says of one that another bridge brought it, and none did",
        (
            "attacks/test_accounting_worlds.py",
            "attacks/test_one_party_alone.py",
            "spark/test_truncation_report.py",
        ),
    ),
    ("withheld", "source"): Cell(
        _Y, "it may withhold what it likes: Felix proves what crossed, not that all did"
    ),
    ("withheld", "destination"): Cell(
        _F,
        "it cannot write the egress log, and a withheld record's commitment tells it nothing. It may claim to have what it never "
        "got, as another bridge's, and the agent then leaves that out: the egress log says whose claim it is, and the report looks for the records in "
        "the ingress log. What the source does not have yet, and less than it gave receipts for, is not believed. It may take records under one grant and keep silent about it, so that the next grant withholds them: "
        "they stay open, as announced and not answered",
        (
            "attacks/test_f15_withheld_records.py",
            "attacks/test_one_party_alone.py",
            "attacks/test_destination_ahead.py",
            "attacks/test_two_bridges_at_once.py",
            "spark/test_truncation_report.py",
            "spark/test_report.py",
        ),
    ),
    ("withheld", "third"): Cell(
        _C, "it cannot write the egress log", ("attacks/test_f05_witnesses_and_names.py",)
    ),
    ("withheld", "store"): Cell(
        _C, "no leaf stands in the store", ("attacks/test_f13_store_administrator.py",)
    ),
    ("withheld", "backup"): Cell(
        _F,
        "source offsets are contiguous: a range that is not accounted for is found",
        ("attacks/test_f08_truncation.py", "audit/test_continuity.py"),
    ),
    ("withheld", "network"): Cell(
        _C,
        "what is dropped is sent again; the position does not move without a receipt",
        ("bridge/test_ingest.py",),
    ),
    ("withheld", "two"): Cell(_Y, "any pair with the agent or the source's operator: it is their word"),
    ("withheld", "both"): Cell(_Y, "it is the source's word"),
    ("withheld", "both-witnessed"): Cell(_Y, "it is the source's word; the witness fixes when it was given"),
    # -- nothing else went through Felix
    ("else", "agent"): Cell(
        _F,
        "all that it may ask of the destination leaves a leaf there: records, documents and checkpoints. Of a batch the destination keeps the records and makes the rest "
        "anew, of a document nothing beside what was signed. What is refused leaves "
        "hashes, also where the destination's broker dies on the way. What the agent leaves out of its own log, the destination's "
        "log shows",
        (
            "attacks/test_f07_foreign_bridge.py",
            "attacks/test_rogue_agent.py",
            "attacks/test_bytes_within_a_frame.py",
            "attacks/test_f07_canaries.py",
            "attacks/test_destination_killed.py",
            "attacks/test_two_bridges.py",
        ),
    ),
    ("else", "source"): Cell(
        _F,
        "as the agent: a region's identities are let in as bridges alone",
        ("attacks/test_f07_foreign_bridge.py", "attacks/test_one_party_alone.py"),
    ),
    ("else", "destination"): Cell(
        _F,
        "it cannot reach into the source: it gets what the agent sends, whose INTENT was durable before. What it took without an "
        "answer before another grant began is named with its records and bytes, under the terms that it was announced under. A "
        "half, a pause or a deny entry that it shows for a moment counts for the agent as it is in the agent's log",
        (
            "attacks/test_f07_foreign_bridge.py",
            "attacks/test_one_party_alone.py",
            "attacks/test_words_unlisted.py",
            "spark/test_report.py",
        ),
    ),
    ("else", "third"): Cell(
        _C,
        "its bridges bring what is granted to them, and leave leaves of their own",
        ("attacks/test_f07_foreign_bridge.py", "attacks/test_f12_other_halves.py"),
    ),
    ("else", "store"): Cell(
        _C,
        "without signed grants nothing crosses, whatever the store says",
        ("attacks/test_f13_store_administrator.py",),
    ),
    ("else", "backup"): Cell(
        _F,
        "what is sent again is recognised, or stands in the ingress log a second time",
        ("attacks/test_f08_truncation.py",),
    ),
    ("else", "network"): Cell(
        _C,
        "it has no identity, and no byte of a foreign one passes twice",
        ("attacks/test_f16_relay_of_a_proof.py",),
    ),
    ("else", "two"): Cell(
        _Y, "the agent and the destination's operator: what they both leave out is in neither log"
    ),
    ("else", "both"): Cell(_Y, "they keep both logs, and may use another way altogether"),
    ("else", "both-witnessed"): Cell(
        _Y, "a witness sees sizes and roots; it cannot notice that something was never written"
    ),
}


def verdict_word(cell: Cell) -> str:
    """As the page prints it."""
    return f"**{cell.verdict}**" if cell.verdict is not Verdict.CANNOT else str(cell.verdict)


def render() -> str:
    """The tables of docs/claims.md."""
    names = {key: NAMES[key] for key in PARTIES}
    lines = ["| | " + " | ".join(names.values()) + " |", "|---" * (len(names) + 1) + "|"]
    for statement in STATEMENTS:
        row = " | ".join(verdict_word(CELLS[statement.key, party]) for party in PARTIES)
        lines.append(f"| {statement.says} | {row} |")
    for statement in STATEMENTS:
        lines += ["", f"## {statement.says}", "", f"It rests on {statement.rests_on}.", ""]
        lines += ["| who | | how, or why | tried by |", "|---|---|---|---|"]
        for party in PARTIES:
            cell = CELLS[statement.key, party]
            tests = ", ".join(f"`{test}`" for test in cell.tests) or "–"
            lines.append(f"| {names[party]} | {verdict_word(cell)} | {cell.why} | {tests} |")
    return "\n".join(lines) + "\n"
