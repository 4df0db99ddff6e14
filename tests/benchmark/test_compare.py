import dataclasses
import json
import sys
import types

import pytest
import torch

from benchmark import compare
from benchmark.common import SHAPES, model_flops, token_batch
from benchmark.compare_report import Comparison, format_table
from benchmark.launch import Outcome
from benchmark.systems import SYSTEMS, Job
from benchmark.systems.gpu_activity import longest_kernels, summarize
from benchmark.systems.run import Run, run_system
from benchmark.systems.weights import build_job_model, build_meta_model, fill_parameters

pytestmark = pytest.mark.slow

MISSING = "deepspeed-zero3-offload"
JOB = Job(
    system="fsdp2",
    model="tiny",
    ranks=1,
    length=64,
    batch=2,
    clipping=0.0,
    speculation="auto",
    gpu_bytes=None,
    host_bytes=None,
    warmup=1,
    steps=1,
)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def without_deepspeed(monkeypatch):
    spec = dataclasses.replace(SYSTEMS[MISSING], package="no_such_package")
    monkeypatch.setitem(SYSTEMS, MISSING, spec)


def test_systems_train_the_same_thing(tmp_path, capsys, without_deepspeed):
    flags = (
        "--batch-size 2 --seq-len 48 --clip 0.5 --warmup 1 --steps 3 --device-memory 24MiB --device-memory fsdp2=all"
    )
    flags += f" --system {MISSING} patrickstar fsdp2"
    files = ["--json", str(tmp_path / "results" / "out.json"), "--plot", str(tmp_path / "out.svg")]
    assert compare.main([*flags.split(), *files]) == 0
    table = capsys.readouterr().out
    print(table)
    results = json.loads((tmp_path / "results" / "out.json").read_text())
    by_name = {system["system"]: system for system in results["systems"]}
    assert list(by_name) == [MISSING, "patrickstar", "fsdp2"]

    missing = by_name.pop(MISSING)
    assert missing["outcome"] == "not installed" and "no_such_package" in missing["reason"]
    assert MISSING in table and "not installed" in table

    reference = by_name["patrickstar"]
    for system in by_name.values():
        assert system["outcome"] == "trained", system
        assert system["losses"] == pytest.approx(reference["losses"], abs=2e-3)  # bfloat16, and other orders of sums
        assert len(system["all_step_seconds"]) == 4
        assert sorted(system["all_step_seconds"][1:])[1] == pytest.approx(system["step_seconds"], abs=1e-4)
        assert system["tokens_per_second_per_gpu"] == pytest.approx(2 * 48 / system["step_seconds"])
        ratio = system["step_seconds"] / reference["step_seconds"]
        assert system["step_seconds_over_patrickstar"] == pytest.approx(ratio)
        assert system["grad_norms"] == pytest.approx(reference["grad_norms"], rel=0.02)
        clipped = sum(norm > 0.5 for norm in system["grad_norms"][1:])
        assert system["num_clipped_steps"] == clipped
        assert f"clipping acted in {clipped} of 3 timed steps" in table
        assert system["host_peak_bytes"] > 100e6
        assert system["exposed_seconds"] is None and system["gpu_activity_missing_because"] == "no GPU"
    assert reference["losses"][0] != reference["losses"][1]
    assert 0 < reference["device_peak_bytes"] <= 24 * 2**20
    assert by_name["fsdp2"]["gpu_limit_bytes"] is None
    assert results["command"].startswith("python -m benchmark.compare ")
    assert results["gpu"] == "none" and results["commit"]
    assert "<svg" in (tmp_path / "out.svg").read_text()


def expected_losses(num_ranks, batch, length):
    shape = dataclasses.replace(SHAPES["tiny"], length=length)
    model = build_meta_model(shape).to_empty(device="cpu")
    fill_parameters(model)
    model.bfloat16()
    batches = [token_batch(shape, batch, torch.Generator().manual_seed(1 + rank)) for rank in range(num_ranks)]
    with torch.no_grad():
        return [model(**batch).loss.item() for batch in batches]


