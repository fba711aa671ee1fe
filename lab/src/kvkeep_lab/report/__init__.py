"""Reports of stores as Markdown, HTML and figures, compared with the papers' values."""

from __future__ import annotations

from kvkeep_lab.report.groups import groups, unmeasured, unread
from kvkeep_lab.report.html import write
from kvkeep_lab.report.markdown import markdown

__all__ = ["groups", "markdown", "unmeasured", "unread", "write"]
