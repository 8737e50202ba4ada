"""I: an object store in which one request fails, or whose answers contradict each other.

A real server behind a proxy that breaks the k-th request, once or from then on, or
before which another client writes or deletes. Both clients for S3. A sound step is never
reported as damaged or absent because of it, and no older one is chosen; a step that
changed is not reported as whole.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from oracle import Outcome
from services.counting_proxy import Answer, CountingProxy, Fault
from services.moto_server import moto_server
from sound_steps import Sound

import ckptctl
from ckptctl import Level, Verdict
from ckptctl.errors import CkptctlError, StorageMisconfigured
from ckptctl.storage import obstore_client, waiting

N_CASES = 1200
BUCKET, RUN = "campaign", "run"
CLIENTS = ("obstore", "s3fs")
TIMEOUT_S = 0.5
PATIENT_S = 60.0
"""How long a request may take where nothing fails: the machine may be busy."""
COULD_NOT_LOOK = (75, 77)

ANY = (
    *(Fault.UNAVAILABLE, Fault.BROKEN, Fault.DENIED, Fault.NOT_THERE, Fault.NO_KEY),
    *(Fault.RESET, Fault.SHORT, Fault.LOST),
)
KEY = "arn:aws:kms:eu-west-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab"
PERMANENT = (
    Answer(403, "InvalidObjectState"),
    Answer(301, "PermanentRedirect", headers=(("x-amz-bucket-region", "eu-west-1"),)),
    Answer(400, "AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>"),
    Answer(400, "KMS.DisabledException", f"<Message>{KEY} is disabled.</Message>"),
    Answer(403, "RequestTimeTooSkewed"),
    Answer(400, "ExpiredToken"),
    Answer(403, "QuotaExceeded"),
    Answer(400, "InvalidRequest"),
)
"""What is not asked again, and says nothing of the step."""

FAULTS: dict[str, tuple[Fault, ...]] = {
    "LIST": (*ANY, Fault.NO_LISTING, Fault.CUT, Fault.STALE, Fault.EMPTY, Fault.NO_TOKEN),
    "GET": (*ANY, Fault.CUT, Fault.SHRUNK),
    "HEAD": ANY,
    "PUT": (*ANY, Fault.THERE, Fault.CONFLICT, Fault.NOT_IMPLEMENTED),
}
SLOW = (Fault.SILENT,)
"""A case of these takes seconds: there are few. A server that sends a few bytes a second
is waited for as long as it sends; the watchdog of the command line ends that, not the library."""

ACTS = ("saved over", "swapped", "cut", "deleted", "added")

Options = dict[str, Any]
QUESTIONS: dict[str, Callable[[str, Options], Any]] = {
    "pick": lambda root, o: ckptctl.pick(root, level=Level.STRUCTURE, **o),
    "pick at listing": lambda root, o: ckptctl.pick(root, **o),
    "scan": lambda root, o: ckptctl.scan(root, level=Level.STRUCTURE, **o),
    "verify": lambda root, o: ckptctl.verify(f"{root}@20", level=Level.CONTENT, **o),
    "seal": lambda root, o: ckptctl.seal(f"{root}@20", **o),
}


class Bucket:
    """moto's server, a run of two steps in it, and a proxy in front of it."""

    def __init__(self, folder: Path, subject: Sound) -> None:
        import botocore.session

        folder.mkdir()
        self._stack = ExitStack()
        endpoint = self._stack.enter_context(moto_server(folder))
        self.proxy = CountingProxy(endpoint)
        self.root = f"s3://{BUCKET}/{RUN}"
        self.client = botocore.session.get_session().create_client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id="campaign",
            aws_secret_access_key="campaign",
            region_name="us-east-1",
        )
        self.client.create_bucket(Bucket=BUCKET)
        self.subject = subject
        for step in (subject.path, subject.older):
            assert step is not None
            for file in step.iterdir():
                if file.is_file():
                    self.put(f"{step.name}/{file.name}", file.read_bytes())
        self._counts: dict[tuple[str, str], dict[str, int]] = {}
        # Pauses between retries are not tested here, and would take hours.
        waiting.FIRST_PAUSE_S = 0.002
        # Pages of any length may lose their token: not only those of 1,000 keys.
        obstore_client.PAGE_KEYS = 1

    def options(self, client: str, timeout_s: float = PATIENT_S) -> Options:
        """The addresses and variables that lead commands to the proxy."""
        return {
            "storage_options": {
                "key": "campaign",
                "secret": "campaign",
                "client": client,
                "client_kwargs": {"region_name": "us-east-1"},
            },
            "endpoint_url": self.proxy.url,
            "timeout_s": timeout_s,
        }

    def counts(self, name: str, client: str) -> dict[str, int]:
        """How many requests a command sends if nothing fails."""
        if (name, client) not in self._counts:
            self.proxy.reset()
            QUESTIONS[name](self.root, self.options(client))
            self._counts[name, client] = dict(self.proxy.counts)
            self.unseal()
        return self._counts[name, client]

    def put(self, path: str, data: bytes) -> None:
        """Write an object behind the proxy's back."""
        self.client.put_object(Bucket=BUCKET, Key=f"{RUN}/{path}", Body=data)

    def delete(self, path: str) -> None:
        """Delete an object behind the proxy's back."""
        self.client.delete_object(Bucket=BUCKET, Key=f"{RUN}/{path}")

    def unseal(self) -> None:
        """Remove the seal, if there is one."""
        self.delete(f"{self.subject.path.name}/.ckptctl/seal.json")

    def close(self) -> None:
        """End the server and the proxy."""
        self.proxy.close()
        self._stack.close()


