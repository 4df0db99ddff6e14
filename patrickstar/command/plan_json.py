"""Output of ``patrickstar plan --json``."""

from __future__ import annotations

import dataclasses
from typing import Any

from patrickstar.config import LossComputation
from patrickstar.planning.planner import Answer
from patrickstar.planning.setting import DoesNotFitError
from patrickstar.sequence.choice import Choice


def length_as_dict(found: Answer | DoesNotFitError) -> dict[str, Any]:
    """Returns a longest sequence in JSON types."""
    if isinstance(found, DoesNotFitError):
        return {"fits": False, "why": str(found)}
    return {
        "fits": True,
        "seq_len": found.question.workload.length,
        "activation_peak_bytes": found.chosen.plan.activation_peak_bytes,
        "step_seconds": found.chosen.step.seconds,
        "tokens_per_second": found.tokens_per_second,
    }


def batch_as_dict(found: Answer) -> dict[str, Any]:
    """Returns a batch size in JSON types."""
    return {
        "batch_size": found.question.workload.batch,
        "gradient_accumulation": found.question.setting.accumulation,
        "activation_peak_bytes": found.chosen.plan.activation_peak_bytes,
        "step_seconds": found.chosen.step.seconds,
        "tokens_per_second": found.tokens_per_second,
    }


def _attention_as_dict(choice: Choice | None) -> dict[str, Any] | None:
    if choice is None:
        return None
    return {
        "mode": choice.mode.value,
        "reason": choice.reason,
        "layer_seconds": choice.seconds,
        "exposed_layer_seconds": choice.exposed_seconds,
    }


def _mesh_as_dict(answer: Answer) -> dict[str, Any] | None:
    mesh, exchanged = answer.question.workload.mesh, answer.exchanged
    if mesh is None or exchanged is None:
        return None
    return {
        "mode": mesh.mode.value,
        "rows": mesh.rows,
        "columns": mesh.columns,
        "reason": mesh.reason,
        "received_bytes": exchanged.received_bytes,
        "link_seconds": exchanged.link_seconds,
        "exposed_seconds": exchanged.exposed_seconds,
    }


def _experts_as_dict(answer: Answer) -> dict[str, Any] | None:
    size, exchanged = answer.question.workload.expert_ranks, answer.exchanged
    if size == 1 or exchanged is None:
        return None
    return {"size": size, "received_bytes": exchanged.received_bytes, "link_seconds": exchanged.link_seconds}


def _images_as_dict(answer: Answer) -> dict[str, Any] | None:
    images = answer.question.workload.images
    return None if images is None else dataclasses.asdict(images) | {"num_tokens": answer.num_image_tokens}


def answer_as_dict(found: Answer | DoesNotFitError) -> dict[str, Any]:
    """Returns the answer in JSON types, for ``--json``."""
    if isinstance(found, DoesNotFitError):
        least = {"least_device_bytes": found.least_device_bytes, "least_host_bytes": found.least_host_bytes}
        return {"fits": False, "why": str(found), **least}
    question, case, step = found.question, found.chosen, found.chosen.step
    return {
        "num_parameters": found.num_params,
        "num_trained_parameters": found.num_trained,
        "num_active_parameters": found.num_active,
        "num_unused_parameters": found.num_unused,
        "machine": question.machine.name,
        "nodes": question.cluster.nodes,
        "gpus_per_node": question.cluster.gpus_per_node,
        "link": question.cluster.link.name,
        "batch_size": question.workload.batch,
        "seq_len": question.workload.length,
        "images": _images_as_dict(found),
        "sequence_parallel": question.workload.sequence_ranks,
        "attention": _attention_as_dict(found.attention),
        "tensor_parallel": _mesh_as_dict(found),
        "expert_parallel": _experts_as_dict(found),
        "fused_loss": question.workload.loss is LossComputation.FUSED,
        "tile_tokens": question.workload.tile_tokens,
        "gradient_accumulation": question.setting.accumulation,
        "fits": True,
        "device_budget_bytes": question.setting.device_bytes,
        "host_budget_bytes": question.setting.host_bytes,
        "chosen_host_budget_bytes": case.setting.host_bytes,
        "chosen_margin_use_ratio": case.setting.margin_use_ratio,
        "least_device_bytes": case.least_device_bytes,
        "least_host_bytes": case.least_host_bytes,
        "chunk_numel": case.chunk_numel,
        "num_chunks": len(case.plan.chunks),
        "num_device_state_chunks": case.num_device_state_chunks,
        "num_device_quantized_chunks": case.num_device_quantized_chunks,
        "num_disk_chunks": case.num_disk_chunks,
        "disk_bytes": case.disk_bytes,
        "disk_read_bytes": step.disk_read_bytes,
        "disk_written_bytes": step.disk_written_bytes,
        "num_speculated_chunks": case.num_speculated_chunks,
        "num_two_phase_updates": case.num_two_phase_updates,
        "activation_peak_bytes": case.plan.activation_peak_bytes,
        "offloaded_bytes": case.offloaded_bytes,
        "selective_attention": case.selective_attention,
        "saved_by_calls": [kept.value for kept in case.saved],
        "all_recomputed_seconds": None if found.all_recomputed is None else found.all_recomputed.seconds,
        "device_peak_bytes": step.peak_bytes,
        "host_bytes": case.host_bytes,
        "host_peak_bytes": case.host_peak_bytes,
        "step_seconds": step.seconds,
        "clipped_step_seconds": case.clipped_step.seconds,
        "tokens_per_second": found.tokens_per_second,
        "model_tflops": found.model_flops / step.seconds / 1e12,
        "uploaded_bytes": step.uploaded_bytes,
        "downloaded_bytes": step.downloaded_bytes,
        "gathered_bytes": step.gathered_bytes,
        "scattered_bytes": step.scattered_bytes,
        "roofline_seconds": step.roofline,
        "stall_seconds": step.stall_seconds,
        "bound": step.bound,
        "config": found.config(),
        "chunk_sizes": [
            {"chunk_numel": c.chunk_numel, "waste_bytes": c.waste_bytes, "step_seconds": c.step.seconds}
            for c in found.cases
        ],
    }
