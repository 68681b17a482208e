"""Owners are named only where the driver's process numbers are ours."""

import os
import pwd

from topology.processes import HOST_PID_NAMESPACE, owner


def table(folder, namespace):
    (folder / "self" / "ns").mkdir(parents=True)
    (folder / "self" / "ns" / "pid").symlink_to(namespace)
    (folder / "42").mkdir()
    return folder


def test_on_the_host_the_owner_is_named(tmp_path):
    assert owner(42, table(tmp_path, HOST_PID_NAMESPACE)) == pwd.getpwuid(os.getuid()).pw_name
    assert owner(43, tmp_path) is None


def test_in_a_container_nobody_is_accused(tmp_path):
    """Process 42 here is another one than process 42 of the host."""
    assert owner(42, table(tmp_path, "pid:[4026532621]")) is None


def test_without_a_process_table_nothing_is_said(tmp_path):
    assert owner(42, tmp_path / "absent") is None
