"""Tests of `weighbridge_service.families`."""
