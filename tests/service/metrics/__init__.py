"""Tests of `weighbridge_service.metrics`."""
