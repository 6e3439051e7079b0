"""Tests of `weighbridge.relay`."""
