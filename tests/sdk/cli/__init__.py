"""Tests of `weighbridge._cli`."""
