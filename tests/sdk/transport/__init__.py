"""Tests of `weighbridge._transport`."""
