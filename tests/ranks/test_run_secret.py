import os
import socket
import stat

import pytest
import torch

from patrickstar import StateError
from patrickstar.ranks import private_files
from patrickstar.ranks.addresses import (
    NETWORKS_VARIABLE,
    AllowedHosts,
    gloo_on_loopback,
    is_loopback,
    join_address,
    listen,
    listening_address,
    split_address,
)
from patrickstar.ranks.emulated import run_emulated
from patrickstar.ranks.exchanges import open_exchanges
from patrickstar.ranks.mesh import Axis, Mesh, MeshRanks
from patrickstar.ranks.private_files import NotPrivateError, make_private_folder, open_private
from patrickstar.ranks.run_secret import RunSecret, SecretError, default_secret_file, read_secret, write_secret


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("open_umask")
def test_a_secret_is_its_users_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = default_secret_file("localhost", 29600)
    assert path == default_secret_file("127.0.0.1", 29600)
    secret = write_secret(path)
    assert mode(path) == 0o600
    assert mode(path.parent) == 0o700
    assert read_secret(path).key("a") == secret.key("a") != secret.key("b")
    assert secret.hex() not in repr(secret)
    with pytest.raises(SecretError, match="exists"):
        write_secret(path)


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o620, 0o666, 0o700 | stat.S_IROTH])
def test_a_secret_that_others_may_read_is_refused(tmp_path, bits):
    path = tmp_path / "secret"
    write_secret(path)
    path.chmod(bits)
    with pytest.raises(SecretError, match=f"open to other users .mode {bits:04o}.; make it private"):
        read_secret(path)


def test_a_secret_of_another_user_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    write_secret(path)
    monkeypatch.setattr(private_files.os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(SecretError, match=r"belongs to user \d+, and this process runs as user"):
        read_secret(path)


def test_files_that_hold_no_secret_are_refused(tmp_path):
    with pytest.raises(SecretError, match="there is no file .*; copy the one that serve_rendezvous wrote"):
        read_secret(tmp_path / "missing")
    for number, content in enumerate((b"", b"12" * 31, b"xy" * 32, b"\xff" * 64)):
        path = tmp_path / str(number)
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(SecretError, match="holds no secret"):
            read_secret(path)
    (tmp_path / "link").symlink_to(tmp_path / "0")
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("link", "fifo"):
        with pytest.raises(SecretError):
            read_secret(tmp_path / name)


def test_folders_that_others_may_use_are_refused(tmp_path):
    folder = tmp_path / "folder"
    make_private_folder(folder)
    make_private_folder(folder)
    folder.chmod(0o750)
    with pytest.raises(NotPrivateError, match="the folder .* is open to other users"):
        make_private_folder(folder)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(NotPrivateError, match="is no folder"):
        make_private_folder(tmp_path / "link")
    with pytest.raises(NotPrivateError, match="is no file"):
        open_private(tmp_path)


def test_short_secrets_are_refused():
    with pytest.raises(ValueError, match="62 hexadecimal digits"):
        RunSecret.from_hex("ab" * 31)


def test_addresses():
    for address, parts in (("host:1", ("host", 1)), ("[::1]:65535", ("::1", 65535)), ("10.0.0.1:80", ("10.0.0.1", 80))):
        assert split_address(address) == parts
        assert join_address(*parts) == address
    for wrong in ("", "host", ":1", "host:", "host:0", "host:65536", "host:x", "host:-1"):
        with pytest.raises(ValueError, match="give host:port"):
            split_address(wrong)
    assert is_loopback("localhost") and is_loopback("127.0.0.5")
    assert not is_loopback("10.1.2.3")


def test_a_socket_listens_where_it_was_told():
    for host in ("127.0.0.1", "localhost", "lo"):
        with listen(listening_address(host), 0) as listening:
            assert listening.getsockname()[0] == "127.0.0.1"
            with pytest.raises(OSError):
                socket.create_connection(("127.0.0.2", listening.getsockname()[1]), 1)
    for host in ("0.0.0.0", "::", ""):
        with pytest.raises(ValueError):
            listening_address(host)
    with pytest.raises(ValueError, match="no address, name or interface of this machine"):
        listening_address("no such host")


def test_gloo_listens_where_its_store_does(monkeypatch):
    for host, named, within in (
        ("127.0.0.1", None, "lo"),
        ("127.0.0.1", "eth7", "eth7"),
        ("10.1.2.3", None, None),
        ("", None, None),
    ):
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        if named:
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
        with gloo_on_loopback(host):
            assert os.environ.get("GLOO_SOCKET_IFNAME") == within
        assert os.environ.get("GLOO_SOCKET_IFNAME") == named


def test_hosts_of_a_run(monkeypatch):
    monkeypatch.delenv(NETWORKS_VARIABLE, raising=False)
    alone = AllowedHosts.around("127.0.0.1")
    alone.check("127.0.0.1")
    for host in ("10.0.0.1", "8.8.8.8", "evil.example", "", "127.0.0.1.evil"):
        with pytest.raises(ValueError, match="is not in the run's networks|is no IP address"):
            alone.check(host)
    cluster = AllowedHosts.around("203.0.113.7")
    for host in ("127.0.0.1", "10.9.8.7", "203.0.113.7"):
        cluster.check(host)
    with pytest.raises(ValueError, match="is not in the run's networks"):
        cluster.check("203.0.113.8")
    monkeypatch.setenv(NETWORKS_VARIABLE, "203.0.113.0/24, 10.1.0.0/16")
    named = AllowedHosts.around("203.0.113.7")
    named.check("203.0.113.8")
    with pytest.raises(ValueError, match="PATRICKSTAR_ELASTIC_NETWORKS names others"):
        named.check("10.9.8.7")
    monkeypatch.setenv(NETWORKS_VARIABLE, "10.1.0.0/99")
    with pytest.raises(ValueError, match="give networks such as"):
        AllowedHosts.around("203.0.113.7")


def test_tensors_come_from_the_ranks_that_sent_them():
    mesh = Mesh(sequence=2, columns=3)

    def run(ranks):
        here = MeshRanks(ranks, mesh)
        lines = [open_exchanges(here.along(axis), axis.value) for axis in (Axis.SEQUENCE, Axis.COLUMNS)]
        came = []
        for line in lines:
            mine = torch.full((2,), float(ranks.context.rank))
            others = [rank for rank in range(line.size) if rank != line.rank]
            incoming = {rank: torch.empty(2) for rank in others}
            line.begin([(rank, mine) for rank in others], list(incoming.items())).wait()
            came.append({rank: tensor[1].item() for rank, tensor in incoming.items()})
        return came, ranks.control.exchange(bytes([ranks.context.rank]), "its number")

    for rank, (came, numbers) in enumerate(run_emulated(mesh.size, run)):
        sequence, column = divmod(rank, 3)
        assert came == [
            {1 - sequence: (1 - sequence) * 3.0 + column},
            {other: sequence * 3.0 + other for other in range(3) if other != column},
        ]
        assert numbers == [bytes([other]) for other in range(6)]


def test_what_one_raises_first_ends_all():
    def run(ranks):
        if ranks.context.rank == 1:
            raise KeyError("first")
        ranks.control.exchange(b"", "what rank 1 never sends")

    with pytest.raises(KeyError, match="first"):
        run_emulated(3, run)
    with pytest.raises(StateError, match="the words"):
        run_emulated(2, lambda ranks: ranks.check_agreement("the words", str(ranks.context.rank)))
