"""Tests of `weighbridge_service.access`."""
