"""Reports: what stores hold, as Markdown, as a page, and as figures, beside what the papers say."""

from __future__ import annotations

from kvkeep_lab.report.groups import groups, unmeasured, unread
from kvkeep_lab.report.html import write
from kvkeep_lab.report.markdown import markdown

__all__ = ["groups", "markdown", "unmeasured", "unread", "write"]
