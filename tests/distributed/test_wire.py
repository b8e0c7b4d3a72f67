"""What is printed as bytes is what crossed the wire (design 9)."""

from __future__ import annotations

import pytest
from rank_wire import draw_views

from splaxel_ns.bench.namespaces import INTERFACE, Network, why_not
from splaxel_ns.bench.rank_job import NAMESPACES, RankJob, bytes_sent_by

REASON = why_not()


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_counted_bytes_are_those_of_the_interface() -> None:
    """Ranks in network namespaces, linked at 1 Gbit/s: the interface adds headers of Ethernet, IP and TCP."""
    with Network(2, "1gbit") as homes:
        with RankJob(2, homes) as job:
            results = job.run(draw_views, "selective", 10, INTERFACE)
        names = [home.namespace for home in homes]
    for counted, carried in results:
        assert counted > 2 * 2**20
        assert counted <= carried <= 1.05 * counted
    assert not any((NAMESPACES / str(name)).exists() for name in names)


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_namespaces_go_with_what_failed() -> None:
    network = Network(2, None)
    with pytest.raises(RuntimeError, match="rank . of 2 failed: There is no network interface nothing0 here"):
        with network as homes, RankJob(2, homes) as job:
            job.run(bytes_sent_by, "nothing0")
    assert not any((NAMESPACES / str(home.namespace)).exists() for home in homes)


def test_rates_that_are_none() -> None:
    with pytest.raises(ValueError, match="The rate is 'fast'"):
        Network(2, "fast")
