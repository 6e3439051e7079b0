"""Tests of `weighbridge_service.converting`."""
