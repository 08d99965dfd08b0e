"""From what the page sends to a look: sizes checked first, then the model runs once, with taps on."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from ..generation.words import Words
from .bodies import LookBody, Search, Variant
from .limits import Limits, Refused
from .served import Served, kinds_of
from .sessions import Session, Sessions

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def open_look(served: Served, body: LookBody, sessions: Sessions, limits: Limits) -> Session:
    """Run the model over a text or an image and keep what is needed to see its attention."""
    from ..lens import look

    model = served.model
    check_text(served, body, limits)
    what = picture(body.image, limits) if served.config.source == "image" else body.text
    search = _search(served, body)
    sessions.make_room(planned_bytes(served, body, search, limits))
    under = changed(served, body.variant)
    with under():
        made = look(model, what, body.target, generate=search)
    return sessions.add(Session(made, served, under))


def check_text(served: Served, body: LookBody, limits: Limits) -> None:
    """Before anything is tokenised: how long the texts are, and whether they are what the model reads."""
    reads_image = served.config.source == "image"
    if reads_image and body.image is None:
        raise Refused(422, f"model {served.id!r} reads an image; give one as base64 in the field image")
    if not reads_image and body.image is not None:
        raise Refused(422, f"model {served.id!r} reads {served.config.source}, not an image")
    if body.target is not None and not served.has_source:
        raise Refused(422, f"model {served.id!r} has no target; its text is all it reads")
    longest = max(served.config.max_len, served.config.max_target_len or 0, 16)
    most = min(limits.characters, longest * limits.characters_per_token)
    for name, text in (("text", body.text), ("target", body.target or "")):
        if len(text) > most:
            raise Refused(
                413, f"{name} has {len(text):,} characters; for model {served.id!r} at most {most:,} are read"
            )
    if not reads_image and not body.text:
        raise Refused(422, "text is empty: there is nothing to look at")


def _search(served: Served, body: LookBody) -> dict[str, Any] | None:
    if body.generate is None:
        return None
    if not served.generates:
        raise Refused(422, f"model {served.id!r} writes no text, so there is nothing to generate")
    if body.target is not None:
        raise Refused(422, "target and generate are both given: a target is either told or written")
    return search_fields(body.generate)


def search_fields(search: Search) -> dict[str, Any]:
    """As ``GenerateConfig`` takes them; a beam's other texts are wanted too, for the tree."""
    fields = search.fields()
    return fields | ({"n_best": search.beam} if search.beam > 1 else {})


def planned_bytes(served: Served, body: LookBody, search: dict[str, Any] | None, limits: Limits) -> int:
    """What q and k of all layers will take, before any of it is there."""
    config, words = served.config, Words(served.model)
    if config.source == "image":
        n_read = (config.image_size // config.patch_size) ** 2
    else:
        n_read = len(words.source.encode(body.text))
    n_target = len(words.target.encode(body.target)) if body.target else 0
    n_written = 0 if not served.generates else int((search or {}).get("max_new_tokens", 128))
    if max(n_read, n_target) > limits.tokens:
        raise Refused(413, f"the text has {max(n_read, n_target):,} tokens; at most {limits.tokens:,} are looked at")
    n_said = min(n_target or n_written, config.max_target_len or config.max_len)
    if not served.has_source:
        n_read, n_said = min(n_read + n_written * (search is not None), config.max_len), 0
    lengths = {"encoder": (n_read, n_read), "cross": (n_said, n_read), "self": (n_said or n_read,) * 2}
    total = 0
    for kind, size in kinds_of(served.model).items():
        d_head = config.d_head or config.d_model // size["heads"]
        n_rows, n_cols = lengths[kind]
        heads = size["heads"] * n_rows + (config.n_kv_heads or size["heads"]) * n_cols
        total += 4 * size["layers"] * heads * d_head
    return total


# ---- a changed model


def changed(served: Served, variant: Variant | None) -> Callable[[], AbstractContextManager[None]]:
    """The model under the page's changes; entered as often as it has to run."""
    return partial(_changed, served, variant or Variant())


@contextmanager
def _changed(served: Served, variant: Variant) -> Iterator[None]:
    with ExitStack() as changes:
        if variant != Variant():
            from ..lens import interventions

            if not variant.causal:
                changes.enter_context(interventions.no_causal_mask(served.model))
            if variant.scale != 1:
                changes.enter_context(interventions.attention_scale(served.model, variant.scale))
            if variant.off:
                changes.enter_context(interventions.switch_off(served.model, list(variant.off)))
        yield


# ---- images


def picture(encoded: str | None, limits: Limits) -> Image:
    """The image of a base64 text or a data: URL, refused by its size before it is decoded."""
    from PIL import Image, UnidentifiedImageError

    text = (encoded or "").strip()
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Refused(422, "image is not base64") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            found = Image.open(io.BytesIO(raw), formats=_FORMATS)
            if found.width * found.height > limits.pixels:
                size = f"{found.width:,} × {found.height:,}"
                raise Refused(413, f"image has {size} pixels, more than the {limits.pixels:,} allowed")
            found.load()
    except UnidentifiedImageError:
        raise Refused(422, f"image is none of {', '.join(_FORMATS)}") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as wrong:
        raise Refused(422, f"image cannot be read: {' '.join(str(wrong).split())[:200]}") from None
    return found
