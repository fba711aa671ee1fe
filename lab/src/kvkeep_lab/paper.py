"""A paper's printed values, and its claims in a form that measurements can decide."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvkeep.errors import UsageError
from kvkeep_lab.studies.base import BudgetText, MethodName

Text = Annotated[str, Field(min_length=1)]
STRICT = ConfigDict(extra="forbid", frozen=True)


class PaperValue(BaseModel):
    """A number that the paper prints, in the metric's unit (shares from 0 to 1). The report shows it beside the
    measurement without a verdict, because the paper has another model and other prompts."""

    model_config = STRICT

    metric: Text
    value: float
    method: str = ""
    """Method of the row beside which it is shown; "" for none."""
    budget: str | None = None
    """Budget of that row; None for every budget."""
    note: str = ""
    """Further information for a reader."""


class Claim(BaseModel):
    """A sentence of the paper, and the numbers that decide it.

    A verdict requires limits of the paper and a measurement like the paper's. A claim about a model also requires one
    of :attr:`ComparedPaper.models`. Claims about a machine have no verdict.
    """

    model_config = STRICT

    says: Text
    """The paper's sentence."""
    metric: Text | None = None
    """Metric whose mean is compared; None: no number decides the claim."""
    methods: tuple[MethodName, ...] = ()
    """Methods, for each of which the claim is made."""
    budgets: tuple[BudgetText, ...] = ()
    """Budgets, for each of which the claim is made; (): every budget of the experiment."""
    than: tuple[MethodName, ...] = ()
    """Other methods. The limits then apply to the difference from each of them at the same budget."""
    at_least: float | None = None
    """The paper's lower limit, in the metric's unit. A sentence that only says "better" or "longer" has equality as its
    limit."""
    at_most: float | None = None
    """The paper's upper limit, in the metric's unit."""
    of: Literal["method", "model", "machine"] = "method"
    """Subject of the sentence: any "method" of its kind, the paper's "model", or its "machine"."""
    unlike: str = ""
    """Difference of this measurement from the paper's; "" for none."""

    @model_validator(mode="after")
    def _decidable(self) -> Claim:
        limits = [limit for limit in (self.at_least, self.at_most) if limit is not None]
        if self.metric is None and (limits or self.methods or self.budgets or self.than):
            raise UsageError("methods, budgets and limits mean nothing without a metric")
        if limits != sorted(limits):
            raise UsageError(f"no number is at least {self.at_least:g} and at most {self.at_most:g}")
        return self

    @property
    def limited(self) -> bool:
        """Whether the paper gives a limit."""
        return self.at_least is not None or self.at_most is not None


class ComparedPaper(BaseModel):
    """The paper with which an experiment is compared."""

    model_config = STRICT

    title: Text
    where: Text
    """The figure or table."""
    setting: Text
    """The paper's model, precision and machine."""
    models: tuple[Text, ...] = ()
    """The paper's models among those that an experiment may use."""
    claims: tuple[Claim, ...] = ()
    """Its claims. A string is a claim that no number decides."""
    values: tuple[PaperValue, ...] = ()

    @field_validator("claims", mode="before")
    @classmethod
    def _sentences(cls, given: Any) -> Any:
        listed = isinstance(given, list | tuple)
        return [{"says": claim} if isinstance(claim, str) else claim for claim in given] if listed else given

    def no_verdict(self, claim: Claim, model: str) -> str:
        """Return the reason why numbers of ``model`` allow no verdict on ``claim``; "" if they do."""
        reasons = []
        if claim.of == "machine":
            reasons.append("another machine's")
        if claim.of == "model" and model not in self.models:
            reasons.append("another model's")
        if claim.unlike:
            reasons.append(f"measured otherwise: {claim.unlike}")
        if not claim.limited and claim.of != "machine":
            reasons.append("the paper names no limit")
        return "; ".join(reasons)
