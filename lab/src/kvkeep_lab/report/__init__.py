"""Reports: what stores hold, as Markdown, as a page, and as figures, beside what the papers say."""

from __future__ import annotations

from kvkeep_lab.report.experiments import chapters, unmeasured
from kvkeep_lab.report.files import write
from kvkeep_lab.report.groups import unread
from kvkeep_lab.report.markdown import markdown
from kvkeep_lab.report.sections import sections
from kvkeep_lab.report.studies import studied, study_chapters

__all__ = ["chapters", "markdown", "sections", "studied", "study_chapters", "unmeasured", "unread", "write"]
