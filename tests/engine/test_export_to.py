import pytest
import torch
from safetensors.torch import load, load_file, save

from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import RanksFailedError, run_ranks
from tests.models import MODELS
from tests.ranks.mixed_models import build
from tests.ranks.runs import rank_and_size
from tests.training import make_config

BUCKET = 16 * 1024
FAMILY = "Qwen3Moe"


def engine_of(family=FAMILY):
    torch.manual_seed(0)
    config = make_config("bf16", device_memory="4MiB", default_chunk_size=8192)
    return initialize_engine(build(family, "grouped_mm"), 0, config)[0]


def received(engine, **options):
    buckets = []
    engine.export_to(buckets.append, **options)
    return buckets


def exported(engine, folder, dtype):
    engine.export_weights(folder, dtype=dtype)
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("family", [FAMILY, "Qwen3VLMoe"])
def test_buckets_hold_the_exported_weights_while_memory_is_lent(family, tmp_path):
    """Experts of one parameter are split as in files."""
    with engine_of(family) as engine:
        with engine.lend():
            buckets = received(engine, bucket_bytes=BUCKET)
            messages = []
            engine.export_to(lambda bucket: messages.append(save(dict(bucket))), bucket_bytes=BUCKET)
        expected = exported(engine, tmp_path / "bf16", torch.bfloat16)
        wide = received(engine, dtype=torch.float32, bucket_bytes="1GiB", device="cpu")
        expected_wide = exported(engine, tmp_path / "fp32", torch.float32)
    assert len(buckets) > 2
    for bucket in buckets:
        assert len(bucket) == 1 or sum(value.nbytes for _, value in bucket) <= BUCKET
    assert_same_bits({name: value for bucket in buckets for name, value in bucket}, expected)
    assert_same_bits({name: value for message in messages for name, value in load(message).items()}, expected)
    assert len(wide) == 1
    assert_same_bits(dict(wide[0]), expected_wide)


def test_a_generator_can_load_the_buckets():
    case = MODELS["gpt2"]
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(case.build, 0, make_config("fp32", device_memory="4MiB"))
    generator = case.build()
    batch = case.batch(torch.Generator().manual_seed(1))
    with engine:
        engine.backward(engine(**batch).loss)
        optimizer.step()
        engine.export_to(lambda bucket: generator.load_state_dict(dict(bucket), strict=False), bucket_bytes=BUCKET)
        with torch.no_grad():
            assert engine(**batch).loss.item() == pytest.approx(generator(**batch).loss.item(), rel=1e-6)


@pytest.mark.parametrize("size", [0, "much"])
def test_a_bucket_has_a_size(size):
    with engine_of() as engine, pytest.raises(ValueError, match=f"bucket_bytes is {size!r}; give bytes, or a size"):
        engine.export_to(print, bucket_bytes=size)


def receive_on_ranks(fails):
    with engine_of() as engine:
        buckets = []

        def receive(bucket):
            if fails and rank_and_size()[0] == 1:
                raise ConnectionError("the generator is gone")
            buckets.append(bucket)

        engine.export_to(receive, bucket_bytes=BUCKET)
        return buckets


def test_each_rank_receives_the_whole_model():
    with engine_of() as engine:
        alone = received(engine, bucket_bytes=BUCKET)
    for buckets in run_ranks(2, receive_on_ranks, False):
        assert [[name for name, _ in bucket] for bucket in buckets] == [[name for name, _ in each] for each in alone]
        for bucket, expected in zip(buckets, alone, strict=True):
            assert_same_bits(dict(bucket), dict(expected))


def test_ranks_end_when_one_cannot_receive():
    with pytest.raises(RanksFailedError, match="the generator is gone"):
        run_ranks(2, receive_on_ranks, True)
