"""Tests of `weighbridge_service.health`."""
