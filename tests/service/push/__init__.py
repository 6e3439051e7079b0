"""Tests of `weighbridge_service.push`."""
