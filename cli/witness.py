"""`felix witness`: an outside witness for anybody's transparency logs (c2sp.org/tlog-witness), and no part of a region."""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from audit.note import Algorithm, VerifierKey
from audit.witness_admission import Network, parse_clients
from audit.witness_policy import WitnessPolicy
from audit.witness_server import WitnessServer
from audit.witness_service import WitnessService
from audit.witness_sqlite import KnownLog, WitnessState, init_witness
from cli.notify import Notifier
from cli.output import note, out, print_json, table
from cli.setting import JsonOption, read_file, run, stop_signals
from felix.address import Address
from felix.collector import keep_what_is_there
from felix.errors import AddressInUseError, Code, RequestError

app = typer.Typer(no_args_is_help=True)

DEFAULT_LISTEN: Final = "127.0.0.1:7480"

Folder = Annotated[Path, typer.Option("--dir", help="The witness's folder: its keys and its state.")]


@app.command("init")
def init(
    name: Annotated[
        str,
        typer.Argument(
            help="What its cosignatures are called: a URL without scheme, as in witness.example/w1."
        ),
    ],
    folder: Folder = Path("felix-witness"),
) -> None:
    """Make a witness: an Ed25519 and an ML-DSA-44 key, and an empty state that belongs to them."""
    keys = init_witness(folder, name)
    out.print(f"{folder}: the witness {name}. Others verify its cosignatures with these keys:", markup=False)
    for key in keys:
        out.print(str(key))
    note(f"Next: felix witness add-log VKEY --dir {folder}, then: felix witness serve --dir {folder}")


@app.command("add-log")
def add_log(
    keys: Annotated[list[str] | None, typer.Argument(help="Verifier keys of a log, NAME+ID+KEY.")] = None,
    origin: Annotated[str, typer.Option(help="The log's origin, where it is not its key's name.")] = "",
    logs: Annotated[
        Path | None, typer.Option("--from", help="A tlog-policy file: take all the logs that it lists.")
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="In place of the keys of the same algorithm that the log had.")
    ] = False,
    folder: Folder = Path("felix-witness"),
) -> None:
    """Cosign a log from now on. A log with several keys is named once for each of them."""
    wanted = [VerifierKey.parse(text) for text in keys or []]
    if logs is not None:
        listed = WitnessPolicy.parse(read_file(logs, "The list of logs")).log_keys
        _require_one_each(logs, listed)
        wanted += listed
    if not wanted:
        raise RequestError("No log is named.", hint="Give its verifier key, or a file with --from.")
    state = WitnessState.open(folder)
    try:
        # A log of several keys has a line for itself, not one for each key.
        is_new: dict[str, bool] = {}
        for key in wanted:
            name = origin or key.name
            is_new[name] = state.add_log(name, key, in_place=in_place) or is_new.get(name, False)
        for name, new in is_new.items():
            out.print(f"{name}: {'cosigned from now on' if new else 'known already'}", markup=False)
    finally:
        state.close()


def _require_one_each(file: Path, keys: Sequence[VerifierKey]) -> None:
    """Raises RequestError where a list has two keys of one algorithm for a log: then one may have ended, perhaps because it leaked, and a list does not say
    which. A witness that took both would cosign what either signs."""
    held: dict[tuple[str, Algorithm], VerifierKey] = {}
    for key in keys:
        if held.setdefault((key.name, key.algorithm), key) is not key:
            raise RequestError(
                f"{file} has two keys of one algorithm for the log {key.name}: one of them may have ended, and a list does not say which.",
                code=Code.CONFLICT,
                hint="Have it printed by `felix audit policy --signing`, or name the keys that sign now.",
            )


@app.command("list")
def list_(folder: Folder = Path("felix-witness"), json: JsonOption = False) -> None:
    """List the logs that are cosigned, and how far."""
    state = WitnessState.open(folder)
    try:
        logs = state.logs()
        keys = [str(signer.key) for signer in state.signers]
    finally:
        state.close()
    if json:
        rows = [
            {"origin": log.origin, "size": log.held.size, "root": _root(log), "keys": _kinds(log)}
            for log in logs
        ]
        print_json(rows, witness=state.name, verifier_keys=keys)
        return
    table(
        state.name,
        ["origin", "cosigned#", "root", "keys"],
        [[log.origin, log.held.size, _root(log)[:16], ", ".join(_kinds(log))] for log in logs],
    )


def _root(log: KnownLog) -> str:
    return (log.held.root or b"").hex()


def _kinds(log: KnownLog) -> list[str]:
    return [key.algorithm.name.lower().replace("_", "-") for key in log.keys]


@app.command("serve")
def serve(
    listen: Annotated[str, typer.Option(help="Host and port; port 0 takes any.")] = DEFAULT_LISTEN,
    prefix: Annotated[str, typer.Option(help="What stands before the calls in a path, behind a proxy.")] = "",
    tls_cert: Annotated[Path | None, typer.Option(help="A certificate chain (PEM), to serve https.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
    client: Annotated[
        list[str] | None,
        typer.Option(
            help="An address, or a network as in 192.0.2.0/24, from where connections are taken however many strangers hold; may be repeated."
        ),
    ] = None,
    folder: Folder = Path("felix-witness"),
) -> None:
    """Serve add-checkpoint over HTTP until interrupted. Refuses to start where its state is lost or older."""
    address, clients = Address.parse(listen), parse_clients(client or ())
    tls: ssl.SSLContext | None = None
    if (tls_cert is None) is not (tls_key is None):
        raise RequestError("TLS needs both --tls-cert and --tls-key.")
    if tls_cert is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            tls.load_cert_chain(tls_cert, tls_key)
        except OSError as error:
            raise RequestError(f"The certificate or its key cannot be read: {error}.") from error
    from cli.clash import told

    logging.getLogger("felix").setLevel(logging.INFO)
    state = WitnessState.open(folder, serve=True)
    try:
        with told("name another one with --listen."):
            run(_serve(state, address, prefix, tls, clients))
    finally:
        state.close()


async def _serve(
    state: WitnessState,
    address: Address,
    prefix: str,
    tls: ssl.SSLContext | None,
    clients: Sequence[Network],
) -> None:
    service = WitnessService(state, lambda: int(time.time()))
    server = WitnessServer(service, address.host, address.port, prefix=prefix, tls=tls, clients=clients)
    ended: asyncio.Event = stop_signals()
    try:
        await server.start()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(str(address), "TCP") from error
        raise RequestError(
            f"{address} cannot be used: {error.strerror or error}.",
            code=Code.CONFIG_INVALID,
            hint="Name another one with --listen.",
        ) from error
    try:
        scheme = "http" if tls is None else "https"
        place = f"{state.name} serves at {scheme}://{address.host}:{server.port}{prefix}"
        async with Notifier.from_environment() as notifier:
            keep_what_is_there()
            notifier.serving(lambda: place)
            note(f"{place}; end it with Ctrl-C")
            await ended.wait()
            notifier.stopping()
    finally:
        await server.close()
