"""The lab: experiments, tasks, studies and reports."""
