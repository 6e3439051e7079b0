"""The service: weight maps, planning, the life of versions, and its gRPC and HTTP faces."""
