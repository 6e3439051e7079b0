"""Tests of `weighbridge._clients`."""
