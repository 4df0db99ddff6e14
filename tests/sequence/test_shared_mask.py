import pytest
import torch
from torch import nn

from patrickstar.sequence.divided_attention import running, shared_mask
from patrickstar.sequence.shared_mask import Reach, SharedMask, reach_of


def masks():
    from transformers import masking_utils as masks

    tokens = torch.tensor([[0, 0, 1, 1, 2]])
    window = masks.sliding_window_causal_mask_function
    or_all = masks.or_masks(masks.causal_mask_function, lambda *_: torch.tensor(True))
    return {
        "causal": (masks.causal_mask_function, None, Reach(None, 0)),
        "all": (masks.bidirectional_mask_function, None, Reach(None, None)),
        "window": (window(5), 5, Reach(4, 0)),
        "long window": (window(4096), 4096, Reach(4095, 0)),
        "window of one": (window(1), 1, Reach(0, 0)),
        "both ways": (masks.sliding_window_bidirectional_mask_function(3), 3, Reach(3, 3)),
        "causal, or all": (or_all, None, Reach(None, None)),
        "window that is not told": (window(1000), None, None),
        "window that sees nothing": (window(0), 0, None),
        "chunks": (masks.chunked_causal_mask_function(4, torch.zeros(1)), 4, None),
        "by kinds of tokens": (masks.blockwise_overlay(tokens), None, None),
        "packed": (masks.packed_sequence_mask_function(tokens), None, None),
    }


def test_what_a_mask_lets_see():
    for name, (sees, window, expected) in masks().items():
        assert reach_of(sees, window) == expected, name


def test_transformers_gets_it_while_a_divided_call_runs():
    from transformers.masking_utils import causal_mask_function

    options = {"batch_size": 2, "kv_length": 6, "mask_function": causal_mask_function, "kv_offset": 0}
    call = object()
    for version in ({"q_length": 6, "q_offset": 0, "device": "cpu"}, {"cache_position": torch.arange(6)}):
        with running(call):
            mask = shared_mask(**options, **version)
        assert (mask.call, mask.reach, tuple(mask.shape)) == (call, Reach(None, 0), (2, 1, 6, 6))
    assert not isinstance(shared_mask(**options, q_length=6, q_offset=0, allow_is_causal_skip=False), SharedMask)


def test_models_hand_it_down_and_compute_nothing_with_it():
    class DogeLike(nn.Module):
        def forward(self, mask):
            return torch.where(mask, 0.0, 1.0)

    call = object()
    mask = SharedMask(call, Reach(None, 0), (2, 1, 8, 8), "cpu")
    for handed in (mask, mask[:, :, :, :8], mask.detach(), mask.to(torch.float32)):
        assert isinstance(handed, SharedMask) and handed.call is call
        assert handed.shape == (2, 1, 8, 8) and handed.dim() == 4 and handed.dtype == torch.bool
    with pytest.raises(ValueError, match=r"DogeLike computes with its attention mask \(where\)"):
        DogeLike()(mask)
