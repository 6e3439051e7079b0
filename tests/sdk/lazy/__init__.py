"""Tests of `weighbridge._lazy`."""
