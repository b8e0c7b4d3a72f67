"""What a rank makes of errors while it waits for others."""

from __future__ import annotations

import pytest
from torch import distributed as dist

from splaxel_ns.comm import LostRank, World

GONE = (
    "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:8594. This is "
    "typically caused by a remote worker crashing."
)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GONE),
        RuntimeError("[/a/gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 5000ms for send operation"),
        RuntimeError("Read error [127.0.0.1]:11157: Connection reset by peer"),
        dist.DistNetworkError("the server has gone"),
        dist.DistBackendError("remote process exited"),
    ],
    ids=str,
)
def test_failures_of_the_network_are_lost_ranks(error: Exception) -> None:
    with pytest.raises(LostRank, match="Rank 1 of 2 lost another rank while it swapped pixels") as caught:
        with World(1, 2).waiting("pixels"):
            raise error
    assert "/gloo/" not in str(caught.value) and caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        RuntimeError("ProcessGroupGloo::allgather: invalid tensor size at index 0 (expected (4), got (3))"),
        ValueError("Default process group has not been initialized"),
    ],
    ids=str,
)
def test_errors_of_our_own_stay_what_they_are(error: Exception) -> None:
    world = World(1, 2)
    with pytest.raises(type(error)) as caught:
        with world.waiting("pixels"):
            raise error
    assert caught.value is error and world.counters.wait_s > 0