def failing_s3(number: int, chance: Random, bucket: Bucket, outcome: Outcome) -> None:
    """Run one command while the storage fails, then again when it works."""
    client = CLIENTS[number % 2]
    name = chance.choice(list(QUESTIONS))
    counts = bucket.counts(name, client)
    verb = chance.choice(list(counts))
    nth = chance.randint(1, counts[verb])
    bucket.proxy.reset()
    if number % 4 == 3 and name != "pick at listing":
        _while_it_changes(chance, bucket, name, client, outcome)
    else:
        fault = chance.choice(
            SLOW if chance.random() < 0.02 else PERMANENT if chance.random() < 0.2 else FAULTS[verb]
        )
        # A store whose every listing is empty is an empty one to everybody; to obstore
        # one that answers every listing with a page in HTML, and all else as S3 does, too.
        unseen = fault is Fault.EMPTY or (fault is Fault.NO_LISTING and client == "obstore")
        lasts = chance.random() < 0.4 and not unseen
        also = " on" if lasts else ""
        outcome.about = f"{client}, {name}: {verb} {nth} of {counts[verb]}{also} {fault.name}"
        bucket.proxy.break_request(verb, fault, nth=nth, lasts=lasts)
        answer = _asked(name, bucket, client, outcome)
        outcome.problem = _wrong(name, answer, outcome, stale=fault is Fault.STALE)
    bucket.proxy.reset()
    if name == "seal":
        outcome.problem = outcome.problem or _wrong_seal(bucket, client, outcome)
        bucket.unseal()
    elif number % 8 == 0:
        healed = QUESTIONS["pick at listing"](bucket.root, bucket.options(client))
        if healed.chosen is None or healed.step != 20:
            outcome.problem = outcome.problem or f"healed, pick ends with {healed.exit_code}"


def _asked(name: str, bucket: Bucket, client: str, outcome: Outcome) -> Any:
    """The answer, or the error, or None for a crash."""
    try:
        answer = QUESTIONS[name](bucket.root, bucket.options(client, TIMEOUT_S))
    except CkptctlError as error:
        outcome.verdict, outcome.said = f"error {error.exit_code}", error.message[:300]
        return error
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        outcome.problem = f"crashed with {type(error).__name__}: {str(error)[:200]}"
        return None
    outcome.verdict = f"exit {answer.exit_code}"
    outcome.said = getattr(answer, "message", "")[:300]
    return answer


