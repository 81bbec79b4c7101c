"""Exceptions: what was refused, what stayed behind, and what a reader should look at.

Three kinds of severity, because they ask for different answers:

- `breach`   the log shows a crossing that its own terms do not allow, or breaks a rule that every log keeps (steps 7
             and 10 of the verification: `rule-broken`, where nothing above says it better);
- `refused`  a control worked: something was tried and did not happen;
- `notice`   allowed, and worth knowing: wildcards, onward transfers, gaps, revocations, destroyed keys, unclean elections.

Alike events are one row with a count and the leaves of the first and last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from audit.spark.begun_again import BEGUN_AGAIN
from audit.spark.reconciliation import PASSED_BY
from audit.spark.shard_key import ENVELOPE, ENVELOPE_KEY, same
from audit.spark.table import COUNT_MAX, Column, Type, one_row_each
from audit.spark.verification import RULE_BROKEN
from audit.verify import UNCOSIGNED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from audit.spark.agreements import Signed
    from audit.spark.stops import Words

BREACH: Final = "breach"
REFUSED: Final = "refused"
NOTICE: Final = "notice"

COLUMNS: Final = (
    Column("severity", Type.TEXT, "Severity"),
    Column("exception", Type.TEXT, "Exception"),
    Column("source_region", Type.TEXT, "From region"),
    Column("destination_region", Type.TEXT, "To region"),
    Column("stream", Type.TEXT, "Stream"),
    Column("grant_id", Type.TEXT, "Grant"),
    Column("actor", Type.TEXT, "Who", "SPIFFE id"),
    Column("action", Type.TEXT, "What"),
    Column("rule", Type.TEXT, "Rule"),
    Column("code", Type.COUNT, "Code", "docs/errors.md"),
    Column("sentence", Type.TEXT, "In words"),
    Column("events", Type.COUNT, "Events"),
    Column("records", Type.COUNT, "Records"),
    Column("first_time", Type.TIME, "First"),
    Column("last_time", Type.TIME, "Last"),
    Column("log", Type.TEXT, "Log"),
    Column("first_leaf", Type.COUNT, "First leaf"),
    Column("last_leaf", Type.COUNT, "Last leaf"),
)

BROUGHT_MS: Final = 60_000
"""How long the source's word may take to the destination, clocks that differ included; what arrives later arrived against it. A
bridge brings it within seconds, and lets nothing across meanwhile."""

_DENIALS: Final = {
    501: "grant-missing",
    502: "grant-invalid",
    503: "grant-expired",
    504: "grant-not-yet",
    505: "grant-revoked",
    506: "grant-mismatch",
    507: "loop-refused",
    508: "budget-exhausted",
}
"""felix.errors.Code of a DENY leaf to the exception's name; any other code is plainly `denied`."""


def _event(
    severity: str,
    name: str,
    where: str,
    sentence: str,
    *,
    actor: str = "bridge",
    action: str = "NULL",
    rule: str = "NULL",
    code: str = "NULL",
    records: str = "0",
) -> str:
    """SQL: the exception of a row where the condition `where` is true, else null. All arguments but `severity` are SQL."""
    return f"""CASE WHEN {where} THEN named_struct(
        'severity', '{severity}', 'exception', CAST({name} AS STRING), 'actor', CAST({actor} AS STRING),
        'action', CAST({action} AS STRING), 'rule', CAST({rule} AS STRING), 'code', CAST({code} AS INT),
        'sentence', CAST({sentence} AS STRING), 'records', CAST({records} AS BIGINT)) END"""


