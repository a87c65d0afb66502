"""Sends a call to the very group its first argument names: Serve's own choice would split families or miss an abort.

Serve makes one in every process that holds a handle of the groups; the dispatcher decides, this only obeys.
"""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class PinnedRequestRouter(RequestRouter):
    """First argument of the call = unique id of the replica that must take it.

    A replica that Serve offers no more cannot be reached; any other then gets the call, and sees that it is not meant.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request:
            # Or Serve asks again at once, without end, when no replica takes it: its event loop then does nothing else.
            pending_request.routing_context.should_backoff = True
        wanted = pending_request.args[0] if pending_request and pending_request.args else None
        return [[r for r in candidate_replicas if r.replica_id.unique_id == wanted] or candidate_replicas]
