"""Tests of the Hub endpoint: `weighbridge_service.api.http.hub_routes` and what it uses."""
