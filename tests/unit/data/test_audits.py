"""Which parts are audited, and by whom."""

from __future__ import annotations

from collections import Counter

import pytest

from manyhosts.data.audits import AuditPlan
from manyhosts.data.order import Position, bounds


def plan(share: float, hosts: str) -> AuditPlan:
    return AuditPlan(share, 7, tuple(hosts), 0)


@pytest.mark.parametrize("hosts", ["ab", "abc", "aabb", "aabbccdd", "aaaa"])
@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_share_of_the_parts_is_audited_and_everybody_audits_equally_many(share: float, hosts: str) -> None:
    steps, parts, size = 4000 if share < 1 else 20, 8, len(hosts)
    audited, audits = 0, Counter[int]()
    for step in range(steps):
        found = plan(share, hosts).of(Position(0, 32 * step), parts, 32)
        assert len({audit.part for audit in found}) == len(found), "no part twice"
        for audit in found:
            assert audit.part in range(*bounds(parts, size, audit.owner))
            assert len(set(audit.ranks)) == len(audit.ranks) == min(3, size)
        by = Counter(audit.auditor for audit in found)
        if parts % size == 0 and found:
            assert set(by.values()) == {len(found) // size}, "nobody waits for another's audits"
        audited += len(found)
        audits.update(by)
    assert audited / (steps * parts) == pytest.approx(share, rel=0.25 if share < 0.1 else 0.1)


def test_auditors_are_of_other_hosts_and_so_is_the_third_where_there_are_three() -> None:
    for step in range(50):
        for audit in plan(1.0, "aabbcc").of(Position(1, step), 6, 6):
            assert len({"aabbcc"[rank] for rank in audit.ranks}) == 3
        for audit in plan(1.0, "aabb").of(Position(1, step), 8, 8):
            assert "aabb"[audit.auditor] != "aabb"[audit.owner]


def test_every_worker_audits_every_other_in_time() -> None:
    pairs = {
        (audit.owner, audit.auditor, audit.third)
        for step in range(200)
        for audit in plan(1.0, "abcd").of(Position(0, step), 4, 4)
    }
    assert len(pairs) == 4 * 3 * 2


def test_parts_without_a_sample_are_not_audited() -> None:
    assert [audit.part for audit in plan(1.0, "ab").of(Position(0, 0), 8, 3)] == [0, 1, 2]