def _leaf_events() -> list[str]:
    denial = "CASE code " + " ".join(f"WHEN {code} THEN '{name}'" for code, name in _DENIALS.items())

    def crossed(severity: str, name: str, where: str, sentence: str) -> str:
        return _event(severity, f"'{name}'", f"crossed AND {where}", sentence, records="records")

    revoked = {"actor": "actor", "action": "'revoke'", "rule": "rule", "code": "code"}
    return [
        crossed(
            BREACH, "crossed-without-terms", "signed IS NULL",
            "'Records crossed under terms for which no signed, accepted and approved grant stands in these logs.'",
        ),
        crossed(
            NOTICE, "terms-unsigned", "NOT signed",
            "'Records crossed under terms that leaves of version 1 state: whether anybody signed them is not shown.'",
        ),
        crossed(
            BREACH, "crossed-after-expiry", "ends_ms > 0 AND time_ms >= ends_ms", "'Records crossed after the grant had expired.'"
        ),
        crossed(BREACH, "crossed-before-start", "time_ms < begins_ms", "'Records crossed before the grant was valid.'"),
        crossed(
            BREACH, "crossed-after-revocation", "leaf_index > revoked_leaf",
            "'Records crossed after the log had recorded the revocation of their grant.'",
        ),
        crossed(
            NOTICE, "announced-again", BEGUN_AGAIN,
            "'Announced, never answered, and then announced again under the grant that followed, or left to another bridge: the destination says that it had not arrived.'",
        ),
        _event(
            REFUSED, f"{denial} ELSE 'denied' END", "kind = 'DENY'", "sentence",
            actor="actor", action="action", rule="rule", code="code",
        ),
        _event(
            REFUSED, "concat('withheld-', reason)", f"kind = 'WITHHELD' AND side = 'egress' AND NOT ({PASSED_BY})", "sentence",
            action="'cross'", rule="rule", code="code", records="records",
        ),
        _event(
            NOTICE, "'resend'", "kind = 'STANDING' AND action = 'resend'",
            "'The source region had records that had stayed cross under this grant.'",
            actor="actor", action="action", rule="rule", code="code",
        ),
        _event(
            NOTICE, "concat('gap-', gap)", "kind = 'GAP'",
            "coalesce(sentence, 'Source offsets could not be read any more, and did not cross.')",
            action="'read'", code="code", records="last_offset - first_offset + 1",
        ),
        _event(
            NOTICE, "'grant-ended'", "kind = 'REVOKE' AND ends", "coalesce(sentence, 'A grant was revoked before its time.')",
            **revoked,
        ),
        _event(
            NOTICE, "'revocation-without-effect'", "kind = 'REVOKE' AND NOT ends",
            "'As far as this log shows, neither region of the grant signed this revocation: it ends nothing.'",
            **revoked,
        ),
        _event(
            NOTICE, "'key-destroyed'", "kind = 'KEY' AND action = 'destroyed'", "concat('Key ', key_id, coalesce(concat(' of ', stream), ''), ' was destroyed.')",
            actor="actor", action="action", code="code",
        ),
        _event(
            NOTICE, "'unclean-election'", "kind = 'UNCLEAN'", "coalesce(sentence, 'A shard is led from a copy that may lack what was acknowledged.')",
            actor="actor", action="action",
        ),
    ]  # fmt: skip


def _terms_events() -> list[str]:
    grant = {"actor": "actor", "action": "'grant'"}
    return [
        _event(
            NOTICE, "'wildcard-grant'", "wildcard", "'The grant names streams by a pattern, not one by one.'", **grant
        ),
        _event(
            NOTICE, "'onward-allowed'", "onward", "'Under the grant records that came from third regions may cross, too.'", **grant
        ),
    ]  # fmt: skip


def _onward() -> str:
    """SQL: records that had been in third regions, as the INTENT says; as its ACK does, which the destination's receipt is for, where the INTENT
    says nothing; and as the destination's own leaf says."""
    names = "array_join(leaves.path, ', ')"
    events = [
        _event(
            NOTICE, "'onward-transfer'", "leaves.side = 'egress'", f"concat('Records that had been in ', {names}, ' crossed onward.')",
            actor="leaves.bridge", records="leaves.records",
        ),
        _event(
            NOTICE, "'onward-transfer'", "leaves.side = 'ingress'", f"concat('Records that had been in ', {names}, ' arrived.')",
            actor="leaves.bridge", records="leaves.records",
        ),
    ]  # fmt: skip
    return f"""
        UNION ALL
        SELECT {_LEAVES_PLACE}, {one_row_each(events)}
        FROM {{leaves}} AS leaves LEFT ANTI JOIN (
            SELECT log, envelope_sha256 FROM {{all_leaves}} WHERE kind = 'INTENT' AND side = 'egress' AND size(path) > 0
        ) AS named ON leaves.kind = 'ACK' AND leaves.log = named.log AND leaves.envelope_sha256 = named.envelope_sha256
        WHERE size(leaves.path) > 1 AND leaves.kind IN ('INTENT', 'ACK')
        """  # noqa: S608  # constants of this module


_PLACE: Final = "source_region, destination_region, stream, grant_id, time_ms, log, leaf_index"
"""Where an exception was found: columns of leaves and terms alike."""
_LEAVES_PLACE: Final = ", ".join(f"leaves.{name}" for name in _PLACE.split(", "))
"""The same, where leaves are joined with something."""


