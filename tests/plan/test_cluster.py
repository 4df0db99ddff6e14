import json

import pytest

from patrickstar.plan import main
from patrickstar.planning.cluster import Cluster, HostTraffic
from patrickstar.planning.machines import H200
from patrickstar.planning.node_links import LINKS, parse_link

SMALL = [
    "--model",
    "gpt:128x4",
    "--no-checkpointing",
    "--batch-size",
    "2",
    "--seq-len",
    "64",
    "--host-memory",
    "4GiB",
    "--device-memory",
    "256MiB",
]
IB = LINKS["ib400"]


def as_json(capsys, *args, expect=0):
    assert main([*SMALL, *args, "--json"]) == expect
    return json.loads(capsys.readouterr().out)


def test_one_gpu_has_no_collectives():
    rates = Cluster().rates(H200, HostTraffic())
    assert (rates.gather_gbps, rates.scatter_gbps, rates.collective_latency_seconds) == (0, 0, 0)
    assert rates.upload_gbps == H200.upload_gbps
    assert rates.host_adam_params_per_second == H200.host_adam_gparams * 1e9


def test_within_a_node():
    four = Cluster(gpus_per_node=4)
    assert four.gather_gbps(H200) == 305
    assert four.scatter_gbps(H200) == 299
    assert four.latency_seconds == pytest.approx(8.4e-6 + 3 * 3.4e-6)
    assert Cluster(nodes=9, gpus_per_node=8).gather_gbps(H200) == 305  # one NVLink domain


def test_between_nodes():
    """Four nodes of eight: a node gets 3/4 of a chunk over its eight adapters, and each GPU sends 3/4 over its own."""
    cluster = Cluster(nodes=4, gpus_per_node=8, link=IB)
    slow = Cluster(nodes=4, gpus_per_node=8, link=parse_link("2"))
    assert cluster.gather_gbps(H200) == 305  # eight adapters are faster than NVLink
    seconds = 0.75 / (8 * 2)
    assert slow.gather_gbps(H200) == pytest.approx(31 / 32 / seconds)
    assert cluster.scatter_gbps(H200) == pytest.approx(31 / 32 / (0.75 / 46))
    assert cluster.latency_seconds == pytest.approx(8.4e-6 + 28 * 3.4e-6 + 3 * 14e-6)


def test_the_memory_of_a_host_is_shared():
    """Measured: four GPUs that move both ways at once have 26.6 GB/s each way, one has 50.8."""
    four = Cluster(gpus_per_node=4)
    both_ways = HostTraffic(upload_gbps=26.6, download_gbps=26.6)
    rates = four.rates(H200, both_ways)
    assert rates.upload_gbps == pytest.approx(26.6, rel=0.01)
    assert rates.download_gbps == pytest.approx(26.6, rel=0.01)
    assert four.rates(H200, HostTraffic()).upload_gbps == 50.8  # one at a time
    # Updates alone: 213 / 4 / 28 Gparam/s each, where the threads of one could do 5.2.
    assert four.rates(H200, HostTraffic()).host_adam_params_per_second == pytest.approx(213 / 4 / 28 * 1e9)
    beside = four.rates(H200, HostTraffic(upload_gbps=10.0)).host_adam_params_per_second
    assert beside == pytest.approx((213 / 4 - 10) / 28 * 1e9)
    busy = four.rates(H200, HostTraffic(upload_gbps=50, download_gbps=50, adam_gbps=150))
    assert busy.upload_gbps == pytest.approx(213 / 4 * 50.8 / (2 * 50.8 + 5.2 * 28))


def test_sizes():
    cluster = Cluster(nodes=2, gpus_per_node=8, link=IB)
    assert cluster.num_ranks == 16
    assert (cluster.of_size(4).nodes, cluster.of_size(4).gpus_per_node) == (1, 4)
    assert (cluster.of_size(256).nodes, cluster.of_size(256).gpus_per_node) == (32, 8)
    with pytest.raises(ValueError, match="12 GPUs are not whole nodes of 8 GPUs"):
        cluster.of_size(12)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 8])
def test_each_rank_keeps_its_share(capsys, ranks):
    args = ["--margin-use-ratio", "0.001", "--chunk-numel", "1048576", "--speculation", "never"]
    one, many = as_json(capsys, *args), as_json(capsys, *args, "--gpus-per-node", str(ranks))
    assert many["host_bytes"] * ranks == pytest.approx(one["host_bytes"], rel=0.1)
    assert many["uploaded_bytes"] * ranks < 1.1 * one["uploaded_bytes"]
    assert one["gathered_bytes"] == one["scattered_bytes"] == 0
    assert many["gathered_bytes"] >= many["scattered_bytes"] > 0
    assert many["least_host_bytes"] * ranks == pytest.approx(one["least_host_bytes"], rel=0.2)
    assert many["roofline_seconds"]["gather"] > 0
    assert many["roofline_seconds"]["compute"] == pytest.approx(one["roofline_seconds"]["compute"], rel=0.2)


def test_a_slow_link_bounds_the_step(capsys):
    found = as_json(capsys, "--nodes", "4", "--gpus-per-node", "2", "--link", "0.1", "--also", "2,16")
    assert found["nodes"] == 4
    assert found["bound"] in ("gather", "scatter", "collective")
    within, more = found["also"]
    assert within["step_seconds"] < found["step_seconds"] <= more["step_seconds"]
    out = main([*SMALL, "--nodes", "4", "--gpus-per-node", "2", "--link", "eth25", "--also", "2,16", "--verbose"])
    assert out == 0
    text = capsys.readouterr().out
    assert "on 8 GPUs, 2 per node, eth25 between nodes" in text
    assert "model TFLOPS per GPU" in text


def test_more_ranks_fit_where_fewer_do_not(capsys):
    """States of 16.5 M parameters take 231 MB: a GPU and its host with 128 MiB each hold a quarter of them."""
    tight = ["--host-memory", "96MiB", "--device-memory", "128MiB", "--gpus-per-node", "4", "--also", "1"]
    found = as_json(capsys, *tight)
    assert found["fits"]
    assert not found["also"][0]["fits"]


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["--link", "string"], "--link: it is 'string'"),
        (["--link", "-3"], "--link: it is '-3'"),
        (["--also", "8,many"], "--also: it is '8,many'"),
        (["--gpus-per-node", "4", "--also", "6"], "6 GPUs are not whole nodes of 4"),
    ],
)
def test_bad_input_is_named(capsys, args, match):
    assert main([*SMALL, *args]) == 2
    assert match in capsys.readouterr().err


def test_counts_are_at_least_1(capsys):
    assert main([*SMALL, "--nodes", "0"]) == 2
    assert "--nodes: it is '0'" in capsys.readouterr().err


def test_kernels_take_longer_beside_collectives(capsys):
    assert Cluster().slowdown(H200) == 1
    assert Cluster(nodes=2).slowdown(H200) == Cluster(gpus_per_node=8).slowdown(H200) == H200.several_gpus_slowdown
    args = ["--margin-use-ratio", "0.001", "--chunk-numel", "1048576", "--speculation", "never"]
    one, two = (as_json(capsys, *args, "--gpus-per-node", ranks)["roofline_seconds"]["compute"] for ranks in "12")
    assert two == pytest.approx(H200.several_gpus_slowdown * one, rel=0.01)