def _wrong(name: str, answer: Any, outcome: Outcome, *, stale: bool) -> str | None:
    """The faults of an answer about a sound step."""
    if answer is None:
        return outcome.problem
    code = answer.exit_code
    if isinstance(answer, CkptctlError):
        inspection_failed = code in COULD_NOT_LOOK or isinstance(answer, StorageMisconfigured)
        return None if inspection_failed else f"ends with {code}"
    if name.startswith("pick"):
        taken = answer.chosen and answer.chosen.number
        right = taken == 20 or (taken is None and code in COULD_NOT_LOOK)
        return None if right else f"pick takes {taken} and ends with {code}"
    if name == "seal":
        return None if code in (0, *COULD_NOT_LOOK) else f"seal ends with {code}"
    reports = [answer] if name == "verify" else answer.reports
    if len(reports) < (1 if name == "verify" else 2):
        return f"{len(reports)} of 2 steps are there"
    if stale:
        # For steps that decide nothing, `scan` reports what the listing shows.
        reports = [report for report in reports if report.number == 20]
    good = (Verdict.COMPLETE, Verdict.UNKNOWN)
    wrong = [report.verdict.value for report in reports if report.verdict not in good]
    return f"a sound step is called {wrong[0]}" if wrong else None


def _wrong_seal(bucket: Bucket, client: str, outcome: Outcome) -> str | None:
    """Every seal that exists is valid, whatever the answer was."""
    report = QUESTIONS["verify"](bucket.root, bucket.options(client))
    said = {finding.code for finding in report.findings if finding.code.startswith("seal.")}
    bad = said if outcome.verdict == "exit 0" else said - {"seal.missing"}
    return f"the seal that is left is {', '.join(sorted(bad))}" if bad else None


def _while_it_changes(
    chance: Random, bucket: Bucket, name: str, client: str, outcome: Outcome
) -> None:
    """Write or delete an object between the first listing and the last one."""
    subject = bucket.subject
    file = chance.choice([*subject.shards, ".metadata"])
    path, data = f"{subject.path.name}/{file}", subject.files[file]
    older = subject.older_bytes(file) or b"another"
    what = chance.choice(ACTS)
    extra = f"{subject.path.name}/__55_0.distcp"
    acts: dict[str, Callable[[], None]] = {
        "saved over": lambda: bucket.put(path, older),
        "swapped": lambda: bucket.put(path, data[::-1]),
        "cut": lambda: bucket.put(path, data[: len(data) // 2]),
        "deleted": lambda: bucket.delete(path),
        "added": lambda: bucket.put(extra, data),
    }
    n = bucket.counts(name, client)["GET"]
    # The other reads are of the step before it, or of a second pass.
    nth = chance.randint(1, n if name == "verify" else max(1, n // 3))
    outcome.about = f"{client}, {name}: {what} ({file}) before GET {nth} of {n}"
    bucket.proxy.reset()
    bucket.proxy.break_request("GET", acts[what], nth=nth)
    allowed = {Verdict.CHANGED, Verdict.UNKNOWN}
    try:
        answer = _asked(name, bucket, client, outcome)
        if name in ("pick", "scan"):  # which inspect a changed step again
            settled = _report_of(name, QUESTIONS[name](bucket.root, bucket.options(client)))
            allowed |= {settled.verdict} if settled else set()
    finally:
        bucket.put(path, data)
        bucket.delete(extra)
    report = _report_of(name, answer)
    if answer is None or isinstance(answer, CkptctlError) or report is None:
        stopped = getattr(answer, "exit_code", None) in (*COULD_NOT_LOOK, 26)
        outcome.problem = outcome.problem or (None if stopped else "no report on the step")
        return
    outcome.codes = sorted({f.code for f in report.findings if f.verdict is not None})
    if report.verdict not in allowed:
        outcome.problem = f"it changed, and is called {report.verdict.value}"


def _report_of(name: str, answer: Any) -> Any:
    """The answer about the newest step."""
    if name == "verify":
        return answer
    if name == "seal":
        return getattr(answer, "report", None)
    if name == "scan":
        return next((one for one in getattr(answer, "reports", ()) if one.number == 20), None)
    reports = [one.report for one in getattr(answer, "passed_over", ())]
    chosen = getattr(answer, "chosen", None)
    return next((one for one in [*reports, chosen] if one and one.number == 20), None)
