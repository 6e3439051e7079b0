"""Version of this distribution, and the commit that it was made from."""

from __future__ import annotations

from pathlib import Path

VERSION = "0.1.0"
COMMIT_FILE = "_commit.txt"
"""A file beside this one in distributions: setup.py writes it, and git does not keep it."""


def commit() -> str | None:
    """The commit that this distribution was made from, or of the checkout that it is imported from.

    Returns:
        Its abbreviated hash, with " and changes" where tracked files differed from it; None where neither says so.
    """
    recorded = Path(__file__).with_name(COMMIT_FILE)
    if recorded.exists():
        return recorded.read_text("utf-8").strip() or None
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():
        return None
    import subprocess  # only a checkout needs it

    line = ["git", "-C", str(checkout), "describe", "--always", "--exclude=*", "--dirty= and changes"]
    try:
        described = subprocess.run(line, capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return None
    return described.stdout.strip() or None
