"""Output of ``patrickstar plan --verbose``."""

from __future__ import annotations

import json
from collections.abc import Sequence

from patrickstar.config import LossComputation
from patrickstar.planning.advice import Advice
from patrickstar.planning.case import Case
from patrickstar.planning.listing import listing_lines
from patrickstar.planning.planner import Answer
from patrickstar.planning.question import Question
from patrickstar.planning.recomputation import recomputation_text
from patrickstar.planning.setting import DoesNotFitError, Setting
from patrickstar.planning.simulation import played_instructions
from patrickstar.sequence.choice import show_seconds
from patrickstar.sizes import enough_size, show_size


def configuration_lines(answer: Answer) -> list[str]:
    """Returns the configuration for ``initialize_engine``."""
    return ["configuration (the learning rate is yours):", json.dumps(answer.config(), indent=2)]


def program_lines(answer: Answer) -> list[str]:
    """Returns the program of the step, or of its last backward if gradients accumulate."""
    plan = answer.chosen.plan
    return listing_lines(played_instructions(plan), plan.timeline)


def answer_lines(answer: Answer) -> list[str]:
    """Returns the plan without advice and configuration."""
    question, case, step = answer.question, answer.chosen, answer.chosen.step
    setting, num_chunks = question.setting, len(case.plan.chunks)
    stalls = ", ".join(f"{name.replace('_', ' ')} {s * 1e3:.0f} ms" for name, s in step.stall_seconds.items())
    early = f"{case.num_speculated_chunks} are updated during backward"
    if case.num_two_phase_updates:
        early += f", of {case.num_two_phase_updates} of them the parameters, and the states in phase two the step"
    lines = [
        f"{parameters_text(answer)}{_trained(answer)} on {question.machine.name} ({question.machine.source})",
        work_line(question),
        *text_lines(answer),
        *_position_lines(answer),
        *_cluster_lines(answer),
        *_attention_lines(answer),
        *_mesh_lines(answer),
        *_expert_lines(answer),
        f"fits: device {show_size(step.peak_bytes)} of {show_size(setting.device_bytes)} (activations "
        f"{show_size(case.plan.activation_peak_bytes)}), host {show_size(case.host_bytes)} and at its "
        f"peak {show_size(case.host_peak_bytes)} of {show_size(setting.host_bytes)}",
        *_offload_store_lines(case),
        *_recomputation_lines(answer),
        *_disk_lines(case),
        f"least that works, all optimizer states {_below(setting)}: device_memory "
        f"{enough_size(case.least_device_bytes)}, host_memory {enough_size(case.least_host_bytes)} "
        f"({case.least_host_bytes * question.cluster.num_ranks / answer.num_params:.1f} bytes per parameter)",
        f"placement: {case.num_device_state_chunks} of {num_chunks} chunks have their optimizer states on the GPU; "
        f"{early}",
        *_quantized_lines(case),
    ]
    if case.setting.host_bytes < setting.host_bytes:
        lines.append(
            f"host_memory {enough_size(case.setting.host_bytes)} of {show_size(setting.host_bytes)} is best: with "
            "more, an engine makes updates on the host that the GPU makes sooner, or whole updates where the next "
            "forward needs only parameters"
        )
    if case.setting.margin_use_ratio < setting.margin_use_ratio:
        lines.append(
            f"margin_use_ratio {case.setting.margin_use_ratio:g} is best: with more an engine updates on the GPU, "
            "between two steps, what the host updates beside it"
        )
    all_recomputed = "" if answer.all_recomputed is None else ", all recomputed"
    lines.append(f"chunk size   at most held for nothing   least device_memory   up per step   step{all_recomputed}")
    lines += [
        f"{c.chunk_numel / 2**20:7.1f} Mi   {show_size(c.waste_bytes):>19}       {show_size(c.least_device_bytes):>19}"
        f"   {show_size(c.step.uploaded_bytes):>11}   {c.step.seconds:.3f} s"
        + ("   <- this plan" if c.chunk_numel == case.chunk_numel else "")
        for c in answer.cases
    ]
    lines += [
        f"step {step.seconds:.3f} s, {answer.tokens_per_second:,.0f} tokens/s, "
        f"{answer.model_flops / step.seconds / 1e12:.0f} model TFLOPS; {show_size(step.uploaded_bytes)} up, "
        f"{show_size(step.downloaded_bytes)} down",
        step.roofline_line(),
        f"the GPU waits for: {stalls}",
    ]
    if question.clipping > 0:
        lines.append(f"steps in which clipping acts: {case.clipped_step.seconds:.3f} s")
    return lines


