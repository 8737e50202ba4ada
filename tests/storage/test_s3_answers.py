"""What an error answer of S3 means is the same for every client and every kind of request."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest
from command_line import clean_environment
from services.counting_proxy import Answer, CountingProxy
from services.plugin import S3Server

from ckptctl.errors import (
    AccessDenied,
    ObjectArchived,
    StorageError,
    StorageFull,
    StorageMisconfigured,
    StorageUnavailable,
)
from ckptctl.storage import waiting
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import open_store
from ckptctl.storage.s3 import error_of, meanings
from ckptctl.storage.waiting import Throttled, Transient

CODES = [key for key in meanings() if str(key)[:1].isupper()]
KEY = "arn:aws:kms:eu-west-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab"
HEADER = "<Message>The authorization header is malformed; the region 'us-east-1' is wrong; "
REDIRECT = "<Endpoint>bucket.s3.eu-west-1.amazonaws.com</Endpoint>"
TO_REGION = "export AWS_REGION=eu-west-1 AWS_DEFAULT_REGION=eu-west-1"


class Refused(Answer):
    """The answer to a deletion of several keys, one of which could not be deleted."""

    @property
    def content(self) -> bytes:
        """One error among the results."""
        error = f"<Error>{self.more}<Code>{self.code}</Code><Message>no</Message></Error>"
        return f"<DeleteResult>{error}</DeleteResult>".encode()


PERMANENT: dict[str, tuple[Answer, type[StorageError], int, str, str]] = {
    "archived": (
        Answer(403, "InvalidObjectState", "<StorageClass>GLACIER</StorageClass>"),
        ObjectArchived,
        75,
        "is archived and cannot be read until it is restored",
        "aws s3api restore-object --bucket",
    ),
    "another region": (
        Answer(
            400,
            "AuthorizationHeaderMalformed",
            f"{HEADER}expecting 'eu-west-1'</Message><Region>eu-west-1</Region>",
        ),
        StorageMisconfigured,
        2,
        "the bucket is in the region eu-west-1",
        TO_REGION,
    ),
    "redirect": (
        Answer(301, "PermanentRedirect", REDIRECT, (("x-amz-bucket-region", "eu-west-1"),)),
        StorageMisconfigured,
        2,
        "the bucket is in the region eu-west-1",
        TO_REGION,
    ),
    "disabled key": (
        Answer(400, "KMS.DisabledException", f"<Message>{KEY} is disabled.</Message>"),
        AccessDenied,
        77,
        f"the encryption key {KEY} is disabled",
        f"aws kms describe-key --key-id {KEY}",
    ),
    "denied key": (
        Answer(
            403,
            "AccessDenied",
            f"<Message>User: x is not authorized to perform: kms:Decrypt on {KEY}</Message>",
        ),
        AccessDenied,
        77,
        f"the encryption key {KEY} may not be used",
        f"aws kms describe-key --key-id {KEY}",
    ),
    "denied": (Answer(403, "AccessDenied"), AccessDenied, 77, "AWS_SECRET_ACCESS_KEY", ""),
    "expired": (
        Answer(400, "ExpiredToken"),
        AccessDenied,
        77,
        "the credentials have expired",
        "aws sts get-caller-identity",
    ),
    "clock": (
        Answer(403, "RequestTimeTooSkewed"),
        AccessDenied,
        77,
        "clocks .* differ too much",
        "timedatectl status",
    ),
    "suspended": (Answer(403, "UserSuspended"), AccessDenied, 77, "suspended", ""),
    "quota": (Answer(403, "QuotaExceeded"), StorageFull, 75, "quota is exceeded", "aws s3"),
    "full": (Answer(507, "XMinioStorageFull"), StorageFull, 75, "storage is full", "aws s3"),
    "refused": (
        Answer(400, "InvalidRequest"),
        StorageUnavailable,
        75,
        r"refused the request \(400 InvalidRequest\)",
        "",
    ),
}  # fmt: skip


@pytest.fixture
def store(
    s3_moto: S3Server, proxy: CountingProxy, client: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    """A root with one file in it."""
    monkeypatch.setattr(waiting, "FIRST_PAUSE_S", 0.01)
    prefix = uuid.uuid4().hex
    s3_moto.client.put_object(Bucket=s3_moto.bucket, Key=f"{prefix}/a file", Body=b"data")
    with open_store(
        f"s3://{s3_moto.bucket}/{prefix}",
        storage_options={**s3_moto.options, "client": client},
        endpoint_url=proxy.url,
        timeout_s=600,
        retries=2,
    ) as opened:
        yield opened


def use(store: Store, verb: str) -> None:
    """Make one request of this kind."""
    if verb == "GET":
        store.read("a file", limit=100)
    elif verb == "LIST":
        store.list_dir()
    elif verb == "PUT":
        store.put("b", b"1", replace=True)
    else:
        store.remove("a file")


@pytest.mark.server
@pytest.mark.parametrize("verb", ["GET", "LIST", "PUT", "DELETE"])
@pytest.mark.parametrize("name", PERMANENT)
def test_an_answer_that_does_not_pass_is_named_and_not_asked_for_again(
    store, proxy, client, name, verb
):
    answer, error, exit_code, says, next_command = PERMANENT[name]
    for other in ("GET", "LIST", "PUT", "POST", "DELETE", "HEAD"):
        proxy.break_request(other, answer, lasts=True)
    if name == "redirect" and client == "obstore":  # which hands on nothing of a redirect
        says, next_command = "the bucket is in another region", "aws s3api get-bucket-location"
    with pytest.raises(error, match=says) as caught:
        use(store, verb)
    assert type(caught.value) is error
    assert caught.value.exit_code == exit_code
    assert caught.value.message.startswith(store.url.rpartition("/")[0])
    assert (caught.value.next_command or "").startswith(next_command)
    # botocore asks for the region of the bucket, and once more with what it hears.
    assert proxy.counts[verb] <= (2 if error is StorageMisconfigured else 1)


@pytest.mark.server
@pytest.mark.parametrize(
    ("code", "error"),
    [("AccessDenied", AccessDenied), ("InternalError", StorageUnavailable), ("NoSuchKey", None)],
)
def test_a_deletion_of_one_key_that_is_refused_in_an_answer_of_200_is_not_done(
    store, proxy, client, code, error
):
    if client == "s3fs":
        pytest.skip("s3fs deletes one key with a request of its own")
    key = f"{store.url.rpartition('/')[2]}/a file"
    proxy.break_request("POST", Refused(200, code, f"<Key>{key}</Key>"), lasts=True)
    if error is None:
        store.remove("a file")
    else:
        with pytest.raises(error) as caught:
            store.remove("a file")
        assert type(caught.value) is error


@pytest.mark.server
def test_an_archived_object_is_no_matter_of_credentials(store, proxy):
    proxy.break_request("GET", PERMANENT["archived"][0], lasts=True)
    with pytest.raises(ObjectArchived) as caught:
        store.read("a file", limit=100)
    assert "AWS_" not in caught.value.message
    assert caught.value.next_command is not None
    assert "/a file' --restore-request Days=7" in caught.value.next_command


@pytest.mark.server
@pytest.mark.parametrize(
    "code", [code for code in CODES if issubclass(meanings()[code].error, Transient)]
)
def test_an_answer_that_passes_is_asked_for_again(store, proxy, code):
    proxy.break_request("GET", Answer(503 if meanings()[code].error is Throttled else 400, code))
    assert store.read("a file", limit=100) == b"data"
    assert proxy.counts["GET"] == 2


_WITHOUT_DESCRIPTORS = """
import os, resource, sys
from ckptctl.storage.opening import open_store

