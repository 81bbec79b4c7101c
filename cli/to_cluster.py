"""`felix region to-cluster`: a region of one broker becomes, in place, one of several (`cli.conversion`)."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.free_address import free_address
from cli.output import out
from cli.process import read_state
from cli.setting import choose_region, folder_of, run
from felix.errors import UnavailableError


def to_cluster(
    name: Annotated[str, typer.Argument(help="The region; its broker must not run.")] = "",
) -> None:
    """Turn a region of one broker into one of several, in place: streams, queues, caches, keys and the audit log stay.

    It begins with the broker that it has; `felix region scale` gives it more. A run that was cut off is finished by the next.
    """
    from cli.conversion import convert, finish
    from cli.several import free_etcd, name_brokers

    region = choose_region(name)
    folder, config = folder_of(region)
    if config.cluster is not None:
        finish(folder, config)
        brokers = ", ".join(str(each.id) for each in config.cluster.brokers)
        out.print(f"{region} is a region of several brokers already: {brokers}")
        return
    if read_state(folder.broker_pid) is not None:
        raise UnavailableError(f"{region} runs here.", hint=f"Stop it first: felix region down {region}.")
    etcd = free_etcd(free_address) if config.metadata.kind == "embedded" else None
    run(convert(folder, config, etcd))
    name_brokers(folder, config, config.broker, 1, free_address, etcd=etcd)
    finish(folder, config)
    out.print(f"{region} is a region of several brokers from now on, and has one: {config.broker}")
    out.print(f"Start it: felix region up {region} --detach")
    if etcd is not None:
        out.print(f"Then give it more: felix region scale 3 --region {region}")
