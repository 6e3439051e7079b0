"""Tests of `weighbridge_service.replicas`."""
