"""Tests of `weighbridge._formats`."""
