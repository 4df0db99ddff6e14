"""A model's 16-bit weights in one file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from patrickstar import _C
from patrickstar.chunked_parameter import ChunkedParameter
from patrickstar.session import Session


def save_16bit_weights(session: Session, path: Path, *, with_frozen: bool) -> None:
    """See ``TrainingEngine.save_16bit_model``. A whole 16-bit copy exists on the first rank alone."""
    session.check_open()
    is_first = session.ranks.context.rank == session.ranks.members[0]
    config = session.config
    dtype = torch.bfloat16 if config.compute_dtype == torch.float32 else config.compute_dtype
    values = _values(session, dtype, with_frozen=with_frozen, keep=is_first)
    if is_first:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        _write(values, partial, as_safetensors=path.suffix == ".safetensors")
        partial.replace(path)
    session.ranks.control.exchange(b"")  # nobody goes on before the file is there


def _values(session: Session, dtype: torch.dtype, *, with_frozen: bool, keep: bool) -> dict[str, torch.Tensor]:
    params = dict(session.module.named_parameters(remove_duplicate=False))
    values: dict[str, torch.Tensor] = {}
    of_param: dict[nn.Parameter, torch.Tensor] = {}
    for name, value in session.module.state_dict(keep_vars=True).items():
        param = params.get(name)
        if param is not None and not (param.requires_grad or with_frozen):
            continue
        if isinstance(param, ChunkedParameter):
            if param not in of_param:
                with _C.HostAllocations():
                    read = session.states.value(param).to(dtype)  # all ranks read
                of_param[param] = read if keep else read[:0]
            values[name] = of_param[param]
        elif keep and isinstance(value, torch.Tensor):
            values[name] = value.detach().cpu()
    return values


def _write(values: dict[str, torch.Tensor], path: Path, *, as_safetensors: bool) -> None:
    if not as_safetensors:
        torch.save(values, path)
        return
    from safetensors.torch import save_file

    unique: dict[int, str] = {}
    for name, value in values.items():
        unique.setdefault(id(value), name)
    save_file({name: values[name].contiguous() for name in unique.values()}, path, metadata={"format": "pt"})
