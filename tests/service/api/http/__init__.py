"""Tests of `weighbridge_service.api.http`."""
