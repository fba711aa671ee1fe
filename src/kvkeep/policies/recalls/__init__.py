"""How entries come back: one file for each recall, and their names."""

from kvkeep.policies.recalls.base import Recall
from kvkeep.policies.recalls.certified import Certified
from kvkeep.policies.recalls.missed import Missed
from kvkeep.policies.recalls.pages import Pages
from kvkeep.policies.recalls.verified import Verified

RECALLS: dict[str, type[Recall]] = {
    "verified": Verified,
    "pages": Pages,
    "certified": Certified,
    "missed": Missed,
}
