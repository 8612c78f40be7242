"""What a trainer and a run say to each other over HTTP: `train.client` speaks it, `runtime.api` serves it.

All requests carry `Authorization: Bearer TOKEN`. Requests and errors are JSON; a claimed batch is MessagePack.

    POST /v1/trainer/claim   ClaimRequest -> 200 Claim | 204 no batch within wait_s | 409 Refused | 410 the run is over
    POST /v1/trainer/renew   RenewRequest -> 200 {}    | 410 the lease is gone
    POST /v1/trainer/ack     Ack          -> 200 {}    | 410 the lease is gone and the batch is not settled by it

A trainer that does not share a file system with the run brings its weights through the same door, and takes those of
the version it starts from:

    POST /v1/trainer/weights WeightsOffer -> 200 WeightsLack | 400 damaged | 410 the lease is gone | 507 no room
    PUT  /v1/trainer/weights/{name}?lease=L&offset=N  bytes of that file from N on -> 200 Received | 400 | 410
    GET  /v1/versions                 -> {"version", "engines": {name: version}}
    GET  /v1/weights/{version}/{name} -> bytes, `Range` honoured; `manifest.json` names the files | 404 no such version

Offer the manifest, send what it lacks, offer again: when nothing is lacking, every checksum was right and the version
is complete in the run's store. A broken connection loses nothing: `have` says where to go on, also over restarts.

A batch is leased to one trainer at a time. A claim by the trainer that already holds a lease takes that lease's place:
it gets the same batch at once under a new lease, which is how a restarted trainer comes back to its work without
waiting for the old lease to run out. An ack is idempotent by `report.batch`: a second one for a settled batch is 200,
whatever its lease.

The run expects the version it trained last. After a crash a trainer may hold a version that the run never heard of
(saved, not acknowledged), or an older one; it learns the expected version from the 409 and goes back or forward to it.
"""

from __future__ import annotations

from agentrl.records import Batch, Record, StepReport, Version, WeightsManifest

CLAIM = "/v1/trainer/claim"
RENEW = "/v1/trainer/renew"
ACK = "/v1/trainer/ack"
GIVE = "/v1/trainer/weights"
VERSIONS = "/v1/versions"
WEIGHTS = "/v1/weights"
RECIPE = "/v1/recipe"

MANIFEST = "manifest.json"

MSGPACK = "application/msgpack"


class ClaimRequest(Record):
    """trainer: a name that stays the same over restarts. version: the one it holds, and will train from.

    lease_s: how long the batch stays with this trainer without a renewal. wait_s: how long the answer may take.
    """

    trainer: str
    version: Version
    lease_s: float
    wait_s: float


class Claim(Record):
    """MessagePack. `batch.version` equals the version the trainer said it holds."""

    lease: str
    batch: Batch


class RenewRequest(Record):
    lease: str
    lease_s: float  # from now


class Ack(Record):
    """The step is done: the weights of `report.version` are complete in the store."""

    lease: str
    report: StepReport


class WeightsOffer(Record):
    """The files of `manifest.version`, which must be the version that the leased batch makes."""

    lease: str
    manifest: WeightsManifest


class WeightsLack(Record):
    """have: of each file that is not whole yet, the bytes that are there. Empty: the version is complete."""

    have: dict[str, int]


class Received(Record):
    """Bytes of the file that are there now. Less than were sent: another sender of the same file took over."""

    have: int


class Problem(Record, forbid_unknown_fields=False):
    """expected: on 409, the version the run would hand a batch for."""

    message: str
    hint: str = ""
    expected: Version | None = None


class Refused(Record, forbid_unknown_fields=False):
    """The body of every 4xx answer: `{"error": {"message": ...}}`."""

    error: Problem
