"""Commands that look at models and versions: models, versions, show, watch, verify."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weighbridge._cli.output import print_json, print_result, print_table, progress_bar, readable_time, say
from weighbridge._cli.parsing import WholeNumber, comparisons, model_perhaps_at_version, ref_of
from weighbridge._cli.resuming import DoneLines
from weighbridge._cli.running import Command, client_options, engine_of
from weighbridge._cli.showing import completing
from weighbridge._cli.signing import FILE, trusted
from weighbridge._cli.tagging import approval_command
from weighbridge._core.engines.golden import readable_metadata
from weighbridge._core.metadata import BASE, BASE_DIGEST, BaseVersion, Metadata, conditions
from weighbridge._core.references import Reference, is_training, training_of
from weighbridge._core.resources import REF_LATEST, REF_LIVE, refs_of, refs_text, why_held
from weighbridge._core.text.counts import counted, named
from weighbridge._core.text.sizes import readable_size
from weighbridge._core.text.suggestions import did_you_mean
from weighbridge.errors import FailedPrecondition, InvalidArgument, NotFound

if TYPE_CHECKING:
    from weighbridge._clients.engine import EngineClient
    from weighbridge._core.resources import Model, RefRequest, Verification, Version
    from weighbridge._signing.checking import Signed


@click.command("models", cls=Command)
@client_options
def models_command(server: str, as_json: bool) -> None:
    """List all models."""
    with engine_of(server) as client:
        found = client.models()
    if as_json:
        print_json(found)
        return
    adapters = any(model.adapters for model in found)
    rows = [
        (
            m.name,
            _type_text(m),
            m.dtype,
            m.tensor_count,
            readable_size(m.tensor_bytes),
            refs_text(m.refs),
            *([named(m.adapters) or "-"] if adapters else []),
        )
        for m in found
    ]
    more = ("ADAPTERS",) if adapters else ()
    print_table(("MODEL", "TYPE", "DTYPE", "TENSORS", "SIZE", "REFS", *more), rows, below=more)


def _type_text(model: Model) -> str:
    if model.is_adapter:
        return f"adapter on {model.base or 'no version yet'}"
    return (model.model_type or "-") + ("" if model.weight_map else " (no weight map)")


@click.command("versions", cls=Command)
@click.argument("model", shell_complete=completing.models)
@click.option("--all", "include_invisible", is_flag=True, help="Also those being received, and those that failed.")
@click.option(
    "--where",
    multiple=True,
    metavar="COMPARISON",
    callback=comparisons,
    help="Only versions whose metadata meets this condition, such as 'reward>=0.7'; with = != < <= > or "
    ">=, and in quotes for the shell. If given several times, all conditions must be met.",
)
@click.option("--limit", type=WholeNumber(min=1), metavar="N", help="Only the newest N.  [default: all]")
@client_options
def versions_command(
    model: str,
    include_invisible: bool,
    where: tuple[str, ...],
    limit: int | None,
    server: str,
    as_json: bool,
) -> None:
    """List a model's versions, newest first."""
    with engine_of(server) as client:
        found = client.versions(model, include_invisible=include_invisible, where=where, limit=limit)
        if where and not found:
            _check_keys(model, where, client.versions(model, include_invisible=True))
        refs = client.refs(model)
    if as_json:
        print_json([{**version.to_json(), "refs": refs_of(refs, version.number)} for version in found])
        return
    bases = any(BaseVersion.of(version.metadata) for version in found)
    rows = [
        (
            v.number,
            v.state.value,
            v.step,
            v.run,
            readable_size(v.tensor_bytes),
            readable_time(v.create_time_ms),
            ", ".join(refs_of(refs, v.number)) or "-",
            *([str(BaseVersion.of(v.metadata) or "-")] if bases else []),
            ", ".join(v.held) or "-",
            _metadata_text(v.metadata) or "-",
            v.error or "; ".join(f"waits for {what}" for what in v.waits_for),
        )
        for v in found
    ]
    print_table(
        (
            "VERSION",
            "STATE",
            "STEP",
            "RUN",
            "SIZE",
            "CREATED",
            "REFS",
            *(["BASE"] if bases else []),
            "HELD",
            "METADATA",
            "NOTE",
        ),
        rows,
        below=("RUN", "BASE", "HELD", "METADATA", "NOTE"),
    )


