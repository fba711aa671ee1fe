"""Dataclasses of options, and lists in one option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from kvkeep.cli import options
from kvkeep.errors import UsageError


@dataclass(frozen=True)
class Paint:
    colour: Annotated[str, typer.Option("--colour", "-c", help="Colour of the paint.")] = "red"
    coats: Annotated[int, typer.Option(min=1)] = 1


THICK = Paint(coats=3)


@options.command
def wall(name: Annotated[str, typer.Argument()], *, paint: Paint, primer: bool = False) -> None:
    """Paint a wall."""
    print(name, paint, primer)


@options.command
def fence(*, paint: Paint = THICK) -> None:
    """Paint a fence."""
    print(paint)


app = typer.Typer()
app.command()(wall)
app.command()(fence)


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, done.output.strip()


def test_each_field_of_a_dataclass_is_an_option() -> None:
    assert run("wall", "north") == (0, "north Paint(colour='red', coats=1) False")
    assert run("wall", "north", "-c", "blue", "--coats", "2", "--primer")[1] == (
        "north Paint(colour='blue', coats=2) True"
    )
    assert run("fence") == (0, "Paint(colour='red', coats=3)"), "the default of the parameter comes first"
    code, text = run("fence", "--coats", "0")
    assert code == 2 and "--coats" in text
    code, text = run("wall", "--help")
    assert code == 0 and "Paint a wall." in text and "Colour of the paint." in text and "--coats" in text


def test_a_list_is_separated_by_commas() -> None:
    assert options.split_list(["h2o:recent=0.5,halflife=64,window", "full"], "-x") == [
        "h2o:recent=0.5,halflife=64", "window", "full",
    ]  # fmt: skip
    assert options.split_list(["none"], "-x") == []
    with pytest.raises(UsageError, match="--method is empty"):
        options.split_list([" , "], "--method")
