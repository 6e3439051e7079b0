"""Proxies on the way to a service: which one a connection passes, and whether it passes one at all.

A CONNECT proxy reads what passes it, unless that is encrypted. gRPC and Python's HTTP client send every connection through the proxy that the
environment names for others, ``http_proxy``, those to this machine and those without TLS included, so that it reads tokens and weights. Here a
connection without TLS passes only the proxy that is named for it, in ``WEIGHBRIDGE_PROXY``; one with TLS passes what the environment names,
as those of other programs do; and one to this machine passes none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from weighbridge._transport.credentials import stays_here
from weighbridge.errors import InvalidArgument

if TYPE_CHECKING:
    import urllib.request

PROXY_VARIABLE = "WEIGHBRIDGE_PROXY"
_OF_GRPC = ("grpc_proxy", "https_proxy", "http_proxy")
"""The environment variables that gRPC reads, in its order."""


def channel_options(
    server: str, *, tls: bool, environment: Mapping[str, str] | None = None
) -> tuple[tuple[str, int | str], ...]:
    """Options of a gRPC channel.

    Args:
        server: address of the service.
        tls: whether the channel speaks TLS.
        environment: of this process by default.

    Raises:
        InvalidArgument: `WEIGHBRIDGE_PROXY` is no URL of a proxy.
    """
    found = os.environ if environment is None else environment
    if not stays_here(server):
        named = found.get(PROXY_VARIABLE)
        if named:
            return (("grpc.http_proxy", _checked(named)),)
        if tls:
            return ()
    return (("grpc.enable_http_proxy", 0),)


def proxy_of(server: str, *, tls: bool, environment: Mapping[str, str] | None = None) -> str:
    """``host:port`` of the proxy that a channel passes, for messages; empty if it passes none. Arguments are those of `channel_options`."""
    found = os.environ if environment is None else environment
    host = server.rpartition(":")[0].strip("[]").lower()
    excepted = (found.get("no_grpc_proxy") or found.get("no_proxy") or "").lower().split(",")
    if stays_here(server) or any(each.strip() and host.endswith(each.strip()) for each in excepted):
        return ""
    names = (PROXY_VARIABLE, *(_OF_GRPC if tls else ()))
    url = next((url for name in names if (url := found.get(name))), "")
    return urlsplit(url).netloc.rpartition("@")[2]  # what stands before it may be a password


def opener(url: str, *handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
    """An opener of HTTP URLs; by a proxy of the environment only where that can read nothing.

    Args:
        url: which one.
        handlers: further ones.
    """
    import urllib.request  # most programs never need it

    if _may_pass(url):
        return urllib.request.build_opener(*handlers)
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), *handlers)


def passes_proxy(url: str) -> bool:
    """Whether `opener` sends requests for a URL through a proxy: then nothing need take connections from here at the URL's own host."""
    import urllib.request

    host = urlsplit(url).hostname or ""
    return _may_pass(url) and "https" in urllib.request.getproxies() and not urllib.request.proxy_bypass(host)


def _may_pass(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "https" and not stays_here(f"{parts.hostname}:0")


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        good = parts.scheme == "http" and bool(parts.hostname) and parts.port is not None
    except ValueError:
        good = False
    if not good:
        raise InvalidArgument(
            f"{PROXY_VARIABLE} is no URL of a proxy that gRPC can use", fix="write it as http://HOST:PORT"
        )
    return url
