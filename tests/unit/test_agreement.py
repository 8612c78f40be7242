"""Engines that took one version must hold one set of weights."""

from __future__ import annotations

from agentrl.records import LoadReport, Version
from agentrl.runtime.agreement import Checksums


def report(version: int, checksum: str) -> LoadReport:
    return LoadReport(version=Version(version), stage_s=0.0, pause_s=0.0, lost_tokens=0, checksum=checksum)


def test_equal_ones_agree_and_each_version_is_looked_at_alone() -> None:
    seen = Checksums()
    for version in (1, 2, 3):
        assert [seen.differs(f"e{i}", report(version, f"sum{version}")) for i in range(3)] == [""] * 3
    assert seen.differs("e0", report(2, "late")) == ""  # an engine that lagged behind; nobody else will load it again
    assert seen.differs("e0", report(3, "")) == ""  # it was not asked


def test_a_difference_names_both_and_the_next_one_counts() -> None:
    seen = Checksums()
    assert seen.differs("e0", report(1, "a")) == ""
    said = seen.differs("e1", report(1, "b"))
    assert "e0" in said
    assert "version 1" in said
    assert [seen.differs("e1", report(1, "b")), seen.differs("e2", report(1, "b"))] == ["", ""]
