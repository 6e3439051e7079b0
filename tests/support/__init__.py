"""What tests share: clients, services, ranks, servers and faults; no tests."""
