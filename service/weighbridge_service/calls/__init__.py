"""Calls: the gRPC face. Control calls are answered on an event loop, streams of weights in threads.

`server` binds the ports; `methods` reads requests, runs handlers and answers; `handlers`' modules translate requests and decide nothing.
"""
