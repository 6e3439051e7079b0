"""Tests of `weighbridge._tracing`."""
