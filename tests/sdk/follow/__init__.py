"""Tests of `weighbridge.follow`."""
