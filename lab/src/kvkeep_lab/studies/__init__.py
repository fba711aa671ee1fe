"""Measurements of a model or a machine, one per module. Each is a study of an experiment and a command."""

from __future__ import annotations

from kvkeep_lab.studies.agent_day import AgentDay
from kvkeep_lab.studies.alignment import AlignmentStudy
from kvkeep_lab.studies.base import Study
from kvkeep_lab.studies.bench import Bench
from kvkeep_lab.studies.bounds import BoundsStudy
from kvkeep_lab.studies.compare import Compare
from kvkeep_lab.studies.conversation_bytes import ConversationBytes
from kvkeep_lab.studies.decoding import Decoding
from kvkeep_lab.studies.drafting import Drafting
from kvkeep_lab.studies.effective_rank import EffectiveRank
from kvkeep_lab.studies.held_bytes import HeldBytesStudy
from kvkeep_lab.studies.kept import KeptSlots
from kvkeep_lab.studies.long_chat import LongChat
from kvkeep_lab.studies.merging_cost import MergingCost
from kvkeep_lab.studies.passes import Passes
from kvkeep_lab.studies.patching import PatchingStudy
from kvkeep_lab.studies.prove import Prove
from kvkeep_lab.studies.reactivation import ReactivationStudy
from kvkeep_lab.studies.rebuilt import Rebuilt
from kvkeep_lab.studies.recompute import Recompute
from kvkeep_lab.studies.rotated_values import RotatedValues
from kvkeep_lab.studies.rotation import RotationStudy
from kvkeep_lab.studies.same_tokens import SameTokens
from kvkeep_lab.studies.sketch_attention import SketchAttention
from kvkeep_lab.studies.sketch_error import SketchError
from kvkeep_lab.studies.spectra import SpectraStudy
from kvkeep_lab.studies.stream import StreamStudy
from kvkeep_lab.studies.throughput import Throughput
from kvkeep_lab.studies.token_bytes import TokenBytes
from kvkeep_lab.studies.verify import Verify
from kvkeep_lab.studies.window_recompute import WindowRecompute

_LISTED: tuple[type[Study], ...] = (
    *(TokenBytes, Rebuilt, SameTokens, PatchingStudy, HeldBytesStudy, LongChat, ConversationBytes, EffectiveRank),
    *(WindowRecompute, Recompute),
    *(Decoding, ReactivationStudy, Throughput, SketchError, SketchAttention, SpectraStudy, AlignmentStudy),
    *(MergingCost, BoundsStudy, RotationStudy, RotatedValues),
    *(KeptSlots, Verify, Prove, Bench, Compare, StreamStudy, AgentDay, Drafting, Passes),
)

STUDIES: dict[str, type[Study]] = {study.name: study for study in _LISTED}
"""Studies by name: first the papers', by paper, then those of the user's model and text."""