def _rules_broken() -> str:
    """SQL: what the verification found, where nothing above says it better."""
    broken = _event(
        BREACH, "story.exception", "true", "story.sentence", actor="coalesce(leaves.bridge, leaves.actor)", records="leaves.records"
    )  # fmt: skip
    return f"""
        UNION ALL
        SELECT {_LEAVES_PLACE}, {one_row_each([broken])}
        FROM {{story}} AS story JOIN {{all_leaves}} AS leaves
            ON story.log = leaves.log AND story.leaf_index = leaves.leaf_index
        LEFT ANTI JOIN (SELECT log, leaf_index FROM told WHERE severity = '{BREACH}') AS told
            ON story.log = told.log AND story.leaf_index = told.leaf_index AND story.exception = '{RULE_BROKEN}'
        """  # noqa: S608  # constants of this module


def _noticed() -> str:
    """SQL: what the verification saw that breaks no rule, of leaves of the window, and of those among them or behind them that are dated before
    its end: a leaf whose time ran back out of the window is in no other place of its report. What nobody cosigned goes on from its leaf to the
    log's end, so it is told where any leaf of the window stands there, whatever the first one is dated."""
    seen = _event(
        NOTICE, "notices.notice", "true", "notices.sentence", actor="coalesce(leaves.bridge, leaves.actor)", records="notices.records"
    )  # fmt: skip
    return f"""
        UNION ALL
        SELECT {_LEAVES_PLACE}, {one_row_each([seen])}
        FROM {{notices}} AS notices JOIN {{all_leaves}} AS leaves ON notices.log = leaves.log AND notices.leaf_index = leaves.leaf_index
        JOIN (
            SELECT log, min(leaf_index) AS first, max(leaf_index) AS last, max(time_ms) AS latest_ms FROM {{leaves}} GROUP BY log
        ) AS seen ON leaves.log = seen.log AND CASE WHEN notices.notice = '{UNCOSIGNED}' THEN leaves.leaf_index <= seen.last
            ELSE leaves.leaf_index >= seen.first AND leaves.time_ms <= seen.latest_ms END
        """  # noqa: S608  # constants of this module


def _dated_before() -> str:
    """SQL: what stands behind the first leaf of the window and is dated before it, by whatever: a report of the time before lacks it, unless it was made of a log that had these leaves."""
    seen = _event(
        NOTICE, "'dated-before-window'", "true",
        "'Leaves behind the first one of this window are dated before it: a report of the time before lacks these records, unless its log had these leaves.'",
        actor="coalesce(leaves.bridge, leaves.actor)", records="leaves.records",
    )  # fmt: skip
    return f"""
        UNION ALL
        SELECT {_LEAVES_PLACE}, {one_row_each([seen])}
        FROM {{all_leaves}} AS leaves
        JOIN (SELECT log, min(leaf_index) AS first, min(time_ms) AS begin_ms FROM {{leaves}} GROUP BY log) AS seen
            ON leaves.log = seen.log AND leaves.leaf_index > seen.first AND leaves.time_ms < seen.begin_ms
        WHERE leaves.records > 0 AND NOT (leaves.kind = 'ACK' AND leaves.side = 'egress')
        """  # noqa: S608  # constants of this module


def _announced_elsewhere() -> str:
    """SQL: what arrived in the window, by the destination's clock, and was announced outside of it, by the agent's: the window's register counts it
    as delivered, and not among what crossed. A batch on its way when the window begins is like that, and so is one whose leaves are dated back, all
    or some. Counted by envelope: arrivals are not split into leaves where INTENTs are, whose headers are of another length."""
    seen = _event(
        NOTICE, "'announced-outside-window'", "leaves.nth = 1 AND leaves.lacking > 0",
        "'Records that arrived in this window were announced by leaves that are dated outside of it: its crossings lack them.'",
        actor="leaves.bridge", records="leaves.lacking",
    )  # fmt: skip

    def announced(leaves: str) -> str:
        """Records by envelope; what was announced again counts once."""
        return f"""(
            SELECT {ENVELOPE}, sum(records) AS records FROM (
                SELECT {ENVELOPE}, part, max(records) AS records FROM {{{leaves}}}
                WHERE kind = 'INTENT' AND side = 'egress' GROUP BY {ENVELOPE}, part
            ) GROUP BY {ENVELOPE}
        )"""  # noqa: S608  # constants of this module

    arrived = f"""
        SELECT *, sum(records) OVER (PARTITION BY {ENVELOPE}) AS arrived,
               row_number() OVER (PARTITION BY {ENVELOPE} ORDER BY leaf_index) AS nth
        FROM {{leaves}} WHERE kind = 'ACK' AND side = 'ingress' AND records > 0
        """  # noqa: S608  # constants of this module
    return f"""
        UNION ALL
        SELECT {_LEAVES_PLACE}, {one_row_each([seen])}
        FROM (
            SELECT arrived.*, least(arrived.arrived, announced.records) - coalesce(inside.records, 0) AS lacking
            FROM ({arrived}) AS arrived
            JOIN {announced("all_leaves")} AS announced ON {same("arrived", "announced", ENVELOPE_KEY)}
            LEFT JOIN {announced("leaves")} AS inside ON {same("arrived", "inside", ENVELOPE_KEY)}
        ) AS leaves
        """  # noqa: S608  # constants of this module