def test_several_ranks_train_the_same_thing(tmp_path, capsys):
    flags = "--system patrickstar fsdp2-offload --ranks 2 --batch-size 2 --seq-len 48 --warmup 1 --steps 2 "
    flags += "--fsdp2-recompute 1 "
    flags += "--host-memory 2GiB"
    assert compare.main([*flags.split(), "--json", str(tmp_path / "out.json")]) == 0
    print(capsys.readouterr().out)
    patrickstar, fsdp2 = json.loads((tmp_path / "out.json").read_text())["systems"]
    expected = expected_losses(2, batch=2, length=48)
    assert abs(expected[0] - expected[1]) > 2e-3  # ranks have different batches
    for system in (patrickstar, fsdp2):
        assert system["outcome"] == "trained" and system["ranks"] == 2
        assert system["losses"][0] == pytest.approx(sum(expected) / 2, abs=5e-4)
        assert len(system["slowest_rank_step_seconds"]) == 3
        assert system["host_peak_bytes"] > 300e6
    assert patrickstar["losses"] == pytest.approx(fsdp2["losses"], abs=5e-4)
    assert patrickstar["settings"]["config"]["host_memory"] == 2**30  # a rank's part


def test_a_system_that_does_not_fit_is_reported_and_the_others_go_on(tmp_path, capsys, without_deepspeed):
    flags = f"--system patrickstar {MISSING} --ranks 2 --batch-size 2 --warmup 0 --steps 1 --device-memory 64KiB --json"
    assert compare.main([*flags.split(), str(tmp_path / "out.json")]) == 1
    table = capsys.readouterr().out
    print(table)
    patrickstar, missing = json.loads((tmp_path / "out.json").read_text())["systems"]
    assert patrickstar["outcome"] == "out of memory" and patrickstar["reason"].startswith("rank ")
    assert "device_memory is 64 KiB, but" in patrickstar["reason"] and "the initialisation" in patrickstar["reason"]
    assert patrickstar["reason"] in table
    assert "Traceback" in patrickstar["log_tail"]
    assert missing["outcome"] == "not installed"


def test_a_system_that_cannot_run_on_several_ranks(monkeypatch):
    monkeypatch.setitem(SYSTEMS, MISSING, dataclasses.replace(SYSTEMS[MISSING], package="torch"))
    run = run_system(dataclasses.replace(JOB, system=MISSING, ranks=2), timeout_seconds=0.0, log=print)
    assert run.outcome is Outcome.NOT_SUPPORTED and run.reason == "2 ranks, but this benchmark runs it on at most 1"
    assert "not supported: " in format_table(Comparison("", [run]))


def test_ratio_and_scaling():
    def run(system, ranks, seconds):
        job = dataclasses.replace(JOB, system=system, ranks=ranks)
        return Run(job, step_seconds=[9.0, seconds], losses=[1.0, 1.0], host_peak_bytes=1)

    runs = [run("patrickstar", 1, 2.0), run("fsdp2", 1, 3.0), run("patrickstar", 4, 2.5), run("fsdp2", 4, 5.0)]
    comparison = Comparison("", runs)
    assert [comparison.ratio(run) for run in runs] == [1.0, 1.5, 1.0, 2.0]
    assert [comparison.scaling(run) for run in runs] == pytest.approx([1.0, 1.0, 0.8, 0.6])
    flops = model_flops(JOB.shape, JOB.batch)
    assert [comparison.tflops_per_gpu(run) for run in runs] == pytest.approx(
        [flops / s / 1e12 for s in (2.0, 3.0, 2.5, 5.0)]
    )
    assert [system["ranks"] for system in comparison.to_dict()["systems"]] == [1, 1, 4, 4]
    table = format_table(comparison)
    print(table)
    assert table.splitlines()[8].split()[:8] == ["fsdp2", "4", "all", "5.000", "0.0", "26", "2.00", "0.600"]
    alone = Comparison("", [runs[2]])
    assert alone.scaling(runs[2]) is None


