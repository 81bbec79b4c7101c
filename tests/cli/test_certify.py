"""`felix region csr` and `certify`: an organisation's certificate, shown by the broker from its next start on."""

from __future__ import annotations

from pathlib import Path

from organisation import Organisation
from region_home import make_region, running
from region_peer import client
from transport.recorder import Echo
from typer.testing import CliRunner

from cli.main import app
from felix.peer import encode_chain
from felix.transport.port import ClientTls, engine_named


async def test_a_certified_region_serves_its_own_clients_and_the_organisations_tools(tmp_path: Path) -> None:
    folder = make_region(tmp_path, "us-east")
    bundle = folder.bundle.read_bytes()
    request, signed = tmp_path / "us-east.csr", tmp_path / "us-east.pem"
    environment = {"FELIX_HOME": str(tmp_path)}
    done = CliRunner().invoke(app, ["region", "csr", "--out", str(request)], env=environment)
    assert done.exit_code == 0, done.output
    acme = Organisation.make()
    signed.write_bytes(acme.sign(request.read_bytes()))
    done = CliRunner().invoke(app, ["region", "certify", str(signed)], env=environment)
    assert done.exit_code == 0 and "us-east.acme is certified by CN=Acme Regions until " in done.stdout
    assert folder.bundle.read_bytes() == bundle  # nobody has to compare anything again
    async with running(folder) as node, client(folder) as region:
        await region.create_stream("acme/ops/crew")
        tls = ClientTls(encode_chain([acme.root]), "us-east.acme")
        tool = await engine_named(None).connect(node.address.host, node.address.port, tls, Echo())
        tool.close(0, "")