def _check_keys(model: str, where: Sequence[str], versions: Sequence[Version]) -> None:
    """Refuse comparisons with keys that no version has, or of numbers with texts.

    Raises InvalidArgument, which names the keys that exist.
    """
    known = sorted({key for version in versions for key in version.metadata})
    unknown = [each.key for each in conditions(where) if each.key not in known]
    if unknown and known:
        raise InvalidArgument(
            f"no version of {model} has metadata called {unknown[0]!r}{did_you_mean(unknown[0], known)}",
            fix=f"compare {', '.join(known)}",
        )
    for each in conditions(where):
        found = [version.metadata[each.key] for version in versions if each.key in version.metadata]
        ordered = each.comparison not in ("=", "!=") and isinstance(each.value, str)
        if ordered and found and not any(isinstance(value, str) for value in found):
            raise InvalidArgument(
                f"{each.key} is {json.dumps(found[0])} in versions of {model}, and {each.value!r} is a string",
                fix=f"compare it with a number: {each.key}{each.comparison}0.7",
            )


def _metadata_text(metadata: Metadata) -> str:
    return ", ".join(
        f"{key}={json.dumps(value)}"
        for key, value in sorted(readable_metadata(metadata).items())
        if key not in (BASE, BASE_DIGEST)
    )


@click.command("show", cls=Command)
@completing.reference("MODEL[@VERSION]", model_perhaps_at_version)
@click.option("--tensors", "with_tensors", is_flag=True, help="Also list the tensors: name, dtype, shape.")
@client_options
def show_command(reference: Reference, with_tensors: bool, server: str, as_json: bool) -> None:
    """Show a model and one of its versions.

    Without @VERSION it is the newest that is not held; of versions that are all held the newest.
    """
    with engine_of(server) as client:
        model = client.model(reference.model)
        wanted = reference.version or next((ref for ref in (REF_LATEST, REF_LIVE) if ref in model.refs), "")
        if not wanted:  # all that there are may be held
            wanted = next((str(version.number) for version in client.versions(model.name)), "")
        version = client.version(model.name, wanted) if wanted else None
        tensors = None
        if with_tensors:
            if version is None:
                raise FailedPrecondition(
                    f"{model.name} has no version yet",
                    fix=f"push one: weighbridge push HF_DIR {model.name} --step N",
                )
            tensors = list(client.pull(model.name, version.number).layout.tensors.values())
        protections, requests = client.protections(model.name), client.ref_requests(model.name)
        state = None if is_training(model.name) else _newest_state(client, model.name)
    if as_json:
        shown: dict[str, Any] = {
            "model": model,
            "version": version,
            "training_state": state,
            "protections": protections,
            "requests": requests,
        }
        if tensors is not None:
            shown["tensors"] = [{"name": t.name, "dtype": t.dtype.name, "shape": list(t.shape)} for t in tensors]
        print_json(shown)
        return
    lines = [
        ("model", model.name),
        *_kind_lines(model, version),
        ("refs", refs_text(model.refs)),
        *([("training", f"{state}, {readable_size(state.tensor_bytes)}")] if state else []),
        *(("protected", each.text) for each in protections),
        *(("asked", _request_text(each)) for each in requests if each.pending),
        *(_version_lines(version, model.refs) if version else [("version", "none yet")]),
    ]
    wide = max(len(label) for label, _ in lines) + len(": ")
    for label, text in lines:
        first, *others = text.split("\n")
        say(f"{label + ':':<{wide}}{first}", *(f"{'':<{wide}}{line}" for line in others))
    if tensors is not None:
        say("")
        print_table(("TENSOR", "DTYPE", "SHAPE"), [(t.name, t.dtype, list(t.shape)) for t in tensors])


def _newest_state(client: EngineClient, model: str) -> Version | None:
    """Newest training state; None if the model has none."""
    try:
        return next(iter(client.versions(training_of(model), limit=1)), None)
    except NotFound:
        return None


