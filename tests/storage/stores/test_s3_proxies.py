"""Does a proxy of the environment read what goes to an S3 server without TLS?"""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.support.connect_proxies import PROXY_VARIABLES, connect_proxy
from tests.support.json_servers import json_server
from weighbridge_storage.stores.s3.client import S3Client
from weighbridge_storage.stores.s3.settings import parse_location


def test_s3_without_tls_is_asked_without_a_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    asked: list[str] = []

    def answer(path: str, _: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        asked.append(path)
        return 404, {}

    with json_server(answer) as url, connect_proxy() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        client = S3Client(parse_location(f"s3://bucket/prefix?endpoint={url}&addressing=path"))
        with pytest.raises(ClientError):
            client.get("name")
        client.close()
    assert asked == ["/bucket/name"]
    assert proxy.asked == []
