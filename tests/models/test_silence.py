"""What is silenced while a model loads."""

from __future__ import annotations

import logging

import pytest
from transformers.utils import logging as theirs

from kvkeep.models.silence import silenced


def test_warnings_of_kvkeep_are_printed_and_those_of_transformers_and_bars_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    handler = logging.StreamHandler()
    logging.root.addHandler(handler)
    before = theirs.is_progress_bar_enabled()
    try:
        with silenced():
            logging.getLogger("kvkeep.native.library").warning("Compiling ...")
            theirs.get_logger("transformers.modeling_utils").warning("an advice")
            logging.getLogger("huggingface_hub.file_download").warning("unauthenticated")
            list(theirs.tqdm(range(3)))
    finally:
        logging.root.removeHandler(handler)
    assert capsys.readouterr().err == "Compiling ...\n"
    assert theirs.is_progress_bar_enabled() == before
