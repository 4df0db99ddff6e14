import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar import _C, StateError
from patrickstar.runtime import initialize_engine
from tests.models import Mlp, token_batch
from tests.training import make_config

DTYPES = [_C.DType.FLOAT32, _C.DType.BFLOAT16, _C.DType.FLOAT16]
ALIGNMENT = 128


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5000), st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=40),
    st.integers(128, 4096),
)
def test_any_parameters(params, chunk_numel):
    numels, dtypes, trainable = zip(*params, strict=True)
    layout = _C.Layout.pack(numels, dtypes, trainable, chunk_numel)
    seen = set()
    for index in range(layout.num_chunks):
        chunk = layout.chunk(index)
        assert chunk["params"] == sorted(chunk["params"])
        end = 0
        for param in chunk["params"]:
            assert layout.placement(param) == (index, end)
            assert end % ALIGNMENT == 0
            assert (dtypes[param], trainable[param]) == (chunk["dtype"], chunk["trainable"])
            end = -(-(end + numels[param]) // ALIGNMENT) * ALIGNMENT
            seen.add(param)
        assert chunk["numel"] == end
        assert end <= chunk_numel or len(chunk["params"]) == 1
    assert seen == set(range(len(params)))


def test_errors():
    with pytest.raises(ValueError, match="default_chunk_size is 64 elements"):
        _C.Layout.pack([10], [DTYPES[0]], [True], 64)
    with pytest.raises(ValueError, match="parameter 0 has 0 elements"):
        _C.Layout.pack([0], [DTYPES[0]], [True], 1024)


def test_working_set():
    layout = _C.Layout.pack([128, 128, 128], [DTYPES[1]] * 3, [True] * 3, 256)
    assert layout.num_chunks == 2
    assert _C.working_set_bytes(layout, [[0]]) == 2 * 256 * 2
    assert _C.working_set_bytes(layout, [[1, 2]]) == (256 + 128 + 256) * 2
    assert _C.working_set_bytes(layout, [[], [2]]) == 2 * 128 * 2


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 30_000), min_size=1, max_size=12), st.integers(1, 5), st.sampled_from([4096, 16384, 65536])
)
def test_shards(numels, num_ranks, chunk_numel):
    args = (numels, [DTYPES[0]] * len(numels), [True] * len(numels), chunk_numel)
    layouts = [_C.Layout.pack(*args, num_ranks=num_ranks, rank=rank) for rank in range(num_ranks)]
    for param, numel in enumerate(numels):
        chunk, offset = layouts[0].placement(param)
        parts = [layout.shard_of(param) for layout in layouts]
        assert [part for part in parts if part[1] > 0] == sorted(part for part in parts if part[1] > 0)
        assert sum(part[1] for part in parts) == numel
        end = 0
        for rank, (begin, count, within) in enumerate(parts):
            if count == 0:
                continue
            assert begin == end
            assert num_ranks == 1 or begin % 4096 == 0
            assert rank * layouts[0].chunk(chunk)["shard_numel"] + within == offset + begin
            end = begin + count
    for chunk in range(layouts[0].num_chunks):
        spec = layouts[0].chunk(chunk)
        assert spec["shard_numel"] * num_ranks == spec["numel"]


def test_a_rank_that_is_not_there():
    with pytest.raises(ValueError, match="rank 2 of 2 ranks"):
        _C.Layout.pack([10], [DTYPES[0]], [True], 4096, num_ranks=2, rank=2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30_000), st.booleans()), min_size=1, max_size=12), st.integers(1, 3))
def test_parameters_that_other_ranks_share_lie_in_other_chunks(params, num_ranks):
    numels, own = zip(*params, strict=True)
    given = [_C.ChunkRanks.of_parts(num_ranks if is_own else 1) for is_own in own]
    layouts = [
        _C.Layout.pack(numels, [DTYPES[0]] * len(numels), [True] * len(numels), 16384, num_ranks, rank, ranks=given)
        for rank in range(num_ranks)
    ]
    of_own = [numel for numel, is_own in params if is_own]
    alone = _C.Layout.pack(of_own, [DTYPES[0]] * len(of_own), [True] * len(of_own), 16384)
    chunks = [layouts[0].chunk(index) for index in range(layouts[0].num_chunks)]
    for layout in layouts:
        assert [layout.chunk(index)["params"] for index in range(layout.num_chunks)] == [c["params"] for c in chunks]
    for chunk in chunks:
        assert chunk["num_ranks"] * chunk["shard_numel"] == chunk["numel"]
        assert {1 if own[param] else num_ranks for param in chunk["params"]} == {chunk["num_ranks"]}
    places = [layouts[-1].shard_of(param) for param in range(len(numels)) if own[param]]
    if num_ranks > 1:
        assert places == [alone.shard_of(index) for index in range(len(places))]