def _arrived_though() -> str:
    """SQL: what arrived against the source's own word, or may have. Not what stands behind that word in the other log: there the
    verification judges. `least_ms`, `most_ms`: by how much the other clock may be ahead."""
    against = """concat('Records arrived more than a minute after ', source_region, ' had ', word,
        ' it, by its own log: its word had not been brought to the destination.')"""
    waiting = """concat('Records arrived more than a minute after ', source_region, ' had ', word,
        ' it by a policy, by its own log. They may have crossed before, and waited at the destination for the rate of their grant: compare the times of their INTENTs.')"""
    ended = """concat('Records arrived more than a minute after ', source_region, ' had ', word,
        ' it by a policy, by its own log, and later than that log and those of its bridges go, as they were given: a later policy may have allowed it. Give later ones.')"""
    set_right = """concat('Records arrived more than a minute after ', source_region, ' had ', word,
        ' it, or before: its own log has times that run back there, so its clock was wrong, and when it said so is not sure.')"""
    perhaps = """concat('By one of the two clocks records arrived more than a minute after ', source_region, ' had ', word,
        ' it, and by the other not: by the documents in both logs the other clock is ', CAST(least_ms DIV 1000 AS STRING), ' to ',
        CAST(most_ms DIV 1000 AS STRING), ' s ahead. Compare the clocks, and how late the documents were brought.')"""
    events = [
        _event(
            BREACH,
            "concat('arrived-though-', word)",
            "is_sure AND NOT may_wait AND NOT is_later",
            against,
            records="records",
        ),
        *(
            _event(NOTICE, "concat('arrived-perhaps-though-', word)", where, sentence, records="records")
            for where, sentence in (
                ("is_later", ended),
                ("may_wait AND NOT is_later", waiting),
                ("NOT is_so_dated AND NOT may_wait AND NOT is_later", perhaps),
                ("is_so_dated AND NOT is_sure AND NOT may_wait AND NOT is_later", set_right),
            )
        ),
    ]

    def stands(latest: str, earliest: str, sure: str = "") -> str:
        """Whether the word stood when the source's clock said so at the latest, and at the earliest. `sure`: "sure_", by the times that its leaves surely had."""
        return f"""(time_ms - {latest} >= {sure}from_ms + {BROUGHT_MS}
            AND ({sure}until_ms IS NULL OR time_ms - {earliest} < {sure}until_ms - {BROUGHT_MS}))"""

    return f"""
        UNION ALL
        SELECT {_PLACE}, {one_row_each(events)}
        FROM (
            SELECT {_LEAVES_PLACE}, leaves.bridge, leaves.records, word, least_ms, most_ms, may_wait, {stands("most_ms", "least_ms", "sure_")} AS is_sure,
                {stands("most_ms", "least_ms")} AS is_so_dated,
                coalesce(time_ms - least_ms > told_to_ms + {BROUGHT_MS}, false) AS is_later
            FROM {{stopped}} AS leaves JOIN {{stops}} AS stops
                ON leaves.source_region = stops.source_region AND leaves.log = stops.stop_log AND leaves.stop_key = stops.stop_key
            WHERE {stands("least_ms", "most_ms")}
                AND (until_ms IS NULL OR until_ms - from_ms > {2 * BROUGHT_MS})
                AND (known_leaf IS NULL OR leaf_index < known_leaf)
        )
        """  # noqa: S608  # constants of this module


def _stopped(leaves: DataFrame, words: Words) -> DataFrame:
    """Of what arrived a row for each key of words that are about it. Of thousands that are about something else none is compared with it."""
    from pyspark.sql.functions import explode, udf

    keys = udf(words.keys, "array<string>", useArrow=False)
    arrived = leaves.where("kind = 'ACK' AND side = 'ingress' AND records > 0")
    return arrived.select(
        "*", explode(keys("source_region", "destination_region", "stream", "grant_id")).alias("stop_key")
    )


