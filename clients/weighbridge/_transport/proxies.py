"""Proxies between a client and a service: whether a connection uses one, and which.

A CONNECT proxy can read connections that are not encrypted. gRPC and Python's HTTP client use the proxy of
``http_proxy`` for every connection, to this machine and without TLS too, so that it could read tokens and weights. Here
a connection without TLS uses only the proxy in ``WEIGHBRIDGE_PROXY``; one with TLS uses the environment's, as other
programs do; and one to this machine uses none.
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
"""Environment variables that gRPC reads, in its order."""


def channel_options(
    server: str, *, tls: bool, environment: Mapping[str, str] | None = None
) -> tuple[tuple[str, int | str], ...]:
    """Options of a gRPC channel.

    Args:
        server: address of the service.
        tls: whether the channel uses TLS.
        environment: environment variables; by default those of this process.

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
    """``host:port`` of the proxy of a channel, for messages; empty if it uses none.

    Arguments are those of `channel_options`.
    """
    found = os.environ if environment is None else environment
    host = server.rpartition(":")[0].strip("[]").lower()
    excepted = (found.get("no_grpc_proxy") or found.get("no_proxy") or "").lower().split(",")
    if stays_here(server) or any(each.strip() and host.endswith(each.strip()) for each in excepted):
        return ""
    names = (PROXY_VARIABLE, *(_OF_GRPC if tls else ()))
    url = next((url for name in names if (url := found.get(name))), "")
    return urlsplit(url).netloc.rpartition("@")[2]  # the part before it may be a password


def opener(url: str, *handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
    """An opener of HTTP URLs, which uses a proxy of the environment only for encrypted connections.

    Args:
        url: the URL.
        handlers: further handlers.
    """
    import urllib.request  # most programs never need it

    if _may_pass(url):
        return urllib.request.build_opener(*handlers)
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), *handlers)


def passes_proxy(url: str) -> bool:
    """Whether `opener` sends requests for a URL through a proxy: then the URL's host need not accept connections from
    here.
    """
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
            f"{PROXY_VARIABLE} is not the URL of a proxy that gRPC can use",
            fix="write it as http://HOST:PORT",
        )
    return url
