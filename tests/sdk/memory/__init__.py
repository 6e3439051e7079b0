"""Tests of `weighbridge._memory`."""
