"""Tests of `weighbridge._lane`."""
