"""Pictures become the pixels that transformers makes of them, and what we do not do is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from regard.config import ModelConfig
from regard.errors import BadModelFile
from regard.io import load
from regard.text.image_processor import ImageProcessor

from .helpers import edit_json, theirs

CONFIG = ModelConfig(architecture="encoder", source="image", head="none", image_size=16, patch_size=4)
MAKERS = {"ViTImageProcessor": ViTImageProcessorPil, "CLIPImageProcessor": CLIPImageProcessorPil}
MAKERS |= {"SiglipImageProcessor": SiglipImageProcessorPil, "BitImageProcessor": BitImageProcessorPil}
MAKERS |= {"DeiTImageProcessor": DeiTImageProcessorPil}
SQUARE = {"height": 16, "width": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "square": ("ViTImageProcessor", {"size": SQUARE}),
    "not square": ("ViTImageProcessor", {"size": {"height": 12, "width": 20}}),
    "number, square": ("ViTImageProcessor", {"size": 16}),
    "shortest edge": ("ViTImageProcessor", {"size": {"shortest_edge": 16}}),
    "shortest edge and crop": (
        "ViTImageProcessor",
        {"size": {"shortest_edge": 18}, "do_center_crop": True, "crop_size": SQUARE},
    ),
    "not resized": ("ViTImageProcessor", {"size": SQUARE, "do_resize": False}),
    "only cropped": ("ViTImageProcessor", {"do_resize": False, "do_center_crop": True, "crop_size": SQUARE}),
    "not rescaled": ("ViTImageProcessor", {"size": SQUARE, "do_rescale": False}),
    "another factor": ("ViTImageProcessor", {"size": SQUARE, "rescale_factor": 1 / 127.5}),
    "not normalised": ("ViTImageProcessor", {"size": SQUARE, "do_normalize": False}),
    "another mean": ("ViTImageProcessor", {"size": SQUARE, "image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3]}),
    **{f"filter {x}": ("ViTImageProcessor", {"size": SQUARE, "resample": x}) for x in range(6)},
    "siglip": ("SiglipImageProcessor", {"size": SQUARE}),
    "dinov2": ("BitImageProcessor", {"size": {"shortest_edge": 20}, "crop_size": SQUARE}),
    "deit": ("DeiTImageProcessor", {"size": {"height": 20, "width": 18}, "crop_size": SQUARE}),
    "clip": ("CLIPImageProcessor", {"size": {"shortest_edge": 16}, "crop_size": SQUARE}),
    "clip, numbers": ("CLIPImageProcessor", {"size": 16, "crop_size": 14}),
    "clip, not cropped": ("CLIPImageProcessor", {"size": {"shortest_edge": 16}, "do_center_crop": False}),
    "clip, a crop wider than the picture": (
        "CLIPImageProcessor",
        {"size": {"shortest_edge": 9}, "crop_size": {"height": 12, "width": 15}},
    ),
}


def picture(width: int, height: int) -> Image.Image:
    noise = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


@pytest.mark.parametrize(("width", "height"), [(31, 22), (21, 37), (25, 25)])
@pytest.mark.parametrize("case", CASES)
def test_pixels_equal_transformers(case: str, width: int, height: int) -> None:
    name, fields = CASES[case]
    processor = ImageProcessor.read({"image_processor_type": name, **fields}, CONFIG)
    image = picture(width, height)
    told = torch.as_tensor(np.asarray(MAKERS[name](**fields)(image, return_tensors="np")["pixel_values"]))
    pixels = processor(image)
    assert pixels.shape == told.shape
    torch.testing.assert_close(pixels, told.float(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_reads_back(case: str) -> None:
    name, fields = CASES[case]
    processor = ImageProcessor.read({"image_processor_type": name, **fields}, CONFIG)
    written = processor.fields()
    assert ImageProcessor.read(written, CONFIG) == processor
    told = MAKERS[written.pop("image_processor_type")](**written)(picture(31, 22), return_tensors="np")["pixel_values"]
    torch.testing.assert_close(processor(picture(31, 22)), torch.as_tensor(np.asarray(told)).float(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["ViTFeatureExtractor", "CLIPFeatureExtractor"])
def test_old_files_name_an_extractor(name: str) -> None:
    processor = ImageProcessor.read({"feature_extractor_type": name, "size": 20, "crop_size": 12}, CONFIG)
    assert (processor.size, processor.crop) == ((20, (12, 12)) if "CLIP" in name else ((20, 20), None))


def test_missing_fields_mean_the_defaults_of_their_kind() -> None:
    for name, maker in MAKERS.items():
        made, read = maker(size=16, crop_size=16), ImageProcessor.read({"image_processor_type": name}, CONFIG)
        assert read.mean == tuple(made.image_mean)
        assert read.std == tuple(made.image_std)
        assert read.resample == made.resample
        assert (read.crop is not None) == bool(made.do_center_crop)


@pytest.mark.parametrize("step", ["do_resize", "do_center_crop", "do_rescale", "do_normalize"])
@pytest.mark.parametrize("name", MAKERS)
def test_null_is_a_step_not_taken(name: str, step: str) -> None:
    fields = {"size": {"height": 18, "width": 17}, "crop_size": SQUARE, step: None}
    told = MAKERS[name].from_dict(fields)(picture(31, 22), return_tensors="np")["pixel_values"]
    pixels = ImageProcessor.read({"image_processor_type": name, **fields}, CONFIG)(picture(31, 22))
    torch.testing.assert_close(pixels, torch.as_tensor(np.asarray(told)).float(), atol=1e-4, rtol=1e-5)


def test_a_grey_picture_for_one_channel() -> None:
    processor = ImageProcessor.read({"size": SQUARE}, CONFIG.with_(n_channels=1))
    assert processor(picture(31, 22)).shape == (1, 1, 16, 16)


@pytest.mark.parametrize(
    "fields",
    [
        {"image_processor_type": "ConvNextImageProcessor"},
        {"size": {"shortest_edge": 16, "longest_edge": 20}},
        {"size": {"max_height": 16, "max_width": 20}},
        {"size": 0},
        {"size": "big"},
        {"do_center_crop": True},
        {"do_center_crop": True, "crop_size": {"shortest_edge": 8}},
        {"do_pad": True},
        {"do_flip_channel_order": True},
        {"use_square_size": True},
        {"image_mean": [0.5]},
        {"image_std": [0.5] * 4},
        {"resample": 9},
        {"resample": "bilinear"},
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], tmp_path: Path) -> None:
    theirs("vit").save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    load(tmp_path)
    edit_json(tmp_path / "preprocessor_config.json", **fields)
    with pytest.raises(BadModelFile, match=list(fields)[-1]):
        load(tmp_path)
