"""Tests of `weighbridge_service.admission`."""
