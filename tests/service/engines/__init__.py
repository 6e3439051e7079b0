"""Tests of `weighbridge_service.engines`."""
