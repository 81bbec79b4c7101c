"""`python -m benchmarks`: Felix beside other systems, and clients beside each other. In the clone alone, not in the wheel.

Each command takes `--help` and `-o json`, and ends as `felix bench` does: exit code 6 where something was lost, so that no
rate stands for it. What Felix alone moves is measured by `felix bench`.
"""

from __future__ import annotations

import typer

from benchmarks import beside, clusters, light, tenants
from cli.command import Command
from cli.main import main

app = typer.Typer(
    name="benchmarks",
    help="Felix beside other systems, and clients beside each other.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("fanout", cls=Command)(beside.fanout)
app.command("queue", cls=Command)(beside.queue)
app.command("cache", cls=Command)(beside.cache)
app.command("fairness", cls=Command)(tenants.fairness)
app.command("slow-consumer", cls=Command)(tenants.slow_consumer)
app.command("shards", cls=Command)(light.shards)
app.command("sessions", cls=Command)(light.sessions)
app.command("cluster", cls=Command)(clusters.cluster)
app.command("failover", cls=Command)(clusters.failover)
app.command("new-copy", cls=Command)(clusters.new_copy)

if __name__ == "__main__":
    main(app)
