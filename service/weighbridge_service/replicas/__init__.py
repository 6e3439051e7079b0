"""Replicas of the service among each other: what they tell, and read from, those that receive the same version.

    progress     how far one replica is with its part of a version, and its form on the wire
    health       whether a replica is alive, as a pure function of how calls to it went
    links        connections to other replicas
    heartbeat    the exchange of progress, and who is gone
    directory    which other replicas there are, also while the store is away
    handover     versions that a replica that leaves hands over to another one
    peer_files   files that another replica owns, as sources for reading
    sessions     sessions of pushes as other replicas see them
    handlers     the gRPC face of all that

Only `sessions` and `handover` know how a push is received; the others have protocols of their own for what they need of that. Nothing in `push`
imports from here.
"""
