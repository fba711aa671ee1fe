"""Agent day: the requests of a coding agent, played against servers.

:mod:`~kvkeep_lab.agent_day.texts` makes texts, :mod:`~kvkeep_lab.agent_day.day` the requests, and
:mod:`~kvkeep_lab.agent_day.playing` sends them. :mod:`~kvkeep_lab.agent_day.prefixes` counts the tokens that a server
has read before, and :mod:`~kvkeep_lab.agent_day.records` keeps and summarises what was measured.
"""
