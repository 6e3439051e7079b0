"""Tests of `weighbridge_service.catalog`."""
