"""Admission: who asks, what they may have, and whose turn it is, before any work is done for them.

Decisions are pure or need a lock at most; nothing here knows of gRPC, HTTP or the store.
"""
