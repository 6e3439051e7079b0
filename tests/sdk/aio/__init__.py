"""Tests of `weighbridge.aio`."""
