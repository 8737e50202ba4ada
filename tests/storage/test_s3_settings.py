"""Settings that no client of S3 can mean are usage errors, and none shows a secret."""

from __future__ import annotations

import pytest

from ckptctl.errors import StorageUnavailable, UsageError
from ckptctl.storage.obstore_client import ObstoreClient
from ckptctl.storage.opening import open_store
from ckptctl.storage.s3 import checked_settings

pytest.importorskip("s3fs")
pytest.importorskip("obstore")

KEYS = {"key": "a", "secret": "b"}


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT_URL", "ENDPOINT_URL_S3", "REGION", "DEFAULT_REGION"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)


MALFORMED = [
    *("nowhere", "http://", "https://", "http:///x", "http://[::1", "http://host:99999"),
    *("http://127.0.0.1:abc", "http://127.0.0.1:-1", "http://127.0.0.1:0", "http://ho st"),
    *("ftp://host", "https//host", "http:/host", "http://host?x=1", "http://host#x"),
    *(" http://host", "http://host\n", "http://host\r", "http://ümlaut.invalid", "http://a..b"),
    *("http://%zz", "http://{host}", "http://$HOST:1", "http://.", "http://[fe80::1%eth0]:80"),
    *("HTTP://host", f"http://{'a' * 300}", "http://[::1]extra:80"),
]


@pytest.mark.parametrize("endpoint", MALFORMED)
def test_a_malformed_endpoint_is_a_usage_error_of_both_clients_and_no_panic(client, endpoint):
    with pytest.raises(UsageError, match="the endpoint"):
        open_store("s3://b/run", storage_options={**KEYS, "client": client}, endpoint_url=endpoint)


def test_an_endpoint_is_checked_wherever_it_is_set(client, monkeypatch):
    nested = {"client_kwargs": {"endpoint_url": "nowhere"}}
    with pytest.raises(UsageError, match="client_kwargs' endpoint_url is 'nowhere'"):
        open_store("s3://b/run", storage_options={**KEYS, **nested, "client": client})
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, "http://")
        with pytest.raises(UsageError, match=f"^{name} is 'http://'"):
            open_store("s3://b/run", storage_options={**KEYS, "client": client})


@pytest.mark.parametrize(
    "endpoint",
    [
        *("http://[::1]:9000", "https://[2001:db8::1]", "http://minio:9000", "http://minio_1:9000"),
        *("https://s3.eu-west-1.amazonaws.com", "https://host/base/path", "https://host."),
    ],
)
def test_a_sound_endpoint_is_taken(client, endpoint):
    if client == "s3fs" or not endpoint.endswith("."):
        open_store(
            "s3://b/run", storage_options={**KEYS, "client": client}, endpoint_url=endpoint
        ).close()


@pytest.mark.parametrize("name", ["key", "secret", "token"])
@pytest.mark.parametrize("value", ["", "very-secret\r", "very-secret\n", "very secret", 5, True])
def test_credentials_that_none_can_be_are_named_and_not_shown(client, name, value):
    with pytest.raises(UsageError, match=f"--storage-option {name}") as caught:
        open_store("s3://b/run", storage_options={**KEYS, name: value, "client": client})
    assert "very" not in caught.value.message


def test_a_line_end_of_windows_in_the_environment_is_named(client, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret\r")
    with pytest.raises(UsageError, match=r"^AWS_SECRET_ACCESS_KEY .*Windows") as caught:
        open_store("s3://b/run", storage_options={"client": client})
    assert "very" not in caught.value.message


@pytest.mark.parametrize("region", ["", "us east", "../x", "ü", 5])
def test_a_region_that_is_none_is_a_usage_error(client, region):
    options = {**KEYS, "client_kwargs": {"region_name": region}, "client": client}
    with pytest.raises(UsageError, match="not a region name"):
        open_store("s3://b/run", storage_options=options)


@pytest.mark.parametrize("name", ["client_kwargs", "config_kwargs"])
def test_nested_options_that_are_none_are_a_usage_error(client, name):
    with pytest.raises(UsageError, match="a JSON object is expected"):
        open_store("s3://b/run", storage_options={**KEYS, name: "x", "client": client})


def test_false_in_any_case_is_not_anonymous():
    # s3fs takes any text for true, and would ask without the keys that are set.
    assert checked_settings({"anon": "False"}) == {"anon": False}
    assert checked_settings({"anon": "true"}) == {"anon": True}
    with pytest.raises(UsageError, match="true or false"):
        checked_settings({"anon": "maybe"})


def test_an_option_of_no_value_is_not_set():
    assert checked_settings({"token": None, "key": "a"}) == {"key": "a"}


@pytest.mark.filterwarnings("ignore")
def test_a_panic_of_obstore_is_a_storage_that_did_not_answer():
    unchecked = ObstoreClient("b", "run", {**KEYS, "endpoint_url": "http://[::1"}, timeout_s=1)
    with pytest.raises(StorageUnavailable, match="client=s3fs"):
        unchecked.list_page("run/", deep=True, token=None)
