"""What an agent read from disk is renewed while it runs: its identity, by its own region; the bundles of regions, as an operator puts them beside it, or pins
them at the source region; the policy of the quorum that it waits for. Sessions are made anew with what changed. What cannot be taken leaves what was there in force, and keeps nothing
else from being taken; it is logged once, and shown in the links' reports until it can. On the event loop. Caller: bridge.agent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from audit.note import VerifierKey
from audit.quorum import Quorum
from audit.trust import witnesses_of
from bridge.agent_files import AgentFiles, check_quorum, keep_own, load_files, load_policy
from bridge.config import BridgeConfig, BridgePaths
from bridge.endpoint import RegionEndpoint
from bridge.link_context import LinkContext
from bridge.pins import Pins, list_pins
from felix.errors import Code, FelixError
from felix.expiry import Life, Stage, stage_of, until_text
from felix.link import Link
from felix.periodic import every
from felix.renewal import request_renewal, store_renewed

log = logging.getLogger("felix.bridge.renewal")

RENEW_S: Final = 30.0
"""How often identity and bundles are read again, so that renewed ones are taken."""
PINS_LOOK_S: Final = 1.0
"""How soon after a session with the source region begins is asked whom that trusts; then every RENEW_S."""


class AgentRenewal:
    """One per agent. `files`: what was read last."""

    def __init__(
        self,
        config: BridgeConfig,
        base: Path,
        paths: BridgePaths,
        files: AgentFiles,
        endpoints: Mapping[str, RegionEndpoint],
        context: LinkContext,
        quorum: Quorum | None,
    ) -> None:
        self.files = files
        self._config = config
        self._base = base
        self._paths = paths
        self._endpoints = endpoints
        self._context = context
        self._quorum = quorum
        self._troubles: dict[str, str] = {}
        """what of the files is not taken, and why"""
        self._pins = Pins(paths.trusted)
        self._pinned_as: Link | None = None
        """the session in which the source region was asked last whom it trusts"""
        self._pins_due_s = 0.0
        self._is_unkept = False
        """whether the bundle of its own region cannot be remembered"""
        self._renewing = asyncio.Lock()
        self._expiry_told = Stage.FRESH
        self._expiry_reasons: set[Code] = set()
        """why the identity could not be renewed, as far as it was told at this stage: each once"""

    async def keep(self) -> None:
        """Renew, for ever."""
        self._say("unpinned", " ".join(self.files.unpinned))
        self._say("unreached", self._unreached())
        await self._keep_own()
        await every(RENEW_S, self.renew, "identity and bundles could not be read again", log)

    async def follow_pins(self) -> None:
        """Take whom the source region trusts, for ever."""
        await every(PINS_LOOK_S, self.take_pins, "the source region's pins could not be taken", log)

    async def _renew_identity(self) -> None:
        """Ask the source region for the next certificate once it is due; the file is read again below."""
        held = self.files.identity
        now_ms = self._context.clock_ms()
        if not held.renewal_due(now_ms):
            return
        source = self._config.source
        try:
            root_pem = self.files.bundles[source].root_pem.encode()
            renewed = await request_renewal(
                self._endpoints[source].connection(), held, root_pem, self._context.clock_ms
            )
            await asyncio.to_thread(store_renewed, renewed, held, self._paths.identity)
        except (FelixError, OSError) as error:
            stage = stage_of(Life(held.not_before_ms, held.not_after_ms), now_ms)
            why = error.code if isinstance(error, FelixError) else Code.STATE
            if stage is not self._expiry_told:
                self._expiry_told, self._expiry_reasons = stage, set()
            if why not in self._expiry_reasons:
                self._expiry_reasons.add(why)
                log.warning(
                    "%s %s, and could not be renewed: %s",
                    held.spiffe_id, until_text(held.not_after_ms, now_ms), error,
                )  # fmt: skip
            return
        self._expiry_told = Stage.FRESH
        log.info("%s renewed its identity", held.spiffe_id)

    async def take_pins(self) -> None:
        """Whom the source region trusts now, as its operator compared it on whichever machine."""
        source = self._config.source
        endpoint, now_s = self._endpoints[source], self._context.runtime.clock.monotonic()
        if not endpoint.is_up or (endpoint.link() is self._pinned_as and now_s < self._pins_due_s):
            return
        self._pinned_as, self._pins_due_s = endpoint.link(), now_s + RENEW_S
        try:
            found = await list_pins(endpoint.connection())
        except FelixError as error:
            # A broker of before lists none; the files count alone then.
            log.info("%s does not say whom it trusts: %s", source, error)
            return
        if await asyncio.to_thread(self._pins.take, found, self.files.bundles[source]):
            await self._read_files()

    async def renew(self) -> None:
        """A renewed identity or bundle is taken without a restart: sessions are made anew with it."""
        await self._renew_identity()
        await self._read_files()

    async def _read_files(self) -> None:
        async with self._renewing:
            await self._read_files_alone()

    async def _read_files_alone(self) -> None:
        await self._take_policy()
        held = self.files
        try:
            files = await asyncio.to_thread(load_files, self._config, self._paths)
            if refused := self._refused(files):
                # Whom it trusts is judged by the same bundle, and not by the one that is not taken.
                files = await asyncio.to_thread(load_files, self._config, self._paths, held.own)
        except (FelixError, OSError) as error:
            self._say("files", f"What is in its folder now is not taken: {error}")
            return
        self._say("files", "")
        self._say("bundle", refused)
        self._say("unpinned", " ".join(files.unpinned))
        bundles = {region: self._pins.newest(region, bundle) for region, bundle in files.bundles.items()}
        files = files._replace(bundles=bundles)
        for region, endpoint in self._endpoints.items():
            bundle = files.bundles[region]
            if files.identity.chain_pem != held.identity.chain_pem or bundle != held.bundles[region]:
                log.info("a renewed identity or bundle is taken; the session with %s begins anew", region)
                endpoint.take_identity(files.identity, bundle)
        self.files = files
        self._context.identity = files.identity
        self._trust_witnesses()
        self._say("unreached", self._unreached())
        await self._keep_own()

    def _refused(self, files: AgentFiles) -> str:
        """Why the bundle of its own region is not taken; empty where it is."""
        try:
            if self._quorum is not None:
                check_quorum(self._quorum.policy, files.own.bundle)
        except FelixError as error:
            return f"The bundle of {self._config.source} that is in its folder now is not taken: {error}"
        return ""

    async def _keep_own(self) -> None:
        try:
            await asyncio.to_thread(keep_own, self._paths, self.files.own)
        except OSError as error:
            if not self._is_unkept:
                log.warning("which bundle of %s counts cannot be remembered: %s", self._config.source, error)
            self._is_unkept = True
        else:
            self._is_unkept = False

    async def _take_policy(self) -> None:
        """The policy of the quorum, as its file has it now: what crosses from here on is held to that."""
        wanted, quorum = self._config.require_quorum, self._quorum
        if wanted is None or quorum is None:
            return
        own = self.files.bundles[self._config.source]
        try:
            policy = await asyncio.to_thread(load_policy, wanted, self._base, own)
        except (FelixError, OSError) as error:
            self._say(
                "policy", f"The policy of require_quorum is not taken, and the former one counts: {error}"
            )
            return
        self._say("policy", "")
        if policy != quorum.policy:
            quorum.take(policy)
            self._trust_witnesses()
            log.warning("the policy of require_quorum has changed; the quorum that it asks for now counts")

    def _trust_witnesses(self) -> None:
        """Whose cosignatures the egress log keeps."""
        trail, quorum = self._context.trail, self._quorum
        if trail is not None:
            regions = witnesses_of(self.files.bundles.values(), self._config.source)
            trail.checkpoints.trust_witnesses(
                [*regions, *(quorum.policy.witness_keys if quorum is not None else ())]
            )

    def _unreached(self) -> str:
        """Whose cosignatures the policy of the quorum asks for, though this agent asks nobody who could give them; empty where it does."""
        config, quorum = self._config, self._quorum
        if quorum is None:
            return ""
        asked = {
            *witnesses_of(self.files.bundles.values(), config.source),
            *(VerifierKey.parse(key) for each in config.witnesses for key in each.keys),
        }
        if quorum.policy.is_met(asked):
            return ""
        names = dict.fromkeys(key.name for key in quorum.policy.witness_keys if key not in asked)
        return (
            f"The policy of require_quorum can be met by nobody whom this agent asks to cosign: neither `witnesses` in bridge.yaml nor the bundle of a region that it reaches has the key of "
            f"{', '.join(names) or 'any witness'}. Nothing crosses once leaves have waited for {quorum.max_lag}."
        )

    def troubles(self) -> list[str]:
        """What of the files is not taken, a sentence each."""
        return list(self._troubles.values())

    def _say(self, what: str, sentence: str) -> None:
        """Once, as long as it stays so; nothing where all is well."""
        if not sentence:
            self._troubles.pop(what, None)
        elif self._troubles.get(what) != sentence:
            self._troubles[what] = sentence
            log.warning("%s", sentence)
