"""Commands about signatures of versions: sign, signatures; and the trusted keys of verify and follow."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weighbridge._cli.output import print_json, print_table, say
from weighbridge._cli.parsing import model_at_version
from weighbridge._cli.running import Command, client_of, client_options
from weighbridge._cli.showing import completing
from weighbridge._core.references import Reference
from weighbridge._core.text.sizes import readable_size

if TYPE_CHECKING:
    from weighbridge._signing.signer import Signer
    from weighbridge._signing.trust import Trusted

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SHOWN = 16
_PASSWORD = "WEIGHBRIDGE_KEY_PASSWORD"  # noqa: S105  # the name of a variable


def trusted(paths: Iterable[Path]) -> tuple[Trusted, ...]:
    """Keys and authorities in files, each of which must have signed."""
    from weighbridge._signing.trust import Trusted

    return tuple(map(Trusted.of_file, paths))


@click.command("sign", cls=Command)
@completing.reference("MODEL@VERSION", model_at_version)
@click.option("--key", type=FILE, help="The private key (PEM), on the curve P-256, P-384 or P-521.")
@click.option(
    "--certificate",
    type=FILE,
    help=(
        "The key's certificate (PEM), optionally followed by those that lead to its authority; by "
        "default the key signs without one."
    ),
)
@click.option(
    "--certificate-chain",
    "chain",
    type=FILE,
    multiple=True,
    help="Further certificates that lead to its authority (PEM).",
)
@click.option(
    "--signature",
    "made",
    type=FILE,
    help="In place of a key: a signature that model_signing has made elsewhere, such as with a key in hardware.",
)
@client_options
def sign_command(
    reference: Reference,
    key: Path | None,
    certificate: Path | None,
    chain: tuple[Path, ...],
    made: Path | None,
    server: str,
    as_json: bool,
) -> None:
    """Sign a version as OpenSSF model signing has it.

    The key stays here. Of an encrypted key the password is asked for, or taken from WEIGHBRIDGE_KEY_PASSWORD.
    """
    if (key is None) == (made is None) or (certificate is not None and key is None):
        raise click.UsageError("name --key, with or without --certificate; or --signature")
    if chain and certificate is None:
        raise click.UsageError("--certificate-chain needs --certificate")
    signer = None if key is None else _signer(key, certificate, chain)
    from weighbridge._signing.signatures import Signatures

    with client_of(server) as client:
        if signer is not None:
            done = Signatures(client).sign(reference.model, reference.version, signer=signer)
        elif made is not None:
            done = Signatures(client).add(reference.model, reference.version, content=made.read_bytes())
    if as_json:
        print_json(done)
        return
    what = "signed" if done.added else "is signed already"
    read = f"; the service has read {readable_size(done.bytes_read)} for it" if done.bytes_read else ""
    say(f"{done.model}@{done.number}: {what} by {done.method} {done.signer[:_SHOWN]}{read}")
    by = done.provenance.get("by")
    whose = f", pushed by {by}" if by else ""
    say(f"step {done.step} of run {done.run}{whose}; signature {done.id}")


@click.command("signatures", cls=Command)
@completing.reference("MODEL@VERSION", model_at_version)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Also write each to this folder, as model_signing verify takes it.",
)
@client_options
def signatures_command(reference: Reference, out: Path | None, server: str, as_json: bool) -> None:
    """List the signatures of a version. Nothing is verified: weighbridge verify --signature does that."""
    from weighbridge._formats.side_files.signature_files import write_signature_files
    from weighbridge._signing.bundle import signed_by

    with client_of(server) as client:
        found = client.signatures(reference.model, reference.version)
    paths = [] if out is None else write_signature_files(out, found)
    rows: list[dict[str, Any]] = []
    for each, path in itertools.zip_longest(found, paths):
        method, signer = signed_by(each.content)
        row = {"id": each.id, "method": method, "signer": signer}
        rows.append(row | ({"file": str(path)} if path else {}))
    if as_json:
        print_json(rows)
    else:
        columns = ("SIGNATURE", "METHOD", "SIGNER", *(("FILE",) if out is not None else ()))
        print_table(columns, [(*row.values(),) for row in rows])


def _signer(key: Path, certificate: Path | None, chain: tuple[Path, ...]) -> Signer:
    from weighbridge._signing.signer import PasswordNeeded, Signer

    password = os.environ.get(_PASSWORD)
    try:
        return Signer(key, password=password, certificate=certificate, chain=chain)
    except PasswordNeeded:
        if password is not None or not sys.stdin.isatty():
            raise
    asked = click.prompt(f"Password of {key}", hide_input=True, err=True)
    return Signer(key, password=asked, certificate=certificate, chain=chain)
