"""The lab: experiments, and what they measure."""
