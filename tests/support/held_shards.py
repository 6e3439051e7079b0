"""Shards for pushes that are to be refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import pytest

from weighbridge import HeldShards
from weighbridge._core.layouts import Layout


class NotSelected(HeldShards):
    """Shards of which no bytes may be requested."""

    def select(self, indexes: Sequence[int], stream: Layout) -> NoReturn:
        pytest.fail(f"shards {list(indexes)} were selected")
