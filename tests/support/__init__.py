"""Helpers that tests share: clients, services, ranks, servers and faults; no tests."""
