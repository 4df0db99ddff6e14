"""Plans of vision-language models with images, against runs on the CPU with the same inputs."""

import functools
import json

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from patrickstar.module.preprocess import plan_params
from patrickstar.plan import main
from patrickstar.planning.image_inputs import image_batch
from patrickstar.planning.images import Images
from patrickstar.planning.machines import H200
from patrickstar.planning.models import build_model
from patrickstar.planning.planner import Planner
from patrickstar.planning.question import Question, Workload
from patrickstar.planning.setting import Setting
from patrickstar.planning.uses import trace_uses
from tests.models import Case
from tests.plan.test_uses import meta_accesses, peak, real_accesses, structure
from tests.ranks.mixed_models import IMAGE, TEXT, VISION, build

TWO = Images(2, 40, 24)
PIXTRAL = {"model_type": "pixtral", **VISION, "head_dim": 8}
FAMILIES = {  # tokens of a sequence; those of an image by the family's rules, for patches of 8 pixels
    "Qwen2VL": (64, 3 * 5),  # of 16 x 16 pixels, from at least 56 x 56
    "Qwen2_5_VL": (64, 3 * 5),
    "Qwen3VL": (600, 13 * 21),  # from at least 256 x 256
    "Qwen3VLMoe": (600, 13 * 21),
    "Qwen3_5": (600, 13 * 21),
    "Llava": (24, 4),  # 16 x 16 pixels whatever the image
    "Pixtral": (24, 2 * 2),  # at most 16 pixels wide
    "SmolVLM": (64, 4 * 3 + 1),  # tiles of 16 x 16 pixels, a token each, of an image that is 64 wide
    "Idefics3": (64, 4 * 3 + 1),
    "InternVL": (64, 3 * 2 + 1),  # tiles, and the whole image
    "Gemma3": (24, 4),
    "Mistral3": (24, 2 * 2),
}


def build_family(family, **changes):
    if family == "Idefics3":
        fields = {"vision_config": VISION, "text_config": {"model_type": "llama", **TEXT}, "scale_factor": 2, **IMAGE}
        return transformers.Idefics3ForConditionalGeneration(transformers.Idefics3Config(**fields))
    if family == "Pixtral":
        return build("Llava", vision_config=PIXTRAL, vision_feature_select_strategy="full")()
    return build(family, *(["batched_mm"] if "Moe" in family else []), **changes)()


def inputs_of(family, **changes):
    with torch.device("meta"):
        module = build_family(family, **changes)
    inputs, num_tokens = image_batch("tiny", module, 1 if "Qwen3" in family else 2, FAMILIES[family][0], TWO)
    return {**inputs, "use_cache": False}, num_tokens


def assert_planned_as_run(family, checkpointing, **changes):
    inputs, _ = inputs_of(family, **changes)
    case = Case(functools.partial(build_family, family, **changes), lambda _: inputs)
    real, planned = (accesses(case, checkpointing, False) for accesses in (real_accesses, meta_accesses))
    assert structure(planned) == structure(real)
    of_inputs = sum(value.nbytes for value in inputs.values() if isinstance(value, torch.Tensor))
    print(f"{family}: activation memory {peak(real)} measured, {peak(planned) - of_inputs} planned, inputs {of_inputs}")
    assert peak(planned) - of_inputs == pytest.approx(peak(real), rel=0.10)  # inputs are no part of the measured one


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"Qwen3_5"}))  # its text layers take long
def test_same_accesses_as_a_real_run(family):
    assert_planned_as_run(family, False)


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "SmolVLM"])
def test_same_accesses_with_recomputation(family):
    assert_planned_as_run(family, True)