def test_shapes():
    billions = {"llama-8b": 8.03, "qwen-14b": 14.77, "31b": 30.63, "llama-70b": 70.55}
    billions |= {"qwen3-30b-a3b": 30.53, "gpt-oss-20b": 20.91}  # published figures
    billions |= {"qwen3-30b-8-layers": 5.607}
    assert SHAPES["qwen3-30b-a3b"].num_active_parameters() / 1e9 == pytest.approx(3.35, rel=0.005)
    for name, shape in SHAPES.items():
        if shape.hidden > 2000:
            expected = billions.get(name) or float(name.removesuffix("b"))
            assert shape.num_parameters() / 1e9 == pytest.approx(expected, rel=0.005)
    for name in ("0.1b", "llama-8b", "qwen-14b", "qwen3-30b-a3b", "llama-70b"):
        shape = SHAPES[name]
        assert sum(param.numel() for param in build_meta_model(shape).parameters()) == shape.num_parameters()


def test_gpu_limits():
    systems = ["patrickstar", "fsdp2"]
    gib = 2**30
    assert compare.gpu_limits([], systems) == {"patrickstar": None, "fsdp2": None}
    assert compare.gpu_limits(["fsdp2=all", "24GiB"], systems) == {"patrickstar": 24 * gib, "fsdp2": None}
    assert compare.gpu_limits(["all", "fsdp2=1GiB"], systems) == {"patrickstar": None, "fsdp2": gib}
    with pytest.raises(ValueError, match="not among the systems that run: patrickstar, fsdp2"):
        compare.gpu_limits(["fsdp=1GiB"], systems)
    with pytest.raises(ValueError, match="--device-memory much: 'much' is no amount"):
        compare.gpu_limits(["much"], systems)


def test_gpu_activity():
    def event(category, name, begin, seconds, **args):
        return {"ph": "X", "cat": category, "name": name, "ts": begin * 1e6, "dur": seconds * 1e6, "args": args}

    figures = summarize(
        [
            event("kernel", "gemm", 0, 2),
            event("kernel", "adam", 1, 0.5),  # within the first
            event("kernel", "gemm", 1.5, 1.5),  # overlaps it
            event("kernel", "ncclDevKernel_AllGather", 3, 9),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 3, 0.25, bytes=100),
            event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 4, 0.25, bytes=10),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 3, 1, bytes=7),
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 3, 1, bytes=5),
            event("gpu_memset", "Memset (Device)", 4, 1),
            event("cuda_runtime", "cudaLaunchKernel", 4, 1),
            event("kernel", "gemm", 10, 1),
            {"ph": "M", "name": "process_name"},
        ]
    )
    assert figures == {
        "computing_seconds": pytest.approx(4),
        "collectives_only_seconds": pytest.approx(8),  # 3 to 12, without the last kernel
        "uploaded_bytes": 110,
        "uploaded_seconds": pytest.approx(0.5),
        "downloaded_bytes": 7,
        "downloaded_seconds": pytest.approx(1),
        "gap_seconds": pytest.approx(7),
        "gaps": {"long: gemm -> gemm": pytest.approx(7)},
    }
    with pytest.raises(RuntimeError, match="no kernel"):
        summarize([])


def test_longest_kernels():
    copy = "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<direct_copy_kernel_cuda()>>(int)"
    names = [copy, "nvjet_tst_128x256", "nvjet_tst_128x256", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage)"]
    events = [{"ph": "X", "cat": "kernel", "name": name, "ts": 0, "dur": 1e6} for name in names]
    many = [{"ph": "X", "cat": "kernel", "name": f"k{index}", "ts": 0, "dur": index} for index in range(20)]
    found = longest_kernels([*many, *events, {"ph": "X", "cat": "cuda_runtime", "name": "launch", "ts": 0, "dur": 9e9}])
    assert found[0] == {"name": "nvjet_tst_128x256", "seconds": 2.0, "number": 2}
    assert {one["name"] for one in found[1:3]} == {"direct_copy_kernel_cuda", "ncclDevKernel_SendRecv"}
    assert [one["name"] for one in found[3:]] == [f"k{index}" for index in range(19, 7, -1)]


def test_liger_kernels_are_applied_before_the_model_is_built(monkeypatch):
    applied = []
    liger = types.ModuleType("liger_kernel.transformers")
    liger.apply_liger_kernel_to_llama = lambda: applied.append("llama")
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    monkeypatch.setattr("benchmark.systems.weights.build_meta_model", lambda shape: applied.append(shape))
    job = dataclasses.replace(JOB, model="tiny-llama")
    build_job_model(job)
    build_job_model(dataclasses.replace(job, kernels="liger"))
    assert applied == [job.shape, "llama", job.shape]
