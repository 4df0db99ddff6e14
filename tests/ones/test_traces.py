import json

import numpy as np
import pytest
from scipy import stats

from patrickstar.command.ones import main
from patrickstar.ones import (
    MIXES,
    PublicFormat,
    make_history,
    make_trace,
    on_types,
    read_public_trace,
    read_trace,
    write_trace,
)
from patrickstar.ones.earlier_jobs import HISTORY_SEED
from patrickstar.ones.mixes import GPUS_PER_NODE
from patrickstar.ones.traces import Curve


def lengths_s(trace):
    return np.array([item.samples / item.job.reference_goodput(GPUS_PER_NODE) for item in trace])


@pytest.mark.parametrize("mix", MIXES)
def test_traces_come_back_as_they_were_written(mix, tmp_path):
    trace = make_trace(mix, seed=4, num_jobs=6)
    write_trace(tmp_path / "jobs.jsonl", trace)
    assert read_trace(tmp_path / "jobs.jsonl") == trace
    typed = on_types(trace, ["A100", "T4"])
    write_trace(tmp_path / "typed.jsonl", typed)
    assert read_trace(tmp_path / "typed.jsonl") == typed and all(len(item.speeds) == 2 for item in typed)
    assert make_trace(mix, seed=4, num_jobs=6) == trace and make_trace(mix, seed=5, num_jobs=6) != trace
    assert len(make_trace(mix, seed=0)) == MIXES[mix].num_jobs


def test_the_mix_is_the_artifacts():
    trace = make_trace("artifact", seed=0, num_jobs=2000)
    gaps = np.diff([item.job.arrival_s for item in trace])
    np.testing.assert_allclose([gaps.mean(), gaps.std()], 30, rtol=0.1)
    np.testing.assert_allclose(np.quantile(lengths_s(trace), [0.25, 0.5, 0.75]), [103, 153, 193], rtol=0.1)
    assert len({item.job.workload for item in trace}) == 10


@pytest.mark.parametrize("mix", MIXES)
def test_nothing_observable_tells_how_long_a_job_is(mix):
    trace = make_trace(mix, seed=1, num_jobs=400)
    work = lengths_s(trace)
    seen = {
        "data set": [item.job.epoch_samples / item.job.reference_goodput(GPUS_PER_NODE) for item in trace],
        "curve": [item.curve_samples / item.job.reference_goodput(GPUS_PER_NODE) for item in trace],
        "GPUs": [item.job.requested_gpus for item in trace],
        "noise scale": [item.job.noise_scale for item in trace],
        "initial loss": [item.initial_loss for item in trace],
        "floor": [item.floor for item in trace],
        "model": [float(sum(item.job.workload.encode())) for item in trace],
    }
    for name, values in seen.items():
        correlation, chance = stats.spearmanr(work, values)
        assert abs(correlation) < 0.17 or chance > 0.001, name


@pytest.mark.parametrize("curve", Curve)
def test_curves_fall_by_samples_and_not_by_progress(curve):
    left = np.array([curve.left(x) for x in np.linspace(0, 60, 400)])
    assert left[0] == 1 and (np.diff(left) <= 1e-12).all() and left[-1] < 0.1
    if curve is Curve.STEPS:
        assert curve.left(2.95) - curve.left(2.99) < 0.01 < curve.left(2.99) - curve.left(3.2)


def test_history_holds_measurements_of_other_jobs_of_the_mix():
    """Noise scales and scaling are those that a scheduler measured, with errors, on sizes that it tried."""
    trace = make_trace("giant", seed=0)
    earlier = [item.job for item in make_trace("giant", HISTORY_SEED, 20)]
    past = make_history("giant", seed=0)
    assert [job.name for job in past] == [job.name for job in earlier] and all(job.epochs for job in past[:1])
    assert not set(lengths_s(trace)) & {job.length_s for job in past}
    errors = [one.noise_ratio * job.base_batch / job.noise_scale for one, job in zip(past, earlier, strict=True)]
    known = [error for error in errors if error]
    assert 1.0 not in known and len(known) > 10 and all(0.4 < error < 2.5 for error in known)
    within = [(one.within, job.throughput) for one, job in zip(past, earlier, strict=True)]
    assert {value is None for value, _ in within} == {True, False}
    assert all(value != speed.sync_s / speed.sample_s for value, speed in within)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is no trace: its first line must be"),
        (["{}"], "is no trace"),
        (['{"format": "patrickstar.ones.trace", "version": 1}'], "is no trace"),
        (["HEAD", "[1]"], ":2: '.1.' is no JSON object"),
        (["HEAD", "{"], ":2: no JSON"),
        (["HEAD", "{}"], ":2: the key 'job' is missing"),
        (["HEAD", "JOB", "", "JOB"], ":4: there is a job 0000-.* before"),
        (["HEAD", "WRONG"], ":2: job 0000-.*: min_gpus 0"),
        (["HEAD", "OTHER"], ":2: .*unexpected keyword argument 'colour'"),
        (["HEAD", "CURVE"], ":2: 'line' is not a valid Curve"),
        (["HEAD", "SPEED"], ":2: job 0000-.*: speeds {'T4': 0} must be positive"),
    ],
)
def test_wrong_traces_are_named_by_their_line(lines, message, tmp_path):
    write_trace(tmp_path / "good", make_trace("artifact", seed=0, num_jobs=1))
    head, job = (tmp_path / "good").read_text().splitlines()
    plain = json.loads(job)
    known = {
        "HEAD": head, "JOB": job, "WRONG": job.replace('"min_gpus": 1', '"min_gpus": 0'),
        "OTHER": json.dumps({**plain, "colour": 1}), "CURVE": json.dumps({**plain, "curve": "line"}),
        "SPEED": json.dumps({**plain, "speeds": {"T4": 0}}),
    }  # fmt: skip
    (tmp_path / "bad").write_text("\n".join(known.get(line, line) for line in lines))
    with pytest.raises(ValueError, match=message):
        read_trace(tmp_path / "bad")


