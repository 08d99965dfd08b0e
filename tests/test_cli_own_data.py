"""`regard train` on files as people have them: colours, encodings, headers and columns of other names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import regard
from regard import cli
from regard.data.sources import open_source

Said = pytest.CaptureFixture[str]
SMALL = (
    *("model.d_model=16", "model.n_heads=2", "model.d_ff=16", "model.n_layers=1", "train.steps=2", "train.device=cpu"),
    *("train.eval_every=0", "train.samples=0", "train.compile=off", "--quiet"),
)


def run(*words: Any) -> int:
    return cli.main([str(word) for word in words])


@pytest.fixture(params=["colour", "grey", "grey as RGB"])
def pictures(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, int]:
    """A folder of folders, and the number of channels its images have."""
    generator = np.random.default_rng(0)
    for name in ("one", "two"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for n in range(8):
            grey = generator.integers(0, 255, (12, 12, 1), dtype=np.uint8)
            pixels = generator.integers(0, 255, (12, 12, 3), dtype=np.uint8) if request.param == "colour" else grey
            image = Image.fromarray(pixels if request.param == "colour" else grey[:, :, 0])
            image = image.convert("RGB") if request.param == "grey as RGB" else image
            image.save(tmp_path / "pictures" / name / f"{n}.png")
    return tmp_path / "pictures", 3 if request.param == "colour" else 1


def test_channels_follow_the_pictures(pictures: tuple[Path, int], tmp_path: Path, capsys: Said) -> None:
    folder, n_channels = pictures
    out = tmp_path / "run"
    sizes = ["model.image_size=12", "model.patch_size=4", "data.valid_fraction=0.2", "train.batch_tokens=64"]
    assert run("train", "classify-images", f"data={folder}", f"train.out={out}", *sizes, *SMALL) == 0, (
        capsys.readouterr()
    )
    assert regard.load(out).config.n_channels == n_channels
    assert run("eval", out, f"data.source={folder}", "--device", "cpu") == 0, capsys.readouterr()
    typed = tmp_path / "typed"
    words = ["model.n_channels=1", f"train.out={typed}", *sizes, *SMALL]
    if n_channels == 3:  # what is typed is meant
        assert run("train", "classify-images", f"data={folder}", *words) == 0
        assert regard.load(typed).config.n_channels == 1


def test_a_table_of_other_names_is_what_the_task_learns_from(tmp_path: Path, capsys: Said) -> None:
    path, out = tmp_path / "stars.csv", tmp_path / "run"
    rows = [f"a film of {n} minutes,{n % 5 + 1}" for n in range(15)]  # too few of each to be told from pairs
    path.write_text("\n".join(["review,stars", *rows]) + "\n", encoding="utf-8")
    words = ["data.tokenizer=chars", "data.valid_fraction=0.2", f"train.out={out}", *SMALL]
    assert run("train", "classify", f"data={path}", *words) == 0, capsys.readouterr().err
    assert regard.load(out).processor.labels == ("1", "2", "3", "4", "5")
    capsys.readouterr()
    assert run("eval", out, "--device", "cpu") == 0, capsys.readouterr().err
    path.write_text("\n".join(["id,review,stars", *(f"{n},{row}" for n, row in enumerate(rows))]), encoding="utf-8")
    capsys.readouterr()
    assert run("train", "classify", f"data={path}", *words) == 1
    assert (
        f"{path} has the columns id, review, stars; say which are text and label: data.columns=review,stars"
        in capsys.readouterr().err
    )


def test_korean_column_names_are_known_and_others_are_suggested_in_order(tmp_path: Path, capsys: Said) -> None:
    path = tmp_path / "films.csv"
    path.write_text(
        "번호,리뷰,라벨\n" + "".join(f"{n},영화 {n},{'긍부'[n % 2]}정\n" for n in range(9)), encoding="utf-8"
    )
    assert run("data", "describe", path, "--tokenizer", "none") == 0, capsys.readouterr().err
    assert "영화 1 → 부정" in capsys.readouterr().out
    path.write_text("번호,리뷰,별점\n" + "".join(f"{n},영화 {n},{n % 2}\n" for n in range(9)), encoding="utf-8")
    assert run("data", "describe", path, "data.columns=리뷰,별점", "--tokenizer", "none") == 0
    assert "영화 1 → 1" in capsys.readouterr().out, "two columns are no texts, though one is known to hold them"
    path.write_text("번호,감상,별점\n1,좋다,5\n2,나쁘다,1\n", encoding="utf-8")
    assert run("data", "describe", path, "--tokenizer", "none") == 1
    assert "data.columns=감상,별점" in capsys.readouterr().err


def test_another_encoding_is_said(tmp_path: Path, capsys: Said, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pairs.csv"
    path.write_bytes(("en,ko\n" + "".join(f"sentence {n},문장 {n}\n" for n in range(30))).encode("cp949"))
    assert run("data", "describe", path, "--tokenizer", "none") == 0
    said = capsys.readouterr().out
    assert f"{path} is read as CP949" in said
    assert "sentence 1 → 문장 1" in said
    open_source(path)
    assert "is read as CP949; data.encoding=… sets another encoding" in caplog.text
    assert run("data", "describe", path, "--tokenizer", "none", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["bad_lines"]["encodings"] == {str(path): "cp949"}
    assert document["n_train"] + document["n_valid"] == 30
