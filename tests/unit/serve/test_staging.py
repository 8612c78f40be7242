"""What is found out about a version's folder before an engine is paused for it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import DataError
from agentrl.serve import staging
from tests.engines import write_weights

SHAPES: dict[str, tuple[int, ...]] = {"embed": (4, 3), "layers.0.norm": (3,), "scale": ()}


def test_a_whole_folder_has_a_layout(tmp_path: Path) -> None:
    write_weights(tmp_path, SHAPES)
    assert staging.layout(tmp_path) == SHAPES


@given(cut=st.data())
def test_a_file_that_ends_early_or_goes_on_is_found_out(cut: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        file = write_weights(Path(name), SHAPES)
        size = file.stat().st_size
        length = cut.draw(st.integers(0, size + 20).filter(lambda n: n != size))
        with file.open("rb+") as opened:
            opened.truncate(length)
        with pytest.raises(DataError, match=r"model\.safetensors: its header"):
            staging.layout(Path(name))


@given(st.binary(max_size=64))
def test_what_is_no_safetensors_file_is_found_out(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "model.safetensors").write_bytes(content)
        with pytest.raises(DataError):
            staging.layout(Path(name))


def test_an_index_that_lists_more_than_there_is(tmp_path: Path) -> None:
    write_weights(tmp_path, SHAPES)
    index = {"metadata": {}, "weight_map": dict.fromkeys([*SHAPES, "lm_head"], "model.safetensors")}
    (tmp_path / staging.INDEX).write_text(json.dumps(index))
    with pytest.raises(DataError, match="lm_head"):
        staging.layout(tmp_path)


def test_another_shape_than_the_engine_holds_is_refused(tmp_path: Path) -> None:
    write_weights(tmp_path / "held", SHAPES)
    write_weights(tmp_path / "new", {**SHAPES, "embed": (4, 5)})
    with pytest.raises(DataError, match=r"embed has shape \(4, 5\), the engine holds \(4, 3\)"):
        staging.fits(str(tmp_path / "new"), str(tmp_path / "held"), complete=False)


def test_less_than_the_engine_holds_is_refused_where_one_writer_made_both(tmp_path: Path) -> None:
    write_weights(tmp_path / "held", SHAPES)
    write_weights(tmp_path / "new", {"embed": (4, 3), "scale": ()})
    staging.fits(str(tmp_path / "new"), str(tmp_path / "held"), complete=False)
    with pytest.raises(DataError, match=r"layers\.0\.norm is missing"):
        staging.fits(str(tmp_path / "new"), str(tmp_path / "held"), complete=True)


def test_a_held_folder_that_is_gone_says_nothing(tmp_path: Path) -> None:
    write_weights(tmp_path / "new", SHAPES)
    staging.fits(str(tmp_path / "new"), str(tmp_path / "gone"), complete=True)


@pytest.mark.parametrize(
    ("config", "found"),
    [('{"vocab_size": 512}', 512), ('{"text_config": {"vocab_size": 7}}', 7), ("{}", None), ("no", None)],
)
def test_the_vocabulary_is_what_the_model_says(tmp_path: Path, config: str, found: int | None) -> None:
    (tmp_path / staging.CONFIG).write_text(config)
    assert staging.vocabulary(str(tmp_path)) == found
    assert staging.vocabulary(str(tmp_path / "gone")) is None
