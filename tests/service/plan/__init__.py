"""Tests of `weighbridge_service.plan`."""
