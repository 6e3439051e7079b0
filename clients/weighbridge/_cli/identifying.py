"""Command for those who say who may do what: token."""

from __future__ import annotations

import click

from weighbridge._cli.output import print_result
from weighbridge._cli.running import Command
from weighbridge._core.text.extras import needs_extra


@click.command("token", cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, also for errors.")
def token_command(as_json: bool) -> None:
    """Make a new token.

    Give the token to the client that it is to identify (WEIGHBRIDGE_TOKEN), and put the digest into the policy of the
    service (--policy).
    """
    with needs_extra("service"):
        from weighbridge_service.access.tokens import digest, new_token

    token = new_token()
    print_result({"token": token, "digest": digest(token)}, as_json, f"token   {token}", f"digest  {digest(token)}")
