"""Tests of `weighbridge_service.runtime`."""
