"""Tests of `weighbridge_service.models`."""
