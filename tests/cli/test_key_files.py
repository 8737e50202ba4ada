"""A key file that others can read or replace is refused."""

from __future__ import annotations

import os

import pytest

from ckptctl.cli.options import seal_key
from ckptctl.errors import UsageError

is_root = os.geteuid() == 0
OTHER = 12_345


@pytest.fixture
def key_file(tmp_path):
    tmp_path.chmod(0o755)
    file = tmp_path / "seal.key"
    file.write_text("a key\n")
    file.chmod(0o600)
    return file


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_file_that_only_its_owner_reads_is_read(key_file, mode):
    key_file.chmod(mode)
    assert seal_key(str(key_file)) == b"a key"


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o666, 0o444, 0o644])
def test_a_file_that_others_read_or_write_is_refused(key_file, mode):
    key_file.chmod(mode)
    with pytest.raises(UsageError, match=f"by (others|its group) .mode {mode:04o}") as raised:
        seal_key(str(key_file))
    assert raised.value.next_command == f"chmod 600 {key_file}"


@pytest.mark.skipif(is_root, reason="of root, the group may read it")
def test_a_file_of_the_user_that_a_group_reads_is_refused(key_file):
    key_file.chmod(0o640)
    with pytest.raises(UsageError, match="by its group"):
        seal_key(str(key_file))


def test_a_folder_in_which_others_replace_files_is_refused(key_file):
    key_file.parent.chmod(0o777)
    with pytest.raises(UsageError, match="in a folder that others can write") as raised:
        seal_key(str(key_file))
    assert raised.value.next_command == f"chmod go-w {key_file.parent}"
    key_file.parent.chmod(0o1777)
    assert seal_key(str(key_file)) == b"a key"


def test_a_link_is_followed_and_its_target_checked(key_file, tmp_path):
    (tmp_path / "links").mkdir(mode=0o755)
    link = tmp_path / "links" / "key"
    link.symlink_to(key_file)
    assert seal_key(str(link)) == b"a key"
    key_file.chmod(0o644)
    with pytest.raises(UsageError, match="can be read by others"):
        seal_key(str(link))


def test_a_secret_as_kubernetes_mounts_it_is_read(tmp_path):
    """Files behind the links of `..data`, in a folder that its group may write."""
    volume = tmp_path / "secret"
    (volume / "..2026_11_26").mkdir(parents=True)
    (volume / "..2026_11_26").chmod(0o755)
    (volume / "..2026_11_26" / "seal.key").write_text("a key")
    (volume / "..2026_11_26" / "seal.key").chmod(0o440 if is_root else 0o400)
    (volume / "..data").symlink_to("..2026_11_26")
    (volume / "seal.key").symlink_to("..data/seal.key")
    volume.chmod(0o3777)
    assert seal_key(str(volume / "seal.key")) == b"a key"


def test_a_key_from_a_pipe_of_the_caller_is_read():
    reader, writer = os.pipe()
    os.write(writer, b"a key\n")
    os.close(writer)
    try:
        assert seal_key(f"/dev/fd/{reader}") == b"a key"
    finally:
        os.close(reader)


def test_a_folder_is_no_key_file(tmp_path):
    with pytest.raises(UsageError, match="is no regular file"):
        seal_key(str(tmp_path))


@pytest.mark.skipif(not is_root, reason="only root creates files of another user")
class TestOfAnotherUser:
    def test_a_file_of_another_user_is_refused(self, key_file):
        os.chown(key_file, OTHER, OTHER)
        with pytest.raises(UsageError, match=f"belongs to the user {OTHER}"):
            seal_key(str(key_file))

    def test_a_file_of_root_with_a_foreign_group_is_refused(self, key_file):
        key_file.chmod(0o440)
        os.chown(key_file, 0, OTHER)
        with pytest.raises(UsageError, match="by its group"):
            seal_key(str(key_file))

    def test_a_link_of_another_user_is_refused(self, key_file, tmp_path):
        link = tmp_path / "key"
        link.symlink_to(key_file)
        os.lchown(link, OTHER, OTHER)
        with pytest.raises(UsageError, match=f"link of the user {OTHER}"):
            seal_key(str(link))
