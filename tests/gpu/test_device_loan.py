import gc

import pytest
import torch

from patrickstar import MemoryBudgetError
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.models import Case, gpt2, token_batch
from tests.training import assert_same, make_config, train

pytestmark = pytest.mark.gpu

CASE = Case(lambda: gpt2(hidden=512, layers=4), token_batch)
LIMIT = 2**30
CONFIG = make_config("bf16", default_chunk_size=2**21, device_memory=LIMIT)


def test_others_take_more_than_the_limit():
    def before_step(engine, step):
        if step in (2, 3, 5):
            free, _ = torch.cuda.mem_get_info()
            with engine.lend():
                assert torch.cuda.memory_reserved() < LIMIT // 8  # parameters outside of chunks, workspaces
                others = torch.empty(2 * LIMIT, dtype=torch.uint8, device="cuda")
                assert torch.cuda.mem_get_info()[0] < free
                del others

    lent, plain = train(CASE, CONFIG, steps=7, before_step=before_step), train(CASE, CONFIG, steps=7)
    assert lent.report["num_device_state_chunks"] == plain.report["num_device_state_chunks"]
    assert_same(lent, plain)


def test_others_keep_some():
    engine, optimizer = initialize_engine(CASE.build, 0, CONFIG)
    batch = token_batch(torch.Generator().manual_seed(0))

    def step():
        engine.backward(engine(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()

    with engine:
        step()
        before = engine.state_dict()
        with pytest.raises(MemoryBudgetError, match=r"free the .* that others hold"), engine.lend():
            others = torch.empty(LIMIT // 2, dtype=torch.uint8, device="cuda")
        assert_same_bits(engine.state_dict(), before)
        del others
        gc.collect()
        with engine.lend():
            pass
        step()


def generate_in(buckets, answers):
    generator = CASE.build().to("cuda", torch.bfloat16).eval()
    for bucket in iter(buckets.get, None):
        generator.load_state_dict(dict(bucket), strict=False)
        torch.cuda.synchronize()
        del bucket
        answers.put("loaded")
    with torch.no_grad():
        answers.put(generator(input_ids=torch.arange(8, device="cuda")[None]).logits.tolist())


def test_another_process_generates_with_the_weights_it_was_sent():
    """Buckets travel as CUDA IPC handles, so the generator copies from the engine's GPU memory."""
    spawn = torch.multiprocessing.get_context("spawn")
    buckets, answers = spawn.SimpleQueue(), spawn.SimpleQueue()

    def send(bucket):
        buckets.put(bucket)
        assert answers.get() == "loaded"

    with initialize_engine(CASE.build, 0, CONFIG)[0] as engine:
        other = spawn.Process(target=generate_in, args=(buckets, answers), daemon=True)
        other.start()
        with engine.lend():
            engine.export_to(send, bucket_bytes="4MiB")
        buckets.put(None)
        logits = answers.get()
        other.join(60)
        plain = CASE.build().to("cuda", torch.bfloat16).eval()
        plain.load_state_dict(engine.state_dict(), strict=False)
        with torch.no_grad():
            expected = plain(input_ids=torch.arange(8, device="cuda")[None]).logits.tolist()
    assert logits == expected
