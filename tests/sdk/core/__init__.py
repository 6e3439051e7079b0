"""Tests of `weighbridge._core`."""
