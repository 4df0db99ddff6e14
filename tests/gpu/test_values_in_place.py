import pytest

from tests.engine.test_speculation import on_host
from tests.gpu.test_equality import MIB, WIDE
from tests.training import Run, assert_same, taken_over, train

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

CHUNK = {"default_chunk_size": MIB}


def plain(**config) -> dict:
    return on_host("bf16", "never", **CHUNK, **config)


@pytest.fixture(scope="module")
def host_memory() -> int:
    report = train(WIDE, plain(), steps=2).report
    return report["host_peak_bytes"] + report["num_chunk_elements"] // 2


def expect_in_place(run: Run) -> None:
    report = run.report
    print(
        f"{report['num_values_in_place']} values in place, {report['num_speculated_updates']} updates began, "
        f"{taken_over(report)} were taken over"
    )
    assert taken_over(report) > 0 < report["num_values_in_place"]


@pytest.mark.parametrize("rank", [None, 1, 4, 7])
def test_states_on_the_host(host_memory, rank):
    norms = sorted(train(WIDE, plain(gradient_clipping=1e9), steps=8).grad_norms)
    clipping = {} if rank is None else {"gradient_clipping": norms[rank]}
    run = train(WIDE, on_host("bf16", "always", host_memory=host_memory, **CHUNK, **clipping), steps=8)
    expect_in_place(run)
    assert_same(run, train(WIDE, plain(**clipping), steps=8))