def _kind_lines(model: Model, version: Version | None) -> list[tuple[str, str]]:
    """Lines on the contents of a model's versions.

    Training states differ from each other, so theirs give the size of the one shown.
    """
    if is_training(model.name):
        size = "" if version is None else f", {readable_size(version.tensor_bytes)} in the one shown"
        return [("type", f"training states{size}")]
    return [
        ("type", _type_text(model)),
        ("dtype", model.dtype),
        ("tensors", f"{model.tensor_count}, {readable_size(model.tensor_bytes)}"),
        ("files", ", ".join(model.files)),
        *([("adapters", named(model.adapters))] if model.adapters else []),
    ]


def _request_text(request: RefRequest) -> str:
    note = f" ({request.note})" if request.note else ""
    until = f"until {readable_time(request.expire_time_ms)}"
    return f"{request.text}, by {request.by}{note}, {until}: {approval_command(request)}"


def _version_lines(version: Version, refs: Mapping[str, int]) -> list[tuple[str, str]]:
    names = ", ".join(refs_of(refs, version.number))
    lines = [
        ("version", f"{version.number}, {version.state.value}" + (f" ({names})" if names else "")),
        ("step", f"{version.step} of run {version.run}"),
        ("created", readable_time(version.create_time_ms)),
        ("ready", readable_time(version.ready_time_ms)),
        ("verified", readable_time(version.verified_time_ms)),
        ("durable", readable_time(version.durable_time_ms)),
    ]
    if (base := BaseVersion.of(version.metadata)) is not None:
        lines.append(("base", str(base)))
    if _metadata_text(version.metadata):
        lines.append(("metadata", _metadata_text(version.metadata)))
    if version.nonfinite_elements:
        lines.append(
            (
                "warning",
                counted(version.nonfinite_elements, "element is", "elements are") + " NaN or infinite",
            )
        )
    if version.held:
        lines.append(("held", why_held(version)))
    if version.approved_reasons:
        lines.append(("approved", f"{version.approval_text}, {readable_time(version.approved_time_ms)}"))
    lines += [("waiting", f"for {what}") for what in version.waits_for]
    if version.error:
        lines.append(("error", version.error + "".join(f"\n- {line}" for line in version.error_details)))
    return lines


@click.command("watch", cls=Command)
@completing.reference("MODEL[@REF]", model_perhaps_at_version)
@click.option("--ref", show_default=REF_LIVE, help="Ref to watch.", shell_complete=completing.refs)
@click.option("--count", type=WholeNumber(min=1), help="Exit after this many versions.")
@client_options
def watch_command(reference: Reference, ref: str | None, count: int | None, server: str, as_json: bool) -> None:
    """Print each version that a ref comes to name.

    Begins with the one it names now; one line a version. Waits out a service that restarts.
    """
    model, ref = reference.model, ref_of(reference, ref, REF_LIVE)
    with engine_of(server) as client:
        say_if_absent(client, model, ref)
        for version in itertools.islice(client.watch(model, ref), count):
            print_result(version, as_json, str(version), one_line=True)


def say_if_absent(client: EngineClient, model: str, ref: str) -> Model | None:
    """Return the model if it is registered.

    Otherwise, or if it lacks a ref that the caller is about to wait for, say so on stderr.

    A service that cannot be reached, or a name that no model can have, is an error now; callers wait out a service that
    goes away later.
    """
    found: Model | None = None
    try:
        found = client.model(model)
    except NotFound as error:
        missing = error.message if error.message.endswith("?") else f"{error.message}."
    else:
        if ref in found.refs:
            return found
        if ref in (REF_LATEST, REF_LIVE):
            missing = f"{model} has no version yet."
        else:
            meant = did_you_mean(ref, [REF_LATEST, REF_LIVE, *found.refs])
            missing = f"{model} has no ref {ref!r}{meant or f': it has {refs_text(found.refs)}.'}"
    say(f"{missing} Waiting until there is one.", err=True)
    return found


