import json

import pytest

from patrickstar.plan import main

# Two tables of words have four fifths of the parameters, each in a chunk of its own, which stays on the host.
ASKED = ["--model", "gpt:256x8", "--batch-size", "2", "--seq-len", "64", "--device-memory", "192MiB", "--no-advice"]
ASKED += ["--chunk-numel", "262144", "--margin-use-ratio", "0.05", "--speculation", "never"]


def plan(capsys, *args, expect=0):
    assert main([*ASKED, *args, "--json"]) == expect
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def host_bytes():
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*ASKED, "--host-memory", "4GiB", "--json"]) == 0
    return json.loads(out.getvalue())["least_host_bytes"]


def test_a_disk_takes_what_the_host_has_no_room_for(capsys, host_bytes):
    found = [
        plan(capsys, "--host-memory", f"{int(share * host_bytes)}B", "--disk", "1TiB", "--disk-bandwidth", "0.1")
        for share in (1.0, 0.96, 0.92, 0.88)
    ]
    assert found[0]["num_disk_chunks"] == 0
    assert "disk_memory" in found[0]["config"]
    for before, after in zip(found, found[1:], strict=False):
        assert after["disk_bytes"] > before["disk_bytes"]
        assert after["step_seconds"] >= before["step_seconds"]
        assert after["disk_read_bytes"] == after["disk_written_bytes"] == after["disk_bytes"]
        assert after["roofline_seconds"]["disk_read"] == pytest.approx(after["disk_bytes"] / 0.1e9)
        assert after["host_peak_bytes"] <= after["host_budget_bytes"]
    assert found[-1]["bound"] in ("disk_read", "disk_write")


def test_without_it_the_model_does_not_fit(capsys, host_bytes):
    scarce = ["--host-memory", f"{int(0.5 * host_bytes)}B", "--gpu-memory", "1GiB"]
    refused = plan(capsys, *scarce, expect=1)
    least = plan(capsys, "--host-memory", f"{host_bytes}B", "--disk", "1TiB")["least_host_bytes"]
    assert least < refused["least_host_bytes"]
    fits = plan(capsys, "--host-memory", f"{least}B", "--disk", "1TiB")
    assert fits["num_disk_chunks"] > 0
    committed = plan(capsys, "--host-memory", f"{host_bytes}B", "--disk", "1TiB", "--speculation", "commit")
    assert committed["fits"]


def test_what_it_prints(capsys, host_bytes):
    assert main([*ASKED, "--host-memory", f"{int(0.9 * host_bytes)}B", "--disk", "1TiB"]) == 0
    out = capsys.readouterr().out
    assert "on disk: the optimizer states of " in out
    assert "least that works, all optimizer states on host and disk" in out
    assert main([*ASKED, "--host-memory", "4GiB", "--disk", "1TiB"]) == 0
    assert "nothing is on disk: GPU and host have room" in capsys.readouterr().out
