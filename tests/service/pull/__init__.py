"""Tests of `weighbridge_service.pull`."""