def test_ranks_with_the_same_part_share_a_chunk():
    kinds = [_C.ChunkRanks(), _C.ChunkRanks.of_parts(2)]
    layouts = [
        _C.Layout.pack([20_000] * 2, [DTYPES[0]] * 2, [True] * 2, 4096, 4, rank, ranks=kinds) for rank in range(4)
    ]
    assert [layouts[0].chunk(index)["num_ranks"] for index in range(2)] == [4, 2]
    begins = [layout.shard_of(1)[0] for layout in layouts]
    assert begins[0] == begins[1] == 0
    assert begins[2] == begins[3] == layouts[0].chunk(1)["shard_numel"]


def test_parts_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(ValueError, match="parameter 0 is to be divided into 3 parts, but there are 4 ranks"):
        _C.Layout.pack([10], [DTYPES[0]], [True], 4096, 4, 0, ranks=[_C.ChunkRanks.of_parts(3)])
    with pytest.raises(ValueError, match="divided into 0 parts"):
        _C.ChunkRanks.of_parts(0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40_000), st.booleans()), min_size=1, max_size=12),
    st.sampled_from([_C.QuantType.NF4, _C.QuantType.INT8]),
    st.sampled_from([1, 2, 3]),
)
def test_quantised_parameters_lie_in_chunks_of_their_own(params, kind, num_ranks):
    numels, quantised = zip(*params, strict=True)
    types = _C.StateType
    states = [_C.StateFormat(types.FLOAT32, types.SIGNED8 if i % 2 else types.FLOAT32) for i in range(len(params))]
    kinds = [kind if is_quantised else _C.QuantType.NONE for is_quantised in quantised]
    trainable = [not is_quantised for is_quantised in quantised]
    layout = _C.Layout.pack(numels, [DTYPES[1]] * len(params), trainable, 32_768, num_ranks, 0, states, kinds)
    for index in range(layout.num_chunks):
        chunk = layout.chunk(index)
        assert {kinds[param] for param in chunk["params"]} == {chunk["quantization"]}
        if chunk["quantization"] == _C.QuantType.NONE:
            continue
        assert all(layout.placement(param)[1] % 256 == 0 for param in chunk["params"])
        assert all(layout.shard_of(param)[0] % 256 == 0 for param in chunk["params"] if layout.shard_of(param)[1])
        own, count = chunk["shard_numel"], len(chunk["params"])
        scales = own // 256 if kind == _C.QuantType.INT8 else chunk["numel"] // 16384 + 2 * count
        codes = own if kind == _C.QuantType.INT8 else own // 2 + own // 64
        assert chunk["resting_tier_bytes"] == codes + 4 * scales


def test_states_do_not_divide_what_is_quantised():
    types = _C.StateType
    states = [_C.StateFormat(types.LOWER_HALF), _C.StateFormat(types.FLOAT32, types.SIGNED8, types.UNSIGNED8)]
    quantization = [_C.QuantType.NF4] * 2
    layout = _C.Layout.pack([300] * 2, [DTYPES[1]] * 2, [False] * 2, 1024, states=states, quantization=quantization)
    assert layout.num_chunks == 1


def test_what_is_trained_is_not_quantised():
    with pytest.raises(ValueError, match="parameter 0 is trained and was to be quantised"):
        _C.Layout.pack([300], [DTYPES[1]], [True], 1024, quantization=[_C.QuantType.NF4])


def test_states_over_a_step():
    engine, optimizer = initialize_engine(Mlp, 0, make_config("bf16", default_chunk_size=1024))
    with engine:
        runtime = engine._session.runtime
        ids = {name: param._patrickstar.id for name, param in engine.named_parameters()}

        def states():
            return {runtime.param_state(i) for i in ids.values()}

        assert states() == {"FREE"}
        seen = []
        engine.module.layers[1][0].register_forward_hook(lambda *_: None)
        engine.module.layers[1][0].register_forward_pre_hook(
            lambda *_: seen.append(runtime.param_state(ids["layers.1.0.weight"]))
        )
        loss = engine(**token_batch(torch.Generator().manual_seed(0)))["loss"]
        assert seen == ["COMPUTE"]
        assert states() == {"HOLD_AFTER_FWD"}
        engine.backward(loss)
        assert states() == {"HOLD_AFTER_BWD"}
        optimizer.step()
        assert states() == {"HOLD"}
        assert {runtime.chunk_state(chunk) for chunk in range(engine.report()["num_chunks"])} == {"HOLD"}
        with torch.no_grad():
            engine(**token_batch(torch.Generator().manual_seed(0)))
        assert states() == {"HOLD"}


@pytest.mark.parametrize(
    ("path", "legal"),
    [
        (["HOLD", "COMPUTE", "HOLD_AFTER_FWD", "COMPUTE", "HOLD_AFTER_BWD", "HOLD"], True),
        (["HOLD_AFTER_BWD", "FREE"], None),
        (["COMPUTE", "FREE"], False),
        (["HOLD", "HOLD_AFTER_FWD"], False),
        (["HOLD_AFTER_FWD", "RELEASED"], False),
    ],
)
def test_transitions(path, legal):
    if legal is False:
        with pytest.raises(StateError, match="cannot go from"):
            for before, after in zip(path, path[1:], strict=False):
                _C.check_transition(before, after)
    else:
        for before, after in zip(path, path[1:], strict=False):
            _C.check_transition(before, after)
