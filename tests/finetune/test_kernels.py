"""``--kernels liger``, with stand-ins of Liger-Kernel, whose kernels need a GPU."""

import importlib.machinery
import json
import sys
import types

import pytest
import torch

from patrickstar.command.flags import UsageError
from patrickstar.finetune import tuning
from patrickstar.finetune.arguments import parse_arguments
from patrickstar.finetune.kernels import check_kernels


@pytest.fixture
def patched(monkeypatch):
    """Calls of a Liger-Kernel that knows Llama alone: the model's class and the arguments."""
    calls = []
    modules = {name: types.ModuleType(name) for name in ("liger_kernel", "liger_kernel.transformers")}
    modules["liger_kernel"].__spec__ = importlib.machinery.ModuleSpec("liger_kernel", None)
    modules["liger_kernel.transformers"]._apply_liger_kernel_to_instance = lambda model, **given: calls.append(
        (type(model).__name__, given)
    )
    patches = types.ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}
    for name, module in (modules | {patches.__name__: patches}).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return calls


@pytest.mark.parametrize("further", ["", "--lora"])
def test_kernels_but_no_loss_are_applied_before_adapters(further, patched, folders):
    given = f"--model {folders('llama')} {further}".split()
    for flags, expected in (([], 0), (["--kernels", "liger"], 1)):
        args, mistakes = parse_arguments([*given, *flags])
        assert not mistakes
        args.precision = "fp32"
        tuning.model_builder(args, None)()
        assert len(patched) == expected
    assert patched == [("LlamaForCausalLM", {"cross_entropy": False, "fused_linear_cross_entropy": False})]


def test_what_has_no_kernels_is_refused(patched, tmp_path, monkeypatch):
    check_kernels("liger", None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(UsageError, match="has none for models of type mamba"):
        check_kernels("liger", tmp_path)
    (tmp_path / "config.json").write_text("[")
    check_kernels("liger", tmp_path)  # another check reports it
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="need a GPU"):
        check_kernels("liger", None)
