"""The common part of tasks on images: colours, patches, and pixels augmented for training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, cast

from torch import Tensor

from ...config import RunConfig
from ...data.examples import Example, ImageExample
from ...data.images import has_colours, image_batch
from ...data.sources import Source
from ...text.image_processor import ImageProcessor
from .task import Task


class ImageTask(Task):
    """A task whose models read images; each patch is a token."""

    processor_parts: ClassVar[tuple[str, ...]] = ("image",)

    @classmethod
    def complete_config(cls, config: RunConfig, source: Source) -> RunConfig:
        """The config with three channels if data.channels=auto and one of the first 200 images has colours."""
        config = super().complete_config(config, source)
        if config.data.channels != "auto":
            return config
        model, data = config.model, config.data.with_(channels="model")
        images = (cast(ImageExample, source.train[index]).image for index in range(min(len(source.train), 200)))
        if model.n_channels < 3 and config.train.init is None and any(map(has_colours, images)):
            model = model.with_(n_channels=3)
        return config.with_(model=model, data=data)

    def _new_image_processor(self) -> ImageProcessor:
        model, half = self.config.model, (0.5,) * self.config.model.n_channels
        return ImageProcessor((model.image_size, model.image_size), half, half)

    @property
    def _n_patches(self) -> int:
        return (self.config.model.image_size // self.config.model.patch_size) ** 2

    def _pixels(
        self, examples: Sequence[Example] | Mapping[int, Example], index: Sequence[int], epoch: int | None = None
    ) -> Tensor:
        """Pixels (B, C, H, W) of the images at ``index``; with an ``epoch``, augmented for training."""
        data, processor = self.config.data, self.processor.image
        assert processor is not None
        shift, flip = (0, False) if epoch is None else (data.shift, data.flip)
        return image_batch(
            cast(Sequence[ImageExample], examples),
            index,
            processor,
            shift=shift,
            flip=flip,
            seed=self.config.train.seed,
            epoch=epoch or 0,
        )
