"""The policy in force: the configured one, or the one that ``PUT /policy`` put in its place.

A change is kept in the state file, where one is configured, before it is in force; what cannot be kept is refused. At
the next start it wins over the configuration, unless that has itself been changed since. Putting the configured policy
back ends the change: there is nothing to keep then.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from highwater.act.rules import PolicyChange, PolicySettings
from highwater.process.errors import NotKept
from highwater.process.state_file import StateFile
from highwater.process.untrusted import sentences


class _Section(BaseModel):
    configured: str
    policy: PolicySettings


class PolicyStore:
    """The policy in force, and where it comes from; ``configured`` comes from file, environment and flags.

    Attributes:
        source: ``settings``, or ``put`` while it is changed.
        startup_notice: What was done with an earlier change at the start; ``None`` without one.
    """

    def __init__(self, file: StateFile, configured: PolicySettings) -> None:
        self.in_force = configured
        self.source: Literal["settings", "put"] = "settings"
        self.startup_notice: str | None = None
        self._file = file
        # What the operator configured, without defaults: a release that changes those is no other configuration.
        self._configured = hashlib.sha256(configured.model_dump_json(exclude_defaults=True).encode()).hexdigest()
        self._meant = _meaning(configured)
        self._turn = asyncio.Lock()
        section = file.read("policy")
        if section is not None:
            self.startup_notice = self._take_up(section)

    @property
    def kept_in(self) -> str | None:
        return str(self._file.path) if self.source == "put" and self._file.configured else None

    async def change(self, change: PolicyChange) -> PolicySettings:
        """Keep the change, then put it in force; a thread waits for the disk. Raises NotKept; nothing has changed."""
        async with self._turn:
            policy = self.in_force.changed(change)
            is_changed = _meaning(policy) != self._meant
            section = _Section(configured=self._configured, policy=policy).model_dump(mode="json")
            await asyncio.to_thread(self._file.write, "policy", section if is_changed else None)
            self.in_force, self.source = policy, "put" if is_changed else "settings"
            return policy

    def _take_up(self, section: dict[str, Any]) -> str:
        try:
            saved = _Section.model_validate(section)
        except ValidationError as exc:
            problems = "; ".join(sentences(exc.errors(include_url=False)))
            return f"the policy kept in {self._file.path} cannot be used, the configured one is in force: {problems}"
        if saved.configured == self._configured:
            self.in_force, self.source = saved.policy, "put"
            return f"the policy of the last PUT /policy is in force, kept in {self._file.path}"
        notice = (
            "the configured policy was changed after the last PUT /policy: it is in force, and that change was dropped"
        )
        try:
            self._file.write("policy", None)  # or it would return with an earlier configuration
        except NotKept as exc:
            return f"{notice}, but is still in the file: {exc}"
        return notice


def _meaning(policy: PolicySettings) -> PolicySettings:
    named = [rule.model_copy(update={"remedies": rule.ordered_remedies}) for rule in policy.rules]
    return policy.model_copy(update={"rules": tuple(named)})