@click.command("verify", cls=Command)
@completing.reference("MODEL[@VERSION]", model_perhaps_at_version)
@click.option(
    "--signature",
    "by_signature",
    is_flag=True,
    help="Also check the signatures, and compare the files with them.",
)
@click.option(
    "--key",
    "keys",
    type=FILE,
    multiple=True,
    help="File of public keys (PEM), one of which must have signed; if given several times, one of each file.",
)
@click.option(
    "--certificate-chain",
    "chains",
    type=FILE,
    multiple=True,
    help=(
        "File of authorities (PEM), one of which must have issued the signer's certificate; if "
        "given several times, one of each file."
    ),
)
@click.option("--all", "all_versions", is_flag=True, help="Check all stored versions of the model, the newest first.")
@click.option(
    "--resume",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --all: file that records which versions were intact. A later command that names the file "
    "leaves these out; the file is deleted at the end.",
)
@client_options
@click.pass_context
def verify_command(
    ctx: click.Context,
    reference: Reference,
    by_signature: bool,
    keys: tuple[Path, ...],
    chains: tuple[Path, ...],
    all_versions: bool,
    resume: Path | None,
    server: str,
    as_json: bool,
) -> None:
    """Check a version's files against digests and signatures.

    Without @VERSION it is the latest one, or with --all each that is stored. The exit code is 1 if anything differs.
    """
    if by_signature != bool(keys or chains):
        raise click.UsageError("--signature and whom to trust, --key or --certificate-chain, must be given together")
    if all_versions and (by_signature or reference.version):
        raise click.UsageError("--all takes a model without @VERSION, and excludes --signature")
    if resume is not None and not all_versions:
        raise click.UsageError("--resume needs --all")
    if all_versions:
        with engine_of(server) as client:
            ctx.exit(_verify_all(client, reference.model, DoneLines(resume), as_json=as_json))
    signed: tuple[Signed, ...] = ()
    with engine_of(server) as client:
        if by_signature:
            from weighbridge._signing.signatures import Signatures

            required = trusted((*keys, *chains))
            found, signed = Signatures(client).verify(
                reference.model, reference.version or REF_LATEST, required=required
            )
        else:
            found = client.verify(reference.model, reference.version or REF_LATEST)
    if as_json:
        print_json(
            {
                **_verified_json(reference.model, found),
                **({"signed": signed} if by_signature else {}),
            }
        )
    else:
        _say_verified(reference.model, found)
        for each in signed:
            say(f"signed by {each.by}, as {each.trusted} requires")
        if found.nonfinite_elements:
            say(
                counted(found.nonfinite_elements, "element is", "elements are")
                + " NaN or infinite, as they were pushed"
            )
    ctx.exit(1 if found.problems else 0)


def _verify_all(client: EngineClient, model: str, progress: DoneLines, *, as_json: bool) -> int:
    """Compare all stored versions of a model, one after another. Returns the exit code."""
    versions = [version for version in client.versions(model) if version.state.stored]
    found: list[Verification] = []
    before = done = 0
    with progress_bar(f"verifying {model}") as update:
        total = sum(version.tensor_bytes for version in versions)
        for version in versions:
            key = (model, version.number, version.create_time_ms)
            if progress.has(key):
                before += 1
            else:
                found.append(client.verify(model, version.number))
                if not found[-1].problems:
                    progress.add(key)
                if not as_json:
                    _say_verified(model, found[-1])
            done += version.tensor_bytes
            update(done, total)
    progress.end()
    wrong = sum(bool(each.problems) for each in found)
    if as_json:
        checked = [_verified_json(model, each) for each in found]
        print_json({"model": model, "ok": not wrong, "versions": checked, "verified_before": before})
    else:
        verdict = f"{counted(wrong, 'version')} of {len(versions)} damaged" if wrong else "all is well"
        earlier = f", {before} of them before the interruption" if before else ""
        say(f"{model}: {verdict} ({counted(len(versions), 'version')} compared{earlier})")
    return 1 if wrong else 0


def _verified_json(model: str, found: Verification) -> dict[str, Any]:
    return {
        "model": model,
        "number": found.number,
        "ok": not found.problems,
        "tensors_checked": found.tensors_checked,
        "bytes_checked": found.bytes_checked,
        "problems": list(found.problems),
        "nonfinite_elements": found.nonfinite_elements,
    }


def _say_verified(model: str, found: Verification) -> None:
    for problem in found.problems:
        say(problem)
    verdict = counted(len(found.problems), "problem") if found.problems else "all is well"
    checked = f"{counted(found.tensors_checked, 'tensor')}, {readable_size(found.bytes_checked)} checked"
    say(f"{model}@{found.number}: {verdict} ({checked})")