def found(
    leaves: DataFrame,
    all_leaves: DataFrame,
    signed: Signed,
    story: DataFrame | None,
    notices: DataFrame | None = None,
) -> DataFrame:
    """The exceptions of the window, each leaf's by itself; what the source forbade and the destination was not told is looked for in the
    source's own log. `all_leaves` and `signed` are of the whole logs: a revocation before
    the window forbids crossings inside it; without a window, `leaves` is the same object. `story`: what the verification's steps 7 and 10 found in whole logs (log, leaf_index,
    sentence, exception); None: nothing. `notices`: what it saw that breaks no rule (log, leaf_index, notice, sentence, records).

    Of version 2, what ends a grant is a revocation that one of its regions signed. Leaves of version 1 have no documents: there
    the log's own word is all there is, and it holds for crossings of version 1 alone, as in the verification.
    """
    asked: dict[str, Any] = {}
    if story is not None:
        asked["story"] = story
    if signed.stops is not None:
        assert signed.words is not None
        asked["stops"], asked["stopped"] = signed.stops, _stopped(leaves, signed.words)
    if notices is not None:
        asked["notices"] = notices
    return leaves.sparkSession.sql(
        f"""
        WITH revocations AS (
            SELECT log, grant_id, leaf_index, false AS claimed FROM {{revocations}}
            UNION ALL
            SELECT log, grant_id, leaf_index, true FROM {{all_leaves}} WHERE kind = 'REVOKE' AND version = 1
        ),
        revoked AS (
            SELECT log, grant_id, claimed, min(leaf_index) AS revoked_leaf FROM revocations GROUP BY ALL
        ),
        ended AS (SELECT DISTINCT log, leaf_index FROM revocations),
        judged AS (
            SELECT leaves.*, leaves.kind = 'INTENT' AND leaves.side = 'egress' AS crossed, terms.signed,
                   terms.expires_ms AS ends_ms, terms.not_before_ms AS begins_ms, revoked.revoked_leaf,
                   ended.log IS NOT NULL AS ends
            FROM {{leaves}} AS leaves
            LEFT JOIN {{terms}} AS terms ON leaves.terms_hash = terms.terms_hash
            LEFT JOIN revoked ON leaves.log = revoked.log AND leaves.grant_id = revoked.grant_id
                AND (leaves.version = 1) = revoked.claimed
            LEFT JOIN ended ON leaves.log = ended.log AND leaves.leaf_index = ended.leaf_index
            WHERE leaves.kind NOT IN ('ACK', 'GRANT')
        ),
        told AS (SELECT {_PLACE}, {one_row_each(_leaf_events())} FROM judged)
        SELECT * FROM told
        UNION ALL
        SELECT {_PLACE}, {one_row_each(_terms_events())} FROM {{terms}}
        {_onward()}
        {_rules_broken() if story is not None else ""}
        {_arrived_though() if signed.stops is not None else ""}
        {_noticed() if notices is not None else ""}
        {_announced_elsewhere() if leaves is not all_leaves else ""}
        {_dated_before() if leaves is not all_leaves else ""}
        """,  # noqa: S608  # constants of this module
        leaves=leaves,
        all_leaves=all_leaves,
        terms=signed.terms,
        revocations=signed.revocations,
        **asked,
    )


def listed(
    leaves: DataFrame,
    all_leaves: DataFrame,
    signed: Signed,
    story: DataFrame | None,
    notices: DataFrame | None = None,
) -> DataFrame:
    """What `found` finds, in order, alike events in one row of `COLUMNS`."""
    gathered = found(leaves, all_leaves, signed, story, notices)
    return leaves.sparkSession.sql(
        f"""
        SELECT severity, exception, source_region, destination_region, stream, grant_id, actor, action, rule, code,
               sentence, count(*) AS events,
               -- Leaves may say that any number is missing: what is more than a column holds is shown as the most that it does.
               coalesce(try_sum(records), CASE WHEN count(records) > 0 THEN {COUNT_MAX} END) AS records, min(time_ms) AS first_time,
               max(time_ms) AS last_time, log, min(leaf_index) AS first_leaf, max(leaf_index) AS last_leaf
        FROM {{gathered}}
        GROUP BY severity, exception, source_region, destination_region, stream, grant_id, actor, action, rule, code,
                 sentence, log
        ORDER BY CASE severity WHEN '{BREACH}' THEN 0 WHEN '{REFUSED}' THEN 1 ELSE 2 END, exception,
                 first_time, log, first_leaf, sentence, stream, actor
        """,  # noqa: S608  # constants of this module
        gathered=gathered,
    )