def philly_job(submitted, attempts):
    return {"status": "Pass", "vc": "a", "jobid": "j", "user": "u", "submitted_time": submitted, "attempts": attempts}


PHILLY = [
    philly_job(
        "2017-10-09 07:00:00",
        [
            {
                "start_time": "2017-10-09 07:10:00", "end_time": "2017-10-09 07:20:00",
                "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu0"]}],
            },
            {"start_time": "2017-10-09 08:00:00", "end_time": "2017-10-09 08:05:00", "detail": []},
        ],
    ),
    philly_job("2017-10-09 06:00:00", []),
    philly_job(
        "2017-10-09 06:30:00",
        [
            {
                "start_time": "2017-10-09 06:30:00", "end_time": "2017-10-09 06:31:00",
                "detail": [{"ip": "m1", "gpus": ["gpu0"]}],
            }
        ],
    ),
]  # fmt: skip
HELIOS = """job_id,user,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
1,u1,8,32,1,COMPLETED,2020-04-01 00:01:00,2020-04-01 00:02:00,2020-04-01 00:12:00,600,60
2,u2,0,4,1,FAILED,2020-04-01 00:00:00,2020-04-01 00:00:00,2020-04-01 00:00:10,10,0
3,u3,1,4,1,CANCELLED,2020-04-01 00:00:30,2020-04-01 00:00:40,2020-04-01 00:01:10,30,10
"""
PAI = """a,worker,4.0,Terminated,1000.0,1100.0,600.0,29.3,50.0,T4
b,tensorflow,1.0,Terminated,900.0,,600.0,29.3,100.0,P100
c,worker,1.0,Failed,950.0,960.0,600.0,29.3,25.0,MISC
"""


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (PublicFormat.PHILLY, json.dumps(PHILLY), [(0, 1, 60), (1800, 3, 900)]),
        (PublicFormat.HELIOS, HELIOS, [(0, 1, 30), (30, 8, 600)]),
        (PublicFormat.PAI, PAI, [(0, 1, 10), (50, 2, 100)]),
    ],
)
def test_public_traces_give_arrivals_gpus_and_lengths(kind, text, expected, tmp_path, capsys):
    (tmp_path / "log").write_text(text)
    trace = read_public_trace(tmp_path / "log", kind)
    found = [
        (item.job.arrival_s, item.job.requested_gpus, round(length, 6))
        for item, length in zip(trace, lengths_s(trace), strict=True)
    ]
    assert found == expected
    arguments = ["trace", str(tmp_path / "t"), "--public", str(tmp_path / "log"), "--format", kind.value, "--jobs", "1"]
    assert main(arguments) == 0 and "1 jobs written" in capsys.readouterr().out
    assert read_trace(tmp_path / "t") == trace[:1]


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (PublicFormat.PHILLY, "[{}]", "record 1 is none of philly's: KeyError.'attempts'."),
        (PublicFormat.HELIOS, "job_id\n1\n", "record 1 is none of helios's: KeyError.'submit_time'."),
        (PublicFormat.PAI, "a,b\n", "record 1 is none of pai's: ValueError"),
        (PublicFormat.HELIOS, "job_id\n", "has no job that ran on a GPU"),
    ],
)
def test_other_files_are_no_public_traces(kind, text, message, tmp_path):
    (tmp_path / "log").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_public_trace(tmp_path / "log", kind)