def test_a_layer_whose_output_is_not_used():
    """LLaVA 1.5 reads the tower's last layer but one. The last one is checkpointed, and never computed again."""
    assert_planned_as_run("Llava", True, vision_feature_layer=-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_same_work_as_a_real_run(family):
    """FLOPs are those that PyTorch counts. Kernels of attention differ, so both use ``eager``."""
    inputs, num_tokens = inputs_of(family)
    assert num_tokens == 2 * FAMILIES[family][1]
    with torch.device("meta"):
        planned = build_family(family)
    real = build_family(family).train()
    for model in (planned, real):
        model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        real(**inputs).loss.backward()
    params = plan_params(planned, torch.float32, use_cpu_embedding=False)
    assert trace_uses(planned, params, torch.float32, inputs, H200.gpu).flops == counter.get_total_flops()


@pytest.mark.parametrize(
    ("name", "size", "tokens"),
    [
        ("qwen2.5-vl-3b", (448, 448), 16 * 16),
        ("qwen3-vl-4b", (1024, 768), 32 * 24),
        ("llava-1.5-7b", (1024, 768), 24 * 24),
        ("smolvlm-256m", (1024, 768), 64 * (4 * 3 + 1)),
        ("smolvlm-2.2b", (448, 448), 81 * (4 * 4 + 1)),
        ("internvl3-8b", (896, 448), 256 * (2 + 1)),
        ("gemma-3-4b", (1024, 768), 256),
        ("mistral-small-3.1-24b", (3080, 1540), 55 * 28),
    ],
)
def test_tokens_of_published_models(name, size, tokens):
    assert build_model(name, 1, 2048, checkpointing=False, images=Images(1, *size)).num_image_tokens == tokens


def plan(capsys, folder, *flags):
    asked = ["--model", str(folder), "--seq-len", "64", "--no-advice", "--host-memory", "1GiB", *flags]
    status = main(asked)
    return status, capsys.readouterr()


def test_the_command(capsys, tmp_path):
    with torch.device("meta"):
        model = build_family("Qwen2_5_VL")
    model.config.save_pretrained(tmp_path)
    tower = sum(param.numel() for param in model.model.visual.parameters())
    images = ("--images", "2", "--image-size", "40x24")
    status, said = plan(capsys, tmp_path, *images, "--json")
    said = json.loads(said.out)
    assert status == 0 and said["images"] == {"count": 2, "width": 40, "height": 24, "num_tokens": 30}
    assert said["num_unused_parameters"] == 0 == said["num_active_parameters"] + tower - said["num_parameters"]
    of_text = json.loads(plan(capsys, tmp_path, "--json")[1].out)
    assert of_text["images"] is None and of_text["num_unused_parameters"] == tower
    assert said["activation_peak_bytes"] > of_text["activation_peak_bytes"]
    lines = plan(capsys, tmp_path, *images)[1].out.splitlines()
    assert lines[2] == "2 images of 40x24 in each sequence: 30 of its 64 tokens"


def test_the_image_processor_of_a_folder(tmp_path):
    with torch.device("meta"):
        build_family("Qwen2_5_VL").config.save_pretrained(tmp_path)
    options = {"patch_size": 8, "size": {"shortest_edge": 16 * 16, "longest_edge": 2 * 16 * 16}}
    transformers.Qwen2VLImageProcessorPil(**options).save_pretrained(tmp_path)
    model = build_model(str(tmp_path), 1, 64, checkpointing=False, images=Images(3, 48, 24))
    assert model.num_image_tokens == 3 * 2


def test_work_of_images_is_that_of_their_patches(tmp_path):
    with torch.device("meta"):
        build_family("Llava", vision_feature_layer=-2).config.save_pretrained(tmp_path)
    found = []
    for count in (0, 1, 2):
        images = Images(count, 9, 9) if count else None
        workload = Workload(model=str(tmp_path), batch=1, length=64, checkpointing=True, images=images)
        setting = Setting(device_bytes=2**30, host_bytes=2**30)
        found.append(Planner().answer(Question(workload=workload, machine=H200, setting=setting)))
    assert [answer.num_image_tokens for answer in found] == [0, 4, 8]
    assert len({answer.num_active for answer in found}) == 1
    none, one, two = (answer.model_flops for answer in found)
    matrices = 2 * (4 * 32 * 32 + 2 * 32 * 48) + 32 * 8 * 8 * 3  # two layers and the patches' embedding
    assert two - none == 2 * (one - none)
    assert one - none == pytest.approx(6 * matrices * 5, rel=0.25)  # 4 patches and a class token; projector, attention


@pytest.mark.parametrize(
    ("family", "flags", "said"),
    [
        ("Llava", ("--images", "20"), "--images: 20 images of 448x448 take 100 tokens, and --seq-len is 64; give"),
        ("AyaVision", ("--images", "1"), "AyaVisionConfig's images become tokens is not known, only that of qwen2_vl"),
        ("Llava", ("--images", "1", "--image-size", "4k"), "--image-size: it is '4k'; give WIDTHxHEIGHT in pixels"),
        ("Llava", ("--image-size", "8x8"), "--image-size is given, but no images; give --images too"),
        ("Llava", ("--images", "1", "--sequence-parallel", "2"), "is given with --sequence-parallel, which"),
    ],
)
def test_refusals(capsys, tmp_path, family, flags, said):
    with torch.device("meta"):
        build_family(family).config.save_pretrained(tmp_path)
    status, found = plan(capsys, tmp_path, *flags)
    assert status == 2 and said in found.err