url, client = sys.argv[1:]
with open_store(url, storage_options={"client": client}) as store:
    store.put("b", b"1", replace=True)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, most))
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    problem = None
    try:
        store.read("no such file", limit=100)
    except Exception as error:
        problem = error
    for descriptor in held:
        os.close(descriptor)
    print(type(problem).__name__)
"""


@pytest.mark.server
def test_an_answer_is_understood_where_no_file_can_be_opened(s3_moto, client):
    url = f"s3://{s3_moto.bucket}/{uuid.uuid4().hex}"
    words = [sys.executable, "-c", _WITHOUT_DESCRIPTORS, url, client]
    environment = clean_environment(**s3_moto.environment)
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    # The answer comes over a connection that is open already, or none can be opened.
    assert done.stdout.strip() in ("PathNotFound", "StorageUnavailable")


@pytest.mark.parametrize("code", CODES)
def test_every_meaning_has_a_message_with_all_its_words(code):
    error = error_of(400, code, bucket="b", key="k", text=f"{KEY} <Region>eu-west-1</Region>")
    assert type(error) is meanings()[code].error
    assert "{" not in f"{error.message}{error.next_command}"


def test_a_region_that_is_not_named_is_asked_for():
    error = error_of(301, "", bucket="b", key="k")
    assert "another region" in error.message
    assert error.next_command == "aws s3api get-bucket-location --bucket b"


@pytest.mark.parametrize(
    "text", ["<Region>$(rm -rf ~)</Region>", "expecting 'eu;id'", "arn:aws:kms:x"]
)
def test_nothing_of_an_answer_is_quoted_but_a_region_and_a_key(text):
    error = error_of(301, "PermanentRedirect", bucket="b", key="k", text=text)
    assert "another region" in error.message
    assert not {*"$;()"} & {*f"{error.next_command}"}
