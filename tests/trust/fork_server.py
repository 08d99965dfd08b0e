"""Where processes of these tests are forked from: everything that takes long to import is there already."""

from __future__ import annotations

import multiprocessing

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        *("regard.training.trainer", "torch.distributed.fsdp", "torch.utils.tensorboard", "numpy.random", "pytest"),
        *("regard.experiments.sweep_report", "regard.io", "regard.export.engines", "torch._dynamo", "PIL.Image"),
        *("regard.cli", "regard.generation", "regard.models"),
    ]
)
