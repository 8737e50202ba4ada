"""On an object store, too, what a refusal names as the next command can be run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import validated
from next_commands import run_and_follow
from services.plugin import S3Server

pytestmark = pytest.mark.server


class Bucket:
    """A bucket of its own with the root `run`: steps 10, 20 and 30."""

    def __init__(self, s3: S3Server, source: Path) -> None:
        self.client, self.name, self.env = s3.client, s3.new_bucket(), s3.environment
        self.url = f"s3://{self.name}/run"
        for number in (10, 20, 30):
            for file in (path for path in source.rglob("*") if path.is_file()):
                self.put(f"run/step_{number}/{file.relative_to(source)}", file.read_bytes())

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=data)

    def cut(self, number: int) -> None:
        """Take the end of a shard away."""
        key = f"run/step_{number}/__0_0.distcp"
        whole = self.client.get_object(Bucket=self.name, Key=key)["Body"].read()
        self.put(key, whole[: len(whole) // 2])

    def lose(self, number: int) -> None:
        """Take the metadata away."""
        self.client.delete_object(Bucket=self.name, Key=f"run/step_{number}/.metadata")

    def run(self, *words: object, **env: str):
        """Run a command as a person does, and what it says next."""
        return run_and_follow(*words, env={**self.env, **env})


@pytest.fixture
def bucket(s3: S3Server, framework_roots: Path) -> Bucket:
    return Bucket(s3, framework_roots / "kempnerforge" / "checkpoints" / "step_30")


SOUND = (
    ("pick", "RUN@20", 2),
    ("pick", "RUN/step_20", 2),
    ("verify", "RUN@99", 2),
    ("verify", "RUN", 2),
    ("verify", "RUN@20", "--require-seal", 22),
    ("verify", "RUN@20", "--remote-checksums", 22),
    ("verify", "RUN@20", "--require", "nothing", 2),
    ("verify", "RUN@30", "--saved-world-size", 64, 20),
    ("show", "RUN@99", 2),
    ("prune", "RUN", "--keep", 1, 0),
    ("prune", "RUN", "--keep", 1, "--unsealed", 0),
    ("pick", "RUN", "--before", 5, 11),
    ("pick", "RUNS", 10),
    ("scan", "RUNS", 10),
    ("preflight", "RUNS", 10),
    ("seal", "RUN@99", 2),
    ("diff", "RUN@10", "RUN@99", 2),
    ("reject", "RUN@99", "--reason", "a spike", 2),
    ("pick", "ABOVE", 2),
    ("pick", "NO-BUCKET", 2),
)


@pytest.mark.parametrize("words", SOUND, ids=lambda words: " ".join(map(str, words[:-1])))
def test_a_refusal_over_sound_steps_leads_on(bucket, words):
    *command, exit_code = words
    named = {
        "RUNS": f"s3://{bucket.name}/other",
        "ABOVE": f"s3://{bucket.name}",
        "NO-BUCKET": "s3://there-is-no-such-bucket-here/run",
    }
    given = [named.get(str(word), str(word).replace("RUN", bucket.url)) for word in command]
    done = bucket.run(*given)
    assert done.returncode == exit_code, done.stderr


DAMAGED = (
    ("pick", "RUN", (0, 11, 0, 11)),
    ("pick", "RUN", "--max-fallback", 0, (11, 11, 0, 11)),
    ("scan", "RUN", (0, 11, 0, 11)),
    ("preflight", "RUN", (0, 11, 0, 11)),
    ("verify", "RUN@30", (20, 20, 26, 26)),
    ("show", "RUN@30", (20, 20, 26, 26)),
    ("seal", "RUN@30", (20, 20, 26, 26)),
    ("prune", "RUN", "--keep", 1, "--unsealed", (0, 0, 0, 0)),
    ("diff", "RUN@30", "RUN@10", (0, 0, 2, 2)),
)
"""Each with the exit codes where one step, or all three, are cut short or lose their metadata."""

DAMAGES = (("cut", 1), ("cut", 3), ("lose", 1), ("lose", 3))


def cases() -> Iterator[object]:
    """Each command with each damage on moto's server, and with one of them on Ceph's, in turn."""
    for n, words in enumerate(DAMAGED):
        name = " ".join(map(str, words[:-1]))
        for m, damage in enumerate(DAMAGES):
            marks = [pytest.mark.slow] if 0 < m < len(DAMAGES) - 1 else []
            yield pytest.param("s3_moto", words, damage, id=f"moto-{name}-{m}", marks=marks)
            if m == n % len(DAMAGES):
                marks = [pytest.mark.slow]
                yield pytest.param("s3_ceph", words, damage, id=f"ceph-{name}-{m}", marks=marks)


@pytest.mark.parametrize(("s3", "words", "damage"), [*cases()], indirect=["s3"])
def test_a_refusal_over_damaged_steps_leads_on(bucket, words, damage):
    *command, exit_codes = words
    how, n_damaged = damage
    for number in (30, 20, 10)[:n_damaged]:
        getattr(bucket, how)(number)
    done = bucket.run(*(str(word).replace("RUN", bucket.url) for word in command))
    assert done.returncode == exit_codes[DAMAGES.index(damage)], done.stderr


def test_a_rejected_step_leads_on(bucket):
    assert bucket.run("reject", f"{bucket.url}@30", "--reason", "a spike").returncode == 0
    assert bucket.run("verify", f"{bucket.url}@30").returncode == 27
    document = validated(bucket.run("pick", bucket.url, "--json").stdout)
    assert document["step"] == 20


@pytest.mark.parametrize("command", ["pick", "scan", "preflight", "prune"])
def test_keys_and_endpoints_that_are_wrong_lead_on(s3_ceph, framework_roots, command):
    bucket = Bucket(s3_ceph, framework_roots / "kempnerforge" / "checkpoints" / "step_30")
    words = [command, bucket.url, *(["--keep", 1] if command == "prune" else [])]
    assert bucket.run(*words, AWS_SECRET_ACCESS_KEY="wrong").returncode == 77
    assert bucket.run(*words, "--endpoint-url", "http://[").returncode == 2
    assert bucket.run(*words, "--storage-option", "retry_for_s=-1").returncode == 2
