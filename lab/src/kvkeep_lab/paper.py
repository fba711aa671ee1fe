"""A paper's claims in a form that measurements decide, and its printed values."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvkeep.errors import UsageError
from kvkeep_lab.studies.base import BudgetText, MethodName

Text = Annotated[str, Field(min_length=1)]
STRICT = ConfigDict(extra="forbid", frozen=True)


class PaperValue(BaseModel):
    """A number that the paper prints, in the metric's own unit (shares from 0 to 1).

    method, budget: the row of ours that it stands beside, where there is one (no budget: every budget). note: what else
    a reader has to know.
    """

    model_config = STRICT

    metric: Text
    value: float
    method: str = ""
    budget: str | None = None
    note: str = ""


class Claim(BaseModel):
    """A sentence of the paper, and the numbers that decide it. Without a metric no number decides it.

    metric: the metric whose mean is compared. methods: the claim is about each of them, at each of ``budgets`` (none:
    every budget of the experiment). at_least, at_most: limits in the metric's unit. than: other methods; the limits are
    then of the difference from each of them at the same budget.
    """

    model_config = STRICT

    says: Text
    metric: Text | None = None
    methods: tuple[MethodName, ...] = ()
    budgets: tuple[BudgetText, ...] = ()
    than: tuple[MethodName, ...] = ()
    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _decidable(self) -> Claim:
        limits = [limit for limit in (self.at_least, self.at_most) if limit is not None]
        if (self.metric is None) == bool(limits):
            raise UsageError("a claim that numbers decide needs a metric, and at_least or at_most")
        if self.metric is None and (self.methods or self.budgets or self.than):
            raise UsageError("methods and budgets mean nothing without a metric")
        if limits != sorted(limits):
            raise UsageError(f"no number is at least {self.at_least:g} and at most {self.at_most:g}")
        return self


class Paper(BaseModel):
    """The paper that an experiment is compared with.

    where: the figure or table. setting: the paper's model, precision and machine. claims: a string stands for a claim
    that no number decides.
    """

    model_config = STRICT

    title: Text
    where: Text
    setting: Text
    claims: tuple[Claim, ...] = ()
    values: tuple[PaperValue, ...] = ()

    @field_validator("claims", mode="before")
    @classmethod
    def _sentences(cls, given: Any) -> Any:
        listed = isinstance(given, list | tuple)
        return [{"says": claim} if isinstance(claim, str) else claim for claim in given] if listed else given