def parameters_text(answer: Answer) -> str:
    """Returns the number of parameters, and that of active ones where they differ."""
    text = f"{answer.num_params / 1e9:.2f} B parameters"
    return text if answer.num_active == answer.num_params else f"{text}, {answer.num_active / 1e9:.2f} B active"


def text_lines(answer: Answer) -> list[str]:
    """Returns a line if the model has parts that no token of text reaches."""
    length, images = answer.question.workload.length, answer.question.workload.images
    if images is not None:
        return [f"{images} in each sequence: {answer.num_image_tokens} of its {length} tokens"]
    if not answer.num_unused:
        return []
    return [
        f"planned for text alone: {answer.num_unused / 1e9:.2f} B parameters that no token of text reaches, such as "
        "towers of images, take memory, and their work is not counted (--images)"
    ]


def length_lines(found: Sequence[tuple[int, Answer | DoesNotFitError]]) -> list[str]:
    """Returns a line per number of GPUs that share a sequence."""
    lines = ["longest sequences that fit:", "GPUs per sequence      tokens   activations       step    tokens/s"]
    for size, one in found:
        if isinstance(one, DoesNotFitError):
            lines.append(f"{size:17}   none: {one}")
            continue
        length, step = one.question.workload.length, one.chosen.step
        lines.append(
            f"{size:17}   {length:9,}   {show_size(one.chosen.plan.activation_peak_bytes):>11}   "
            f"{step.seconds:>8.3f} s "
            f"{one.tokens_per_second:9,.0f}"
        )
    return lines if found else []


def batch_lines(found: Sequence[Answer]) -> list[str]:
    """Returns a line per batch size of a given number of tokens per step."""
    if not found:
        return []
    lines = ["batch sizes, the fastest first:", "batch   backwards per step       step    tokens/s   activations"]
    for one in found:
        work, case = one.question.workload, one.chosen
        lines.append(
            f"{work.batch:5}   {one.question.setting.accumulation:18}   {case.step.seconds:>8.3f} s "
            f"{one.tokens_per_second:9,.0f}   {show_size(case.plan.activation_peak_bytes):>11}"
        )
    return lines


def _position_lines(answer: Answer) -> list[str]:
    length, there = answer.question.workload.length, answer.num_positions
    if there is None or length <= there:
        return []
    return [
        f"{length} tokens are more than the {there} positions of the model's configuration: memory and time are "
        "these, what it learns depends on how its positions are scaled"
    ]


def _attention_lines(answer: Answer) -> list[str]:
    choice, size = answer.attention, answer.question.workload.sequence_ranks
    if choice is None:
        return []
    return [
        f"{size} GPUs share each sequence, mode {choice.mode.value}: attention by {choice.reason}, of which GPUs wait "
        f"{show_seconds(choice.exposed_seconds)} for each other"
    ]


def _mesh_lines(answer: Answer) -> list[str]:
    mesh, exchanged = answer.question.workload.mesh, answer.exchanged
    if mesh is None or exchanged is None:
        return []
    lines = [
        f"{mesh.size} GPUs share matrices, divided {mesh.described()}: in forward and backward each receives "
        f"{show_size(exchanged.received_bytes)}, for which its link is busy "
        f"{show_seconds(exchanged.link_seconds)}; it waits {show_seconds(exchanged.exposed_seconds)} of the step for "
        "what products do not hide"
    ]
    return lines + ([f"so divided since {mesh.reason}"] if mesh.reason else [])


def _expert_lines(answer: Answer) -> list[str]:
    size, exchanged = answer.question.workload.expert_ranks, answer.exchanged
    if size == 1 or exchanged is None:
        return []
    return [
        f"{size} GPUs divide the experts: in forward and backward each receives {show_size(exchanged.received_bytes)} "
        f"of tokens, if they are spread evenly, and waits {show_seconds(exchanged.exposed_seconds)} for them"
    ]


def _quantized_lines(case: Case) -> list[str]:
    num_chunks = sum(chunk.quantization != "NONE" for chunk in case.plan.chunks)
    kept = f"{case.num_device_quantized_chunks} of {num_chunks} quantised chunks stay on the GPU, in few bits"
    return [kept] if num_chunks else []


def _offload_store_lines(case: Case) -> list[str]:
    lines = []
    if case.offloaded_bytes:
        offloaded = show_size(case.offloaded_bytes)
        lines.append(f"activations that leave the device: {offloaded}, on the host until their backward")
    if case.selective_attention:
        lines.append(f"attention of checkpointed layers: {case.selective_attention} calls are kept for backward")
    return lines


