"""Whether engines that took the same version hold the same weights. Pure."""

from __future__ import annotations

from agentrl.records import LoadReport, Version


class Checksums:
    """Of the newest version only; for engines that are alike, since another split of a model has another checksum."""

    def __init__(self) -> None:
        self._version = Version(-1)
        self._of: tuple[str, str] | None = None  # who said it first, and what

    def differs(self, engine: str, report: LoadReport) -> str:
        """What is wrong; empty: nothing is known to be. Which of two is right cannot be told, so after a difference
        the next one to load it counts."""
        if not report.checksum or report.version < self._version:
            return ""
        if report.version > self._version or self._of is None:
            self._version, self._of = report.version, (engine, report.checksum)
            return ""
        first, checksum = self._of
        if checksum == report.checksum:
            return ""
        self._of = None
        return f"its weights of version {report.version} are not those of {first}: {report.checksum}, {checksum}"