def _recomputation_lines(answer: Answer) -> list[str]:
    saved, seconds, recomputed = answer.chosen.saved, answer.chosen.step.seconds, answer.all_recomputed
    return [] if recomputed is None else [recomputation_text(saved, seconds, recomputed.seconds)]


def _below(setting: Setting) -> str:
    return "on host and disk" if setting.disk_bytes else "on the host"


def _disk_lines(case: Case) -> list[str]:
    if not case.setting.disk_bytes:
        return []
    if not case.num_disk_chunks:
        return ["nothing is on disk: GPU and host have room for all optimizer states"]
    step = case.step
    return [
        f"on disk: the optimizer states of {case.num_disk_chunks} chunks, {show_size(case.disk_bytes)}; a step reads "
        f"{show_size(step.disk_read_bytes)} in {show_seconds(step.disk_read_seconds)} and writes "
        f"{show_size(step.disk_written_bytes)} in {show_seconds(step.disk_write_seconds)}"
    ]


def _trained(answer: Answer) -> str:
    return "" if answer.num_trained == answer.num_params else f", {answer.num_trained / 1e6:.1f} M of them trained,"


def work_line(question: Question) -> str:
    """Returns what one GPU computes in a step."""
    work, accumulation = question.workload, question.setting.accumulation
    parts = [f"batch {work.batch} x {work.length} tokens in {work.precision}"]
    parts += [f"{accumulation} backwards for each step"] if accumulation > 1 else []
    parts += [f"LoRA of rank {work.lora_rank}"] if work.lora_rank else []
    parts += [f"frozen weights in {work.quantization.value}"] if work.quantization is not None else []
    parts += [f"products of linear layers and experts in FP8 ({work.fp8.value})"] if work.fp8 is not None else []
    parts += ["the loss without logits"] if work.loss is LossComputation.FUSED else []
    parts += [f"MLPs and norms in tiles of {work.tile_tokens} tokens"] if work.tile_tokens else []
    parts.append("activations are recomputed" if work.checkpointing else "activations are kept")
    return ", ".join(parts)


def _cluster_lines(answer: Answer) -> list[str]:
    cluster, machine, step = answer.question.cluster, answer.question.machine, answer.chosen.step
    if cluster.num_ranks == 1:
        return []
    link = f", {cluster.link.name} between nodes" if cluster.nodes > 1 else ""
    lines = [
        f"on {cluster.num_ranks} GPUs, {cluster.gpus_per_node} per node{link}; all figures but tokens/s are one GPU's"
    ]
    group = answer.question.chunk_cluster.chunk_group
    if group.num_ranks > 1:
        lines.append(
            f"between GPUs {show_size(step.gathered_bytes)} gathered at {group.gather_gbps(machine):.0f} GB/s, "
            f"{show_size(step.scattered_bytes)} scattered at {group.scatter_gbps(machine):.0f} GB/s, "
            f"{group.latency_seconds * 1e6:.0f} us for each"
        )
    return lines


def refusal_lines(question: Question) -> list[str]:
    """Returns the work and the budgets of a model that does not fit."""
    return [work_line(question), budgets_line(question)]


def budgets_line(question: Question) -> str:
    """Returns the budgets, and the flags that set them."""
    device, host = question.setting.device_bytes, question.setting.host_bytes
    return (
        f"budgets: {show_size(device)} of the {question.machine.name}'s {show_size(question.machine.gpu_bytes)}, "
        f"{show_size(host)} of host memory (--device-memory, --host-memory; by default what an engine would take of "
        "that GPU and of this machine)"
    )


def advice_lines(advice: Sequence[Advice], found: Answer | DoesNotFitError) -> list[str]:
    """Returns proposals that speed the model up or make it fit."""
    fits = isinstance(found, Answer)
    if not advice:
        return ["nothing that was tried makes it faster by 1 %"] if fits else ["nothing that was tried makes it fit"]
    head = "what would help, each planned again:" if fits else "what would fit, each planned:"
    return [head, *(f"  {item}" for item in advice)]


def comparison_lines(answers: Sequence[Answer | DoesNotFitError], questions: Sequence[Question]) -> list[str]:
    """Returns a line per number of GPUs."""
    lines = ["GPUs   nodes   step      model TFLOPS per GPU   what bounds it"]
    for found, question in zip(answers, questions, strict=True):
        head = f"{question.cluster.num_ranks:4}   {question.cluster.nodes:5}   "
        if isinstance(found, DoesNotFitError):
            lines.append(f"{head}does not fit: {found}")
            continue
        step = found.chosen.step
        tflops = found.model_flops / step.seconds / 1e12
        lines.append(f"{head}{step.seconds:.3f} s   {tflops:20.0f}   {step.bound.replace('_', ' ')}")
    return lines
